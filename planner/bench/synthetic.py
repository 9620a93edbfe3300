"""Synthetic dataflow graphs of decoders of any size, to see how planning scales."""

from __future__ import annotations

from itertools import count
from typing import Any

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec

#: Shape of :func:`transformer_graph`: a decode step of a small model.
_BATCH, _HEADS, _HEAD_DIM = 8, 16, 64
_HIDDEN, _INTERMEDIATE, _KV_LENGTH = _HEADS * _HEAD_DIM, 2816, 256

#: One layer in this many differs from all others (an activation scale of its own).
_UNIQUE_EVERY = 8


def transformer_graph(size: int) -> DataflowGraph:
    """A decoder of ``size`` ops as capture would give it: matmuls and attention, in-place cache updates, views.

    Layers repeat with period four (RMSNorm or LayerNorm, SwiGLU or GEGLU); every eighth has a part found nowhere else.
    The last layer is cut off where ``size`` is reached.
    """
    return _Decoder(size).graph()


class _Decoder:
    """Writes ops until there are enough."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.nodes: list[OpNode] = []
        self.specs: dict[str, TensorSpec] = {}
        self.inputs: list[str] = []
        self.order: list[tuple[str, str]] = []

    def graph(self) -> DataflowGraph:
        hidden = self._input((_BATCH, 1, _HIDDEN))
        angles = self._input((_BATCH, 1, _HEAD_DIM))
        cos, sin = (self._op(f"aten.{name}.default", (angles,), (_BATCH, 1, _HEAD_DIM)) for name in ("cos", "sin"))
        for layer in count():
            if len(self.nodes) >= self.size:
                break
            hidden = self._layer(layer, hidden, cos, sin)
        nodes = self.nodes[: self.size]
        names = {node.name for node in nodes}
        used = {value for node in nodes for value in node.inputs}
        returned = [node.name for node in nodes if node.name not in used]
        order = [(before, after) for before, after in self.order if after in names]
        return DataflowGraph(nodes, self.specs, self.inputs, returned, order=order)

    def _layer(self, number: int, hidden: str, cos: str, sin: str) -> str:
        normed = self._norm(number, hidden)
        attended = self._attention(normed, cos, sin)
        hidden = self._op("aten.add.Tensor", (hidden, attended))
        normed = self._norm(number, hidden)
        gate, up = (self._linear(normed, _INTERMEDIATE) for _ in range(2))
        activation = "aten.silu.default" if number % 4 < 3 else "aten.gelu.default"
        inner = self._op("aten.mul.Tensor", (self._op(activation, (gate,)), up))
        if number % _UNIQUE_EVERY == _UNIQUE_EVERY - 1:
            inner = self._op("aten.mul.Tensor", (inner,), other=1.0 + number / 4096)
        return self._op("aten.add.Tensor", (hidden, self._linear(inner, _HIDDEN)))

    def _norm(self, number: int, hidden: str) -> str:
        if number % 4 == 1:
            weights = (self._input((_HIDDEN,)), self._input((_HIDDEN,)))
            return self._op("aten.layer_norm.default", (hidden, *weights), normalized_shape=(_HIDDEN,), eps=1e-5)
        row = (_BATCH, 1, 1)
        squared = self._op("aten.pow.Tensor_Scalar", (hidden,), exponent=2)
        mean = self._op("aten.mean.dim", (squared,), row, dim=(-1,), keepdim=True)
        scale = self._op("aten.rsqrt.default", (self._op("aten.add.Tensor", (mean,), other=1e-5),))
        return self._op("aten.mul.Tensor", (self._input((_HIDDEN,)), self._op("aten.mul.Tensor", (hidden, scale))),
                        (_BATCH, 1, _HIDDEN))

    def _attention(self, normed: str, cos: str, sin: str) -> str:
        heads = (_BATCH, _HEADS, 1, _HEAD_DIM)
        q, k, v = (self._heads(self._linear(normed, _HIDDEN)) for _ in range(3))
        cos, sin = (self._op("aten.unsqueeze.default", (t,), (_BATCH, 1, 1, _HEAD_DIM), dim=1) for t in (cos, sin))
        q, k = self._rope(q, cos, sin), self._rope(k, cos, sin)
        caches, writes = [], []
        for new in (k, v):
            caches.append(self._input((_BATCH, _HEADS, _KV_LENGTH, _HEAD_DIM)))
            operands = (caches[-1], self._input((1,), "int64"), new)
            writes.append(self._op("aten.index_copy_.default", operands, dim=2))
        attended = self._op("aten.scaled_dot_product_attention.default", (q, *caches), heads)
        self.order += [(write, attended) for write in writes]
        flat = (_BATCH, 1, _HIDDEN)
        return self._linear(self._op("aten.view.default", (self._swapped(attended),), flat, size=flat), _HIDDEN)

    def _heads(self, projected: str) -> str:
        split = (_BATCH, 1, _HEADS, _HEAD_DIM)
        return self._swapped(self._op("aten.view.default", (projected,), split, size=split))

    def _rope(self, x: str, cos: str, sin: str) -> str:
        half = _HEAD_DIM // 2
        spec = self.specs[x]
        first, second = (
            self._emit("aten.slice.Tensor", (x,), TensorSpec((*spec.shape[:-1], half), spec.dtype, spec.strides),
                       dim=3, start=start, end=start + half)
            for start in (0, half)
        )
        turned = self._op("aten.cat.default", (self._op("aten.neg.default", (second,)), first), spec.shape, dim=-1)
        parts = (self._op("aten.mul.Tensor", (x, cos)), self._op("aten.mul.Tensor", (turned, sin)))
        return self._op("aten.add.Tensor", parts)

    def _linear(self, x: str, features: int) -> str:
        weight = self._input((features, self.specs[x].shape[-1]))
        return self._op("aten.linear.default", (x, weight), (*self.specs[x].shape[:-1], features), bias=None)

    def _input(self, shape: tuple[int, ...], dtype: str = "float32") -> str:
        name = f"p{len(self.inputs)}"
        self.inputs.append(name)
        self.specs[name] = TensorSpec.contiguous(shape, dtype)
        return name

    def _swapped(self, value: str) -> str:
        """Dimensions 1 and 2 transposed."""
        spec = self.specs[value]
        shape, strides = (tuple(sizes[dim] for dim in (0, 2, 1, 3)) for sizes in (spec.shape, spec.strides))
        return self._emit("aten.transpose.int", (value,), TensorSpec(shape, spec.dtype, strides), dim0=1, dim1=2)

    def _op(self, op: str, inputs: tuple[str, ...], shape: tuple[int, ...] | None = None, **attrs: Any) -> str:
        """An op with a contiguous result (of the first operand's shape unless given)."""
        spec = TensorSpec.contiguous(self.specs[inputs[0]].shape if shape is None else shape, "float32")
        return self._emit(op, inputs, spec, **attrs)

    def _emit(self, op: str, inputs: tuple[str, ...], spec: TensorSpec, **attrs: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(OpNode(op, inputs, (name,), attrs))
        self.specs[name] = spec
        return name
