"""Whether what a compiled program did is right: as eager where that is exact, else no further from float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from program_rounding import Watch, Wide
from programs import Program, Step, namespace, shares, twin

#: Samples of what rounding alone does to a program: so many that none of its elements stays where it is in all of them.
_SAMPLES = 16
#: How often the root of their mean square an element may be off: several roundings may add up.
_SPREADS = 6.0
#: Relative errors of a function, in float32 and in float64.
_FUNCTION = {torch.float32: 8 * 2.0**-24, torch.float64: 4 * 2.0**-53}


def in_float64(program: Program, call: int, seed: int | None = None) -> list[torch.Tensor]:
    """Results, then arguments as the program left them, in float64; with a seed, each rounding as chance has it.

    What rounds once is rounded as in float32 on the way there.
    """
    narrow = dict(zip((f"x{number}" for number in range(len(program.inputs))), program.arguments(call), strict=True))
    space = namespace(torch.float64)
    space |= {
        name: twin(one, torch.float64 if one.is_floating_point() else one.dtype) for name, one in narrow.items()
    }
    # What each value's rounding is can only be told from the program as it runs.
    own = namespace(None) | dict(narrow)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    default = torch.get_default_dtype()
    try:
        for step in program.steps:
            torch.set_default_dtype(torch.float32)
            with Watch() as watch:
                exec(step.text, own)
            torch.set_default_dtype(torch.float64)
            roundings = [one.within() for one in watch.roundings] if program.rounds_once else watch.roundings
            with Wide(roundings, generator if step.rounds else None) as wide:
                exec(step.text, space)
            if not _is_write(step):
                space[step.target] = wide.settled(space[step.target])
    finally:
        torch.set_default_dtype(default)
    names = (*program.results, *(f"x{number}" for number in range(len(program.inputs))))
    return [eval(name, space) for name in names]


def _is_write(step: Step) -> bool:
    return " = " not in step.text


def complaints(program: Program, call: int, results: Sequence[Any], arguments: Sequence[torch.Tensor]) -> list[str]:
    """What is wrong with a call's results and with what it left of its arguments; nothing where float64 excuses it."""
    own_arguments = program.arguments(call)
    expected = list(program.function()(*own_arguments))
    found = []
    for number, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        if (got.shape, got.dtype, _strides(got)) != (wanted.shape, wanted.dtype, _strides(wanted)):
            found.append(f"result {number} is {_layout(got)}, eager's {_layout(wanted)}")
        elif _memory(got, arguments) != _memory(wanted, own_arguments):
            found.append(f"result {number} shares memory with {_memory(got, arguments)}, eager's with "
                         f"{_memory(wanted, own_arguments)}")
    if found:
        return found
    wide = in_float64(program, call)
    samples = [in_float64(program, call, seed) for seed in range(_SAMPLES)]
    pairs = [*zip(results, expected, strict=True), *zip(arguments, own_arguments, strict=True)]
    for number, (got, wanted) in enumerate(pairs):
        what = f"result {number}" if number < len(expected) else f"argument {number - len(expected)}"
        moved = [sample[number] for sample in samples]
        complaint = _difference(got, wanted, wide[number], moved, program.rounds_once)
        if complaint:
            found.append(f"{what}: {complaint}")
    return found


def _strides(tensor: torch.Tensor) -> list[int]:
    """Those that mean something: over one element, or none of it, PyTorch's own fake tensors have others than eager's
    results.
    """
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} @ {tensor.stride()}"


def _memory(tensor: torch.Tensor, arguments: Sequence[torch.Tensor]) -> list[int]:
    return [at for at, one in enumerate(arguments) if tensor.numel() and shares(tensor, one)]


def _difference(
    got: torch.Tensor, wanted: torch.Tensor, exact: torch.Tensor, samples: Sequence[torch.Tensor], once: bool
) -> str:
    if got.numel() == 0:
        return ""
    if not got.is_floating_point():
        unsure = torch.zeros(got.shape, dtype=torch.bool)
        for sample in samples:
            unsure |= sample != exact
        wrong = (got != wanted) & ~unsure & (wanted == exact)
        return f"{int(wrong.sum())} of {got.numel()} elements differ from eager" if bool(wrong.any()) else ""
    own, eager, exact = got.double(), wanted.double(), exact.double()
    narrow = exact.to(got.dtype).double()
    same = (own == eager) | (own == narrow) | (own.isnan() & (eager.isnan() | narrow.isnan()))
    finite = own.isfinite() & exact.isfinite() & eager.isfinite()
    if bool((~same & ~finite & ~(own.isfinite() & narrow.isfinite())).any()):
        return f"{int((~same & ~finite).sum())} elements are not finite where eager's are, or the other way round"
    spread = torch.stack([(sample - exact).double().square() for sample in samples]).mean(0).sqrt()
    spread = torch.where(spread.isfinite(), spread, 0.0)
    error, eager_error = (own - exact).abs(), (eager - exact).abs()
    function = _FUNCTION[torch.float64 if got.dtype == torch.float64 else torch.float32]
    bound = _SPREADS * spread + function * exact.abs() + _half_unit(exact, got.dtype)
    # What is rounded on the way, too, may be off one way where eager is off the other.
    bound = torch.maximum(bound, eager_error) if once else bound + eager_error
    excess = torch.where(finite & ~same, error - bound, -1.0)
    if float(excess.max()) <= 0:
        return ""
    at = int(excess.argmax())
    return (
        f"{int((excess > 0).sum())} of {got.numel()} elements are off, one by {float(error.reshape(-1)[at]):.3g}: "
        f"{float(own.reshape(-1)[at]):.6g}, eager {float(eager.reshape(-1)[at]):.6g}, "
        f"float64 {float(exact.reshape(-1)[at]):.6g} (eager's error {float(eager_error.reshape(-1)[at]):.3g}, "
        f"rounding {float(spread.reshape(-1)[at]):.3g})"
    )


def _half_unit(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rounding to a dtype moves each number by, at most."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(exact, info.eps / 4), exponent)
