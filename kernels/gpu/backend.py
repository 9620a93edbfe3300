"""What the two GPU back ends share: from a generated function to a callable."""

from __future__ import annotations

import functools
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from fuseplan.kernels.gpu.build import KernelSpec, ModuleStore, compile_kernel
from fuseplan.kernels.gpu.direct import only_by_triton
from fuseplan.kernels.gpu.launch import (
    Arguments,
    Geometry,
    Loader,
    RepeatedKernel,
    ScratchKernel,
    Variant,
    interpreter_is_on,
    loaded_kernel,
)
from fuseplan.kernels.gpu.overlap import plainly
from fuseplan.kernels.gpu.targets import read_resources, toolchain
from fuseplan.kernels.gpu.tile import LAUNCH, WARP, as_launched, chunk_width, launches, needs_int64, tile_of
from fuseplan.kernels.ir.backend import Backend, BuildError, CompiledKernel, Config, Resources, Target, config_key
from fuseplan.kernels.ir.in_place import Execution, ReuseOptions, reuse_options
from fuseplan.kernels.ir.ir import Apply, KernelIR
from fuseplan.kernels.ir.ops import op_spec

#: Planning asks for every group, and to look takes as long as to price one.
_find_spec = functools.cache(importlib.util.find_spec)


def unspelled(ir: KernelIR) -> str:
    """The scalar op of a kernel that only the C++ back end can spell; "" where there is none."""
    ops = (instr.op for segment in ir.segments for instr in segment.body if isinstance(instr, Apply))
    return next((op for op in ops if not op_spec(op).triton), "")


class GpuBackend(Backend):
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
        missing = next((package for package in self.packages if _find_spec(package) is None), None)
        return None if missing is None else f"{missing} is not installed: pip install 'fuseplan[gpu]' (Linux)"

    def refuse(self, ir: KernelIR, target: Target) -> str | None:
        if not target.is_gpu:
            return f"{self.name} kernels run on CUDA devices, not on '{target.device_type}'"
        if not target.gpu.fp8 and any(buffer.dtype == "float8_e4m3fn" for buffer in ir.buffers):
            return f"{target.arch} has no float8_e4m3fn"
        if missing := unspelled(ir):
            return f"kernels for GPUs have no {missing}"
        return self._refuse(ir, target)

    @abstractmethod
    def _refuse(self, ir: KernelIR, target: Target) -> str | None:
        """:meth:`refuse` of a kernel whose types a GPU has."""

    def _resources_key(self, ir: KernelIR, config: Config, target: Target) -> str:
        dtypes = ",".join(buffer.dtype for buffer in ir.buffers)
        return f"{self.versions()}|{target.arch}|{config_key(config)}|{self.source(ir, config)}|{dtypes}"

    def is_compiled(self, ir: KernelIR, config: Config, target: Target) -> bool:
        return self.store.resources(self._resources_key(ir, config, target)) is not None

    def prepare(self, ir: KernelIR, config: Config, target: Target) -> Resources:
        key = self._resources_key(ir, config, target)
        resources = self.store.resources(key)
        if resources is None:
            compiled = self._compile(ir, config, target, Variant(wide=needs_int64(ir)))
            if only_by_triton(compiled):
                toolchain(target.gpu).build_launcher(compiled)
            resources = read_resources(compiled)
            self.store.keep_resources(key, resources)
        return resources

    def load(self, ir: KernelIR, config: Config, target: Target) -> CompiledKernel:
        if interpreter_is_on():
            config, resources = plainly(config), Resources()
            function = self._function(ir, config, Variant())
            binary: Callable[[Variant], Any] = lambda _: function  # noqa: E731
        elif torch.cuda.is_available():
            resources = self.prepare(ir, config, target)
            binary = functools.partial(self._compile, ir, config, target, known=resources)
        else:
            raise BuildError(f"{self.name}: no CUDA device is visible to load a kernel on; prepare() needs none")

        number = launches(ir, config)
        symbols = ir.symbols if number == 1 else (*ir.symbols, LAUNCH)

        @functools.cache
        def geometry(sizes: tuple[int, ...]) -> Geometry:
            values = dict(zip(ir.symbols, sizes, strict=False))
            return Geometry(self._programs(ir, config, target, values), needs_int64(ir, values))

        numbers, counters = self.scratch(ir, config)
        buffers = len(ir.buffers) + (2 if counters else 0)
        loader = Loader(binary, geometry, symbols, self._arguments(ir, config), buffers)
        kernel = loaded_kernel(loader, resources)
        kernel = kernel if number == 1 else RepeatedKernel(kernel, number)
        return ScratchKernel(kernel, len(ir.inputs), numbers, counters) if counters else kernel

    def scratch(self, ir: KernelIR, config: Config) -> tuple[int, int]:
        """Float32 numbers and counters of the kernel's own, which it takes behind its inputs; (0, 0) for none."""
        return 0, 0

    def _compile(
        self, ir: KernelIR, config: Config, target: Target, variant: Variant, known: Resources | None = None
    ) -> Any:
        """Triton's ``CompiledKernel``."""
        return compile_kernel(self._function(ir, config, variant), self._spec(ir, config, variant), target, known)

    @abstractmethod
    def versions(self) -> str:
        """Versions of what a binary depends on beside its source."""

    @abstractmethod
    def _function(self, ir: KernelIR, config: Config, variant: Variant) -> Any:
        """The generated ``@triton.jit`` function."""

    @abstractmethod
    def _spec(self, ir: KernelIR, config: Config, variant: Variant) -> KernelSpec:
        """What the compiler needs beside that function."""

    @abstractmethod
    def _programs(self, ir: KernelIR, config: Config, target: Target, sizes: Mapping[str, int]) -> int:
        """Programs of a launch, for given dynamic sizes."""

    @abstractmethod
    def _arguments(self, ir: KernelIR, config: Config) -> Arguments:
        """The function's arguments before the dynamic sizes."""

    def reuse_options(self, ir: KernelIR, config: Config) -> ReuseOptions:
        return reuse_options(as_launched(ir, config), self.executions(ir, config))

    def executions(self, ir: KernelIR, config: Config) -> tuple[Execution, ...]:
        """How each segment is computed: a tile with fewer elements than threads is held by several alike."""
        threads = WARP * int(config["num_warps"])
        segments = as_launched(ir, config).segments
        tiles = ((tile_of(segment, config), chunk_width(ir.buffers, segment, config)) for segment in segments)
        return tuple(Execution(tile.looped, tile.elements < threads, chunk > 0) for tile, chunk in tiles)
