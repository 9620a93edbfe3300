"""Timing that decides: rotating operands, calibrated batches, interleaved rounds, paired gains, A/A noise.

A :class:`~fuseplan.search.timers.Timer` knows how to time one call on one kind of device and launch mode; everything
here is the same for all of them, and runs on a virtual clock in the tests.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fuseplan.search.record import Measurement
from fuseplan.search.timers import Operands, Run, Sampler, Timer

#: A gain below this is never worth a change of plan.
MIN_GAIN = 0.01
#: Cold operands rotate over this many times the last-level cache.
CACHE_MULTIPLE = 3
_DEFAULT_CACHE_BYTES = 32 * 2**20
#: More operand sets than this cost more to build than their coldness is worth.
_MAX_SETS = 256
_SCREEN_SAMPLES = 7
_MIN_CLEAN = 3
_MIN_ROUNDS = 7
_MAX_ROUNDS = 61
#: How many times longer than planned to wait for undisturbed samples.
_PATIENCE = 4
#: How often a sample of a round is repeated while something disturbs it.
_TRIES = 5
#: Standard error of a median over that of a mean, times the factor from MAD to standard deviation.
_MEDIAN_SE = 1.2533 * 1.4826

#: The interleaved run's second copy of one contestant, from which the noise is read.
_AGAIN = "again"


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
    """Operand sets to call a kernel with in turn: hot inputs are shared, cold ones copied until no cache holds them.

    Args:
        inputs: One tensor per input.
        hot: Per input, whether it was just produced (and may be cached).
        llc_bytes: Last-level cache size.
        limit_bytes: Memory the copies may take; the rotation is shorter where it does not suffice.
    """
    cold_bytes = sum(span_bytes(tensor) for tensor, is_hot in zip(inputs, hot, strict=True) if not is_hot)
    if cold_bytes == 0:
        return [tuple(inputs)]
    wanted = math.ceil(CACHE_MULTIPLE * llc_bytes / cold_bytes) + 1
    count = max(1, min(wanted, _MAX_SETS, limit_bytes // cold_bytes))
    pairs = list(zip(inputs, hot, strict=True))
    copies = (tuple(t if is_hot else copy_with_layout(t) for t, is_hot in pairs) for _ in range(count - 1))
    return [tuple(inputs), *copies]


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def copy_with_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, with the same strides (broadcast dimensions and gaps included)."""
    count = span_bytes(tensor) // tensor.element_size()
    flat = tensor.as_strided((count,), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride())


