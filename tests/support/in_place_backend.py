"""The interpreting back end of the dispatch tests, able to write outputs over inputs: in torch, all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reference_backend import ReferenceBackend, ReferenceKernel

from fuseplan.kernels.ir.backend import NOTHING, CompiledKernel, Config, Layouts, Target
from fuseplan.kernels.ir.in_place import Execution, Reuse, ReuseOptions, reuse_options
from fuseplan.kernels.ir.ir import KernelIR


@dataclass
class InPlaceKernel(ReferenceKernel):
    taken: list[Reuse] = field(default_factory=list)

    def fused(self, inputs: int, layouts: Layouts, reuse: Reuse = NOTHING) -> Callable[..., Any]:
        if chosen := {output: source for output, source in reuse.items() if output not in self.ir.overwritten}:
            self.taken.append(chosen)
        return super().fused(inputs, layouts, reuse)


class InPlaceBackend(ReferenceBackend):
    """``taken`` collects the reuse of each call that was made."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.taken: list[Reuse] = []

    def reuse_options(self, ir: KernelIR, config: Config) -> ReuseOptions:
        return reuse_options(ir, (Execution(looped=False, replicated=False),) * len(ir.segments))

    def load(self, ir: KernelIR, config: Config, target: Target) -> CompiledKernel:
        super().load(ir, config, target)
        return InPlaceKernel(ir, self.calls, self.fails_in_call, taken=self.taken)
