"""A case that is measured, and one that computes it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseplan.kernels.ir.backend import Backend, Target
from fuseplan.planner.capture.traced import Traced
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.lowering.lower import Lowered
from fuseplan.planner.runtime.fallback import GroupPlan
from fuseplan.search.timing.timers import Run

#: Contestants by the names that tables use.
OURS, EAGER, INDUCTOR, MAX_AUTOTUNE = "fuseplan", "eager", "inductor", "inductor max-autotune"
STANDARD_PEERS = (EAGER, INDUCTOR, MAX_AUTOTUNE)


class PeerError(Exception):
    """A peer cannot take part in a cell; the message says why."""


def library_function(library: str, module: str, name: str) -> Callable[..., Any]:
    """A function of a library that may not be installed.

    Raises:
        PeerError: The library, or the function, is not there.
    """
    package = library.partition(".")[0]
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(f"{library}.{module}"), name)
    except ImportError as error:
        raise PeerError(f"{package} cannot be imported: {error}") from error
    except AttributeError:
        raise PeerError(f"this version of {package} has no {module}.{name}") from None
    return found


@dataclass(frozen=True)
class Case:
    """One pattern at one shape, as contestants are given it: its graph as eager runs it, and the groups of our plan."""

    pattern: str
    shape: tuple[int, ...]
    dtype: str
    traced: Traced
    #: Names of the inputs, and the inputs.
    names: tuple[str, ...]
    inputs: tuple[torch.Tensor, ...]
    groups: tuple[GroupPlan, ...]
    target: Target
    backends: tuple[Backend, ...] = ()
    numerics: str = "fp32"

    def kernel(self, ops: Sequence[str]) -> Lowered:
        """The kernel of one of the plan's groups."""
        return lower_group(self.traced.graph, ops, self.numerics)


def tensors_of(result: Any, operands: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
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
    """How one op of a library computes a pattern; ``build``'s contestant takes ``inputs`` in this order."""

    inputs: tuple[str, ...]
    build: Callable[[Case], Contestant]
