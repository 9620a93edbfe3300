"""Which configuration to try next: all of a small space, else seeded TPE and then coordinate descent.

A strategy answers :meth:`Strategy.ask` with positions in a :class:`~fuseplan.search.tune.space.Space` and is told their
times. It never asks for the same position twice.
"""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fuseplan.search.tune.space import Space, is_ordered

if TYPE_CHECKING:
    import optuna

#: Spaces up to this size are measured whole, budget allowing.
EXHAUSTIVE_LIMIT = 200
#: Asks of the sampler that may hit known or infeasible points before the enumerated list fills in.
_SAMPLER_TRIES = 20
#: Part of the trials left over after the seeds that the sampler gets; coordinate descent has the rest.
_SAMPLER_SHARE = 0.5
#: Fewer trials left over than this are all for descent: a sampler knows nothing before it has seen a few points.
_SAMPLER_MIN = 10
#: A combination that should be faster by less than this is not worth a compilation.
_WORTHWHILE = 0.97
#: Combinations at most that are worth compiling before it is known which one will be wanted.
_PROSPECTS = 12


class Strategy(ABC):
    """Proposes positions of a space until its trials are used up or there is nothing left to learn."""

    def __init__(self, space: Space, trials: int) -> None:
        self.space = space
        self.limit = min(trials, len(space))
        self.times: dict[int, float] = {}
        self._asked: dict[int, None] = {}

    @property
    def best(self) -> int | None:
        """The fastest position told so far, the earliest among equals; None when all failed."""
        good = [(time, position) for position, time in self.times.items() if math.isfinite(time)]
        return min(good)[1] if good else None

    def ask(self, count: int) -> list[int]:
        """Up to ``count`` new positions; [] when done. Those of one call may be tried in any order."""
        proposed: list[int] = []
        while len(proposed) < count and len(self._asked) < self.limit:
            position = self._propose()
            if position is None:
                break
            self._asked[position] = None
            proposed.append(position)
        return proposed

    def tell(self, position: int, median_us: float | None) -> None:
        """Report a time in microseconds; None for a configuration that failed."""
        self._asked.setdefault(position, None)
        self.times[position] = math.inf if median_us is None else median_us
        self._learn(position)

    def prospects(self) -> list[int]:
        """Positions that may be asked for once the outstanding times are in, likely ones first; not all of them."""
        return []

    @abstractmethod
    def _propose(self) -> int | None:
        """A position not yet asked for; None when there is none for now."""

    @abstractmethod
    def _learn(self, position: int) -> None:
        """Take in the time of ``position``."""


def make_strategy(space: Space, trials: int, seed: int, first: Iterable[int] = ()) -> Strategy:
    """Exhaustive for a space that is small and fits the trials, else guided.

    ``first`` are positions worth trying early, best guess first; the default always leads.
    """
    seeds = list(dict.fromkeys([0, *first]))
    if len(space) <= min(EXHAUSTIVE_LIMIT, trials):
        return ExhaustiveStrategy(space, trials, seeds)
    return GuidedStrategy(space, trials, seeds, seed)


class ExhaustiveStrategy(Strategy):
    """Seeds, then every other position in enumeration order."""

    def __init__(self, space: Space, trials: int, seeds: list[int]) -> None:
        super().__init__(space, trials)
        self._order = list(dict.fromkeys([*seeds, *range(len(space))]))

    def _propose(self) -> int | None:
        return next((position for position in self._order if position not in self._asked), None)

    def _learn(self, position: int) -> None:
        pass


