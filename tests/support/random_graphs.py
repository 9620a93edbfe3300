"""Random dataflow graphs for property tests."""

from __future__ import annotations

import random

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec

_UNARY = ("aten.exp.default", "aten.neg.default", "aten.silu.default")
_BINARY = ("aten.add.Tensor", "aten.mul.Tensor")
_OPAQUE = "aten.rrelu.default"
_VIEW = "aten.view.default"


def random_graph(seed: int, size: int, opaque: float = 0.2, view: float = 0.2, order: int = 0) -> DataflowGraph:
    """A random graph of ``size`` ops on 4 x 8 tensors.

    Args:
        seed: Equal seeds give equal graphs.
        size: Number of ops.
        opaque: Probability that an op is one that only ATen runs.
        view: Probability that an op is a view.
        order: Number of ordering edges tried between random ops.
    """
    rng = random.Random(seed)
    spec = TensorSpec.contiguous((4, 8), "float32")
    values = ["x0", "x1", "w"]
    specs = dict.fromkeys(values, spec) | {"w": TensorSpec.contiguous((8, 8), "float32")}
    nodes: list[OpNode] = []
    for number in range(size):
        name, draw = f"n{number}", rng.random()
        recent = [value for value in values if value != "w"][-5:]
        if draw < opaque:
            node = OpNode(_OPAQUE, (rng.choice(recent),), (name,), {"dim": 1})
        elif draw < opaque + view:
            node = OpNode(_VIEW, (rng.choice(recent),), (name,), {"size": (4, 8)})
        elif rng.random() < 0.4:
            node = OpNode(rng.choice(_UNARY), (rng.choice(recent),), (name,))
        else:
            node = OpNode(rng.choice(_BINARY), (rng.choice(recent), rng.choice(recent)), (name,))
        nodes.append(node)
        values.append(name)
        specs[name] = spec
    pairs = {tuple(sorted(rng.sample(range(size), 2))) for _ in range(order)} if size > 1 else set()
    used = {value for node in nodes for value in node.inputs}
    returned = [node.name for node in nodes if node.name not in used or rng.random() < 0.1]
    edges = [(f"n{a}", f"n{b}") for a, b in sorted(pairs)]
    return DataflowGraph(nodes, specs, ("x0", "x1", "w"), returned, order=edges)
