"""Shifts by any amount, of every integer type, against eager."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder
from kernel_reference import run_reference

from fuseplan.planner.lowering.lower import lower
from fuseplan.planner.ops.table import why_opaque

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OPS = ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__")


def operand(dtype: torch.dtype) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    return torch.tensor([0, 1, 3, 100, limits.max, limits.max // 2 + 1, limits.min, limits.min + 1], dtype=dtype)


def shifted(op: str, builder: Builder, *operands: str, **attrs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel makes of it, and what eager does."""
    value = builder(op, *operands, **attrs)
    lowered = lower(builder.graph(value), (value,), "fp32", (value,))
    (result,) = run_reference(lowered.ir, builder.values(lowered.inputs))
    return result, builder.tensors[value].to(result.dtype)


@pytest.mark.parametrize("by_dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_by_a_tensor(op: str, dtype: torch.dtype, by_dtype: torch.dtype) -> None:
    limits = torch.iinfo(by_dtype)
    by = torch.tensor([n for n in (0, 1, 7, 8, 9, 15, 16, 31, 32, 33, 63, 64, 100, 127, 255, -1, -2, -128)
                       if limits.min <= n <= limits.max] + [limits.min, limits.max], dtype=by_dtype)
    torch.testing.assert_close(*shifted(f"aten.{op}.Tensor", Builder(x=operand(dtype)[:, None], by=by), "x", "by"))


@pytest.mark.parametrize("by", [0, 1, 7, 8, 9, 31, 32, 63, 64, 65, 200, -1, -8, 256, 257, 2**31, 2**32 + 1, -256])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_by_a_number(op: str, dtype: torch.dtype, by: int) -> None:
    spelling = f"aten.{op}.Scalar" if op.startswith("__") else f"aten.{op}.Tensor_Scalar"
    limits = torch.iinfo(dtype)
    if not limits.min <= by <= limits.max:  # ATen takes as much of it as the type holds
        builder = Builder(x=operand(dtype))
        graph = builder.graph(builder(spelling, "x", other=by))
        assert "is no number" in (why_opaque(next(iter(graph)), graph.specs) or "")
        return
    torch.testing.assert_close(*shifted(spelling, Builder(x=operand(dtype)), "x", other=by))