class GuidedStrategy(Strategy):
    """Seeds; then Optuna's TPE for a share of the trials; then coordinate descent from the best.

    The descent walks the enumerated list, so that it never proposes an infeasible point; it ends where no one-step
    neighbour is faster, and what trials are left go to the sampler again.

    Few trials asked for all at once are all steps from the default. Where a parameter is a choice between names, which
    as a rule has little to do with the numbers, one trial is kept for the best steps taken together, if they gained.
    """

    def __init__(self, space: Space, trials: int, seeds: list[int], seed: int) -> None:
        super().__init__(space, trials)
        self._seeds = seeds
        self._sampler = _Sampler(space, seed)
        spare = max(0, self.limit - len(seeds))
        self._sampled_until = len(seeds) + (int(spare * _SAMPLER_SHARE) if spare >= _SAMPLER_MIN else 0)
        named = any(not is_ordered(tunable) for tunable in space.tunables)
        self._keeps_one = named and 3 < spare < _SAMPLER_MIN
        self._kept_one = False

    def _propose(self) -> int | None:
        for position in self._seeds:
            if position not in self._asked:
                return position
        if len(self._asked) < self._sampled_until:
            return self._sampler.ask(self._asked)
        outstanding = bool(set(self._asked) - set(self.times))
        if self._keeps_one and len(self._asked) == self.limit - 1:
            if outstanding:
                self._kept_one = True
                return None
            if self._kept_one:
                return self._crossing()
        around = self._descend()
        if around is not None:
            return around
        if outstanding:
            # The centre of the descent may move once the outstanding times are in.
            return None
        return self._sampler.ask(self._asked)

    def _descend(self) -> int | None:
        best = self.best
        if best is None:
            if self.times:  # everything failed so far
                return None
            best = 0  # nothing is known yet: the default is the best guess
        return next((position for position in self.space.neighbours(best) if position not in self._asked), None)

    def _crossing(self) -> int | None:
        """The default with every step that was faster than it, each parameter's best; None when that is not promising.

        Steps are taken to gain independently of each other.
        """
        base_us, best = self.times.get(0, math.inf), self.best
        gains: dict[str, tuple[float, int | str]] = {}
        for position, time in self.times.items():
            changed = self._changed(position)
            if len(changed) == 1 and time < base_us:
                (name,) = changed
                gains[name] = min(gains.get(name, (math.inf, 0)), (time / base_us, changed[name]), key=lambda g: g[0])
        expected_us = base_us * math.prod(gain for gain, _ in gains.values())
        if best is None or not math.isfinite(base_us) or expected_us > _WORTHWHILE * self.times[best]:
            return None
        together = self.space.find({**self.space.default, **{name: choice for name, (_, choice) in gains.items()}})
        return None if together in self._asked else together

    def prospects(self) -> list[int]:
        """What :meth:`_crossing` may come to: any steps from the default that were asked for, taken together."""
        if not self._keeps_one or len(self._asked) != self.limit - 1:
            return []
        choices: dict[str, list[int | str]] = {}
        for position in self._asked:
            changed = self._changed(position)
            if len(changed) == 1:
                (name,) = changed
                choices.setdefault(name, []).append(changed[name])
        options: list[list[tuple[str, int | str] | None]] = [
            [None, *((name, choice) for choice in listed)] for name, listed in choices.items()
        ]
        taken = [dict(filter(None, steps)) for steps in itertools.product(*options)]
        crossings = [steps for steps in sorted(taken, key=len) if len(steps) > 1]
        found = (self.space.find({**self.space.default, **steps}) for steps in crossings)
        return [position for position in found if position is not None and position not in self._asked][:_PROSPECTS]

    def _changed(self, position: int) -> dict[str, int | str]:
        """What a configuration has otherwise than the default."""
        default = self.space.default
        return {name: value for name, value in self.space.configs[position].items() if default.get(name) != value}

    def _learn(self, position: int) -> None:
        self._sampler.tell(position, self.times[position])


class _Sampler:
    """Optuna's TPE over positions: what it asks for is looked up in the space, what was measured is added to it."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._seed = seed
        self._study: optuna.Study | None = None
        self._told: list[tuple[int, float]] = []

    def ask(self, known: Iterable[int]) -> int | None:
        """A position outside ``known``; None when there is none."""
        from optuna.trial import TrialState

        known = set(known)
        if len(known) >= len(self._space):
            return None
        study, distributions = self._ready(), self._distributions()
        for _ in range(_SAMPLER_TRIES):
            trial = study.ask(distributions)
            study.tell(trial, state=TrialState.FAIL)  # only what was measured counts
            position = self._space.find(self._config(trial.params))
            if position is not None and position not in known:
                return position
        return next(position for position in range(len(self._space)) if position not in known)

    def tell(self, position: int, time: float) -> None:
        """Report the time of a position; infinite when it failed."""
        self._told.append((position, time))

    def _ready(self) -> optuna.Study:
        """The study, with everything told so far."""
        import optuna

        if self._study is None:
            # Optuna announces every study; its users' own verbosity is put back at once.
            level = optuna.logging.get_verbosity()
            optuna.logging.set_verbosity(logging.WARNING)
            try:
                sampler = optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=4)
                self._study = optuna.create_study(sampler=sampler)
            finally:
                optuna.logging.set_verbosity(level)
        for position, time in self._told:
            params = self._params(position)
            if params is not None and math.isfinite(time):
                self._study.add_trial(optuna.trial.create_trial(
                    params=params, distributions=self._distributions(), value=math.log(time)
                ))
        self._told.clear()
        return self._study

    def _params(self, position: int) -> dict[str, Any] | None:
        """The sampler's parameters of a position; None for a default outside the tunables' choices."""
        config = self._space.configs[position]
        params: dict[str, Any] = {}
        for tunable in self._space.tunables:
            if config.get(tunable.name) not in tunable.choices:
                return None
            value = config[tunable.name]
            params[tunable.name] = tunable.choices.index(value) if is_ordered(tunable) else value
        return params

    def _config(self, params: dict[str, Any]) -> dict[str, int | str]:
        return {
            tunable.name: tunable.choices[params[tunable.name]] if is_ordered(tunable) else params[tunable.name]
            for tunable in self._space.tunables
        }

    def _distributions(self) -> dict[str, Any]:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        return {
            tunable.name: IntDistribution(0, len(tunable.choices) - 1) if is_ordered(tunable)
            else CategoricalDistribution(tunable.choices)
            for tunable in self._space.tunables
        }
