"""Which ways there are to run a group on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.costmodel.device import Mode
from fuseplan.kernels.ir.backend import Backend, Target
from fuseplan.planner.implementations.aten import AtenOp
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.implementation import Implementation
from fuseplan.planner.implementations.inductor import InductorAsked, InductorCode
from fuseplan.planner.implementations.library_op import LibraryOp
from fuseplan.planner.libraries.library_calls import LIBRARY_CALLS


@dataclass(frozen=True)
class Implementations:
    """The ways to run groups on a device: ``aten`` single ops, ``kernel`` what lowers, ``inductor`` whole regions."""

    aten: Implementation
    kernel: GeneratedKernel
    inductor: InductorCode
    libraries: tuple[LibraryOp, ...] = ()

    @property
    def by_rule(self) -> tuple[LibraryOp, ...]:
        """The libraries' calls that the cost model may choose by itself."""
        return tuple(one for one in self.libraries if one.call.by_rule)

    def named(self, name: str) -> Implementation:
        """The one that a record names, by a back end's name the kernel of that; KeyError where there is none."""
        known = {one.name: one for one in (self.aten, self.inductor, *self.libraries)}
        return known.get(name) or self.kernel.by(name)


def implementations_for(
    regime: str, backends: Sequence[Backend], target: Target, inductor: InductorAsked = "default"
) -> Implementations:
    """The ways to run groups on a device; ``inductor`` is what TorchInductor is asked for."""
    mode: Mode = "graph" if regime == "graph" else "eager"
    return Implementations(
        AtenOp(mode),
        GeneratedKernel(tuple(backends), target, kernel_mode(regime)),
        InductorCode(mode, compiled_for="default" if inductor == "off" else inductor),
        tuple(LibraryOp(call, call.name, mode) for call in LIBRARY_CALLS),
    )


def kernel_mode(regime: str) -> Mode:
    """How generated kernels are launched in a regime; those of a CUDA graph overlap where the device can."""
    return "overlapped" if regime == "graph" else "kernel"
