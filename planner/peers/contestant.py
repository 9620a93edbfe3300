"""A case that is measured, and one that computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseplan.kernels.ir.backend import Backend, Target
from fuseplan.planner.capture.traced import Traced
from fuseplan.planner.runtime.fallback import GroupPlan
from fuseplan.search.timing.timers import Run

#: Contestants by the names that tables use.
OURS, EAGER, INDUCTOR, MAX_AUTOTUNE = "fuseplan", "eager", "inductor", "inductor max-autotune"
STANDARD_PEERS = (EAGER, INDUCTOR, MAX_AUTOTUNE)


class PeerError(Exception):
    """A peer cannot take part in a cell; the message says why."""


@dataclass(frozen=True)
class Case:
    """One pattern at one shape, as contestants are given it.

    Attributes:
        pattern: Name of the pattern.
        shape: Its shape.
        dtype: Its dtype.
        traced: The pattern's graph, as eager runs it.
        names: Names of its inputs.
        inputs: Its inputs, in that order.
        groups: The fused groups of our plan for it.
        target: The device.
        backends: Kernel back ends of the device.
        numerics: How our kernels round.
    """

    pattern: str
    shape: tuple[int, ...]
    dtype: str
    traced: Traced
    names: tuple[str, ...]
    inputs: tuple[torch.Tensor, ...]
    groups: tuple[GroupPlan, ...]
    target: Target
    backends: tuple[Backend, ...] = ()
    numerics: str = "fp32"


def tensors_of(result: Any, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that a call returned."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


@dataclass(frozen=True)
class Contestant:
    """A callable that computes a pattern.

    Attributes:
        run: What is timed: called with the operands.
        prepare: Makes its operands from the pattern's inputs, outside the timing: another layout, or copies for what
            is overwritten. None: it takes the inputs as they are.
        outputs: The pattern's outputs, in order, from what ``run`` returned and its operands.
        note: What was special, for the table.
        in_place: It writes results over operands, which halves what it moves through the caches.
    """

    run: Run
    prepare: Callable[..., tuple[torch.Tensor, ...]] | None = None
    outputs: Callable[[Any, Sequence[torch.Tensor]], Sequence[torch.Tensor]] = tensors_of
    note: str = ""
    in_place: bool = False

    def operands(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What ``run`` is called with."""
        return tuple(inputs) if self.prepare is None else self.prepare(*inputs)


@dataclass(frozen=True)
class LibraryOp:
    """How one op of a library computes a pattern.

    Attributes:
        inputs: Names of the pattern's inputs, in the order that ``build``'s contestant takes them.
        build: Makes the contestant.
    """

    inputs: tuple[str, ...]
    build: Callable[[Case], Contestant]
