"""The feasible configurations of one kernel on one back end, enumerated before anything is compiled."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from fuseplan.kernels.ir.backend import Backend, Config, Target, Tunable, config_key, same_config
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.search import policy


@dataclass(frozen=True)
class Space:
    """Feasible configurations, each once, the default first, then in the order of the tunables' choices."""

    tunables: tuple[Tunable, ...]
    configs: tuple[Config, ...]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {config_key(config): number for number, config in enumerate(self.configs)}

    @cached_property
    def _places(self) -> dict[str, dict[int | str, int]]:
        return {tunable.name: {c: i for i, c in enumerate(tunable.choices)} for tunable in self.tunables}

    def __len__(self) -> int:
        return len(self.configs)

    @property
    def default(self) -> Config:
        return self.configs[0]

    def find(self, config: Config) -> int | None:
        """Position of a configuration; None when it is not in the space."""
        position = self._index.get(config_key(config))
        # Texts may be equal where values are not: 1 and "1".
        return position if position is not None and same_config(self.configs[position], config) else None

    def neighbours(self, position: int) -> list[int]:
        """Configurations that differ in one parameter, in tunable order.

        By the nearest feasible step down or up where the choices are numbers; by any other choice where they are names.
        """
        found: list[int] = []
        base = self.configs[position]
        for tunable in self.tunables:
            place = self._places[tunable.name].get(base[tunable.name])
            if place is None:
                continue
            below, above = range(place - 1, -1, -1), range(place + 1, len(tunable.choices))
            for steps in (below, above) if is_ordered(tunable) else [(step,) for step in (*reversed(below), *above)]:
                reached = (self.find({**base, tunable.name: tunable.choices[step]}) for step in steps)
                nearest = next((other for other in reached if other is not None), None)
                if nearest is not None:
                    found.append(nearest)
        return found

    def nearest(self, config: Config) -> int:
        """The feasible configuration closest to ``config`` in steps of the tunables; the earliest among equals.

        Parameters that this space does not have are ignored, choices that it does not have are as far as can be.
        """
        exact = self.find(config)
        if exact is not None:
            return exact
        return min(range(len(self)), key=lambda number: self._distance(self.configs[number], config))

    def _distance(self, mine: Config, other: Config) -> float:
        total = 0.0
        for tunable in self.tunables:
            places = self._places[tunable.name]
            if tunable.name not in other or mine[tunable.name] == other[tunable.name]:
                continue
            here, there = places.get(mine[tunable.name]), places.get(other[tunable.name])
            if here is None or there is None:
                total += len(tunable.choices)
            else:
                total += abs(here - there) if is_ordered(tunable) else 1
        return total


def is_ordered(tunable: Tunable) -> bool:
    """Whether the choices are numbers: their order means something. Names have none."""
    return all(isinstance(choice, int) for choice in tunable.choices)


def enumerate_space(backend: Backend, ir: KernelIR, target: Target) -> Space:
    """Every feasible configuration of ``ir``, the back end's default first, even where it is none of the choices."""
    tunables = backend.tunables(ir, target)
    names = [tunable.name for tunable in tunables]
    total = math.prod(len(tunable.choices) for tunable in tunables)
    # A stride that shares no factor with the choices' counts would be better still; an odd one is close enough.
    step = 1 if total <= policy.COMBINATIONS_LIMIT else (total // policy.COMBINATIONS_LIMIT) | 1
    default = dict(backend.default_config(ir, target))
    configs: dict[str, Config] = {config_key(default): default}
    for values in itertools.islice(itertools.product(*(tunable.choices for tunable in tunables)), 0, None, step):
        config = dict(zip(names, values, strict=True))
        if backend.infeasible(ir, config, target) is None:
            configs.setdefault(config_key(config), config)
    return Space(tunables, tuple(configs.values()))
