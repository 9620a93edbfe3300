"""Timing that ranks, by short screenings, and that decides, by interleaved rounds, paired gains and A/A noise.

Contestants of one run meet the same state of the machine, sample by sample; only their differences count.
"""

from __future__ import annotations

import gc
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from fuseplan.search import policy
from fuseplan.search.store.record import Measurement
from fuseplan.search.timing.timers import Operands, Run, Timer

#: Standard error of a median over that of a mean, times the factor from MAD to standard deviation.
_MEDIAN_SE = 1.2533 * 1.4826

#: The interleaved run's second copy of one contestant, from which the noise is read.
_AGAIN = "again"


@dataclass(frozen=True)
class Contest:
    """Paired samples of an interleaved run (``samples[name][round]`` in microseconds), and its relative A/A noise.

    ``conditions`` are the runs that this one is the mean of, if any. A winner may lose ``max_loss`` under one of them.
    """

    samples: Mapping[str, tuple[float, ...]]
    noise: float
    regime: str
    conditions: tuple[Contest, ...] = ()
    max_loss: float = policy.MAX_LOSS

    @property
    def threshold(self) -> float:
        """What a paired gain has to exceed to count.

        Noise is relative to the time that has it, a gain to the slower of two times: of two that differ by the noise
        alone, the faster gains ``noise / (1 + noise)``. That matters where noise is large: no gain exceeds 1.
        """
        return max(policy.MIN_GAIN, min(self.noise, max(policy.MAX_NOISE, self.noise / (1 + self.noise))))

    def time(self, name: str) -> Measurement:
        """In the regime: of several conditions that is the first."""
        if self.conditions:
            return self.conditions[0].time(name)
        own = self.samples[name]
        return measurement_of(own, self.regime, len(own), self.noise)

    def gain(self, challenger: str, incumbent: str) -> float:
        """Median of the paired differences over the incumbent's median; positive when the challenger is faster."""
        differences = self._differences(challenger, incumbent)
        return statistics.median(differences) / statistics.median(self.samples[incumbent])

    def _differences(self, challenger: str, incumbent: str) -> list[float]:
        return [a - b for a, b in zip(self.samples[incumbent], self.samples[challenger], strict=True)]

    def gain_range(self, challenger: str, incumbent: str) -> tuple[float, float]:
        """How many times faster the challenger was in its rounds (:func:`middle_range`)."""
        pairs = zip(self.samples[incumbent], self.samples[challenger], strict=True)
        return middle_range(slow / fast for slow, fast in pairs)

    def both_ways(self) -> Contest:
        """The run with every two neighbouring rounds as one: they go through the contestants in opposite order.

        What a call finds depends on who ran before it (free memory, caches), and a contestant's samples then lie in two
        clusters, one for each of its neighbours: their median may be in either.
        """
        samples = {
            name: tuple((a + b) / 2 for a, b in zip(own[::2], own[1::2], strict=False)) or own
            for name, own in self.samples.items()
        }
        return replace(self, samples=samples)

    def accepts(self, challenger: str, incumbent: str) -> bool:
        """True when the challenger's gain exceeds the threshold and its own uncertainty; an incumbent keeps a tie.

        A mean hides that one condition got worse: under none may the incumbent be better by more than ``max_loss``.
        """
        faster = self._is_faster(challenger, incumbent, self.threshold)
        return faster and not self._loses(challenger, (incumbent,))

    def is_safer(self, one: str, other: str) -> bool:
        """True when ``one`` loses less to ``other`` at its worst condition than the reverse, beyond the threshold."""
        runs = self.conditions or (self,)
        at_most, reverse = (max(run.gain(b, a) for run in runs) for a, b in ((one, other), (other, one)))
        return reverse - at_most > self.threshold

    def undecided(self, one: str, other: str) -> bool:
        """True when the noise hides which of two contestants is faster, though they may be far apart."""
        pairs = ((one, other), (other, one))
        if max(self.noise, *(self._doubt(*pair) for pair in pairs)) <= policy.MAX_NOISE:
            return False
        return not any(self._is_faster(*pair, self.threshold) for pair in pairs)

    def _is_faster(self, one: str, other: str, threshold: float) -> bool:
        return self.gain(one, other) > max(threshold, self._doubt(one, other))

    def _doubt(self, one: str, other: str) -> float:
        """Two standard errors of a gain."""
        return 2 * _standard_error(self._differences(one, other)) / statistics.median(self.samples[other])

    def settled(self, incumbent: str, ordered: bool = True) -> bool:
        """True when every round says the same: of each challenger, that it is slower than the incumbent or faster by
        more than the threshold; where ``ordered``, also which of the faster ones is the fastest.

        Two that are alike would agree so in one of 128 runs of eight rounds, and longer ones less often.
        """
        challengers = [name for name in self.samples if name != incumbent]
        faster = [name for name in challengers if self._always_faster(name, incumbent)]
        if not all(name in faster or max(self._differences(name, incumbent)) < 0 for name in challengers):
            return False
        best = max(faster, key=lambda name: self.gain(name, incumbent), default=incumbent)
        return not ordered or all(name == best or self._always_faster(best, name) for name in faster)

    def _always_faster(self, one: str, other: str) -> bool:
        least = min(self._differences(one, other)) / statistics.median(self.samples[other])
        return least > self.threshold and self._is_faster(one, other, self.threshold)

    def winner(self, incumbent: str, challengers: Sequence[str]) -> str:
        """The incumbent, unless challengers beat it; then the first in order that is as good as the best of them.

        Among challengers the mean decides. But where somebody beats the best by much under one condition, and others
        are hardly worse in the mean, the one of them wins that loses least under any.
        """
        better = [name for name in challengers if self.accepts(name, incumbent)]
        if not better:
            return incumbent
        best = max(better, key=lambda name: self.gain(name, incumbent))
        everyone = (incumbent, *challengers)
        if self._loses(best, everyone):
            near = [name for name in better if not self._is_faster(best, name, policy.NEAR_GAIN)]
            return min(near, key=lambda name: max(
                one.gain(other, name) for one in self.conditions for other in everyone))
        return next(name for name in better if name == best or not self._is_faster(best, name, self.threshold))

    def _loses(self, name: str, others: Sequence[str]) -> bool:
        """True when one of the others is better by more than ``max_loss`` under some condition."""
        return any(
            one._is_faster(other, name, max(one.threshold, self.max_loss))
            for one in self.conditions for other in others
        )


