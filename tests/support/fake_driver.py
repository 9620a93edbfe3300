"""A fake driver that records what cuLaunchKernel would get, and kernels for it; tensors are on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compilers import find_compiler

from fuseplan.kernels.gpu import direct as gpu_direct
from fuseplan.kernels.gpu.direct import Launcher
from fuseplan.kernels.gpu.launch import Geometry, GpuKernel, Loader, Variant
from fuseplan.kernels.ir.backend import Resources

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

_HANDLE = ctypes.c_void_p
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, _HANDLE, *[ctypes.c_uint] * 7, _HANDLE, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
_CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute`` of cuda.h."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", _HANDLE),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_LAUNCH_CONFIG = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Config), _HANDLE, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
_TEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))


def ptx(bits: list[int]) -> str:
    rows = ",\n".join(f"\t.param .u{width} fused_param_{n}" for n, width in enumerate(bits))
    return f".visible .entry fused(\n{rows}\n)\n.reqntid 128\n{{\n}}"


def compiled_kernel(bits: list[int], run: Callable[..., None], function: int = 1, **changes: Any) -> Any:
    """What :func:`entry_of` and Triton's launcher read of a ``CompiledKernel``."""
    facts = {"num_warps": 4, "shared": 77, "num_ctas": 1, "launch_pdl": False, "global_scratch_size": 0, **changes}
    return SimpleNamespace(
        run=run, function=function, packed_metadata=(), asm={"ptx": ptx(bits)}, metadata=SimpleNamespace(**facts)
    )


class Unloaded:
    """A ``CompiledKernel`` as Triton makes it: the function has no handle before the launcher is asked for."""

    def __init__(self, compiled: Any) -> None:
        self._compiled, self.function = compiled, None

    def __getattr__(self, name: str) -> Any:
        if name == "run":
            self.function = self._compiled.function
        return getattr(self._compiled, name)


#: Handles of the fake functions, by index width.
FUNCTIONS = {False: 1000, True: 2**63 + 1000}


@dataclass
class Machine:
    """One fake GPU and one kernel for it. CPU tensors (device -1) stand for tensors on it.

    Attributes:
        addresses, sizes: How many parameters of the kernel are addresses and dynamic sizes.
        context: Which driver context is current (0: none).
        error: What the driver answers to a launch.
        direct: Launches through the driver: (function, grid, block, shared, stream, parameters).
        attributes: Of each launch with a configuration: (number, value).
        compiled: What it was compiled for, in order.
        slow: Launches through Triton's launcher: (variant, programs, arguments).
    """

    addresses: int
    sizes: int = 0
    context: int = 1
    error: int = 0
    stream: int = 7
    check_device: bool = False
    direct: list[tuple[Any, ...]] = field(default_factory=list)
    slow: list[tuple[Any, ...]] = field(default_factory=list)
    compiled: list[Variant] = field(default_factory=list)
    attributes: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._functions = (
            _LAUNCH(self._launch),
            _CONTEXT(self._current),
            _TEXT(self._text),
            _LAUNCH_CONFIG(self._launch_config),
        )
        self.driver = tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions)

    def bits(self, wide: bool) -> list[int]:
        return [64] * self.addresses + [64 if wide else 32] * self.sizes + [64, 64]

    def _launch(self, function: int, *rest: Any) -> int:
        grid, block, shared, stream, parameters = rest[:3], rest[3:6], rest[6], rest[7], rest[8]
        kinds = {32: ctypes.c_int32, 64: ctypes.c_int64}
        values = tuple(
            ctypes.cast(parameters[n], ctypes.POINTER(kinds[width]))[0]
            for n, width in enumerate(self.bits(function == FUNCTIONS[True]))
        )
        self.direct.append((function, grid, block, shared, stream, values))
        return self.error

    def _launch_config(self, config: Any, function: int, parameters: Any, extra: Any) -> int:
        one = config[0]
        self.attributes.append([(one.attributes[n].id, one.attributes[n].value) for n in range(one.count)])
        return self._launch(function, *one.grid, *one.block, one.shared, one.stream, parameters, extra)

    def _current(self, context: Any) -> int:
        context[0] = self.context
        return 0

    def _text(self, error: int, text: Any) -> int:
        text[0] = b"an illegal memory access was encountered"
        return 0

    def launcher(self, allocate: Callable[..., torch.Tensor] | None = None) -> Launcher:
        make = allocate or torch._C._dynamo.guards._empty_strided_cpu
        module = gpu_direct.load_extension("gpu_launcher.cpp")
        return Launcher(module, self.driver, make, self._ask_stream, self.check_device)

    def _ask_stream(self, device: int) -> int:
        assert device == -1
        return self.stream

    def kernel(
        self,
        arguments: tuple[tuple[int | None, int], ...],
        buffers: int,
        geometry: Callable[[Any], Geometry] = lambda _: Geometry(5, False),
        allocate: Callable[..., torch.Tensor] | None = None,
        **changes: Any,
    ) -> GpuKernel:
        def compile_variant(variant: Variant) -> Any:
            self.compiled.append(variant)

            def run(*args: Any) -> None:
                self.slow.append((variant, args[0], args[9:]))

            return Unloaded(compiled_kernel(self.bits(variant.wide), run, FUNCTIONS[variant.wide], **changes))

        symbols = tuple("nmk"[: self.sizes])
        loader = Loader(compile_variant, geometry, symbols, arguments, buffers)
        return GpuKernel(loader, Resources(), self.launcher(allocate))


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors (device -1) pass for tensors of the current device, whose stream for Triton is 3."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=3))


def aligned(numel: int, shift: int = 0) -> torch.Tensor:
    """fp32 elements that start ``shift`` elements behind a multiple of 16 bytes."""
    storage = torch.zeros(numel + 8)
    base = next(offset for offset in range(4) if storage[offset:].data_ptr() % 16 == 0)
    return storage[base + shift : base + shift + numel]