def summarise(samples: Sequence[float], regime: str, rounds: int = 0, noise: float = 0.0) -> Measurement:
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
    with _no_collection():
        sample = timer.prepare(run, operands)
        start = timer.clock()
        while True:
            before = timer.disturbances()
            value = sample(len(clean) + len(disturbed))
            (clean if timer.disturbances() == before else disturbed).append(value)
            spent = timer.clock() - start
            enough = len(clean) >= _SCREEN_SAMPLES or (spent >= seconds and len(clean) >= _MIN_CLEAN)
            if enough or spent >= seconds * _PATIENCE:
                break
    if len(clean) < _MIN_CLEAN:
        everything = sorted(clean + disturbed)
        clean = everything[: (len(everything) + 1) // 2]
    return summarise(clean, timer.regime)


@dataclass(frozen=True)
class Contest:
    """Samples of an interleaved run: ``samples[name][round]`` in microseconds.

    Attributes:
        samples: Paired samples by contestant.
        noise: Relative A/A noise.
        regime: ``"eager"`` or ``"graph"``.
    """

    samples: Mapping[str, tuple[float, ...]]
    noise: float
    regime: str

    @property
    def threshold(self) -> float:
        """What a paired gain has to exceed to count."""
        return max(MIN_GAIN, self.noise)

    def time(self, name: str) -> Measurement:
        own = self.samples[name]
        return summarise(own, self.regime, len(own), self.noise)

    def gain(self, challenger: str, incumbent: str) -> float:
        """Median of the paired differences over the incumbent's median; positive when the challenger is faster."""
        differences = self._differences(challenger, incumbent)
        return statistics.median(differences) / statistics.median(self.samples[incumbent])

    def _differences(self, challenger: str, incumbent: str) -> list[float]:
        return [a - b for a, b in zip(self.samples[incumbent], self.samples[challenger], strict=True)]

    def accepts(self, challenger: str, incumbent: str) -> bool:
        """True when the challenger's gain exceeds the threshold and its own uncertainty; an incumbent keeps a tie."""
        differences = self._differences(challenger, incumbent)
        doubt = 2 * _standard_error(differences) / statistics.median(self.samples[incumbent])
        return self.gain(challenger, incumbent) > max(self.threshold, doubt)

    def winner(self, incumbent: str, challengers: Sequence[str]) -> str:
        """The incumbent, unless challengers beat it; then the first in order that is as good as the best of them."""
        better = [name for name in challengers if self.accepts(name, incumbent)]
        if not better:
            return incumbent
        best = max(better, key=lambda name: self.gain(name, incumbent))
        return next(name for name in better if name == best or not self.accepts(best, name))


def contest(
    timer: Timer, contestants: Mapping[str, Run], operands: Operands, seconds: float, twice: str | None = None
) -> Contest:
    """Time all contestants in interleaved rounds, each starting with another one.

    A sample that something else disturbed is repeated, and a round that stays disturbed is left out, unless the
    processor is never left alone.

    Args:
        timer: How to time.
        contestants: What to time, by name.
        operands: Operand sets; every contestant of a round meets the same ones.
        seconds: Time to spend on rounds; at least a few rounds are run whatever they take.
        twice: The contestant that runs a second time for the A/A noise; the first one by default.
    """
    twice = next(iter(contestants)) if twice is None else twice
    clean: list[dict[str, float]] = []
    disturbed: list[dict[str, float]] = []
    with _no_collection():
        samplers: dict[str, Sampler] = {name: timer.prepare(run, operands) for name, run in contestants.items()}
        samplers[_AGAIN] = timer.prepare(contestants[twice], operands)
        start = timer.clock()
        while len(clean) < _MAX_ROUNDS:
            number = len(clean) + len(disturbed)
            tried = {name: _undisturbed(timer, samplers[name], number) for name in _turn(list(samplers), number)}
            found = {name: value for name, (value, _) in tried.items()}
            (clean if all(alone for _, alone in tried.values()) else disturbed).append(found)
            spent = timer.clock() - start
            if spent >= seconds and len(clean) >= _MIN_ROUNDS:
                break
            if spent >= seconds * _PATIENCE and number >= _MIN_ROUNDS:
                break
    rounds = clean if len(clean) >= _MIN_ROUNDS else clean + disturbed
    samples = {name: tuple(one[name] for one in rounds) for name in samplers}
    noise = paired_noise(samples[twice], samples.pop(_AGAIN))
    return Contest(samples, noise, timer.regime)


def _turn(names: list[str], number: int) -> list[str]:
    """The order of a round: another one starts each time, and every second round runs backwards.

    So nobody always follows the same neighbour.
    """
    shift = number % len(names)
    turn = names[shift:] + names[:shift]
    return turn if number % 2 == 0 else turn[::-1]


def _undisturbed(timer: Timer, sampler: Sampler, number: int) -> tuple[float, bool]:
    """A sample that nothing else disturbed, else the fastest of a few, for disturbances only ever add; and which."""
    fastest = math.inf
    for _ in range(_TRIES):
        before = timer.disturbances()
        fastest = min(fastest, sampler(number))
        if timer.disturbances() == before:
            return fastest, True
    return fastest, False


def paired_noise(first: Sequence[float], second: Sequence[float]) -> float:
    """Relative gain that two runs of the same thing show by chance: the median's offset plus two standard errors."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    offset = abs(statistics.median(differences))
    return (offset + 2 * _standard_error(differences)) / statistics.median(first)


def _standard_error(values: Sequence[float]) -> float:
    """Standard error of the median, from the median absolute deviation."""
    centre = statistics.median(values)
    return _MEDIAN_SE * statistics.median(abs(value - centre) for value in values) / math.sqrt(len(values))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of the samples."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