@dataclass(frozen=True)
class Rounds:
    """How many undisturbed rounds a run has, how often a disturbed sample is tried, and what ends a run early.

    ``enough`` is asked after every second round, when contestants have had as many in one order as in the other.
    """

    least: int = policy.MIN_ROUNDS
    most: int = policy.MAX_ROUNDS
    tries: int = policy.SAMPLE_TRIES
    enough: Callable[[Contest], bool] = lambda _: False

    @staticmethod
    def until_settled(incumbent: str, ordered: bool = True, most: int = policy.MAX_ROUNDS) -> Rounds:
        """As many as the time allows, unless they all say the same (:meth:`Contest.settled`)."""
        return Rounds(most=most, enough=lambda found: found.settled(incumbent, ordered))


def decisive(
    timer: Timer, contestants: Mapping[str, Run], operands: Operands, seconds: float, incumbent: str,
    twice: str | None = None, ordered: bool = True,
) -> Contest:
    """As :func:`contest` until it is settled, repeated for longer while noise hides who is faster than ``incumbent``.

    Where ``ordered``, who of several is the fastest counts, too.
    """
    found = contest(timer, contestants, operands, seconds, twice, Rounds.until_settled(incumbent, ordered))
    for factor in policy.LONGER_RUNS:
        if not any(found.undecided(name, incumbent) for name in contestants if name != incumbent):
            break
        if seconds * factor * 1e6 < math.fsum(map(math.fsum, found.samples.values())):
            continue
        longer = Rounds.until_settled(incumbent, ordered, policy.MAX_ROUNDS * factor)
        found = contest(timer, contestants, operands, seconds * factor, twice, longer)
    return found


def middle_of_three(run: Callable[[], Contest], incumbent: str) -> Contest:
    """One run, or the middle one of three where noise hides whether anybody is faster than ``incumbent``.

    Gains vary with where operands lie in memory, which no longer run on the same operands shows. Where nobody is faster
    in two runs, the middle one of three says the same, and the third is left out. Long calls (``policy.LONG_CALL_US``)
    run once: three runs would take a quarter of a minute, and a tie keeps the incumbent.
    """
    def gain(found: Contest) -> float:
        return max((found.gain(name, incumbent) for name in found.samples if name != incumbent), default=-math.inf)

    first = run()
    if abs(gain(first)) > first.threshold or statistics.median(first.samples[incumbent]) > policy.LONG_CALL_US:
        return first
    second = run()
    if gain(second) <= second.threshold:
        return min(first, second, key=lambda found: abs(gain(found)))
    return sorted((first, second, run()), key=gain)[1]


