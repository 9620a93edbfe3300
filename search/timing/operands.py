"""Operand sets to call a contestant with in turn, so that weights come cold from memory as they do in a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fuseplan.kernels.native.overlap import span_bytes
from fuseplan.search.timing.timers import Operands, Run

#: Cold operands rotate over this many times the last-level cache.
CACHE_MULTIPLE = 3
_DEFAULT_CACHE_BYTES = 32 * 2**20
#: The side of a run that only reads memory, and so many bytes of it at least.
MEMORY = "memory"
_LEAST_READ_BYTES = 128 * 2**20
#: More operand sets than this cost more to build than their coldness is worth.
_MAX_SETS = 256


def cache_bytes(target_bytes: int) -> int:
    """Last-level cache size: the target's, a usual size where the system did not tell."""
    return target_bytes or _DEFAULT_CACHE_BYTES


def rotating_operands(
    inputs: Sequence[torch.Tensor], hot: Sequence[bool], llc_bytes: int, limit_bytes: int
) -> Operands:
    """Operand sets to call a kernel with in turn, of ``limit_bytes`` at most.

    Inputs that were just produced (``hot``) are shared; the others are copied until a last-level cache of ``llc_bytes``
    cannot hold them.
    """
    cold_bytes = sum(span_bytes(tensor) for tensor, is_hot in zip(inputs, hot, strict=True) if not is_hot)
    if cold_bytes == 0:
        return [tuple(inputs)]
    wanted = math.ceil(CACHE_MULTIPLE * llc_bytes / cold_bytes) + 1
    count = max(1, min(wanted, _MAX_SETS, limit_bytes // cold_bytes))
    pairs = list(zip(inputs, hot, strict=True))
    copies = (tuple(t if is_hot else copy_with_layout(t) for t, is_hot in pairs) for _ in range(count - 1))
    return [tuple(inputs), *copies]


def memory_bytes(target_bytes: int) -> int:
    """How much :func:`memory_read` reads: more than a last-level cache holds."""
    return max(_LEAST_READ_BYTES, CACHE_MULTIPLE * cache_bytes(target_bytes))


def memory_read(target_bytes: int) -> Run:
    """What reads memory with all threads and does little else: how fast that is tells states of a machine apart."""
    numbers = torch.ones(memory_bytes(target_bytes) // 4)
    return lambda *operands: numbers.sum()


def copy_with_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, with the same strides (broadcast dimensions and gaps included)."""
    count = span_bytes(tensor) // tensor.element_size()
    flat = tensor.as_strided((count,), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride())
