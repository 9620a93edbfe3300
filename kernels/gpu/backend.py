"""What the two GPU back ends share: a callable that allocates outputs beside its inputs, on their device."""

from __future__ import annotations

import functools
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from fuseplan.kernels.gpu.build import KernelSpec, ModuleStore, build_launcher, compile_kernel, read_resources
from fuseplan.kernels.gpu.direct import Layout, find_launcher
from fuseplan.kernels.gpu.launch import (
    Geometry,
    GpuKernel,
    InterpretedKernel,
    Layouts,
    Variant,
    allocating,
    interpreter_is_on,
)
from fuseplan.kernels.gpu.overlap import plainly
from fuseplan.kernels.gpu.tile import chunk_width, needs_int64, tile_of
from fuseplan.kernels.ir.backend import Backend, BuildError, CompiledKernel, Config, Resources, Target, config_key
from fuseplan.kernels.ir.in_place import Execution, Reuse, WritesInPlace
from fuseplan.kernels.ir.ir import KernelIR

_WARP = 32


class GpuBackend(Backend, WritesInPlace):
    """A back end whose kernels run on CUDA devices, compiled by Triton.

    In a process that has Triton's interpreter on (``TRITON_INTERPRET=1`` before the first import), :meth:`load` gives
    kernels that run on CPU tensors. Generated modules are kept in ``cache_dir``, by default the user's cache folder.
    """

    device_type: ClassVar[str] = "cuda"
    #: What has to be installed.
    packages: ClassVar[tuple[str, ...]] = ("triton",)

    def __init__(self, cache_dir: Path | str | None = None) -> None:
        self.store = ModuleStore(self.name, cache_dir)

    def unavailable(self) -> str | None:
        missing = next((package for package in self.packages if importlib.util.find_spec(package) is None), None)
        return None if missing is None else f"{missing} is not installed: pip install {missing} (Linux)"

    def prepare(self, ir: KernelIR, config: Config, target: Target) -> Resources:
        dtypes = ",".join(buffer.dtype for buffer in ir.buffers)
        key = f"{self.versions()}|{target.arch}|{config_key(config)}|{self.source(ir, config)}|{dtypes}"
        resources = self.store.resources(key)
        if resources is None:
            compiled = self._compile(ir, config, target, Variant(wide=needs_int64(ir)))
            build_launcher(compiled)
            resources = read_resources(compiled)
            self.store.keep_resources(key, resources)
        return resources

    def load(self, ir: KernelIR, config: Config, target: Target) -> CompiledKernel:
        symbols, buffers = ir.symbols, len(ir.buffers)
        if interpreter_is_on():
            config = plainly(config)
            function, programs = self._function(ir, config), functools.partial(self._programs, ir, config)
            return InterpretedKernel(function, programs, symbols, self._arguments(ir, config), buffers)
        if not torch.cuda.is_available():
            raise BuildError(f"{self.name}: no CUDA device is visible to load a kernel on; prepare() needs none")
        resources = self.prepare(ir, config, target)
        return GpuKernel(
            functools.partial(self._compile, ir, config, target, known=resources),
            lambda sizes: Geometry(self._programs(ir, config, sizes), needs_int64(ir, sizes)),
            symbols, self._arguments(ir, config), buffers, resources, find_launcher(),
        )

    def _compile(
        self, ir: KernelIR, config: Config, target: Target, variant: Variant, known: Resources | None = None
    ) -> Any:
        """Triton's ``CompiledKernel``."""
        return compile_kernel(self._function(ir, config, variant.wide), self._spec(ir, config, variant), target, known)

    @abstractmethod
    def versions(self) -> str:
        """Versions of what a binary depends on beside its source."""

    @abstractmethod
    def _function(self, ir: KernelIR, config: Config, wide: bool = False) -> Any:
        """The generated ``@triton.jit`` function; with ``wide`` its index arithmetic is in 64 bits."""

    @abstractmethod
    def _spec(self, ir: KernelIR, config: Config, variant: Variant) -> KernelSpec:
        """What the compiler needs beside that function."""

    @abstractmethod
    def _programs(self, ir: KernelIR, config: Config, sizes: Mapping[str, int]) -> int:
        """Programs of a launch, for given dynamic sizes."""

    @abstractmethod
    def _arguments(self, ir: KernelIR, config: Config) -> tuple[tuple[int | None, int], ...]:
        """The function's arguments before the dynamic sizes, as :class:`GpuKernel` wants them."""

    def fused_callable(
        self, ir: KernelIR, config: Config, target: Target
    ) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
        """``call(*inputs, *sizes)``: allocates the outputs where the first input lives, launches, and returns them."""
        return self.call(self.load(ir, config, target), ir, target, {})

    def executions(self, ir: KernelIR, config: Config) -> tuple[Execution, ...]:
        """How each segment is computed: a tile with fewer elements than threads is held by several alike."""
        threads = _WARP * int(config["num_warps"])
        found = []
        for segment in ir.segments:
            tile = tile_of(segment, config)
            found.append(Execution(tile.looped, tile.elements < threads, chunk_width(ir.buffers, segment, config) > 0))
        return tuple(found)

    def call(
        self, kernel: CompiledKernel, ir: KernelIR, target: Target, reuse: Reuse
    ) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
        """Outputs that lie in no input are allocated where the first input lives."""
        inputs, reuse = len(ir.inputs), {**reuse, **ir.overwritten}
        layout = _layouts(ir, [number for number in range(len(ir.outputs)) if number not in reuse])
        if isinstance(kernel, GpuKernel):
            return kernel.fused(inputs, layout, reuse)
        return allocating(kernel, inputs, layout, reuse)


def _layouts(ir: KernelIR, outputs: Sequence[int]) -> Layouts:
    """Dynamic sizes -> layouts of the outputs at those positions."""
    symbols, dtypes = ir.symbols, [getattr(torch, ir.outputs[number].dtype) for number in outputs]

    @functools.lru_cache(maxsize=1024)
    def layout(sizes: tuple[int, ...]) -> tuple[Layout, ...]:
        bound = ir.bind(dict(zip(symbols, sizes, strict=True))).outputs
        return tuple(
            (bound[number].shape, bound[number].strides, dtype) for number, dtype in zip(outputs, dtypes, strict=True)
        )

    return layout