def contest(
    timer: Timer, contestants: Mapping[str, Run], operands: Operands, seconds: float, twice: str | None = None,
    rounds: Rounds = Rounds(),
) -> Contest:
    """Time all contestants in interleaved rounds, each starting with another one.

    A sample that something else disturbed is repeated, and a round that stays disturbed is left out, unless the
    processor is never left alone or ``rounds`` lets it stand. The least ``rounds`` are run, however long they take.
    ``twice`` (the first contestant) runs a second time for the A/A noise.
    """
    twice = next(iter(contestants)) if twice is None else twice
    taken: list[dict[str, float]] = []
    clean: list[dict[str, float]] = []

    def found(taken: Sequence[Mapping[str, float]]) -> Contest:
        samples = {name: tuple(one[name] for one in taken) for name in samplers}
        noise = paired_noise(samples[twice], samples.pop(_AGAIN))
        return Contest(samples, noise, timer.regime)

    with no_collection():
        samplers = {name: timer.prepare(run, operands)
                    for name, run in {**contestants, _AGAIN: contestants[twice]}.items()}
        start = timer.clock()
        while len(clean) < rounds.most:
            number = len(taken)
            # Long samples are not repeated, nor any past the time for that: something always disturbs them.
            repeats = bool(taken) and sum(taken[-1].values()) * 1e-6 * rounds.least < seconds
            left = rounds.tries if repeats and timer.clock() - start < seconds * policy.ROUNDS_PATIENCE else 1
            tried = {name: timer.observe(samplers[name], left) for name in _turn(list(samplers), number)}
            taken.append({name: value for name, (value, _) in tried.items()})
            if rounds.tries == 1 or all(alone for _, alone in tried.values()):
                clean.append(taken[-1])
            spent = timer.clock() - start
            if spent >= seconds and len(clean) >= rounds.least:
                break
            if spent >= seconds * policy.ROUNDS_PATIENCE and number >= rounds.least:
                break
            if number >= rounds.least and number % 2 and rounds.enough(found(taken)):
                break
    return found(clean if len(clean) >= rounds.least else taken)


def mean_contest(first: Contest, second: Contest, max_loss: float = policy.MAX_LOSS) -> Contest:
    """Two runs of the same contestants under different conditions as one: who wins is best in both together.

    A gain in it is about the mean of the gains in both, and no winner loses more than ``max_loss`` in either. The
    longer run's rounds are averaged to as many as the other has. Contestants of one run only are left out.
    """
    samples = {
        name: tuple(math.sqrt(a * b) for a, b in zip(*both, strict=True))
        for name, both in _common_rounds((first, second)).items()
    }
    return Contest(samples, math.hypot(first.noise, second.noise) / 2, first.regime, (first, second), max_loss)


def sum_of_contests(contests: Sequence[Contest], weights: Sequence[float]) -> Contest:
    """Runs of the same contestants on parts, each of which a whole has ``weights`` times, as one run of the whole."""
    if len(contests) == 1:
        return contests[0]
    samples = {
        name: tuple(math.fsum(map(operator.mul, weights, times)) for times in zip(*parts, strict=True))
        for name, parts in _common_rounds(contests).items()
    }
    own = [statistics.fmean(one.samples[next(iter(samples))]) * weight
           for one, weight in zip(contests, weights, strict=True)]
    noise = math.hypot(*(one.noise * time for one, time in zip(contests, own, strict=True))) / math.fsum(own)
    conditions = tuple(
        sum_of_contests(one, weights) for one in zip(*(part.conditions for part in contests), strict=True))
    return replace(contests[0], samples=samples, noise=noise, conditions=conditions)


def _common_rounds(contests: Sequence[Contest]) -> dict[str, list[list[float]]]:
    """Samples by contestant and run, of those in all runs: longer ones averaged to as many as the shortest has."""
    names = [name for name in contests[0].samples if all(name in one.samples for one in contests)]
    rounds = min(len(one.samples[name]) for one in contests for name in names)

    def averaged(values: Sequence[float]) -> list[float]:
        edges = [number * len(values) // rounds for number in range(1, rounds)]
        return [float(part.mean()) for part in np.split(np.asarray(values), edges)]

    return {name: [averaged(one.samples[name]) for one in contests] for name in names}


def _turn(names: list[str], number: int) -> list[str]:
    """The order of a round: every second one runs backwards, and every two start with another one.

    So nobody always follows the same neighbour: in both rounds of a pair, taken together, everyone follows both of its
    own, except the one that starts the pair. The last of the first round is last again, for it would follow itself.
    """
    shift = number // 2 % len(names)
    turn = names[shift:] + names[:shift]
    return turn if number % 2 == 0 else turn[-2::-1] + turn[-1:]


def middle_range(values: Iterable[float]) -> tuple[float, float]:
    """The least and the most, of ten or more without a tenth at each end."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return ordered[tenth], ordered[-1 - tenth]


def paired_noise(first: Sequence[float], second: Sequence[float]) -> float:
    """Relative gain that two runs of the same thing show by chance: the median's offset plus two standard errors."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    offset = abs(statistics.median(differences))
    return (offset + 2 * _standard_error(differences)) / statistics.median(first)


def _standard_error(values: Sequence[float]) -> float:
    """Standard error of the median, from the median absolute deviation."""
    centre = statistics.median(values)
    return _MEDIAN_SE * statistics.median(abs(value - centre) for value in values) / math.sqrt(len(values))


def measurement_of(samples: Sequence[float], regime: str, rounds: int = 0, noise: float = 0.0) -> Measurement:
    """Median and interquartile range of samples in microseconds."""
    low, median, high = map(float, np.percentile(samples, (25, 50, 75)))
    return Measurement(median, high - low, len(samples), rounds, regime, noise)


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
