"""What the two GPU back ends share: a callable that allocates outputs beside its inputs, on their device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from fuseplan.kernels.backend import Backend, CompiledKernel, Config, Target
from fuseplan.kernels.ir import KernelIR


class GpuBackend(Backend):
    """A back end whose kernels run on CUDA devices."""

    device_type: ClassVar[str] = "cuda"

    @abstractmethod
    def load(self, ir: KernelIR, config: Config, target: Target) -> CompiledKernel:
        """Compile (or reuse the cache) and load."""

    def fused_callable(
        self, ir: KernelIR, config: Config, target: Target
    ) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
        """``call(*inputs, *sizes)``: allocates the outputs where the first input lives, launches, and returns them."""
        kernel = self.load(ir, config, target)
        inputs, symbols = len(ir.inputs), ir.symbols
        dtypes = [getattr(torch, buffer.dtype) for buffer in ir.outputs]

        def layout(values: Mapping[str, int]) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
            outputs = ir.bind(values).outputs
            return [(one.shape, one.strides, dtype) for one, dtype in zip(outputs, dtypes, strict=True)]

        layouts = {} if symbols else {(): layout({})}
        empty = torch.empty_strided

        def call(*args: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
            sizes = args[inputs:]
            outputs = layouts.get(sizes)
            if outputs is None:
                outputs = layouts[sizes] = layout(dict(zip(symbols, sizes, strict=True)))
            device = args[0].device if inputs else torch.device(target.device_type, torch.cuda.current_device())
            made = tuple(empty(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in outputs)
            kernel(*args[:inputs], *made, *sizes)
            return made[0] if len(made) == 1 else made

        return call
