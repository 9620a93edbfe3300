"""A case that is measured, and one that computes it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseplan.kernels.ir.backend import Backend, Target
from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.implementations.sample_inputs import needs_positive_inputs, random_tensor
from fuseplan.planner.lowering.lower import Lowered
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.patterns.table import trace_pattern
from fuseplan.search.timing.timers import Run

#: Contestants by the names that tables use.
OURS, EAGER, INDUCTOR, MAX_AUTOTUNE = "fuseplan", "eager", "inductor", "inductor max-autotune"
STANDARD_PEERS = (EAGER, INDUCTOR, MAX_AUTOTUNE)
#: Inputs that are divided by, or whose sign would mean nothing.
_POSITIVE = ("temperature", "scale")


class PeerError(Exception):
    """A peer cannot take part in a cell; the message says why."""


def library_function(library: str, module: str, name: str) -> Callable[..., Any]:
    """A function of a library that may not be installed; :class:`PeerError` where it is not there."""
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
    """A cell as contestants are given it: its graph as eager runs it, its inputs, and the groups of our plan."""

    cell: Cell
    traced: Traced
    names: tuple[str, ...]
    inputs: tuple[torch.Tensor, ...]
    target: Target
    groups: tuple[PlannedGroup, ...] = ()
    backends: tuple[Backend, ...] = ()
    numerics: str = "fp32"

    def kernel(self, ops: Sequence[str]) -> Lowered:
        """The kernel of one of the plan's groups."""
        return lower_group(self.traced.graph, ops, self.numerics)

    @property
    def hot(self) -> list[bool]:
        """For each input, whether it is an activation, which the kernel before has just produced."""
        graph = self.traced.graph
        return [name in graph.fresh for name in graph.inputs]


def make_case(cell: Cell, target: Target, backends: tuple[Backend, ...] = (), numerics: str = "fp32") -> Case:
    """A case on random inputs, without a plan."""
    traced, specs = trace_cell(cell, target.device_type)
    inputs = make_inputs(traced, specs, target.device_type)
    return Case(cell, traced, tuple(specs), inputs, target, (), backends, numerics)


def trace_cell(cell: Cell, device_type: str) -> tuple[Traced, dict[str, TensorSpec]]:
    """The cell's graph as eager runs it, and the layout of its inputs."""
    return trace_pattern(cell.pattern, cell.shape, cell.dtype, device_type)


def make_inputs(
    traced: Traced, specs: Mapping[str, TensorSpec], device_type: str, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Random inputs: N(0, 1), positive where the pattern needs it, and cosine and sine of the same angles.

    The second half of a row of angles repeats the first: some kernels read one half.
    """
    generator = torch.Generator(device_type).manual_seed(seed)
    positive = needs_positive_inputs(traced.graph)
    angles: torch.Tensor | None = None
    inputs = []
    for name, spec in specs.items():
        if name not in ("cos", "sin"):
            inputs.append(random_tensor(spec, generator, positive or name.endswith(_POSITIVE)))
            continue
        if angles is None:
            *rows, width = (int(extent) for extent in spec.shape)
            half = torch.rand((*rows, (width + 1) // 2), generator=generator, device=device_type) * 2 * torch.pi
            angles = torch.cat([half, half], -1)[..., :width]
        inputs.append((angles.cos() if name == "cos" else angles.sin()).to(getattr(torch, spec.dtype)))
    return tuple(inputs)


def tensors_of(result: Any, operands: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """The tensors that a call returned."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


@dataclass(frozen=True)
class Contestant:
    """A callable that computes a pattern.

    Attributes:
        run: What is timed: called with the operands.
        prepare: Makes operands from the pattern's inputs, outside the timing.
        outputs: The pattern's outputs, in order, from what ``run`` returned and its operands.
        note: What was special, for the table.
    """

    run: Run
    prepare: Callable[..., tuple[torch.Tensor, ...]] = lambda *inputs: inputs
    outputs: Callable[[Any, Sequence[torch.Tensor]], Sequence[torch.Tensor]] = tensors_of
    note: str = ""


@dataclass(frozen=True)
class PeerOp:
    """How a library's op computes a pattern; it takes ``inputs`` in this order, of ``dtypes`` (() for all)."""

    inputs: tuple[str, ...]
    build: Callable[[Case], Contestant]
    dtypes: tuple[str, ...] = ()
