"""Kernels one after another, as a model runs them: what one makes, a later one reads.

A kernel that is timed alone finds all its data in a cache that holds them. In a sequence the others' data are in the
cache too: on an H200 two kernels that take 8.4 us by themselves took 12.1 us together, and one kernel for both 10.7.
So what is decided between sequences is decided by running them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeAlias

import torch

from fuseplan.kernels.backend import Backend, Config, Target
from fuseplan.search.subject import Subject
from fuseplan.search.timers import Run

#: Makes a subject's operands.
MakeInputs: TypeAlias = Callable[[Subject], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Part:
    """One kernel of a sequence: a subject's fused kernel or, without a back end, its unfused chain.

    Attributes:
        subject: The fusion group.
        backend: Who compiles its kernel.
        config: With which configuration.
        reads: Names of its inputs; a name stands for the same value in all parts. Empty: it shares nothing.
        makes: Names of its outputs.
    """

    subject: Subject
    backend: Backend | None = None
    config: Config = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()

    @property
    def outputs(self) -> int:
        return len(self.subject.ir.outputs)

    def call(self, target: Target) -> Callable[..., Any]:
        """Called with the inputs; returns the outputs, or the only one."""
        if self.backend is not None:
            return self.backend.fused_callable(self.subject.ir, self.config, target)
        chain = self.subject.eager
        return chain if self.outputs > 1 else lambda *inputs: chain(*inputs)[0]


class SharedOperands:
    """What sequences read from outside: all of one play-off are called with the same operands.

    Attributes:
        tensors: The operands.
        hot: For each, whether an earlier kernel of the model has just produced it.
    """

    def __init__(self, make_inputs: MakeInputs) -> None:
        self.tensors: list[torch.Tensor] = []
        self.hot: list[bool] = []
        self._make_inputs = make_inputs
        self._slots: dict[object, int] = {}

    def sources(self, part: Part, made: Collection[str]) -> tuple[str | int, ...]:
        """Where each input of a part comes from: a value's name, if it is in ``made``, else the number of an operand.

        Only floating-point values are handed on and shared. Indices have to be within the table that a part made for
        itself, so every part keeps its own.
        """
        found: list[str | int] = []
        for position, tensor in enumerate(self._make_inputs(part.subject)):
            name = part.reads[position] if part.reads and tensor.is_floating_point() else ""
            found.append(name if name in made else self._slot(part, position, name, tensor))
        return tuple(found)

    def _slot(self, part: Part, position: int, name: str, tensor: torch.Tensor) -> int:
        # A table that is only looked up is shorter for some parts than for others.
        key = (name, tensor.shape, tensor.stride()) if name else (id(part), position)
        if key not in self._slots:
            self._slots[key] = len(self.tensors)
            self.tensors.append(tensor)
            self.hot.append(part.subject.hot_inputs[position])
        return self._slots[key]


def sequence(parts: Sequence[Part], operands: SharedOperands, kept: Collection[str], target: Target) -> Run:
    """One function that runs parts in an order in which they can run.

    Straight-line code, like a compiled model's: a loop over the parts would cost the host as much as some launches.

    Args:
        parts: The parts, in any order.
        operands: Is given what they read from outside; the function takes all operands that there are by then.
        kept: Names of values that are needed afterwards and returned. Others are released after their last use, so
            that results take no more memory than in a model.
        target: The device.

    Raises:
        ValueError: Parts wait for each other.
    """
    made = {name: (number, at) for number, part in enumerate(parts) for at, name in enumerate(part.makes)}
    sources = [operands.sources(part, made) for part in parts]
    reads = [[made[one] for one in found if isinstance(one, str)] for found in sources]
    try:
        needs = {number: {maker for maker, _ in values} for number, values in enumerate(reads)}
        order = tuple(TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise ValueError(f"parts of a sequence wait for each other: {error.args[1]}") from None
    results = [value for name, value in made.items() if name in kept]
    last_use = {value: number for number in order for value in reads[number]}
    lines = []
    for number in order:
        own = [(number, at) for at in range(parts[number].outputs)]
        given = (_variable(made[one]) if isinstance(one, str) else f"s[{one}]" for one in sources[number])
        lines.append(f"{', '.join(map(_variable, own))} = k{number}({', '.join(given)})")
        unused = [value for value in own if value not in last_use]
        ended = [value for value, last in last_use.items() if last == number]
        dead = [_variable(value) for value in (*ended, *unused) if value not in results]
        lines += [f"del {', '.join(dead)}"] if dead else []
    lines.append(f"return ({''.join(f'{_variable(value)}, ' for value in results)})")
    namespace: dict[str, Any] = {f"k{number}": part.call(target) for number, part in enumerate(parts)}
    exec("def run(*s):\n" + "".join(f"    {line}\n" for line in lines), namespace)
    run: Run = namespace["run"]
    return run


def _variable(value: tuple[int, int]) -> str:
    """Of an output: the number of its part, and its own."""
    return "v{}_{}".format(*value)
