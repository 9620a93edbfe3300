"""Timing that ranks: rotating operands and short screenings. What decides is :mod:`fuseplan.search.timing.contest`."""

from __future__ import annotations

import gc
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fuseplan.kernels.native.overlap import span_bytes
from fuseplan.search import policy
from fuseplan.search.store.record import Measurement
from fuseplan.search.timing.timers import Operands, Run, Timer

#: Cold operands rotate over this many times the last-level cache.
CACHE_MULTIPLE = 3
_DEFAULT_CACHE_BYTES = 32 * 2**20
#: More operand sets than this cost more to build than their coldness is worth.
_MAX_SETS = 256


def cache_bytes(target_bytes: int) -> int:
    """Last-level cache size: the target's, else what the operating system says, else a usual size."""
    if target_bytes > 0:
        return target_bytes
    for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE"):
        if name in os.sysconf_names and os.sysconf(name) > 0:
            return os.sysconf(name)
    return _DEFAULT_CACHE_BYTES


def rotating_operands(
    inputs: Sequence[torch.Tensor], hot: Sequence[bool], llc_bytes: int, limit_bytes: int
) -> Operands:
    """Operand sets to call a kernel with in turn.

    Inputs that were just produced (``hot``) are shared; the others are copied until a last-level cache of ``llc_bytes``
    cannot hold them. The rotation is shorter where ``limit_bytes`` do not suffice.
    """
    cold_bytes = sum(span_bytes(tensor) for tensor, is_hot in zip(inputs, hot, strict=True) if not is_hot)
    if cold_bytes == 0:
        return [tuple(inputs)]
    wanted = math.ceil(CACHE_MULTIPLE * llc_bytes / cold_bytes) + 1
    count = max(1, min(wanted, _MAX_SETS, limit_bytes // cold_bytes))
    pairs = list(zip(inputs, hot, strict=True))
    copies = (tuple(t if is_hot else copy_with_layout(t) for t, is_hot in pairs) for _ in range(count - 1))
    return [tuple(inputs), *copies]


def copy_with_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, with the same strides (broadcast dimensions and gaps included)."""
    count = span_bytes(tensor) // tensor.element_size()
    flat = tensor.as_strided((count,), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride())


def measurement_of(samples: Sequence[float], regime: str, rounds: int = 0, noise: float = 0.0) -> Measurement:
    """Median and interquartile range of samples in microseconds."""
    ordered = sorted(samples)
    if len(ordered) < 2:
        return Measurement(ordered[0], 0.0, len(ordered), rounds, regime, noise)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Measurement(statistics.median(ordered), high - low, len(ordered), rounds, regime, noise)


def screen(timer: Timer, run: Run, operands: Operands, seconds: float) -> Measurement:
    """A quick time of one callable on its own: enough to rank, not to decide.

    Samples that something else disturbed are left out, and more are taken; on a processor that is never left alone
    the faster half of all samples counts, for disturbances only ever add time.
    """
    clean: list[float] = []
    disturbed: list[float] = []
    with no_collection():
        sample = timer.prepare(run, operands)
        start = timer.clock()
        while True:
            value, undisturbed = timer.observe(sample)
            (clean if undisturbed else disturbed).append(value)
            spent = timer.clock() - start
            enough = len(clean) >= policy.SCREEN_SAMPLES or (spent >= seconds and len(clean) >= policy.SCREEN_LEAST)
            if enough or spent >= seconds * policy.SCREEN_PATIENCE:
                break
    if len(clean) < policy.SCREEN_LEAST:
        everything = sorted(clean + disturbed)
        clean = everything[: (len(everything) + 1) // 2]
    return measurement_of(clean, timer.regime)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of the samples."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
