"""Which configuration to try next: all of a small space, else seeded TPE and then coordinate descent.

A strategy answers :meth:`Strategy.ask` with positions in a :class:`~fuseplan.search.tune.space.Space` and is told their
times. It never asks for the same position twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fuseplan.search import policy
from fuseplan.search.tune.space import Space, is_ordered
from fuseplan.search.tune.study import quiet_optuna

if TYPE_CHECKING:
    import optuna

#: Asks of the sampler that may hit known or infeasible points before the enumerated list fills in.
_SAMPLER_TRIES = 20
#: Share of the trials left over after the seeds that the sampler gets, and of how many at least: it knows nothing
#: before it has seen a few points. Coordinate descent has the rest.
_SAMPLER_SHARE, _SAMPLER_MIN = 0.5, 10
#: Combinations at most that are worth compiling before it is known which one will be wanted.
_PROSPECTS = 12


class Strategy:
    """Proposes positions of a space until its trials are used up or there is nothing left to learn.

    The default, then ``first`` (positions worth trying early, best guess first), then all of a small space that fits
    the trials. Else Optuna's TPE for a share of the trials; then coordinate descent from the best. The descent walks
    the enumerated list, so that it never proposes an infeasible point; it ends where no one-step neighbour is faster,
    and what trials are left go to the sampler again.

    Few trials asked for all at once are all steps from the default. Where a parameter is a choice between names, which
    as a rule has little to do with the numbers, one trial is kept for the best steps taken together, if they gained.
    """

    def __init__(self, space: Space, trials: int, seed: int, first: Iterable[int] = ()) -> None:
        self.space = space
        self.limit = min(trials, len(space))
        #: Microseconds by position, infinite where it failed.
        self.times: dict[int, float] = {}
        self._asked: dict[int, None] = {}
        everything = range(len(space)) if len(space) <= min(policy.EXHAUSTIVE_LIMIT, trials) else ()
        self._seeds: list[int] = list(dict.fromkeys([0, *first, *everything]))
        self._sampler = _Sampler(space, seed)
        spare = max(0, self.limit - len(self._seeds))
        self._sampled_until = len(self._seeds) + (int(spare * _SAMPLER_SHARE) if spare >= _SAMPLER_MIN else 0)
        named = any(not is_ordered(tunable) for tunable in space.tunables)
        self._keeps_one = named and 3 < spare < _SAMPLER_MIN
        self._kept_one = False

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

    def prospects(self) -> list[int]:
        """Positions that may be asked for once the outstanding times are in, likely ones first.

        They are what is asked for in any case, else some that :meth:`_crossing` may come to.
        """
        certain = [position for position in self._seeds if position not in self._asked] if self._asked else []
        if certain:
            return certain[: self.limit - len(self._asked)]
        if not self._keeps_one or len(self._asked) != self.limit - 1:
            return []
        options = [[None, *((name, choice) for choice in steps)] for name, steps in self._steps().items()]
        crossings = sorted((dict(filter(None, steps)) for steps in itertools.product(*options)), key=len)
        found = (self.space.find({**self.space.default, **steps}) for steps in crossings if len(steps) > 1)
        return [position for position in found if position is not None and position not in self._asked][:_PROSPECTS]

    def _propose(self) -> int | None:
        """A position not yet asked for; None when there is none for now."""
        for position in self._seeds:
            if position not in self._asked:
                return position
        if len(self._asked) < self._sampled_until:
            return self._sampler.ask(self._asked, self.times)
        outstanding = self._asked.keys() > self.times.keys()
        if self._keeps_one and len(self._asked) == self.limit - 1:
            if outstanding:
                self._kept_one = True
                return None
            if self._kept_one:
                return self._crossing()
        best = self.best if self.times else 0  # the best guess, where nothing is known yet
        around = [] if best is None else self.space.neighbours(best)
        found = next((position for position in around if position not in self._asked), None)
        if found is not None or outstanding:  # the centre of the descent may move once the outstanding times are in
            return found
        return self._sampler.ask(self._asked, self.times)

    def _crossing(self) -> int | None:
        """The default with each parameter's best step, as if their gains were independent; None if not promising."""
        base_us, best = self.times.get(0, math.inf), self.best
        together, expected_us = dict(self.space.default), base_us
        for name, steps in self._steps().items():
            choice = min(steps, key=lambda choice: self.times[steps[choice]])
            if self.times[steps[choice]] < base_us:
                together[name] = choice
                expected_us *= self.times[steps[choice]] / base_us
        if best is None or not math.isfinite(base_us) or expected_us > (1 - policy.COMBINATION_GAIN) * self.times[best]:
            return None
        found = self.space.find(together)
        return None if found in self._asked else found

    def _steps(self) -> dict[str, dict[int | str, int]]:
        """What was asked for and differs from the default in one parameter: positions by parameter and choice."""
        default = self.space.default
        found: dict[str, dict[int | str, int]] = {}
        for position in self._asked:
            config = self.space.configs[position]
            changed = [name for name, value in config.items() if default.get(name) != value]
            if len(changed) == 1:
                found.setdefault(changed[0], {})[config[changed[0]]] = position
        return found


class _Sampler:
    """Optuna's TPE over positions: what it asks for is looked up in the space, what was measured is added to it."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._seed = seed
        self._learnt = 0

    def ask(self, known: Collection[int], times: Mapping[int, float]) -> int | None:
        """A position outside ``known``; None when there is none. ``times`` is what was measured, in its order."""
        if len(known) >= len(self._space):
            return None
        from optuna.trial import TrialState, create_trial

        tunables = self._space.tunables
        for position, time in itertools.islice(times.items(), self._learnt, None):
            config = self._space.configs[position]
            params = {
                one.name: one.choices.index(config[one.name])
                for one in tunables if config.get(one.name) in one.choices
            }
            # A default may lie outside the tunables' choices.
            if len(params) == len(tunables) and math.isfinite(time):
                self._study.add_trial(create_trial(
                    params=params, distributions=self._distributions, value=math.log(time)))
        self._learnt = len(times)
        for _ in range(_SAMPLER_TRIES):
            trial = self._study.ask(self._distributions)
            self._study.tell(trial, state=TrialState.FAIL)  # only what was measured counts
            found = self._space.find({one.name: one.choices[trial.params[one.name]] for one in tunables})
            if found is not None and found not in known:
                return found
        return next(position for position in range(len(self._space)) if position not in known)

    @cached_property
    def _study(self) -> optuna.Study:
        import optuna

        with quiet_optuna():
            return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=4))

    @cached_property
    def _distributions(self) -> dict[str, Any]:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        return {  # of positions among the choices
            one.name: IntDistribution(0, len(one.choices) - 1) if is_ordered(one)
            else CategoricalDistribution(range(len(one.choices))) for one in self._space.tunables
        }
