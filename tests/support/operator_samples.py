"""PyTorch's own samples of its operators, each between pointwise ops, compiled and judged against eager mode."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

import fuseplan.planner
from fuseplan.planner.runtime import logs

# For each sample it would read the source of all that calls it, to find a test of PyTorch's own.
common_utils.extract_test_fn = lambda: None
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
}
#: Their results are what memory held before.
UNFILLED = re.compile(r"empty|new_empty|resize|as_strided_partial")
#: Reasons of fallbacks that are a failure of ours.
_FAILED = re.compile(r"^(planning failed|tracing|first call failed|\w*(Error|Exception)\b)")


@dataclass(frozen=True)
class Case:
    """An operator, a dtype and the sample of that number; ``in_place`` calls its in-place variant."""

    op: OpInfo
    dtype: str
    number: int
    in_place: bool = False

    @property
    def name(self) -> str:
        variant = f".{self.op.variant_test_name}" if self.op.variant_test_name else ""
        return f"{self.op.name}{variant}{' in place' if self.in_place else ''} {self.dtype} {self.number}"


def cases(words: str, numbers: range, dtypes: Mapping[str, torch.dtype] = DTYPES) -> list[Case]:
    """Samples of each operator with one of ``words`` in its name, of each dtype that it takes, by their ``numbers``."""
    return [
        Case(op, name, number, in_place)
        for op in op_db if any(word in op.name for word in words.split(","))
        for name, dtype in dtypes.items() if dtype in op.supported_dtypes("cpu")
        for in_place in ((False, True) if op.inplace_variant is not None else (False,))
        for number in numbers
    ]


def arguments(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Operands of the case; None where the operator has not so many samples, or needs gradients."""
    torch.manual_seed(0)
    # All are made: a generator left unfinished would go on when it is collected, in the middle of a trace.
    samples = list(case.op.sample_inputs("cpu", DTYPES[case.dtype], requires_grad=False))
    sample = samples[case.number] if case.number < len(samples) else None
    return None if sample is None else ((sample.input, *sample.args), dict(sample.kwargs))


def before(value: Any) -> Any:
    """The same number, by a pointwise op."""
    if not _is_plain(value):
        return value
    return torch.logical_not(torch.logical_not(value)) if value.dtype is torch.bool else value.neg().neg()


def after(value: Any) -> Any:
    """What a pointwise op makes of a result."""
    if not _is_plain(value):
        return value
    return torch.logical_not(value) if value.dtype is torch.bool else value + value


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized


def program(case: Case) -> Callable[..., Any]:
    """``before`` each operand, the operator, and its results with what is made ``after`` them."""
    call = case.op.inplace_variant if case.in_place else case.op.op

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(before, (args, kwargs))
        results = call(*args, **kwargs)
        return results, pytree.tree_map(after, results)

    return run


def judge(case: Case, db: str, dynamic: bool = False) -> dict[str, Any]:
    """Compile and call the case, with ``dynamic`` sizes if asked.

    The answer has its ``complaints``, how many groups were ``fused``, and why it is ``left`` out.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = arguments(case)
        if given is None:
            return _outcome(left="no such sample")
        expected = _outcome_of(program(case), given)
        torch._dynamo.reset()
        logs.SAID.clear()
        fuseplan.planner.reset_stats()
        compiled = partial(torch.compile, program(case), dynamic=dynamic)
        run = compiled(backend="fuseplan", options={"db": db})
        results = [_outcome_of(run, given) for _ in range(2)]
        values = not UNFILLED.search(case.op.name)
        found = [text for result in results for text in differences(expected, result, case, given, values)]
        if found and (why := _by_dynamo(compiled, given, expected)) is not None:
            return _outcome(left=why)
        seen = fuseplan.planner.stats()
        found += [f"{count} x {reason}" for reason, count in seen.fallbacks.items() if _FAILED.match(reason)]
        found += [f"{count} x {note}" for note, count in seen.notes.items() if "fault of fuseplan" in note]
        return _outcome(list(dict.fromkeys(found)), seen.groups_fused)


def _by_dynamo(compiled: Callable[..., Any], given: Any, expected: Any) -> str | None:
    """How Dynamo alone, which runs eager mode's ops, has another answer too; None where it has not."""
    torch._dynamo.reset()
    result = _outcome_of(compiled(backend="eager"), given)
    return "Dynamo has another answer" if any(differences(expected, result)) else None


