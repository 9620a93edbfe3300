"""Loads that are read in transposed blocks: the elements of every type, at sizes that no block divides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ir_samples as samples
import pytest
import torch

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.cpp.emitter import simplified_segments, transposed_loads
from fuseplan.kernels.ir.backend import Target
from fuseplan.kernels.ir.index import Size, symbol
from fuseplan.kernels.ir.ir import Buffer, KernelIR
from fuseplan.kernels.ir.ops import torch_dtype

REASON = CppBackend().unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
TARGET = Target("cpu", "native", 2)
TYPES = ("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "int16", "int8", "bool")
#: Shapes of the result, and the order of its dimensions in the operand's memory.
SHAPES = [((127, 4097), (1, 0)), ((4097, 3), (1, 0)), ((1, 127), (1, 0)), ((40, 130), (1, 0)), ((17, 1025), (1, 0)),
          ((3, 33, 257), (0, 2, 1)), ((2, 5, 19, 33), (0, 2, 3, 1)), ((2, 67, 9, 31), (0, 3, 1, 2))]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> CppBackend:
    return CppBackend(tmp_path_factory.mktemp("kernels"))


def picked(dtype: str, shape: Sequence[Size], order: Sequence[int]) -> KernelIR:
    """Elements of x, whose dimensions lie in memory in this ``order``, where those of y are greater than they are 0."""
    lying = samples.contiguous("x", dtype, tuple(shape[dim] for dim in order))
    strides = tuple(lying.strides[order.index(dim)] for dim in range(len(shape)))
    buffers = [Buffer("x", dtype, tuple(shape), strides), samples.contiguous("y", dtype, shape),
               samples.contiguous("out", dtype, shape, True)]
    b = samples.Body(buffers, shape[:-1], shape[-1])
    x, y = b.load("x", b.at), b.load("y", b.at)
    b.store("out", b.at, b("where", b("ne", y, b("ne", y, y) if dtype == "bool" else b("sub", y, y)), x, y))
    return KernelIR(tuple(buffers), (b.segment(),))


def operands(dtype: str, shape: Sequence[int], order: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randint(1, 100, [shape[dim] for dim in order])
    x = x.permute([order.index(dim) for dim in range(len(shape))])
    y = torch.randint(0, 2, tuple(shape))
    wanted = torch_dtype(dtype)
    return (x % 2 == 0 if dtype == "bool" else x.to(wanted)), y.to(wanted)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "order"), SHAPES, ids=str)
def test_every_element_comes_to_its_place(
    backend: CppBackend, dtype: str, shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    ir = picked(dtype, shape, order)
    x, y = operands(dtype, shape, order)
    expected = torch.where(y.bool(), x.double(), y.double())
    config = backend.default_config(ir, TARGET)
    for rows, tile in ((1, 32), (4, 128), (16, 32), (64, 16384)):
        changed = {**config, "rows_per_task": rows, "col_tile": tile}
        made = backend.fused_callable(ir, changed, TARGET)(x, y)
        assert torch.equal(made.double(), expected), (rows, tile)


def test_sizes_may_be_dynamic(backend: CppBackend) -> None:
    ir = picked("float32", (symbol("s0"), 3, symbol("s1")), (0, 2, 1))
    assert transposed_loads(simplified_segments(ir)[0])
    call = backend.fused_callable(ir, backend.default_config(ir, TARGET), TARGET)
    for sizes in ((1, 3, 1), (5, 3, 127), (33, 3, 1030)):
        x, y = operands("float32", sizes, (0, 2, 1))
        assert torch.equal(call(x, y, sizes[0], sizes[2]), torch.where(y.bool(), x, y))


def test_only_rows_side_by_side_are_read_so(backend: CppBackend) -> None:
    (segment,) = simplified_segments(picked("float32", (40, 130), (1, 0)))
    (value,) = transposed_loads(segment)
    load = segment.body[value]
    apart = replace(load, index=load.index * 2)
    body = tuple(apart if number == value else instr for number, instr in enumerate(segment.body))
    assert transposed_loads(replace(segment, body=body)) == ()
