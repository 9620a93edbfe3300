"""Calls that must not write to memory of another argument: a check of address ranges in front of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.native.build import data_ptr_address, load_extension

logger = logging.getLogger(__name__)


class Operand(NamedTuple):
    """A tensor among the arguments; ``span_bytes`` from its first to its last element, -1 where sizes are dynamic."""

    position: int
    itemsize: int
    span_bytes: int

    @staticmethod
    def of(position: int, tensor: torch.Tensor) -> Operand:
        """As a traced tensor shows it."""
        sizes = (*tensor.shape, *tensor.stride())
        fixed = all(isinstance(size, int) for size in sizes)
        return Operand(position, tensor.element_size(), span_bytes(tensor) if fixed else -1)


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element, both included."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def guarded(
    compiled: Callable[..., Any], unfused: Callable[..., Any], met: Callable[[], None], written: Sequence[Operand],
    read: Sequence[Operand],
) -> Callable[..., Any]:
    """``compiled``, or ``met`` and then ``unfused`` in calls in which memory of a written operand meets another's.

    Ranges decide, even of interleaved views. Some nanoseconds an operand; without a C++ compiler, a microsecond.
    """
    module = load_guard()
    if module is not None:
        guard: Callable[..., Any] = module.Guard(
            compiled, unfused, met, data_ptr_address(), len(written), (*written, *read)
        ).call
        return guard

    def call(*args: Any) -> Any:
        if _any_meets([args[one.position] for one in written], [args[one.position] for one in read]):
            met()
            return unfused(*args)
        return compiled(*args)

    return call


def _any_meets(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> bool:
    """Whether memory of one of ``written`` meets that of another tensor."""
    spans = [(one.data_ptr(), one.data_ptr() + span_bytes(one)) for one in (*written, *read)]
    return any(
        max(begin, other) < min(end, other_end)
        for at, (begin, end) in enumerate(spans[: len(written)], 1) for other, other_end in spans[at:]
    )


@lru_cache(maxsize=1)
def load_guard() -> Any | None:
    try:
        return load_extension("overlap.cpp")
    except BuildError as error:
        logger.info("calls that write to their arguments take some microseconds more: %s", error)
        return None