def _outcome_of(run: Callable[..., Any], given: Any) -> Any:
    """A call's results, or the error that it raised."""
    try:
        return _called(run, given)
    except Exception as error:
        return error


def _outcome(complaints: list[str] | None = None, fused: int = 0, left: str | None = None) -> dict[str, Any]:
    return {"complaints": complaints or [], "fused": fused, "left": left}


def _called(run: Callable[..., Any], given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """One call on copies of the operands, with the random numbers of every other call."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, _twin, given)
    torch.manual_seed(1)
    return run(*args, **kwargs)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides and the offset of a strided tensor."""
    if not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    memory = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def differences(
    expected: Any, result: Any, case: Case | None = None, given: Any = None, values: bool = True
) -> Iterator[str]:
    """What is not as in eager mode: structure, dtypes, shapes, strides; with ``values`` numbers that are further from
    the ``case`` in float64 than eager mode's, beyond rounding.
    """
    if isinstance(expected, Exception) or isinstance(result, Exception):
        if not (isinstance(expected, Exception) and isinstance(result, Exception)):
            yield f"{_told(result)} for {_told(expected)}"
        return
    (wanted, form), (found, other) = pytree.tree_flatten(expected), pytree.tree_flatten(result)
    if form != other:
        yield f"the results are {other} for {form}"
        return
    exact: list[Any] | None = None
    for at, (one, mine) in enumerate(zip(wanted, found, strict=True)):
        if not isinstance(one, torch.Tensor):
            if type(one) is not type(mine) or (values and not (one == mine or one != one)):
                yield f"result {at} is {mine!r} for {one!r}"
            continue
        text = _form(one, mine) or (_number(one, mine) if values else None)
        if text is not None and _form(one, mine) is None and case is not None:
            exact = _exact(case, given) if exact is None else exact
            if at < len(exact) and _is_as_near(one, mine, exact[at]):
                continue
        if text is not None:
            yield f"result {at} {text}"


def _told(outcome: Any) -> str:
    if not isinstance(outcome, Exception):
        return "results"
    return f"{type(outcome).__name__}: {(str(outcome).strip().splitlines() or [''])[0]}"


def _form(one: torch.Tensor, mine: torch.Tensor) -> str | None:
    for what in ("dtype", "shape", "layout"):
        if getattr(one, what) != getattr(mine, what):
            return f"has {what} {getattr(mine, what)} for {getattr(one, what)}"
    if _is_plain(one) and one.numel():
        strides = [[step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1] for t in (mine, one)]
        if strides[0] != strides[1]:
            return f"has strides {mine.stride()} for {one.stride()} (shape {tuple(one.shape)})"
    return None


def _number(one: torch.Tensor, mine: torch.Tensor) -> str | None:
    try:
        torch.testing.assert_close(mine, one, equal_nan=True, check_stride=False)
    except AssertionError as error:
        lines = str(error).splitlines()
        return f"{lines[0]} {'; '.join(lines[2:4])}"
    return None


def _exact(case: Case, given: Any) -> list[Any]:
    """Results of the case with floats in float64; nothing where the operator does not take them."""
    wide = pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, given)
    try:
        return pytree.tree_leaves(_called(program(case), wide))
    except Exception:
        return []


def _is_as_near(one: torch.Tensor, mine: torch.Tensor, exact: Any) -> bool:
    """Whether no number is further from float64's than eager mode's furthest, but for its own rounding."""
    if not _is_plain(one) or not one.is_floating_point() or exact.shape != one.shape:
        return False
    if not torch.equal(mine.isfinite(), one.isfinite()):
        return False
    held = one.isfinite() & exact.isfinite()
    far, near = ((t.double() - exact)[held].abs() for t in (mine, one))
    return bool((far <= near.max() + exact[held].abs() * torch.finfo(one.dtype).eps).all())
