"""A region's partition by measurement: the guided loop, the tuning of what it uses, and the play-off that decides.

Screenings taken minutes apart rank partitions only roughly. So the cheapest cover on the nominal device is the
incumbent, and what the loop finds has to beat it in one interleaved run, by a margin. Else every tune keeps it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from fuseplan.planner.cost.prices import MeasuredPrices
from fuseplan.planner.implementations.choices import Choice, RegionProblem
from fuseplan.planner.partition.guided_loop import GuidedResult, Priced, guided_partition, predicted_partition
from fuseplan.planner.partition.whole_region import play_off
from fuseplan.search import policy
from fuseplan.search.errors import counted
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.sequence import Part

_INCUMBENT, _CHALLENGER = "incumbent", "challenger"
#: How a gain is known, in words.
_BY_PRICES, _INTERLEAVED = "by the times of its groups", "in an interleaved run"
_FAILED = f"{_BY_PRICES} (their interleaved run failed)"


@dataclass(eq=False)
class MeasuredRegion:
    """Decides a region's partition: the loop's has to gain ``margin``; ``max_measured`` is the loop's."""

    problem: RegionProblem
    prices: MeasuredPrices
    margin: float
    max_measured: int
    _given_up: set[Choice] = field(default_factory=set, init=False)
    _unclear: bool = field(default=False, init=False)
    _contest: Callable[[], Contest | None] | None = field(default=None, init=False)
    _calls: list[Choice] = field(default_factory=list, init=False)

    def begin(self) -> None:
        """Send what can be measured at any time to the measuring process: calls of one matmul or attention."""
        if self._contest is None and self._is_anchor and len(self.problem.plain) == 1 and not self._untimed():
            self._calls = [one for one in self.problem.choices[1:] if math.isfinite(self.prices.bound_s(one))]
            if self._calls:
                self._contest = self.prices.contest(self.problem.plain[0], self._calls)

    def decide(self) -> GuidedResult:
        """Measure, tune, and choose. A matmul or attention that takes long, or next to nothing, is not timed: ATen runs
        it, or a call that is known to be faster.
        """
        if self._is_anchor and (why := self._untimed()):
            known = tuple(one for one in self.problem.choices
                          if one.is_plain or one.implementation.surpasses(self.prices.table, one.group))
            return predicted_partition(replace(self.problem, choices=known), self.prices.predict_s, reason=why)
        self.begin()
        contest = self._contest() if self._contest is not None else None
        decided = self._decide() if contest is None else self._by_contest(contest)
        unclear = self._unclear or any(record.undecided for record in self.prices.records.values())
        return replace(decided, undecided=unclear)

    @property
    def _is_anchor(self) -> bool:
        return all(self.prices.table.is_anchor(one.group) for one in self.problem.plain)

    def _untimed(self) -> str:
        """Why no calls of a matmul or of attention are timed; "" where they are."""
        prices = self.prices
        longest_s = policy.LONG_OP_S.on(prices.table.device_type)
        if prices.spec is not None and all(prices.predict_s(one) > longest_s for one in self.problem.plain):
            return "its calls take too long to time"
        return "too little of the model's time to choose a call" if prices.minor else ""

    def _priced(self, choices: Sequence[Choice]) -> dict[Choice, Priced]:
        return dict(zip(choices, map(Priced, choices, self.prices.measure_s(choices)), strict=True))

    def _by_contest(self, contest: Contest) -> GuidedResult:
        """A matmul or attention: ATen's op and all that libraries offer, in one run."""
        (plain,) = self.problem.plain
        priced = {choice.implementation.name: one for choice, one in self._priced((plain, *self._calls)).items()}
        aten, *others = (name for name in priced if name in contest.samples)
        self._unclear = any(contest.undecided(name, aten) for name in others)
        least = max(self.margin, policy.CALL_GAIN)
        medians = {name: statistics.median(contest.samples[name]) for name in (aten, *others)}
        gains = {name: 1 - medians[name] / medians[aten] for name in others}
        winner = contest.winner(aten, [name for name in others if gains[name] > least])
        story = f"gains {gains[winner]:.1%} on ATen's op" if winner in gains else (
            f"no call of a library gains {least:.1%} on ATen's op beyond noise (the best {max(gains.values()):.1%}, "
            f"with a noise of {contest.noise:.1%})" if gains
            else "no library's call of it is right"
        )
        best_s, chosen = min(one.cost_s for one in priced.values()), priced[winner]
        return GuidedResult(
            (chosen,), tuple(one for name, one in priced.items() if name != winner), best_s, chosen.cost_s == best_s,
            len(self.problem.choices), 1, priced[aten].cost_s,
            f"{len(priced)} ways to call it in one interleaved run; {story}",
        )

    def _nominal(self) -> GuidedResult:
        """The cheapest nominal cover of groups that are worth fusing; nothing else is measured but ATen's ops."""
        chosen, plain = self._priced(self._incumbent(tune=True)), self._priced(self.problem.plain)
        return GuidedResult(
            tuple(chosen.values()), tuple(one for choice, one in plain.items() if choice not in chosen),
            predicted_partition(self.problem, self.prices.bound_s).cost_s, False, len(self.problem.choices), 1,
            math.fsum(one.cost_s for one in plain.values()),
            "the nominal cover: too little of the model's time to search for a better one",
        )

    def _decide(self) -> GuidedResult:
        if self.prices.minor:
            return self._nominal()
        incumbent = self._incumbent()
        self._tune(incumbent)
        found = self._search(incumbent)
        challenger = tuple(priced.choice for priced in found.chosen)
        story = ""
        for _ in range(policy.INCUMBENTS_LIMIT):
            if set(incumbent) == set(challenger):
                break
            gain, accepted, how = self._gain(challenger, incumbent)
            if not accepted:
                story = (f"; the cheapest cover found gains {gain:.1%} on the nominal one, which is too little to take "
                         "its place")
                found = self._with_cover(found, incumbent)
                break
            story = f"; gains {gain:.1%} on the nominal cover {how}"
            if not self._give_up(incumbent, challenger):
                break
            incumbent = self._incumbent()
        return replace(found, reason=_reason(found) + story)

    def _incumbent(self, tune: bool = False) -> tuple[Choice, ...]:
        """The cheapest nominal cover of groups that work, ``tune`` tuned, and were not given up."""
        while True:
            cover = predicted_partition(self.problem, self._nominal_s)
            chosen = tuple(priced.choice for priced in cover.chosen)
            failed = [choice for choice, one in self._priced(chosen).items() if math.isinf(one.cost_s)]
            if not failed and not (tune and self._tune(chosen)):
                return chosen
            self._given_up.update(failed)

    def _nominal_s(self, choice: Choice) -> float:
        return math.inf if choice in self._given_up else self.prices.nominal_s(choice)

    def _search(self, start: Sequence[Choice]) -> GuidedResult:
        """The guided loop, until everything that its partition uses is tuned."""
        model = predicted_partition(self.problem, self.prices.predict_s, self.margin)
        first = [*start, *(priced.choice for priced in model.chosen)]
        while True:
            result = guided_partition(
                self.problem, self.prices, policy.GAP_TOLERANCE, self.margin, self.max_measured, first)
            # A tuned time, or "do not fuse", may make another cover the cheapest.
            if not self._tune(priced.choice for priced in result.chosen):
                return result

    def _tune(self, choices: Iterable[Choice]) -> bool:
        """Search the configurations that were not; True when there were any."""
        groups = [choice.group for choice in choices if self.prices.untuned(choice)]
        self.prices.tuner.prefetch((self.prices.table.subject(group) for group in groups[1:]), self.prices.minor)
        for group in groups:
            self.prices.tuned(group)
        return bool(groups)

    def _gain(self, challenger: Sequence[Choice], incumbent: Sequence[Choice]) -> tuple[float, bool, str]:
        """What the challenger gains on the incumbent, whether that is enough to take its place, and how it is known."""
        gain = self._price_gain(challenger, incumbent)
        if gain > policy.HOPELESS_GAIN:
            return gain, True, _BY_PRICES
        self._tune(incumbent)  # the challenger is tuned already
        gain = self._price_gain(challenger, incumbent)
        if gain == 1.0:  # a group of the incumbent must not be fused: it has no time
            return gain, True, _BY_PRICES
        if gain <= self.margin:
            return gain, False, _BY_PRICES
        covers = {_INCUMBENT: incumbent, _CHALLENGER: challenger}
        sides = {side: {choice: self.part(choice) for choice in cover} for side, cover in covers.items()}
        contest = play_off(self.prices.tuner.play_off, self.prices.table, sides)
        if contest is None:
            return gain, True, _FAILED
        gain = contest.gain(_CHALLENGER, _INCUMBENT)
        self._unclear = contest.undecided(_CHALLENGER, _INCUMBENT)
        return gain, contest.accepts(_CHALLENGER, _INCUMBENT) and gain > self.margin, _INTERLEAVED

    def _price_gain(self, challenger: Sequence[Choice], incumbent: Sequence[Choice]) -> float:
        new_s, old_s = (math.fsum(self.prices.measure_s(cover)) for cover in (challenger, incumbent))
        return 1.0 - new_s / old_s

    def part(self, choice: Choice) -> Part:
        """What a play-off runs of a choice: of what is searched its tuned kernel."""
        record = self.prices.tuned(choice.group) if choice.implementation.backends else None
        backend, config = ("", {}) if record is None else (record.backend, record.config)
        return choice.implementation.part(self.prices.table, choice.group, backend, config)

    def _give_up(self, incumbent: Sequence[Choice], challenger: Sequence[Choice]) -> bool:
        """Of the losing choices, drop the one farthest above its nominal cost; False when there is none to drop."""
        kept = {*challenger, *self.problem.plain}
        lost = self._priced([choice for choice in incumbent if choice not in kept])
        if lost:
            self._given_up.add(max(lost, key=lambda choice: lost[choice].cost_s / self.prices.nominal_s(choice)))
        return bool(lost)

    def _with_cover(self, found: GuidedResult, cover: Sequence[Choice]) -> GuidedResult:
        """The loop's result with another of its measured covers chosen."""
        known = {priced.choice: priced for priced in (*found.chosen, *found.rejected)} | self._priced(cover)
        chosen = tuple(known.pop(choice) for choice in cover)
        made = replace(found, chosen=chosen, rejected=tuple(known.values()))
        return replace(made, optimal=found.optimal and made.cost_s <= found.cost_s)


def _reason(result: GuidedResult) -> str:
    proof = "optimal" if result.optimal else f"within {result.gap:.1%} of the bound"
    return (
        f"measured {result.measured} of {counted(result.enumerated, 'choice')} in "
        f"{counted(result.iterations, 'round')}; {proof} over the candidates"
    )
