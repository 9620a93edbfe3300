"""What counts as an op that a kernel could take over, and what of it is covered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Builder
from op_coverage import Coverage, MemoryBound, Role, coverage, role_of

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Ref, TensorSpec

X = TensorSpec.contiguous((3, 5), "float32")
COLD = TensorSpec((3, 5), "float32", (1, 3))
INDEX = TensorSpec.contiguous((3,), "int64")
TRUE = TensorSpec.contiguous((3,), "bool")


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "role"),
    [
        ("aten.add.Tensor", (X, X), {}, "coverable"),
        ("aten.group_norm.default", (X,), {"num_groups": 1}, "coverable"),
        ("aten.a_recipe_that_nobody_wrote.default", (X,), {}, "opaque"),
        ("aten.erfinv.default", (X,), {}, "coverable"),
        ("aten.linear.default", (X, X), {}, "anchor"),
        ("aten.conv2d.default", (X, X), {}, "anchor"),
        ("aten._scaled_dot_product_flash_attention.default", (X, X, X), {}, "anchor"),
        ("aten.max_pool2d.default", (X,), {"kernel_size": (2, 2)}, "anchor"),
        ("aten.transpose.int", (X,), {"dim0": 0, "dim1": 1}, "view"),
        ("aten.arange.default", (), {"end": 15}, "constant"),
        ("aten.zeros_like.default", (X,), {}, "constant"),
        ("aten.add_.Tensor", (X, X), {}, "opaque"),
        ("aten.topk.default", (X,), {"k": 2}, "opaque"),
        ("aten.cumsum.default", (X,), {"dim": 1}, "opaque"),
        ("aten.nonzero.default", (X,), {}, "opaque"),
        ("aten.bernoulli.default", (X,), {}, "opaque"),
        ("aten.dropout.default", (X,), {"p": 0.5, "train": True}, "opaque"),
        ("aten.dropout.default", (X,), {"p": 0.5, "train": False}, "coverable"),
        ("aten.index.Tensor", (X, INDEX), {"indices": (Ref(1),)}, "coverable"),
        ("aten.index.Tensor", (X, TRUE), {"indices": (Ref(1),)}, "opaque"),
        ("higher_order.cond", (X,), {}, "opaque"),
    ],
)
def test_roles_are_told_by_kinds_of_op(
    op: str, inputs: tuple[TensorSpec, ...], attrs: dict[str, Any], role: Role
) -> None:
    names = tuple(f"x{number}" for number in range(len(inputs)))
    specs = {**dict(zip(names, inputs, strict=True)), "y": X}
    assert role_of(OpNode(op, names, ("y",), attrs), specs) == role


def test_a_reshape_that_copies_is_work() -> None:
    specs = {"x": COLD, "y": TensorSpec.contiguous((15,), "float32")}
    assert role_of(OpNode("aten.reshape.default", ("x",), ("y",), {"shape": (15,)}), specs) == "coverable"


def chain() -> tuple[DataflowGraph, dict[str, str]]:
    """linear, an activation by itself, linear, two ops that belong together, a sort."""
    b = Builder(x=torch.randn(3, 5), w=torch.randn(5, 5))
    made = {"gelu": b("aten.gelu.default", b("aten.linear.default", "x", "w"))}
    made["mul"] = b("aten.mul.Tensor", b("aten.linear.default", made["gelu"], "w"), other=2.0)
    made["exp"] = b("aten.exp.default", b("aten.transpose.int", made["mul"], dim0=0, dim1=1))
    values = b.many("aten.sort.default", made["exp"], outputs=2)
    return b.graph(*values), made


@pytest.mark.parametrize(
    ("fused", "expected"),
    [
        ((), Coverage(3, 0, 1, {"aten.gelu.default": 1, "aten.mul.Tensor": 1, "aten.exp.default": 1})),
        (("mul", "exp"), Coverage(3, 2, 1, {"aten.gelu.default": 1})),
        (("gelu", "mul"), Coverage(3, 2, 0, {"aten.exp.default": 1})),
        (("gelu", "mul", "exp"), Coverage(3, 3, 0, {})),
    ],
)
def test_an_op_left_alone_is_told_from_one_that_others_could_join(
    fused: tuple[str, ...], expected: Coverage
) -> None:
    graph, made = chain()
    assert coverage(graph, [made[name] for name in fused]) == expected


def test_ops_bound_by_memory_are_all_but_matmuls() -> None:
    """A sort is one that nothing else covers; a window and a scan are, too."""
    graph, made = chain()
    found = coverage(graph, [made["mul"], made["exp"]]).memory_bound
    assert found == MemoryBound(4, 2, 1, {"aten.sort.default": 1})
    b = Builder(x=torch.randn(2, 3, 8, 8), i=torch.tensor([0, 1]))
    drawn = b("aten.rand_like.default", b("aten.max_pool2d.default", "x", kernel_size=(2, 2)))
    scanned = b("aten.cumsum.default", b("aten.index_select.default", "x", "i", dim=0), dim=1)
    left = {"aten.max_pool2d.default": 1, "aten.cumsum.default": 1}
    assert coverage(b.graph(drawn, scanned), ()).memory_bound == MemoryBound(3, 0, 1, left)


def test_shares() -> None:
    found = Coverage(10, 7, 2, {"a": 3}) + Coverage(10, 9, 1, {"a": 1})
    assert (found.share, found.share_or_alone, found.left) == (0.8, 0.95, {"a": 4})
    assert Coverage().share == Coverage().share_or_alone == 1.0
