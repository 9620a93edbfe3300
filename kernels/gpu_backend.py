"""What the two GPU back ends share: a callable that allocates outputs beside its inputs, on their device."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

from fuseplan.kernels.backend import Backend, CompiledKernel, Config, Target
from fuseplan.kernels.gpu_direct import Layout
from fuseplan.kernels.gpu_launch import GpuKernel, allocating
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

        @functools.lru_cache(maxsize=1024)
        def layout(sizes: tuple[int, ...]) -> tuple[Layout, ...]:
            outputs = ir.bind(dict(zip(symbols, sizes, strict=True))).outputs
            return tuple((one.shape, one.strides, dtype) for one, dtype in zip(outputs, dtypes, strict=True))

        return kernel.fused(inputs, layout) if isinstance(kernel, GpuKernel) else allocating(kernel, inputs, layout)
