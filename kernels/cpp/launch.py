"""Calling compiled CPU kernels: through a small CPython extension where it can be built, else through ctypes."""

from __future__ import annotations

import _ctypes
import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fuseplan.kernels.ir.backend import NOTHING, BuildError, CompiledKernel, Layouts, OutsideTable
from fuseplan.kernels.ir.in_place import Reuse
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.kernels.native.build import (
    OPENMP_FUNCTIONS,
    Compiler,
    address,
    build_library,
    data_ptr_address,
    load_extension,
    shared_openmp,
)


@dataclass(frozen=True)
class RunSettings:
    """How to run a kernel; none of it changes the binary."""

    #: At most; torch's own limit (``torch.set_num_threads``) holds as well.
    threads: int = 1
    #: Elements that are worth one thread, 0 to use all ``threads``; for dynamic sizes.
    grain: int = 0
    rows_per_task: int = 1
    #: Columns of one task in kernels without reductions.
    col_tile: int = 4096
    #: Let other Python threads run meanwhile.
    release_gil: bool = False


class Library:
    """A loaded shared library, unloaded with this object; two objects of one file keep each other's code."""

    def __init__(self, path: Path) -> None:
        self.loaded = ctypes.CDLL(str(path))
        # Not when the process ends: other threads may still be in it.
        weakref.finalize(self, _ctypes.dlclose, self.loaded._handle).atexit = False

    def address(self, function: str) -> int:
        """Where a function lies; good for as long as this object."""
        return address(getattr(self.loaded, function))


class CppKernel(CompiledKernel):
    """A loaded CPU kernel, whose calls raise ``OutsideTable``; ``call`` makes the outputs (None: no extension)."""

    def __init__(self, run: Callable[..., None], call: Callable[..., Any] | None = None) -> None:
        self.run, self._call = run, call

    def __call__(self, *args: torch.Tensor | int) -> None:
        self.run(*args)

    def fused(self, inputs: int, layouts: Layouts, reuse: Reuse = NOTHING) -> Callable[..., Any]:
        return self._call or super().fused(inputs, layouts, reuse)


def load_kernel(
    ir: KernelIR, source: str, settings: RunSettings, compiler: Compiler, cache_dir: Path
) -> CppKernel:
    """Compile a kernel unless the cache has it, and bind it to a call path; its library goes with the last call."""
    loaded = Library(build_library(source, compiler, cache_dir))
    launcher = load_launcher(compiler, cache_dir)
    if launcher is None:
        return _ctypes_kernel(ir, loaded, settings)
    addresses = (
        loaded.address("fuseplan_launch"), loaded.address("fuseplan_shapes"), data_ptr_address(), *shared_openmp(),
    )
    layouts = tuple((buffer.shape, buffer.strides, torch_dtype(buffer.dtype)) for buffer in ir.outputs)
    outputs = tuple(
        (len(shape), dtype, -1 if buffer.over is None else buffer.over)
        for buffer, (shape, _, dtype) in zip(ir.outputs, layouts, strict=True)
    )
    empty = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None) or (
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype))
    kernel = launcher.Kernel(
        addresses, (len(ir.inputs), len(ir.symbols), settings.release_gil),
        (settings.threads, settings.grain, settings.rows_per_task, settings.col_tile), empty, outputs,
        None if ir.symbols else layouts, OutsideTable, loaded,
    )
    return CppKernel(kernel.run, kernel.fused)


@lru_cache(maxsize=4)
def load_launcher(compiler: Compiler, cache_dir: Path) -> Any | None:
    """The extension module, built on first use; None where Python's headers are missing or it does not build."""
    try:
        return load_extension("cpp_launcher.cpp", compiler, cache_dir)
    except BuildError:
        return None


class _Launch(ctypes.Structure):
    """``Launch`` of ``cpp_loops.h``."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("threads", "grain", "rows_per_task", "col_tile")),
        *((name, ctypes.c_void_p) for name in OPENMP_FUNCTIONS),
    )


def _ctypes_kernel(ir: KernelIR, library: Library, settings: RunSettings) -> CppKernel:
    """The same call path without the extension: some microseconds a call."""
    how = _Launch(settings.threads, settings.grain, settings.rows_per_task, settings.col_tile, *shared_openmp())
    tensors, symbols = len(ir.buffers), ir.symbols
    pointers, sizes = ctypes.c_void_p * (tensors + 1), ctypes.c_longlong * max(len(symbols), 1)

    def run(*args: torch.Tensor | int) -> None:
        addresses = [tensor.data_ptr() for tensor in args[:tensors] if isinstance(tensor, torch.Tensor)]
        if len(addresses) != tensors or len(args) != tensors + len(symbols):
            raise TypeError(f"the kernel takes {tensors} tensors and {len(symbols)} sizes, got {len(args)} arguments")
        outside = ctypes.c_int(0)
        given = pointers(*addresses, ctypes.addressof(outside))
        library.loaded.fuseplan_launch(given, sizes(*map(int, args[tensors:])), ctypes.byref(how))
        if outside.value:
            raise OutsideTable("an index is outside its table")

    return CppKernel(run)
