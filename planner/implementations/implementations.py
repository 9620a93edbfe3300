"""Which implementations there are on a device."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.costmodel.device import Mode
from fuseplan.kernels.ir.backend import Backend, Target
from fuseplan.planner.implementations.aten_op import AtenOp
from fuseplan.planner.implementations.choices import Implementations
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.library_op import LibraryOp
from fuseplan.planner.libraries.library_calls import LIBRARY_CALLS


def implementations_for(regime: str, backends: Sequence[Backend], target: Target) -> Implementations:
    """The ways to run groups."""
    mode: Mode = "graph" if regime == "graph" else "eager"
    return Implementations(
        AtenOp(mode),
        GeneratedKernel(tuple(backends), target, kernel_mode(regime)),
        tuple(LibraryOp(call, call.name, mode) for call in LIBRARY_CALLS),
    )


def kernel_mode(regime: str) -> Mode:
    """How generated kernels are launched in a regime; those of a CUDA graph overlap where the device can."""
    return "overlapped" if regime == "graph" else "kernel"
