"""Calling compiled CPU kernels: through a small CPython extension where it can be built, else through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fuseplan.kernels.ir.backend import BuildError, CompiledKernel, Resources
from fuseplan.kernels.ir.dtypes import torch_dtype
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.native.build import OPENMP_FUNCTIONS, Compiler, address, load_extension, shared_openmp

_MODULE = "fuseplan_cpp_launcher"


@dataclass(frozen=True)
class RunSettings:
    """How to run a kernel; none of it changes the binary.

    Attributes:
        threads: Threads at most; torch's own limit (``torch.set_num_threads``) holds as well.
        grain: Elements that are worth one thread, 0 to use all ``threads``; for dynamic sizes.
        rows_per_task: Rows that stay together on one thread.
        col_tile: Columns of one task in kernels without reductions.
        release_gil: Let other Python threads run meanwhile.
    """

    threads: int = 1
    grain: int = 0
    rows_per_task: int = 1
    col_tile: int = 4096
    release_gil: bool = False


class CppKernel(CompiledKernel):
    """A loaded CPU kernel.

    Attributes:
        run: ``run(*inputs, *outputs, *sizes)``, as calling the kernel does.
        fused: ``fused(*inputs, *sizes)``, which allocates the outputs and returns the tensor, or a tuple of them.
    """

    def __init__(self, run: Callable[..., None], fused: Callable[..., Any]) -> None:
        self.run, self.fused, self.resources = run, fused, Resources()

    def __call__(self, *args: torch.Tensor | int) -> None:
        self.run(*args)


def load_kernel(
    ir: KernelIR, library: Path, settings: RunSettings, compiler: Compiler, cache_dir: Path
) -> CppKernel:
    """Bind a compiled kernel to a call path."""
    loaded = ctypes.CDLL(str(library))
    launcher = load_launcher(compiler, cache_dir)
    if launcher is None:
        return _ctypes_kernel(ir, loaded, settings)
    guards = torch._C._dynamo.guards
    addresses = (
        address(loaded.fuseplan_launch), address(loaded.fuseplan_shapes),
        getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", 0), *shared_openmp(),
    )
    outputs = tuple(
        (len(buffer.shape), torch_dtype(buffer.dtype), -1 if buffer.over is None else buffer.over)
        for buffer in ir.outputs
    )
    fixed = None
    if not ir.symbols:
        fixed = tuple((buffer.shape, buffer.strides, torch_dtype(buffer.dtype)) for buffer in ir.outputs)
    kernel = launcher.Kernel(
        addresses,
        (len(ir.inputs), len(ir.symbols), settings.release_gil),
        (settings.threads, settings.grain, settings.rows_per_task, settings.col_tile),
        getattr(guards, "_empty_strided_cpu", _empty_strided),
        outputs,
        fixed,
    )
    return CppKernel(kernel.run, kernel.fused)


def _empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


@lru_cache(maxsize=4)
def load_launcher(compiler: Compiler, cache_dir: Path) -> Any | None:
    """The extension module, built on first use; None where Python's headers are missing or it does not build."""
    try:
        source = Path(__file__).parent.parent / "native" / "cpp_launcher.cpp"
        return load_extension(_MODULE, source, compiler, cache_dir)
    except BuildError:
        return None


class _Launch(ctypes.Structure):
    """``Launch`` of ``cpp_loops.h``."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("threads", "grain", "rows_per_task", "col_tile")),
        *((name, ctypes.c_void_p) for name in OPENMP_FUNCTIONS),
    )


def _ctypes_kernel(ir: KernelIR, loaded: ctypes.CDLL, settings: RunSettings) -> CppKernel:
    """The same call path without the extension: some microseconds a call."""
    how = _Launch(settings.threads, settings.grain, settings.rows_per_task, settings.col_tile, *shared_openmp())
    tensors, inputs, symbols = len(ir.buffers), len(ir.inputs), ir.symbols
    pointers, sizes = ctypes.c_void_p * tensors, ctypes.c_longlong * max(len(symbols), 1)

    def run(*args: torch.Tensor | int) -> None:
        addresses = [tensor.data_ptr() for tensor in args[:tensors] if isinstance(tensor, torch.Tensor)]
        if len(addresses) != tensors or len(args) != tensors + len(symbols):
            raise TypeError(f"the kernel takes {tensors} tensors and {len(symbols)} sizes, got {len(args)} arguments")
        loaded.fuseplan_launch(pointers(*addresses), sizes(*map(int, args[tensors:])), ctypes.byref(how))

    def fused(*args: torch.Tensor | int) -> Any:
        values = {name: int(value) for name, value in zip(symbols, args[inputs:], strict=True)}
        made = tuple(
            torch.empty_strided(buffer.shape, buffer.strides, dtype=torch_dtype(buffer.dtype))
            if buffer.over is None else args[buffer.over]
            for buffer in ir.bind(values).outputs
        )
        run(*args[:inputs], *made, *args[inputs:])
        return made[0] if len(made) == 1 else made

    return CppKernel(run, fused)
