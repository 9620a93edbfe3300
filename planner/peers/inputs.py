"""A cell's graph as eager runs it, and inputs for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fuseplan.planner.capture.traced import Traced
from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.implementations.sample_inputs import needs_positive_inputs, random_tensor
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.patterns.table import trace_pattern

#: Inputs that hold an angle's cosine and sine. Kernels that read each angle once need both halves of a row equal.
_TABLES = ("cos", "sin")
#: Inputs that are divided by, or whose sign would mean nothing.
_POSITIVE = ("temperature", "scale")


def trace_cell(cell: Cell, device_type: str) -> tuple[Traced, dict[str, TensorSpec]]:
    """The cell's graph as eager runs it, and the layout of its inputs."""
    return trace_pattern(cell.pattern, cell.shape, cell.dtype, device_type)


def make_inputs(
    traced: Traced, specs: Mapping[str, TensorSpec], device_type: str, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Random inputs: N(0, 1), positive where the pattern needs it, and real angles in rotary tables."""
    generator = torch.Generator(device_type).manual_seed(seed)
    positive = needs_positive_inputs(traced.graph)
    angles: torch.Tensor | None = None
    inputs = []
    for name, spec in specs.items():
        if name in _TABLES:
            angles = _angles(spec, generator) if angles is None else angles
            inputs.append((angles.cos() if name == "cos" else angles.sin()).to(getattr(torch, spec.dtype)))
        else:
            inputs.append(random_tensor(spec, generator, positive or name.endswith(_POSITIVE)))
    return tuple(inputs)


def _angles(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Random angles [..., width] whose second half repeats the first."""
    *rows, width = (int(extent) for extent in spec.shape)
    half = torch.rand((*rows, (width + 1) // 2), generator=generator, device=generator.device) * 2 * torch.pi
    return torch.cat([half, half], -1)[..., :width]
