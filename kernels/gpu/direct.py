"""Launching a compiled Triton kernel with one driver call: what the extension in ``gpu_launcher.cpp`` must be told.

Without a C++ compiler, or for a kernel that asks for more than a grid (scratch memory, clusters), Triton's own launcher
is used: some microseconds more a call, same results.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from fuseplan.kernels.gpu.targets import warm_up
from fuseplan.kernels.gpu.tile import WARP
from fuseplan.kernels.ir.backend import NOTHING, BuildError
from fuseplan.kernels.ir.in_place import Reuse
from fuseplan.kernels.native.build import address, data_ptr_address, load_extension

logger = logging.getLogger(__name__)

_MAX_ARGUMENTS = 256  # of launcher.h

#: Addresses of the driver's ``cuLaunchKernel``, ``cuCtxGetCurrent``, ``cuGetErrorString`` and ``cuLaunchKernelEx``.
Driver: TypeAlias = tuple[int, int, int, int]


class DriverEntry(NamedTuple):
    """A loaded kernel as the driver sees it: its handle, what each block has, and whether it may start early."""

    function: int
    threads: int
    shared_bytes: int
    overlapped: bool = False


@dataclass(frozen=True)
class Launcher:
    """The extension, and what it calls."""

    module: Any
    driver: Driver
    #: ``(shape, strides, dtype)`` -> tensor on the current device.
    allocate: Callable[..., torch.Tensor]
    #: Device index -> handle of its current stream.
    stream: Callable[[int], int]
    #: Whether tensors may be on another device than the current one, which is then looked up.
    check_device: bool = False

    def bind(
        self, counts: tuple[int, int, int], arguments: Sequence[tuple[int, int]], slow_run: Callable[..., None],
        slow_fused: Callable[..., Any], reuse: Reuse = NOTHING
    ) -> Any | None:
        """A ``Kernel`` of the extension; None when there are more arguments than it holds.

        ``counts`` are inputs, outputs, dynamic sizes; ``arguments`` buffer and byte offset of each address.
        ``slow_run(kernel, *tensors, *sizes)`` does a call, and adds to the kernel what it did not know; so does
        ``slow_fused(kernel, *inputs, *sizes)``, which makes the outputs.
        """
        if sum(counts) > _MAX_ARGUMENTS or len(arguments) > _MAX_ARGUMENTS:
            return None
        reused = tuple(reuse.get(number, -1) for number in range(counts[1]))
        calls = (self.allocate, self.stream, slow_run, slow_fused)
        return self.module.Kernel(
            self.driver, data_ptr_address(), (*counts, self.check_device), tuple(arguments), reused, calls
        )

    def address_reader(self, positions: Sequence[int], others: Sequence[torch.Tensor]) -> Callable[[Any], bytes]:
        """``read(args)``: where the tensors at ``positions`` of a tuple lie, and then ``others``."""
        read, data_ptr, chosen, more = self.module.addresses, data_ptr_address(), tuple(positions), tuple(others)
        return lambda args: read(data_ptr, args, chosen, more)


def find_launcher() -> Launcher | None:
    """The launcher of this process, built on first use; None where it cannot be had."""
    return _search()[0]


@lru_cache(maxsize=1)
def prepare_first_launch() -> None:
    """Begin, on threads, what the first launch of a process waits for: C compilers, and a hash of Triton's files."""
    with suppress(ImportError):
        importlib.import_module("triton.compiler")  # threads may find half of modules that import each other

    def begin(step: Callable[[], object]) -> None:
        with suppress(Exception):  # it is raised again where the result is needed
            step()

    for step in (find_launcher, _triton_driver, warm_up):
        threading.Thread(target=begin, args=(step,), daemon=True).start()


def _triton_driver() -> object:
    from triton.runtime import driver

    return driver.active.get_current_target


def launcher_problem() -> str | None:
    """Why calls of GPU kernels go through Triton's launcher in this process, None when they do not."""
    return _search()[1]


@lru_cache(maxsize=1)
def _search() -> tuple[Launcher | None, str | None]:
    internals: Any = torch._C
    try:
        return Launcher(
            load_extension("gpu_launcher.cpp"), cuda_driver(), internals._dynamo.guards._empty_strided_cuda,
            internals._cuda_getCurrentRawStream, torch.cuda.device_count() > 1,
        ), None
    except (BuildError, AttributeError) as error:  # AttributeError: PyTorch names its internals otherwise
        problem = str(error)  # a logged error would keep its frames, and their kernels
        logger.info("GPU kernels go through Triton's launcher, some microseconds slower a call: %s", problem)
        return None, problem


def cuda_driver() -> Driver:
    """The driver of this machine; :class:`BuildError` where there is none, or it lacks a function."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return (address(library.cuLaunchKernel), address(library.cuCtxGetCurrent), address(library.cuGetErrorString),
                address(library.cuLaunchKernelEx))
    except (OSError, AttributeError) as error:
        raise BuildError(f"the CUDA driver cannot be used: {error}") from error


def only_by_triton(compiled: Any) -> str | None:
    """What a Triton ``CompiledKernel`` asks for that a direct launch has not; None for nothing."""
    metadata = compiled.metadata
    if getattr(metadata, "num_ctas", 1) != 1:
        return "it is launched in clusters"
    if getattr(metadata, "launch_cooperative_grid", False):
        return "it is compiled with launch_cooperative_grid"
    scratch = (name for name in ("global_scratch_size", "profile_scratch_size") if getattr(metadata, name, 0))
    return next((f"it uses scratch memory ({name})" for name in scratch), None)


def entry_of(compiled: Any, parameter_bits: Sequence[int]) -> DriverEntry:
    """How to launch a Triton ``CompiledKernel`` on the current device, with parameters of these widths in order."""
    metadata = compiled.metadata
    if (reason := only_by_triton(compiled)) is not None:
        raise BuildError(reason)
    found = ptx_parameter_bits(compiled.asm["ptx"])
    # Triton appends addresses of scratch memory that may be null.
    count = len(parameter_bits)
    if found[:count] != tuple(parameter_bits) or found[count:] not in ((), (64,), (64, 64)):
        raise BuildError(f"its parameters have {found} bits, expected {tuple(parameter_bits)}")
    overlapped = bool(getattr(metadata, "launch_pdl", False))
    return DriverEntry(load_function(compiled), int(metadata.num_warps) * WARP, int(metadata.shared), overlapped)


def load_function(compiled: Any) -> int:
    """Load a kernel on the current device, unless it is; its handle."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    if hasattr(nvidia, "make_launcher") and compiled.function is None:
        # Up to 3.6 Triton would first have a C compiler make what launches it, for each signature, in longer than the
        # kernel took. Should it have to launch it after all, it loads the kernel again.
        active = driver.active
        loaded = active.utils.load_binary(
            compiled.name, compiled.kernel, compiled.metadata.shared, active.get_current_device())
        compiled.function = loaded[1]
    elif compiled.function is None:
        _ = compiled.run
    return int(compiled.function)


def ptx_parameter_bits(ptx: str) -> tuple[int, ...]:
    """Width of each parameter of the kernel in PTX text."""
    match = re.search(r"\.entry\s+[\w$]+\s*\(([^)]*)\)", ptx)
    return tuple(int(bits) for bits in re.findall(r"\.param\s+\.\w(\d+)", match[1])) if match else ()
