"""How planning scales with the size of a graph, on synthetic decoders: the table behind ``bench.py planner``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pandas as pd

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.groups.regions import find_regions, unique_regions
from fuseplan.planner.tuning.planner import Planner

#: Shape of :func:`transformer_graph`: a decode step of a small model.
_BATCH, _HEADS, _HEAD_DIM = 8, 16, 64
_HIDDEN, _INTERMEDIATE, _KV_LENGTH = _HEADS * _HEAD_DIM, 2816, 256
_FLAT = (_BATCH, 1, _HIDDEN)

#: One layer in this many differs from all others (an activation scale of its own).
_UNIQUE_EVERY = 8


def plan_scaling(planner: Callable[[], Planner], sizes: Sequence[int] = (1_000, 10_000, 100_000)) -> pd.DataFrame:
    """A row for synthetic decoders of each of these numbers of ops: what is found, and the seconds of each step.

    Each is built, cut into regions and planned with a new ``planner``.
    """
    return pd.DataFrame([_plan_once(planner(), size) for size in sizes])


def _plan_once(planner: Planner, size: int) -> dict[str, float | int]:
    laps = [time.perf_counter()]
    graph = transformer_graph(size)
    laps.append(time.perf_counter())
    regions = find_regions(graph)
    laps.append(time.perf_counter())
    plan = planner.plan_graph(graph)
    laps.append(time.perf_counter())
    steps = dict(zip(("build_s", "regions_s", "plan_s"), np.diff(laps).tolist(), strict=True))
    total_s = sum(steps.values())
    return {
        "ops": len(graph),
        "regions": len(regions),
        "unique_regions": len(unique_regions(regions)),
        "choices": sum(one.record.enumerated for one in plan.unique()),
        "groups": sum(choice.is_kernel for one in plan.regions for choice in one.record.groups),
        **steps,
        "total_s": total_s,
        "us_per_op": total_s / len(graph) * 1e6,
    }


def transformer_graph(size: int) -> DataflowGraph:
    """A decoder of ``size`` ops as capture would give it: matmuls and attention, in-place cache updates, views.

    Layers repeat with period four (RMSNorm or LayerNorm, SwiGLU or GEGLU); every eighth has a part found nowhere else.
    The last layer is cut off where ``size`` is reached.
    """
    decoder = _Decoder()
    hidden, angles = decoder.input(*_FLAT), decoder.input(_BATCH, 1, _HEAD_DIM)
    cos, sin = (decoder.op(f"{name}.default", angles) for name in ("cos", "sin"))
    for layer in count():
        if len(decoder.nodes) >= size:
            break
        hidden = decoder.layer(layer, hidden, cos, sin)
    nodes = decoder.nodes[:size]
    names = {node.name for node in nodes}
    used = {value for node in nodes for value in node.inputs}
    returned = [node.name for node in nodes if node.name not in used]
    order = [(before, after) for before, after in decoder.order if after in names]
    return DataflowGraph(nodes, decoder.specs, decoder.inputs, returned, order=order)


class _Decoder:
    """Writes ops down."""

    def __init__(self) -> None:
        self.nodes: list[OpNode] = []
        self.specs: dict[str, TensorSpec] = {}
        self.inputs: list[str] = []
        self.order: list[tuple[str, str]] = []

    def layer(self, number: int, hidden: str, cos: str, sin: str) -> str:
        hidden = self.op("add.Tensor", hidden, self._attention(self._norm(number, hidden), cos, sin))
        normed = self._norm(number, hidden)
        gate, up = (self._linear(normed, _INTERMEDIATE) for _ in range(2))
        activation = "silu.default" if number % 4 < 3 else "gelu.default"
        inner = self.op("mul.Tensor", self.op(activation, gate), up)
        if number % _UNIQUE_EVERY == _UNIQUE_EVERY - 1:
            inner = self.op("mul.Tensor", inner, other=1.0 + number / 4096)
        return self.op("add.Tensor", hidden, self._linear(inner, _HIDDEN))

    def _norm(self, number: int, hidden: str) -> str:
        if number % 4 == 1:
            weights = (self.input(_HIDDEN), self.input(_HIDDEN))
            return self.op("layer_norm.default", hidden, *weights, normalized_shape=(_HIDDEN,), eps=1e-5)
        squared = self.op("pow.Tensor_Scalar", hidden, exponent=2)
        mean = self.op("mean.dim", squared, shape=(_BATCH, 1, 1), dim=(-1,), keepdim=True)
        scale = self.op("rsqrt.default", self.op("add.Tensor", mean, other=1e-5))
        return self.op("mul.Tensor", self.input(_HIDDEN), self.op("mul.Tensor", hidden, scale), shape=_FLAT)

    def _attention(self, normed: str, cos: str, sin: str) -> str:
        split = (_BATCH, 1, _HEADS, _HEAD_DIM)
        q, k, v = (
            self._swapped(self.op("view.default", self._linear(normed, _HIDDEN), shape=split, size=split))
            for _ in range(3)
        )
        cos, sin = (self.op("unsqueeze.default", one, shape=(_BATCH, 1, 1, _HEAD_DIM), dim=1) for one in (cos, sin))
        q, k = self._rope(q, cos, sin), self._rope(k, cos, sin)
        caches, writes = [], []
        for new in (k, v):
            caches.append(self.input(_BATCH, _HEADS, _KV_LENGTH, _HEAD_DIM))
            writes.append(self.op("index_copy_.default", caches[-1], self.input(1, dtype="int64"), new, dim=2))
        attended = self.op("scaled_dot_product_attention.default", q, *caches)
        self.order += [(write, attended) for write in writes]
        return self._linear(self.op("view.default", self._swapped(attended), shape=_FLAT, size=_FLAT), _HIDDEN)

    def _rope(self, x: str, cos: str, sin: str) -> str:
        half, strides = _HEAD_DIM // 2, self.specs[x].strides
        shape = (_BATCH, _HEADS, 1, half)
        first, second = (
            self.op("slice.Tensor", x, shape=shape, strides=strides, dim=3, start=start, end=start + half)
            for start in (0, half)
        )
        turned = self.op("cat.default", self.op("neg.default", second), first, shape=self.specs[x].shape, dim=-1)
        return self.op("add.Tensor", self.op("mul.Tensor", x, cos), self.op("mul.Tensor", turned, sin))

    def _linear(self, x: str, features: int) -> str:
        *rows, width = self.specs[x].shape
        return self.op("linear.default", x, self.input(features, int(width)), shape=(*rows, features), bias=None)

    def _swapped(self, value: str) -> str:
        """Dimensions 1 and 2 transposed."""
        spec = self.specs[value]
        shape, strides = (tuple(sizes[dim] for dim in (0, 2, 1, 3)) for sizes in (spec.shape, spec.strides))
        return self.op("transpose.int", value, shape=shape, strides=strides, dim0=1, dim1=2)

    def input(self, *shape: int, dtype: str = "float32") -> str:
        name = f"p{len(self.inputs)}"
        self.inputs.append(name)
        self.specs[name] = TensorSpec.contiguous(shape, dtype)
        return name

    def op(self, op: str, *inputs: str, shape: Any = None, strides: Any = None, **attrs: Any) -> str:
        """An ATen op whose result has the first operand's shape, contiguous, unless told otherwise."""
        name = f"v{len(self.nodes)}"
        spec = TensorSpec.contiguous(self.specs[inputs[0]].shape if shape is None else shape, "float32")
        self.nodes.append(OpNode(f"aten.{op}", inputs, (name,), attrs))
        self.specs[name] = spec if strides is None else TensorSpec(spec.shape, spec.dtype, strides)
        return name
