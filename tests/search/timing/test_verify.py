"""The check before timing: right kernels pass, every kind of wrong one is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from search_fakes import FakeKernel, FakeSubject, muladd_ir

from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import CompiledKernel, Resources
from fuseplan.kernels.ir.index import Index
from fuseplan.kernels.ir.ir import Apply, Buffer, Cast, KernelIR, Load, Segment, Store
from fuseplan.search.errors import SubjectError
from fuseplan.search.timing.verify import check_result, errors, make_oracle

SUBJECT = FakeSubject()


class Kernel(CompiledKernel):
    """A kernel from a function of (inputs, output)."""

    resources = Resources()

    def __init__(self, body: Callable[..., None]) -> None:
        self.body = body

    def __call__(self, *args: torch.Tensor | int) -> None:
        self.body(*args)


def judge(fault: str) -> str:
    kernel = FakeKernel(SUBJECT.ir, 1.0, 0.0, fault)
    return check_result(kernel, SUBJECT, make_oracle(SUBJECT, SUBJECT.make_inputs(5, "cpu")), "cpu").reason


def test_a_right_kernel_passes() -> None:
    oracle = make_oracle(SUBJECT, SUBJECT.make_inputs(5, "cpu"))
    verdict = check_result(FakeKernel(SUBJECT.ir, 1.0, 0.0, ""), SUBJECT, oracle, "cpu")
    assert verdict.ok
    assert verdict.reason == ""
    assert 0 < verdict.error < 1e-6
    assert 0 < oracle.eager_error < 1e-6


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "NaN or were never written"),
        ("partial", "1 of 381 elements are NaN or were never written"),
        ("inf", "infinite"),
        ("wrong", "error"),
        ("after", "output 0: written outside"),
        ("before", "output 0: written outside"),
        ("input", "input 0 was changed"),
        ("overread", "NaN or were never written"),
    ],
)
def test_every_fault_is_named(fault: str, reason: str) -> None:
    assert reason in judge(fault)


def test_inputs_are_fresh_for_each_seed() -> None:
    one, two = (make_oracle(SUBJECT, SUBJECT.make_inputs(seed, "cpu")) for seed in (1, 2))
    assert not torch.equal(one.inputs[0], two.inputs[0])


def test_a_broken_chain_or_a_nan_reference_is_the_subjects_fault() -> None:
    with pytest.raises(SubjectError, match=r"muladd 3x127: the unfused chain fails: RuntimeError: the chain does"):
        make_oracle(replace(SUBJECT, broken="eager"), SUBJECT.make_inputs(0, "cpu"))
    with pytest.raises(SubjectError, match="output 0 of the float64 reference is NaN"):
        make_oracle(replace(SUBJECT, broken="nan"), SUBJECT.make_inputs(0, "cpu"))


@dataclass(frozen=True)
class Custom:
    """A subject of one input and one output with given functions and layouts."""

    eager_of: Callable[[torch.Tensor], torch.Tensor]
    source: torch.Tensor
    out: torch.Tensor
    reference_of: Callable[[torch.Tensor], torch.Tensor] | None = None
    key: str = "custom"
    label: str = "custom"
    work: Work = field(default_factory=Work)
    hot_inputs: tuple[bool, ...] = (True,)
    kernel: KernelIR = field(default_factory=lambda: muladd_ir(1, 1))

    @property
    def ir(self) -> KernelIR:
        return self.kernel

    def make_inputs(self, seed: int, device: str) -> list[torch.Tensor]:
        return [self.source]

    def allocate_outputs(self, device: str) -> list[torch.Tensor]:
        return [torch.empty_strided(self.out.shape, self.out.stride(), dtype=self.out.dtype)]

    def eager(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [self.eager_of(*inputs)]

    def reference(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
        return [(self.reference_of or self.eager_of)(*wide)]


def check(subject: Custom, body: Callable[..., None]) -> str:
    return check_result(Kernel(body), subject, make_oracle(subject, subject.make_inputs(0, "cpu")), "cpu").reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 3, 127, 4097])
def test_correct_rounding_passes_and_two_roundings_of_error_do_not(dtype: torch.dtype, numel: int) -> None:
    torch.manual_seed(numel)
    source = torch.randn(numel, dtype=torch.float64).abs().add(1).to(dtype)
    subject = Custom(torch.exp, source, source)
    assert check(subject, lambda x, out: out.copy_(torch.exp(x.double()))) == ""
    off = 1 + 24 * max(torch.finfo(dtype).eps, 2.0**-23 if dtype != torch.float64 else 0)
    assert "error" in check(subject, lambda x, out: out.copy_(torch.exp(x.double()) * off))


def test_an_intermediate_rounding_that_eager_does_not_have_is_seen() -> None:
    source = torch.linspace(0.5, 4, 4097, dtype=torch.float32)
    subject = Custom(lambda x: torch.exp(x) * 2, source, source)
    assert "normwise" in check(subject, lambda x, out: out.copy_(torch.exp(x).bfloat16().float() * 2))


def test_one_bad_element_among_many_is_seen() -> None:
    source = torch.ones(100_000)
    subject = Custom(lambda x: x * 2, source, source)

    def body(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 2)
        out[77] += 1e-4

    assert "error" in check(subject, body)


def test_eagers_own_error_is_allowed_but_no_licence_to_overflow() -> None:
    source = torch.full((64,), 300.0, dtype=torch.float16)
    # Eager overflows in the middle (300 * 300); the exact result fits.
    subject = Custom(lambda x: (x * x) / 300, source, source)
    assert check(subject, lambda x, out: out.copy_(x.float() * x.float() / 300)) == ""
    assert "infinite" in check(subject, lambda x, out: out.copy_((x * x) / 300))


def test_a_result_too_large_for_its_type_is_rightly_infinite() -> None:
    source = torch.full((5,), 400.0, dtype=torch.float16)
    subject = Custom(lambda x: x * x, source, source)
    assert check(subject, lambda x, out: out.copy_(x * x)) == ""
    assert "infinite" in check(subject, lambda x, out: out.copy_(-(x * x)))


def test_infinities_of_a_mask_pass() -> None:
    source = torch.tensor([1.0, -2.0, 3.0])
    subject = Custom(lambda x: torch.where(x > 0, x, -torch.inf), source, source)
    assert check(subject, lambda x, out: out.copy_(torch.where(x > 0, x, -torch.inf))) == ""


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])
def test_integers_and_booleans_are_exact(dtype: torch.dtype) -> None:
    source = torch.arange(9)
    out = torch.empty(9, dtype=dtype)
    subject = Custom(lambda x: (x % 2).to(dtype), source, out)
    assert check(subject, lambda x, out: out.copy_(x % 2)) == ""
    assert "11.11%" in check(subject, lambda x, out: out.copy_(torch.where(x == 4, 1, x % 2)))
    missing = check(subject, lambda x, out: out[:-1].copy_(x[:-1] % 2))
    assert "never written" in missing or "elements differ" in missing


def rounding_ir(count: int) -> KernelIR:
    """int8 numbers rounded from floats."""
    column = Index.coord(0, count)
    buffers = (Buffer("x", "float32", (count,), (1,)), Buffer("y", "int8", (count,), (1,), True))
    body = (Load("float32", 0, column), Apply("float32", "round", (0,)), Cast("int32", 1))
    return KernelIR(buffers, (Segment((), count, body, (Store(1, column, 2),)),))


@pytest.mark.parametrize(("numel", "ties"), [(9, 2), (4097, 4)])
def test_a_few_ties_of_quantised_integers_may_fall_to_either_side(numel: int, ties: int) -> None:
    source = torch.randn(numel) * 30
    subject = Custom(
        lambda x: x.round().to(torch.int8), source, torch.empty(numel, dtype=torch.int8), kernel=rounding_ir(numel)
    )

    def off(count: int, by: int) -> Callable[..., None]:
        def body(x: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(x.round().to(torch.int8))
            out[:count] += by

        return body

    assert check(subject, off(0, 0)) == check(subject, off(ties, 1)) == check(subject, off(1, -1)) == ""
    assert "elements differ" in check(subject, off(ties + 1, 1))
    assert "elements differ" in check(subject, off(1, 2))
    assert "elements differ" in check(replace(subject, kernel=muladd_ir(1, 1)), off(1, 1))


def test_float8_is_judged_by_its_own_rounding() -> None:
    source = torch.cat([torch.randn(4096) * 100, torch.tensor([0.0])])
    number = source.clamp(-448, 448)
    out = torch.empty(4097, dtype=torch.float8_e4m3fn)
    subject = Custom(lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn), source, out)
    assert check(subject, lambda x, out: out.copy_(number)) == ""
    assert check(subject, lambda x, out: out.copy_(number * 1.001)) == ""  # some ties fall to the other side
    assert "error" in check(subject, lambda x, out: out.copy_((number * 1.3).clamp(-448, 448)))
    assert "never written" in check(subject, lambda x, out: out[1:].copy_(number[1:]))


def test_gaps_between_strided_elements_are_watched() -> None:
    source = torch.randn(4, 3)
    out = torch.empty_strided((4, 3), (8, 2))
    subject = Custom(lambda x: -x, source, out)
    assert check(subject, lambda x, out: out.copy_(-x)) == ""

    def spill(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(-x)
        out.as_strided((1,), (1,), out.storage_offset() + 1).fill_(7.0)

    assert "outside its elements" in check(subject, spill)


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(5).expand(3, 5),
        torch.randn(6, 8)[:, 2:5],
        torch.randn(7, 3).t(),
        torch.randn(10).as_strided((4, 3), (2, 1)),
        torch.tensor(2.0),
        torch.randn(0, 3),
    ],
    ids=["broadcast", "slice", "transpose", "overlapping", "scalar", "empty"],
)
def test_input_layouts_arrive_as_they_are(source: torch.Tensor) -> None:
    seen: list[tuple[int, ...]] = []
    subject = Custom(lambda x: x + 1, source, torch.empty(source.shape))

    def body(x: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(x.stride())
        out.copy_(x + 1)

    assert check(subject, body) == ""
    assert seen == [source.stride()]


def test_reading_a_gap_of_the_input_is_seen() -> None:
    source = torch.randn(4, 6)[:, :3]
    subject = Custom(lambda x: x + 1, source, torch.empty(4, 3))

    def body(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x.as_strided((4, 3), (6, 1), x.storage_offset() + 1) + 1)

    assert "NaN" in check(subject, body)


def test_what_is_rightly_nan_has_to_be_nan_and_the_rest_exact() -> None:
    source = torch.randn(5, 7)
    source[1] = source[3, 1:] = -torch.inf
    subject = Custom(lambda x: x.softmax(-1), source, source)
    assert check(subject, lambda x, out: out.copy_(x.softmax(-1))) == ""
    assert "infinite or NaN" in check(subject, lambda x, out: out.copy_(x.softmax(-1).nan_to_num()))
    assert "error" in check(subject, lambda x, out: out.copy_(x.softmax(-1) * 1.01))
    assert "8 of 35 elements" in check(subject, lambda x, out: out[:, :5].copy_(x.softmax(-1)[:, :5]))


def test_a_wrong_shape_is_named() -> None:
    source = torch.randn(4)
    subject = Custom(lambda x: x, source, torch.empty(5))
    assert "has shape (5,), the reference (4,)" in check(subject, lambda x, out: out.fill_(0.0))


def test_errors_by_hand() -> None:
    norm, worst = errors(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert norm == pytest.approx(0.1)
    assert worst == pytest.approx(0.5)
    assert errors(torch.tensor([math.nan]), torch.tensor([1.0])) == (math.inf, math.inf)
    assert errors(torch.tensor([1.0]), torch.tensor([math.nan])) == (math.inf, math.inf)
    assert errors(torch.tensor([math.nan, 2.0]), torch.tensor([math.nan, 2.0])) == (0.0, 0.0)
    assert errors(torch.zeros(2), torch.zeros(2)) == (0.0, 0.0)
    assert errors(torch.ones(2), torch.zeros(2))[0] == math.inf
    assert errors(torch.tensor([1, 2]), torch.tensor([1, 3])) == (0.5, 0.5)
