"""Whether what a compiled program did is right: as eager where that is exact, else no further from float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from program_rounding import Watch, Wide
from programs import Program, Step, namespace, shares

#: Samples of what rounding alone does to a program.
_SAMPLES = 3


def _twin(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own, laid out the same."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        wide = tensor.to(dtype, copy=True)
        return wide.as_strided(tensor.shape, tensor.stride()) if tensor.numel() else wide
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype).copy_(tensor)


def in_float64(program: Program, call: int, seed: int | None = None) -> list[torch.Tensor]:
    """Results, then arguments as the program left them, in float64; with a seed, each rounding as chance has it."""
    narrow = dict(zip((f"x{number}" for number in range(len(program.inputs))), program.arguments(call), strict=True))
    space = namespace(torch.float64)
    space |= {
        name: _twin(one, torch.float64 if one.is_floating_point() else one.dtype) for name, one in narrow.items()
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
            with Wide(watch.roundings, generator if step.rounds else None) as wide:
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
        complaint = _difference(got, wanted, wide[number], [sample[number] for sample in samples])
        if complaint:
            found.append(f"{what}: {complaint}")
    return found


def _strides(tensor: torch.Tensor) -> list[int]:
    """Those that mean something: over one element, PyTorch's own fake tensors have others than eager's results."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} @ {tensor.stride()}"


def _memory(tensor: torch.Tensor, arguments: Sequence[torch.Tensor]) -> list[int]:
    return [at for at, one in enumerate(arguments) if tensor.numel() and shares(tensor, one)]


def _difference(
    got: torch.Tensor, wanted: torch.Tensor, exact: torch.Tensor, samples: Sequence[torch.Tensor]
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
    spread = max((float((sample - exact)[finite].abs().max()) for sample in samples), default=0.0) if bool(
        finite.any()
    ) else 0.0
    error = torch.where(finite, own - exact, 0.0).abs()
    eager_error = float(torch.where(finite, eager - exact, 0.0).abs().max())
    unit = max(torch.finfo(got.dtype).eps, 4 * 2.0**-23 if got.dtype != torch.float64 else 0.0)
    bound = eager_error + 2 * (spread if math.isfinite(spread) else 0.0) + 2 * unit * exact.abs() + 1e-37
    excess = torch.where(finite & ~same, error - bound, -1.0)
    if float(excess.max()) <= 0:
        return ""
    at = int(excess.argmax())
    return (
        f"{int((excess > 0).sum())} of {got.numel()} elements are off, one by {float(error.reshape(-1)[at]):.3g}: "
        f"{float(own.reshape(-1)[at]):.6g}, eager {float(eager.reshape(-1)[at]):.6g}, "
        f"float64 {float(exact.reshape(-1)[at]):.6g} (eager's largest error {eager_error:.3g}, rounding {spread:.3g})"
    )
