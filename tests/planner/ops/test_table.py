"""What the table of ops says, beside what PyTorch says of the same ops."""

from __future__ import annotations

import pytest
import torch

from fuseplan.planner.graph.execute import resolve_op
from fuseplan.planner.ops.op import Op
from fuseplan.planner.ops.table import OPS, op_of


@pytest.mark.parametrize("name", OPS)
def test_every_row_is_of_an_op_that_pytorch_has(name: str) -> None:
    if name.endswith(".*"):
        namespace, packet, _ = name.split(".")
        assert getattr(getattr(torch.ops, namespace), packet).overloads()
    else:
        assert str(resolve_op(name)) == name


def test_an_overload_without_a_row_has_that_of_its_op() -> None:
    assert op_of("aten.conv2d.padding").is_anchor and not op_of("aten.conv2d.padding").new_memory
    assert op_of("aten.mm.out").is_anchor and op_of("aten.mm.out").build is None
    assert op_of("aten.scatter_.src").family == "write"
    assert op_of("aten.asinh.default") == op_of("mine.op.default") == op_of("higher_order.cond") == Op()


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.new_memory])
def test_schemas_agree_that_a_result_is_new_memory(name: str) -> None:
    schema = resolve_op(name)._schema
    assert not schema.is_mutable and all(one.alias_info is None for one in schema.returns)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.writes is not None or op.family == "state"])
def test_schemas_agree_that_an_op_writes_to_its_first_operand(name: str) -> None:
    first = resolve_op(name)._schema.arguments[0]
    assert first.alias_info is not None and first.alias_info.is_write


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.rows_by is not None])
def test_rows_are_given_by_an_index(name: str) -> None:
    by = op_of(name).rows_by
    assert by is not None and resolve_op(name)._schema.arguments[by].name in ("index", "indices")


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.factors is not None])
def test_factors_are_the_operands_that_a_product_multiplies(name: str) -> None:
    factors, arguments = op_of(name).factors, resolve_op(name)._schema.arguments
    assert factors is not None
    left, right = (arguments[at].name for at in factors)
    assert (left, right) in {("input", "weight"), ("self", "other"), ("self", "mat2"), ("mat1", "mat2"),
                             ("batch1", "batch2"), ("x", "weights")}
