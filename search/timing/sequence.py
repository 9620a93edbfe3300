"""Kernels one after another, as a model runs them: what one makes, a later one reads.

A kernel that is timed alone finds all its data in a cache that holds them. In a sequence the others' data are in the
cache too, so what is decided between sequences is decided by running them whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import networkx as nx
import torch

from fuseplan.kernels.ir.backend import Backend, Config, Target, config_key
from fuseplan.kernels.ir.gathers import computes_indices
from fuseplan.search.timing.signs import goes_on
from fuseplan.search.timing.subject import Subject
from fuseplan.search.timing.timers import Run


@dataclass(frozen=True)
class Part:
    """One kernel of a sequence: a subject's fused kernel or, without a back end, its unfused chain.

    ``reads`` and ``makes`` name its inputs and outputs; a name stands for the same value in all parts. Empty: it shares
    nothing.
    """

    subject: Subject
    backend: Backend | None = None
    config: Config = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()

    def call(self, target: Target) -> Callable[..., Any]:
        """Called with the inputs; a kernel returns its only output itself, everything else a list or tuple."""
        if self.backend is None:
            return self.subject.eager
        return self.backend.fused_callable(self.subject.ir, self.config, target)


#: Parts by their names, and the names that each side of a comparison runs, in order.
Parts: TypeAlias = Mapping[str, Part]
Sides: TypeAlias = Mapping[str, Sequence[str]]


class SharedOperands:
    """What sequences read from outside: all of one play-off are called with the same operands.

    An operand is what the first part that asks for it would be given alone; ``hot`` ones were just produced.
    """

    def __init__(self, make_inputs: Callable[[Subject], Sequence[torch.Tensor]]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.hot: list[bool] = []
        self._make_inputs = make_inputs
        self._slots: dict[object, int] = {}
        self._limits: list[float] = []
        self._parts: list[Part] = []  # kept, since slots and layouts name them by their addresses
        self._known: dict[int, list[torch.Tensor]] = {}

    def sources(self, part: Part, made: Collection[str]) -> tuple[str | int, ...]:
        """Where each input of a part comes from: a value's name, if it is in ``made``, else the number of an operand.

        Integers are not handed on: an index has to be within the table that a part made for itself. All parts that
        read one are given those of the part with the shortest table, so that sides see equally much of a cache through
        the masks that they make. Where a part computes its indices, no number may be larger than its own, and its other
        inputs are its own.
        """
        self._parts.append(part)
        found: list[str | int] = []
        ir = part.subject.ir
        indexed, limits = computes_indices(ir), part.subject.positions
        for position, tensor in enumerate(self._inputs(part.subject)):
            integer = not (tensor.is_floating_point() or tensor.dtype == torch.bool)
            name = part.reads[position] if part.reads and (integer or not indexed) else ""
            if name in made and not integer:
                found.append(name)
                continue
            # A table that is only looked up is shorter for some parts than for others.
            key = (name, tensor.shape, tensor.stride()) if name else (id(part), position)
            slot, limit = self._slots.setdefault(key, len(self.tensors)), limits.get(position, math.inf)
            if integer and indexed and position in limits and tensor.numel():
                limit = int(tensor.max()) + 1
            if slot == len(self.tensors):
                self.tensors.append(self._make_inputs(part.subject)[position] if tensor.is_meta else tensor)
                self.hot.append(part.subject.hot_inputs[position])
                self._limits.append(limit)
            elif limit < self._limits[slot]:
                self.tensors[slot], self._limits[slot] = tensor, limit
            found.append(slot)
        return tuple(found)

    def _inputs(self, subject: Subject) -> Sequence[torch.Tensor]:
        """What a subject would be given alone; repeated layers share it: layouts without numbers, except integers."""
        known = self._known.get(id(subject))
        if known is not None:
            return known
        made = list(self._make_inputs(subject))
        goes_on()
        self._known[id(subject)] = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
            if one.is_floating_point() or one.dtype == torch.bool else one
            for one in made
        ]
        return made


def sequence(parts: Sequence[Part], operands: SharedOperands, kept: Collection[str], target: Target) -> Run:
    """One function of all ``operands`` that runs parts, near to their order, and returns the values that are ``kept``.

    It is straight-line code: a loop over the parts would cost the host as much as some launches. Values are released
    after their last use, as in a model. ValueError where parts wait for each other, or nothing makes what is kept.
    """
    made = {name: f"v{number}_{at}" for number, part in enumerate(parts) for at, name in enumerate(part.makes)}
    if unknown := sorted(set(kept) - made.keys()):
        raise ValueError(f"no part of the sequence makes {', '.join(unknown)}")
    given = [
        [made[one] if isinstance(one, str) else f"s[{one}]" for one in operands.sources(part, made)] for part in parts
    ]
    maker = {name: number for number, part in enumerate(parts) for name in part.makes}
    graph = nx.DiGraph((maker[name], at) for at, part in enumerate(parts) for name in part.reads if name in maker)
    graph.add_nodes_from(range(len(parts)))
    try:
        order = list(nx.lexicographical_topological_sort(graph))  # the smallest that can come next
    except nx.NetworkXUnfeasible:
        raise ValueError(f"parts of a sequence wait for each other: {nx.find_cycle(graph)}") from None
    lines = _lines(parts, order, given, [made[name] for name in made if name in kept])
    made_calls: dict[object, Callable[..., Any]] = {}
    namespace: dict[str, Any] = {}
    for number, part in enumerate(parts):
        key = (id(part.subject), id(part.backend), config_key(part.config))
        if key not in made_calls:  # repeated layers share theirs
            made_calls[key] = part.call(target)
        namespace[f"k{number}"] = made_calls[key]
    exec("def run(*s):\n" + "".join(f"    {line}\n" for line in lines), namespace)
    run: Run = namespace["run"]
    return run


def _lines(
    parts: Sequence[Part], order: Sequence[int], given: Sequence[Sequence[str]], results: Sequence[str]
) -> Iterator[str]:
    """Statements that call the parts (``k0``, ``k1``, ...) in order with what each is given, and return the results."""
    last_use = {variable: number for number in order for variable in given[number]}
    for number in order:
        own = [f"v{number}_{at}" for at in range(len(parts[number].subject.ir.outputs))]
        alone = parts[number].backend is not None and len(own) == 1
        targets = own[0] if alone else "".join(f"{one}, " for one in own)
        yield f"{targets} = k{number}({', '.join(given[number])})"
        ended = [one for one in given[number] if one.startswith("v") and last_use[one] == number]
        unused = [one for one in own if one not in last_use]
        if dead := [one for one in dict.fromkeys((*ended, *unused)) if one not in results]:
            yield f"del {', '.join(dead)}"
    yield f"return ({''.join(f'{one}, ' for one in results)})"
