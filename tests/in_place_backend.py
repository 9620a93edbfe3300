"""The interpreting back end of the dispatch tests, able to write outputs over inputs: in torch, all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from reference_backend import ReferenceBackend

from fuseplan.kernels.backend import CompiledKernel, Config, Target
from fuseplan.kernels.in_place import Execution, Reuse, WritesInPlace, placed_call
from fuseplan.kernels.ir import KernelIR


class InPlaceBackend(ReferenceBackend, WritesInPlace):
    """``taken`` collects the reuse of each call that was made."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.taken: list[Reuse] = []

    def executions(self, ir: KernelIR, config: Config) -> tuple[Execution, ...]:
        return (Execution(looped=False, replicated=False),) * len(ir.segments)

    def call(self, kernel: CompiledKernel, ir: KernelIR, target: Target, reuse: Reuse) -> Callable[..., Any]:
        inputs, symbols = len(ir.inputs), ir.symbols

        def allocate(*args: Any) -> tuple[torch.Tensor, ...]:
            outputs = ir.bind(dict(zip(symbols, args[inputs:], strict=True))).outputs
            return tuple(
                torch.empty_strided(one.shape, one.strides, dtype=getattr(torch, one.dtype))
                for number, one in enumerate(outputs) if number not in reuse
            )

        if reuse:
            self.taken.append(reuse)
        return placed_call(kernel, (inputs, len(ir.outputs), len(symbols)), reuse, allocate)
