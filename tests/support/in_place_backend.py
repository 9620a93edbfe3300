"""The interpreting back end of the dispatch tests, able to write outputs over inputs: in torch, all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from reference_backend import ReferenceBackend

from fuseplan.kernels.gpu.direct import OutputLayout
from fuseplan.kernels.gpu.launch import allocating
from fuseplan.kernels.ir.backend import CompiledKernel, Config, Target
from fuseplan.kernels.ir.in_place import Execution, Reuse, WritesInPlace
from fuseplan.kernels.ir.ir import KernelIR


class InPlaceBackend(ReferenceBackend, WritesInPlace):
    """``taken`` collects the reuse of each call that was made."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.taken: list[Reuse] = []

    def executions(self, ir: KernelIR, config: Config) -> tuple[Execution, ...]:
        return (Execution(looped=False, replicated=False),) * len(ir.segments)

    def call(self, kernel: CompiledKernel, ir: KernelIR, target: Target, reuse: Reuse) -> Callable[..., Any]:
        def layout(sizes: tuple[int, ...]) -> tuple[OutputLayout, ...]:
            outputs = ir.bind(dict(zip(ir.symbols, sizes, strict=True))).outputs
            return tuple(
                (one.shape, one.strides, getattr(torch, one.dtype))
                for number, one in enumerate(outputs) if number not in taken
            )

        taken = {**reuse, **ir.overwritten}
        if reuse:
            self.taken.append(reuse)
        return allocating(kernel, len(ir.inputs), layout, taken)
