"""Is a kernel right? Checked before it is timed, against float64, in memory that shows every stray access.

Outputs start as NaN (or as a sentinel) between guard zones; inputs lie between NaN. So an element left unwritten, a
write outside, a changed input, and a read outside that reaches a result are all seen, except for elements that are
rightly NaN (the softmax of a row that is masked as a whole).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fuseplan.costmodel.devices import is_gpu
from fuseplan.kernels.ir.backend import CompiledKernel
from fuseplan.kernels.ir.ir import Cast, KernelIR, operands
from fuseplan.kernels.native.overlap import span_bytes
from fuseplan.search import policy
from fuseplan.search.errors import OWN_FAULTS, SubjectError
from fuseplan.search.timing.signs import goes_on
from fuseplan.search.timing.subject import Subject

_GUARD_BYTES = 4096
_GUARD_VALUE = 0xA5


@dataclass(frozen=True)
class CheckResult:
    """Whether a kernel may be used, why not, and the largest normwise relative error of its outputs against float64."""

    ok: bool
    reason: str
    error: float


@dataclass(frozen=True)
class _Expected:
    """One output's oracle and what eager makes of it."""

    reference: torch.Tensor
    eager_norm: float
    eager_worst: float
    quantised: bool


@dataclass(frozen=True)
class Oracle:
    """Inputs of a subject, and their float64 results; one serves every configuration."""

    inputs: tuple[torch.Tensor, ...]
    expected: tuple[_Expected, ...]

    @property
    def eager_error(self) -> float:
        return max((item.eager_norm for item in self.expected), default=0.0)


def make_oracle(subject: Subject, inputs: Sequence[torch.Tensor]) -> Oracle:
    """Run the reference and the unfused chain; :class:`SubjectError` where one fails, or gives nothing but NaN."""
    written = set(subject.ir.overwritten.values())
    try:
        references = subject.reference(*inputs)
        goes_on()
        eager = subject.eager(*(one.clone() if number in written else one for number, one in enumerate(inputs)))
    except Exception as error:
        OWN_FAULTS.tolerate(error)
        raise SubjectError(f"{subject.label}: the unfused chain fails: {type(error).__name__}: {error}") from error
    goes_on()
    expected = []
    quantised = quantised_outputs(subject.ir)
    for number, (reference, own) in enumerate(zip(references, eager, strict=True)):
        reference = reference.to(own.device)
        if reference.is_floating_point() and reference.numel() and bool(torch.isnan(reference).all()):
            raise SubjectError(f"{subject.label}: output {number} of the float64 reference is NaN; cannot be checked")
        norm, worst = errors(own, reference)
        expected.append(_Expected(reference, norm, worst, number in quantised))
    return Oracle(tuple(inputs), tuple(expected))


def quantised_outputs(ir: KernelIR) -> set[int]:
    """Numbers of the integer outputs that a kernel makes of floats."""
    found: set[int] = set()
    for segment in ir.segments:
        made_of_float: list[bool] = []
        for instr in segment.body:
            if instr.dtype.startswith("float"):
                made_of_float.append(False)
                continue
            converted = isinstance(instr, Cast) and segment.body[instr.arg].dtype.startswith("float")
            made_of_float.append(converted or any(made_of_float[arg] for arg in operands(instr)))
        found |= {store.buffer - len(ir.inputs) for store in segment.stores if made_of_float[store.value]}
    return found


