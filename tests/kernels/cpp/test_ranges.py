"""Long folds whose columns tasks share: exact or close to float64, and the same bits whatever runs them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import ir_samples as samples
import pytest
import torch
from kernel_reference import run_reference

from fuseplan.kernels.cpp import launch
from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.cpp.config import count_tasks
from fuseplan.kernels.cpp.emitter import simplified_segments
from fuseplan.kernels.ir.backend import OutsideTable, Target, fused_call
from fuseplan.kernels.ir.index import Index, Size, symbol
from fuseplan.kernels.ir.ir import Buffer, KernelIR, Load

REASON = CppBackend().unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
TARGET = Target("cpu", "native", 2)
#: Long enough for several ranges: as many as divide it, an odd number, and a prime.
LONG = (2**18, 200_001, 131_101)
#: Columns, rows before and behind them, and how far apart columns are.
Layout: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], int]
LAYOUTS: list[Layout] = [
    *((cols, (), (), 1) for cols in (1, 3, 127, 4097, *LONG)),
    (131_101, (3,), (), 1), (2**17, (2, 2), (), 1), (200_001, (), (), 3),
    (131_101, (), (5,), 1), (20_011, (), (8,), 1), (8192, (2,), (33,), 1), (8192, (), (70,), 2),
]


#: Types whose products are rounded in a graph.
NARROW = ("bool", "uint8")


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> CppBackend:
    return CppBackend(tmp_path_factory.mktemp("kernels"))


def folds(
    kinds: Sequence[str], dtype: str, cols: Size, before: Sequence[int] = (), behind: Sequence[int] = (), step: int = 1
) -> KernelIR:
    """Folds of all kinds of x * x (of narrow types: x), and twice x for each column."""
    shape, rows = (*before, cols, *behind), (*before, *behind)
    plain = samples.contiguous("x", dtype, (*before, cols * step, *behind))
    strides = [stride * (step if axis == len(before) else 1) for axis, stride in enumerate(plain.strides)]
    buffers = [Buffer("x", dtype, shape, tuple(strides)),
               *(samples.contiguous(kind, dtype, rows, True) for kind in kinds)]
    if dtype != "bool":
        buffers.append(samples.contiguous("twice", dtype, shape, True))
    b = samples.Body(buffers, rows, cols)
    *at, column = b.at
    element = (*at[: len(before)], column, *at[len(before) :])
    x = b.load("x", element)
    for kind in kinds:
        b.store(kind, at, b.reduce(kind, x if dtype in NARROW else b("mul", x, x)))
    if dtype != "bool":
        b.store("twice", element, b("add", x, x))
    return KernelIR(tuple(buffers), (b.segment(),))


def expected(ir: KernelIR, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    wide = x.double() if x.dtype.is_floating_point else x
    square = wide if ir.buffers[0].dtype in NARROW else wide * wide
    found = {"sum": torch.sum, "prod": torch.prod, "max": torch.amax, "min": torch.amin}
    return [found[one.name](square, dim) if one.name in found else wide + wide for one in ir.outputs]


def tasks(ir: KernelIR) -> int:
    return count_tasks(simplified_segments(ir), 1, 1024)


def calls(backend: CppBackend, ir: KernelIR, *inputs: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Results with one thread and with two, by configuration and by torch's own limit, twice each."""
    made = []
    for threads in (1, 2):
        config = {**backend.default_config(ir, TARGET), "threads": threads}
        call = fused_call(backend.load(ir, config, TARGET), ir)
        for limit in (1, 2, 2):
            before = torch.get_num_threads()
            torch.set_num_threads(limit)
            try:
                result = call(*inputs)
            finally:
                torch.set_num_threads(before)
            made.append(result if isinstance(result, tuple) else (result,))
    return made


