"""Small dataflow graphs for tests, built call by call: specs come from running each ATen op on real tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.graph.execute import run_node


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).split(".")[1], tuple(tensor.stride()))


class Builder:
    """``b = Builder(x=tensor); y = b("aten.mul.Tensor", "x", "x"); graph = b.graph(y)``."""

    def __init__(self, **inputs: torch.Tensor) -> None:
        self.tensors: dict[str, torch.Tensor] = dict(inputs)
        self.inputs = tuple(inputs)
        self.nodes: list[OpNode] = []

    def __call__(self, /, op: str, *operands: str, **attrs: Any) -> str:
        return self.many(op, *operands, **attrs)[0]

    def many(self, /, op: str, *operands: str, outputs: int = 1, **attrs: Any) -> tuple[str, ...]:
        names = tuple(f"v{len(self.nodes)}_{number}" for number in range(outputs))
        node = OpNode(op, operands, names, attrs)
        results = run_node(node, [self.tensors[name] for name in operands], "cpu")
        assert len(results) == outputs, (op, len(results))
        self.nodes.append(node)
        self.tensors.update(zip(names, results, strict=True))
        return names

    def graph(self, *outputs: str) -> DataflowGraph:
        specs = {name: spec_of(tensor) for name, tensor in self.tensors.items()}
        return DataflowGraph(self.nodes, specs, self.inputs, outputs)

    def values(self, names: Sequence[str]) -> list[torch.Tensor]:
        return [self.tensors[name] for name in names]


def wide(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]