def errors(value: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Normwise relative and largest absolute error; for integers and booleans the part that differs, twice.

    Infinities and NaN that agree count as exact. Anything else that is not finite makes the error infinite.
    """
    if value.numel() == 0:
        return 0.0, 0.0
    if not value.is_floating_point():
        wrong = float((value.to(torch.float64) != reference.to(torch.float64)).double().mean())
        return wrong, wrong
    wide, exact = value.to(torch.float64), reference.to(torch.float64)
    difference = (wide - exact).abs()
    if not bool(torch.isfinite(difference).all()):
        # A number too large for the output's type is rightly infinite in it.
        agree = torch.isinf(wide) & (wide == exact.to(value.dtype).to(torch.float64))
        agree |= torch.isnan(wide) & torch.isnan(exact)
        difference, exact = (torch.where(agree, 0.0, one) for one in (difference, exact))
        if not bool(torch.isfinite(difference).all()):
            return math.inf, math.inf
    norm = float(torch.linalg.vector_norm(exact))
    distance = float(torch.linalg.vector_norm(difference))
    return (distance / norm if norm > 0 else (0.0 if distance == 0 else math.inf)), float(difference.max())


def check_result(kernel: CompiledKernel, subject: Subject, oracle: Oracle, device: str) -> CheckResult:
    """Run ``kernel`` once on the oracle's inputs and judge everything it wrote.

    It passes when, for every output, its normwise error and its largest error exceed those of the unfused chain by no
    more than :func:`rounding`. Exceptions of the kernel are passed on.
    """
    inputs = [_Guarded(tensor, filled=True) for tensor in oracle.inputs]
    before = [guarded.buffer.clone() for guarded in inputs]
    outputs = [_Guarded(tensor) for tensor in subject.allocate_outputs(device)]
    for guarded, buffer in zip(outputs, subject.ir.outputs, strict=True):
        if buffer.over is not None:
            guarded.view.copy_(oracle.inputs[buffer.over])
        elif guarded.view.is_floating_point():  # other types start as the guard's bytes
            guarded.view.fill_(math.nan)
    kernel(*(guarded.view for guarded in inputs), *(guarded.view for guarded in outputs))
    if is_gpu(device):
        torch.cuda.synchronize()
    goes_on()
    kept = [torch.equal(guarded.buffer, old) for guarded, old in zip(inputs, before, strict=True)]
    strays = [f"input {number} was changed, or memory around it" for number, same in enumerate(kept) if not same]
    outside = (number for number, guarded in enumerate(outputs) if guarded.touched_outside())
    strays += [f"output {number}: written outside its elements" for number in outside]
    return _verdict([(guarded.view, guarded.unwritten()) for guarded in outputs], oracle, strays)


def check_call(run: Callable[..., Sequence[torch.Tensor]], oracle: Oracle, ops: int = 1) -> CheckResult:
    """Judge what a library's call returns, as :func:`check_result` judges a kernel; its memory is its own business.

    It may round as often as a kernel for each of ``ops``, one after another.
    """
    results = run(*oracle.inputs)
    goes_on()
    return _verdict([(value, 0) for value in results], oracle, [], ops)


def _verdict(
    results: Sequence[tuple[torch.Tensor, int]], oracle: Oracle, reasons: list[str], ops: int = 1
) -> CheckResult:
    """Of results, each with how many of its elements are known to be unwritten; the first of the ``reasons`` counts."""
    worst = 0.0
    for number, ((value, unwritten), expected) in enumerate(zip(results, oracle.expected, strict=True)):
        error, complaint = _judge(value, unwritten, expected, ops)
        worst = max(worst, error)
        reasons += [f"output {number}: {complaint}"] if complaint else []
    return CheckResult(not reasons, next(iter(reasons), ""), worst)


def _judge(value: torch.Tensor, unwritten: int, expected: _Expected, ops: int) -> tuple[float, str]:
    """Normwise error of one output, and what is wrong with it."""
    reference = expected.reference
    if value.shape != reference.shape:
        return math.inf, f"has shape {tuple(value.shape)}, the reference {tuple(reference.shape)}"
    norm, worst = errors(value, reference)
    if value.is_floating_point() and math.isinf(norm):  # what still holds the poison, or is NaN and should not be
        unwritten = int((torch.isnan(value.to(torch.float64)) & ~torch.isnan(reference)).sum())
    if unwritten:
        return math.inf, f"{unwritten} of {value.numel()} elements are NaN or were never written"
    if not value.is_floating_point():
        allowed = expected.eager_norm
        if expected.quantised:  # numbers halfway between two steps fall to either
            one_off = int(((value.to(torch.int64) - reference.to(torch.int64)).abs() == 1).sum())
            allowed += min(one_off, max(policy.FEW_TIES, policy.TIE_SHARE * value.numel())) / max(value.numel(), 1)
        return norm, f"{norm:.2%} of the elements differ" if norm > allowed else ""
    if math.isinf(norm):
        return norm, "is infinite or NaN where the reference is not, or the other way round"
    # An eager chain that overflows gives a kernel no licence to be wrong.
    errors_of_eager = (expected.eager_norm, expected.eager_worst)
    eager_norm, eager_worst = (error if math.isfinite(error) else 0.0 for error in errors_of_eager)
    allowed_norm = eager_norm + max(rounding(value.dtype) / 8, policy.COMPUTE_TOLERANCE * ops)
    if norm > allowed_norm:
        return norm, f"normwise error {norm:.2e}, eager has {expected.eager_norm:.2e} (allowed {allowed_norm:.2e})"
    if value.numel() == 0:
        return norm, ""
    wide, exact = value.to(torch.float64), reference.to(torch.float64)
    info = torch.finfo(value.dtype)
    # Kernels may flush float32's subnormals to zero; narrower types keep theirs.
    floor = max(info.tiny * info.eps, torch.finfo(torch.float32).tiny)
    # Several ops may round intermediate values that are larger than the result: a running sum may end near zero.
    size = exact.abs() if ops == 1 else exact.abs().nan_to_num(0.0, 0.0, 0.0).max()
    miss = (wide - exact).abs() - (eager_worst + rounding(value.dtype, ops) * size + floor)
    # Infinities and NaN agree here: those that do not were refused before.
    if float(torch.where(torch.isfinite(wide), miss, 0.0).max()) > 0:
        return norm, f"largest error {worst:.2e}, eager has {expected.eager_worst:.2e}"
    return norm, ""


def rounding(dtype: torch.dtype, ops: int = 1) -> float:
    """Relative rounding that code may add: its output type's, or a few, for each op, of the float32 it computes in."""
    if dtype == torch.float64:
        return 4 * ops * torch.finfo(torch.float64).eps
    return max(torch.finfo(dtype).eps, policy.COMPUTE_TOLERANCE * ops)


class _Guarded:
    """A tensor of a given layout inside a buffer whose every other byte is watched.

    ``filled``: it has the elements of ``like``, with NaN in every gap and around (floats; other types keep the guard's
    bytes).
    """

    def __init__(self, like: torch.Tensor, filled: bool = False) -> None:
        size = like.element_size()
        self.span = span_bytes(like) // size
        self.guard = _GUARD_BYTES // size
        self.buffer = torch.full(
            ((self.span + 2 * self.guard) * size,), _GUARD_VALUE, dtype=torch.uint8, device=like.device
        )
        self.flat = self.buffer.view(like.dtype)
        self.view = self.flat.as_strided(like.shape, like.stride(), self.guard)
        self._covered: torch.Tensor | None = None
        if like.numel() != self.span:
            self._covered = torch.zeros(self.span, dtype=torch.bool, device=like.device)
            self._covered.as_strided(like.shape, like.stride()).fill_(True)
        if filled and self.span:
            if self.flat.is_floating_point():
                self.flat.fill_(math.nan)
            whole, middle = like.as_strided((self.span,), (1,)), self.flat[self.guard : self.guard + self.span]
            middle.copy_(whole if self._covered is None else torch.where(self._covered, whole, middle))

    def unwritten(self) -> int:
        """How many elements of a bool tensor still hold the guard's bytes. An integer kernel may compute those: a wrong
        value is found by comparing.
        """
        if self.flat.dtype != torch.bool:
            return 0
        return int((self.buffer.as_strided(self.view.shape, self.view.stride(), self.guard) > 1).sum())

    def touched_outside(self) -> bool:
        """True when a guard byte or a byte in a gap has changed."""
        rows = self.buffer.view(-1, self.flat.element_size())
        around = torch.cat([rows[: self.guard], rows[self.guard + self.span :]])
        gaps = [] if self._covered is None else [rows[self.guard : self.guard + self.span][~self._covered]]
        return any(bool((watched != _GUARD_VALUE).any()) for watched in (around, *gaps))
