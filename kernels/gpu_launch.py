"""Launching compiled Triton kernels with little work per call, on whatever device and stream the caller is on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fuseplan.kernels.backend import CompiledKernel, Resources


@dataclass(frozen=True)
class Variant:
    """Assumptions a binary is compiled under.

    Attributes:
        wide: Index arithmetic in 64 bits.
        aligned: Every buffer starts at a multiple of 16 bytes.
    """

    wide: bool = False
    aligned: bool = True


@dataclass(frozen=True)
class Geometry:
    """What a launch needs for one set of dynamic sizes: the number of programs, and whether 64-bit indices."""

    programs: int
    wide: bool


class GpuKernel(CompiledKernel):
    """A Triton kernel with all configuration folded: its arguments are addresses and the dynamic sizes.

    Binaries are compiled for a variant when a call first needs it, and kept per device. Capturable in a CUDA graph
    after one warm-up call.

    Args:
        compile_variant: Compiles a variant to Triton's ``CompiledKernel``.
        geometry: Programs and index width for given dynamic sizes.
        symbols: Names of the dynamic sizes.
        arguments: For each argument of the kernel before the dynamic sizes, the buffer and the bytes to add to its
            address; or None and the value of a compile-time argument (launchers expect those in their places).
        num_buffers: Number of tensors in a call.
        resources: Facts of the default variant.
    """

    def __init__(
        self,
        compile_variant: Callable[[Variant], Any],
        geometry: Callable[[Mapping[str, int]], Geometry],
        symbols: tuple[str, ...],
        arguments: tuple[tuple[int | None, int], ...],
        num_buffers: int,
        resources: Resources,
    ) -> None:
        self.resources = resources
        self._compile_variant = compile_variant
        self._geometry = geometry
        self._symbols = symbols
        self._arguments = None if arguments == tuple((n, 0) for n in range(num_buffers)) else arguments
        self._num_buffers = num_buffers
        self._geometries: dict[tuple[int, ...], Geometry] = {}
        self._launchers: dict[tuple[int, bool, bool], Callable[..., None]] = {}

    def __call__(self, *args: Any) -> None:
        tensors, sizes = args[: self._num_buffers], args[self._num_buffers :]
        geometry = self._geometries.get(sizes)
        if geometry is None:
            geometry = self._geometries[sizes] = self._geometry(dict(zip(self._symbols, sizes, strict=True)))
        if geometry.programs == 0:
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        if self._arguments is not None:
            addresses = [rest if buffer is None else addresses[buffer] + rest for buffer, rest in self._arguments]
        device = tensors[0].get_device()
        key = (device, geometry.wide, bits % 16 == 0)
        launch = self._launchers.get(key)
        if launch is None:
            launch = self._launchers[key] = self._load(*key)
        if device == torch.cuda.current_device():
            launch(geometry.programs, _raw_stream(device), *addresses, *sizes)
        else:
            with torch.cuda.device(device):
                launch(geometry.programs, _raw_stream(device), *addresses, *sizes)

    def _load(self, device: int, wide: bool, aligned: bool) -> Callable[..., None]:
        with torch.cuda.device(device):
            return direct_launcher(self._compile_variant(Variant(wide, aligned)))


def _raw_stream(device: int) -> int:
    """Handle of the current stream, without making a ``torch.cuda.Stream`` where PyTorch offers that."""
    query = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(query(device) if query else torch.cuda.current_stream(device).cuda_stream)


def direct_launcher(compiled: Any) -> Callable[..., None]:
    """``launch(programs, stream, *arguments)`` for a Triton ``CompiledKernel``, loaded on the current device.

    It calls the compiled launcher with addresses as integers, which skips Triton's argument inspection (and a driver
    query per pointer).
    """
    run = compiled.run
    function, metadata = compiled.function, compiled.packed_metadata

    def launch(programs: int, stream: int, *arguments: int) -> None:
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


def interpreter_is_on() -> bool:
    """True when Triton was imported with its interpreter on: its functions then run on CPU tensors, in NumPy."""
    import triton

    return bool(triton.knobs.runtime.interpret)


class InterpretedKernel(CompiledKernel):
    """A generated kernel under Triton's interpreter, for machines without a GPU: right, and very slow.

    Args:
        function: The kernel, an ``InterpretedFunction``.
        programs: Number of programs for given dynamic sizes.
        symbols: Names of the dynamic sizes.
        bind: Turns the buffers of a call into the kernel's arguments before the dynamic sizes.
        num_buffers: Number of tensors in a call.
    """

    def __init__(
        self,
        function: Any,
        programs: Callable[[Mapping[str, int]], int],
        symbols: tuple[str, ...],
        bind: Callable[[tuple[torch.Tensor, ...]], tuple[Any, ...]],
        num_buffers: int,
    ) -> None:
        self.resources = Resources()
        self._function, self._programs, self._symbols = function, programs, symbols
        self._bind, self._num_buffers = bind, num_buffers

    def __call__(self, *args: Any) -> None:
        tensors, sizes = args[: self._num_buffers], args[self._num_buffers :]
        count = self._programs(dict(zip(self._symbols, sizes, strict=True)))
        if count:
            self._function[(count,)](*self._bind(tensors), *sizes)