def same_bits(made: Sequence[Sequence[torch.Tensor]]) -> bool:
    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))

    return all(equal(one, other) for more in made[1:] for one, other in zip(made[0], more, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_several_folds_of_any_layout(backend: CppBackend, layout: Layout) -> None:
    cols, before, behind, step = layout
    ir = folds(("sum", "max", "min"), "float32", cols, before, behind, step)
    x = samples.Sample("folds", ir).inputs()[0]
    made = calls(backend, ir, x)
    assert same_bits(made)
    for actual, wanted in zip(made[0], expected(ir, x, len(before)), strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=2e-6, atol=0)
    together = behind != () and behind[0] >= 8  # rows of a task are as many as the vectors' tile
    assert (tasks(ir) > 1 if together else tasks(ir) > math.prod((*before, *behind))) == (cols >= 8192)
    assert backend.default_config(ir, TARGET)["threads"] == (2 if cols >= 8192 else 1)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("path", ["extension", "ctypes", "no OpenMP"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int64", "int32", "uint8", "bool"])
def test_types_keep_their_own_parts(
    backend: CppBackend, dtype: str, path: str, across: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "ctypes":
        monkeypatch.setattr(launch, "load_launcher", lambda *_: None)
    if path == "no OpenMP":
        monkeypatch.setattr(launch, "shared_openmp", lambda: (0,) * 4)
    kinds = ("max", "min") if dtype == "bool" else ("sum", "max", "min", "prod")
    ir = folds(kinds, dtype, 20_011, behind=(11,)) if across else folds(kinds, dtype, 131_101, (2,))
    x = samples.Sample("folds", ir).inputs()[0]
    rows = x.T if across else x
    if dtype != "bool":
        rows.masked_fill_(torch.arange(rows.shape[1]) % 9001 != 5, 1)
    else:
        rows[0], rows[1] = False, True
        rows[0, 17_777], rows[1, -1] = True, False
    made = calls(backend, ir, x)
    assert same_bits(made)
    for actual, wanted in zip(made[0], expected(ir, x, 0 if across else 1), strict=True):
        if actual.dtype.is_floating_point:
            torch.testing.assert_close(actual.double(), wanted, rtol=1e-13 if dtype == "float64" else 4e-3, atol=0)
        else:
            assert torch.equal(actual, wanted.to(actual.dtype))


def test_booleans_are_counted(backend: CppBackend) -> None:
    buffers = [samples.contiguous("x", "float32", (LONG[1],)), samples.contiguous("y", "int64", (), True)]
    b = samples.Body(buffers, (), LONG[1])
    b.store("y", (), b.reduce("sum", b.cast(b("gt", b.load("x", b.at), b.const(0.0)), "int64")))
    ir = KernelIR(tuple(buffers), (b.segment(),))
    x = torch.randn(LONG[1])
    made = calls(backend, ir, x)
    assert same_bits(made) and made[0][0] == (x > 0).sum()
    assert "FP_WIDEST 4" in backend.source(ir, backend.default_config(ir, TARGET))


@pytest.mark.parametrize("place", [0, 77_777, 131_072, 131_100])
def test_nan_and_infinity_of_any_range_reach_the_result(backend: CppBackend, place: int) -> None:
    ir = folds(("sum", "max", "min"), "float32", 131_101)
    for number in (math.nan, math.inf):
        x = torch.ones(131_101)
        x[place] = number
        total, most, least, _ = calls(backend, ir, x)[0]
        torch.testing.assert_close(torch.stack([total, most]), torch.full((2,), number), equal_nan=True)
        assert least.isnan() == math.isnan(number)


def norm(cols: Size, over: bool = False) -> tuple[list[Buffer], samples.Body]:
    """Of each row its root of a mean, times a number of the row: into memory of its own, or over an input."""
    buffers = [samples.contiguous("x", "float32", (3, cols)), samples.contiguous("scale", "float32", (3,)),
               samples.contiguous("kept", "float32", (3,)), samples.contiguous("y", "float32", (3,), True)]
    buffers[-1] = replace(buffers[-1], over=2) if over else buffers[-1]
    b = samples.Body(buffers, (3,), cols)
    x = b.load("x", b.at)
    root = b("sqrt", b.reduce("sum", b("mul", x, x)))
    b.store("y", b.at[:1], b("mul", root, b.load("scale", b.at[:1])))
    return buffers, b


@pytest.mark.parametrize("over", [False, True])
def test_what_follows_is_done_once_a_row(backend: CppBackend, over: bool) -> None:
    buffers, b = norm(LONG[0], over)
    short = [samples.contiguous("a", "float32", (40, 100)), samples.contiguous("b", "float32", (40, 100), True)]
    buffers = [*buffers[:3], short[0], buffers[3], short[1]]
    ir = KernelIR(tuple(buffers), tuple(
        replace(one, body=tuple(replace(i, buffer=i.buffer + shift) if isinstance(i, Load) else i for i in one.body),
                stores=tuple(replace(s, buffer=4 + at) for s in one.stores))
        for at, (one, shift) in enumerate(((b.segment(), 0), (copied(short), 3)))))
    inputs = samples.Sample("norm", ir).inputs()
    wanted = run_reference(ir, inputs)
    made = calls(backend, ir, *inputs)
    assert same_bits(made) and tasks(ir) > 6
    for actual, one in zip(made[0], wanted, strict=True):
        torch.testing.assert_close(actual.double(), one, rtol=2e-6, atol=0)
    assert (made[0][0].data_ptr() == inputs[2].data_ptr()) == over


def copied(buffers: list[Buffer]) -> samples.Segment:
    b = samples.Body(buffers, (40,), 100)
    b.store("b", b.at, b.load("a", b.at))
    return b.segment()


def test_a_dynamic_size_is_one_range(backend: CppBackend) -> None:
    buffers, b = norm(symbol("n"))
    ir = KernelIR(tuple(buffers), (b.segment(),))
    inputs = samples.Sample("norm", ir, {"n": LONG[1]}).inputs()
    made = fused_call(backend.load(ir, backend.default_config(ir, TARGET), TARGET), ir)(*inputs, LONG[1])
    torch.testing.assert_close(made.double(), run_reference(ir, inputs, {"n": LONG[1]})[0], rtol=2e-6, atol=0)


def test_what_is_shared_by_columns_is_divided_along_with_them(backend: CppBackend) -> None:
    """x[a, b] + y[b] of all a and b: where a row is one range or several, no column asks for a division."""
    outer, inner = 96, 4096
    buffers = [samples.contiguous("x", "float32", (outer * inner,)), samples.contiguous("y", "float32", (inner,)),
               samples.contiguous("z", "float32", (), True)]
    b = samples.Body(buffers, (), outer * inner)
    b.store("z", (), b.reduce("sum", b("add", b.load("x", b.at), b.load("y", (b.at[0] % inner,)))))
    ir = KernelIR(tuple(buffers), (b.segment(),))
    x, y = samples.Sample("sum", ir).inputs()
    made = calls(backend, ir, x, y)
    torch.testing.assert_close(made[0][0].double(), (x.double().view(outer, inner) + y).sum(), rtol=0, atol=1e-2)
    assert same_bits(made) and tasks(ir) > 1


@pytest.mark.parametrize("over", [False, True])
def test_an_index_outside_its_table_fails_in_any_range(backend: CppBackend, over: bool) -> None:
    """One for each column, whether its element is needed or not, and one for a row that is looked up after the fold."""
    cols = LONG[1]
    buffers = [samples.contiguous("table", "float32", (100,)), samples.contiguous("ids", "int64", (cols,)),
               samples.contiguous("more", "int64", (cols,)), samples.contiguous("at", "int64", (1,)),
               samples.contiguous("kept", "float32", (1,)),
               replace(samples.contiguous("y", "float32", (1,), True), over=4 if over else None)]
    b = samples.Body(buffers, (1,), cols)
    total = b.reduce("sum", b.gather("table", (Index(0),), b.load("ids", b.at[1:]), 0, 0.0))
    b.gather("table", (Index(0),), b.load("more", b.at[1:]), 0, 0.0)
    b.store("y", b.at[:1], b("add", total, b.gather("table", (Index(0),), b.load("at", (Index(0),)), 0, 0.0)))
    ir = KernelIR(tuple(buffers), (b.segment(),))
    table, ids, at, kept = torch.arange(100.0) % 50, torch.randint(0, 100, (cols,)), torch.tensor([7]), torch.ones(1)
    wanted = table.double()[ids].sum() + table[7]  # exact in float32
    call = fused_call(backend.load(ir, backend.default_config(ir, TARGET), TARGET), ir)
    assert torch.equal(call(table, ids, ids, at, kept.clone()).double(), wanted[None])
    for number, place in itertools.product((0, 1), (0, cols // 2, cols - 1)):
        wrong = [ids.clone(), ids.clone()]
        wrong[number][place] = 100
        with pytest.raises(OutsideTable):
            call(table, *wrong, at, kept)
        assert kept.item() == 1.0
    with pytest.raises(OutsideTable):
        call(table, ids, ids, torch.tensor([-1]), kept)
    assert kept.item() == 1.0


@pytest.mark.parametrize("path", ["extension", "ctypes"])
@pytest.mark.parametrize("sample", [
    samples.softmax(1, LONG[0]), samples.softmax(1, LONG[2], "bfloat16"), samples.layer_norm(1, LONG[1]),
    samples.rms_norm(1, LONG[1]),
], ids=samples.label)
def test_one_row_is_shared_fold_after_fold(
    backend: CppBackend, sample: samples.Sample, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "ctypes":
        monkeypatch.setattr(launch, "load_launcher", lambda *_: None)
    inputs = sample.inputs()
    made = calls(backend, sample.ir, *inputs)
    assert same_bits(made) and len(simplified_segments(sample.ir)) > 1
    for actual, wanted in zip(made[0], run_reference(sample.ir, inputs), strict=True):
        tolerance = 4e-3 if actual.dtype == torch.bfloat16 else 5e-6
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def test_folds_of_folds_of_several_rows_and_many_rows_are_left_alone() -> None:
    assert tasks(samples.softmax(2, 2**18).ir) == 2
    assert tasks(folds(("sum",), "float32", 2**18, (256,))) == 256
    assert tasks(folds(("sum",), "float32", 2**16)) == 1
