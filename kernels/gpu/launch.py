"""Launching compiled Triton kernels with little work per call, on whatever device and stream the caller is on."""

from __future__ import annotations

import contextvars
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from fuseplan.kernels.gpu.direct import NOTHING, Entry, Launcher, OutputLayout, entry_of
from fuseplan.kernels.ir.backend import BuildError, CompiledKernel, Resources

logger = logging.getLogger(__name__)


#: Dynamic sizes -> layout of each output.
Layouts: TypeAlias = Callable[[tuple[int, ...]], tuple[OutputLayout, ...]]


@dataclass(frozen=True)
class Variant:
    """Assumptions a binary is compiled under: 64-bit index arithmetic, buffers that start at multiples of 16 bytes."""

    wide: bool = False
    aligned: bool = True


class Geometry(NamedTuple):
    """What a launch needs for one set of dynamic sizes: the number of programs, and whether 64-bit indices."""

    programs: int
    wide: bool


class GpuKernel(CompiledKernel):
    """A Triton kernel with all configuration folded: its arguments are addresses and the dynamic sizes.

    Binaries are compiled for a variant when a call first needs it, and kept per device. A CUDA graph can capture it
    after one warm-up call.

    Args:
        arguments: For each argument before the dynamic sizes: a buffer and the bytes to add to its address, or None and
            the value of a compile-time argument (Triton's launcher expects those in their places).
        resources: Facts of the default variant.
        launcher: Makes calls direct; None to go through Triton's launcher.
    """

    def __init__(
        self, compile_variant: Callable[[Variant], Any], geometry: Callable[[Mapping[str, int]], Geometry],
        symbols: tuple[str, ...], arguments: tuple[tuple[int | None, int], ...], num_buffers: int,
        resources: Resources, launcher: Launcher | None = None
    ) -> None:
        self.resources = resources
        self._loader = _Loader(compile_variant, geometry, symbols, arguments, num_buffers, launcher is not None)
        self._launcher = launcher
        direct = self._bind((num_buffers, 0, len(symbols)), _never)
        self.run: Callable[..., None] = functools.partial(self._loader.run, None) if direct is None else direct.run

    def __call__(self, *args: Any) -> None:
        self.run(*args)

    def fused(self, inputs: int, layout: Layouts, reuse: Mapping[int, int] = NOTHING) -> Callable[..., Any]:
        """``call(*inputs, *sizes)``, which allocates the outputs as ``layout`` says, and returns them.

        ``reuse``: for positions among the outputs, the position of the input that each overwrites.
        """
        loader = self._loader

        def slow(direct: Any, *args: Any) -> Any:
            sizes = args[inputs:]
            result = allocating(functools.partial(loader.run, direct), inputs, layout, reuse)(*args)
            direct.add_grid(sizes, *loader.geometry(sizes), layout(sizes))
            return result

        direct = self._bind((inputs, loader.num_buffers - inputs, len(loader.symbols)), slow, reuse)
        if direct is None:
            return allocating(self.run, inputs, layout, reuse)
        call: Callable[..., Any] = direct.fused
        return call

    def _bind(
        self, counts: tuple[int, int, int], slow_fused: Callable[..., Any], reuse: Mapping[int, int] = NOTHING
    ) -> Any | None:
        """A direct call path, None without a launcher. It knows the loader but not this object: no cycle."""
        if self._launcher is None:
            return None
        addresses = [(buffer, offset) for buffer, offset in self._loader.arguments if buffer is not None]
        return self._launcher.bind(counts, addresses, self._loader.run, slow_fused, reuse)


def _never(*_: Any) -> None:
    raise AssertionError("this call path has no outputs to allocate")


def allocating(
    run: Callable[..., None], inputs: int, layout: Layouts, reuse: Mapping[int, int] = NOTHING
) -> Callable[..., Any]:
    """``call(*inputs, *sizes)`` for a kernel called with every buffer: outputs are made beside the first input."""
    empty = torch.empty_strided

    def call(*args: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        sizes = args[inputs:]
        device = args[0].device if inputs else torch.device("cuda", torch.cuda.current_device())
        made = [empty(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in layout(sizes)]
        for number in sorted(reuse):
            made.insert(number, args[reuse[number]])
        run(*args[:inputs], *made, *sizes)
        return made[0] if len(made) == 1 else tuple(made)

    return call


def fused_call(
    kernel: CompiledKernel, inputs: int, layout: Layouts, reuse: Mapping[int, int]
) -> Callable[..., Any]:
    """:meth:`GpuKernel.fused` of any kernel."""
    if isinstance(kernel, GpuKernel):
        return kernel.fused(inputs, layout, reuse)
    return allocating(kernel, inputs, layout, reuse)


@dataclass(eq=False)
class _Loader:
    """Binaries of one kernel, by device and variant; and calls of them through Triton's launcher.

    What a direct call path does not know yet (a device, sizes, an alignment) comes here, and the path is told.
    """

    compile_variant: Callable[[Variant], Any]
    geometry_of: Callable[[Mapping[str, int]], Geometry]
    symbols: tuple[str, ...]
    arguments: tuple[tuple[int | None, int], ...]
    num_buffers: int
    direct: bool
    _geometries: dict[tuple[int, ...], Geometry] = field(default_factory=dict)
    #: Triton's ``CompiledKernel``, and what a direct call needs (None: impossible).
    _binaries: dict[tuple[int, bool, bool], tuple[Any, Entry | None]] = field(default_factory=dict)

    def geometry(self, sizes: tuple[int, ...]) -> Geometry:
        if sizes not in self._geometries:
            self._geometries[sizes] = self.geometry_of(dict(zip(self.symbols, sizes, strict=True)))
        return self._geometries[sizes]

    def run(self, direct: Any, *args: Any) -> None:
        """A call; ``direct`` is the extension's ``Kernel`` that it came from, or None."""
        tensors, sizes = args[: self.num_buffers], args[self.num_buffers :]
        programs, wide = self.geometry(sizes)
        if direct is not None:
            direct.add_grid(sizes, programs, wide, None)
        if programs == 0:
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        passed = [rest if buffer is None else addresses[buffer] + rest for buffer, rest in self.arguments]
        device = tensors[0].get_device()
        key = (device, wide, all(address % 16 == 0 for address in addresses))
        with torch.cuda.device(device):
            self._launch(key, direct, programs, (*passed, *sizes))

    def _launch(self, key: tuple[int, bool, bool], direct: Any, programs: int, arguments: tuple[int, ...]) -> None:
        if key not in self._binaries:
            compiled = self.compile_variant(Variant(*key[1:]))
            _ = compiled.run  # loads it on the current device
            self._binaries[key] = compiled, self._entry(compiled, key[1]) if self.direct else None
        compiled, entry = self._binaries[key]
        # Triton's compiled launcher takes addresses as integers, and skips the inspection of arguments.
        stream = torch.cuda.current_stream(key[0]).cuda_stream
        given = (compiled.function, compiled.packed_metadata, None, None, None, *arguments)
        run = functools.partial(compiled.run, programs, 1, 1, stream, *given)
        if getattr(compiled.metadata, "global_scratch_size", 0):
            contextvars.copy_context().run(_with_memory, run, key[0])
        else:
            run()
        if direct is not None and entry is not None:
            direct.add_binary(*key, *entry)

    def _entry(self, compiled: Any, wide: bool) -> Entry | None:
        addresses = sum(buffer is not None for buffer, _ in self.arguments)
        try:
            return entry_of(compiled, [64] * addresses + [64 if wide else 32] * len(self.symbols))
        except BuildError as error:
            logger.info("a kernel goes through Triton's launcher: %s", error)
            return None


def _with_memory(run: Callable[[], None], device: int) -> None:
    """Launch a kernel that asks for memory, such as for descriptors.

    To be run in a copy of the context: it sets Triton's allocator there, and the caller's stays what it was.
    """
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))

    triton.set_allocator(allocate)
    run()


def interpreter_is_on() -> bool:
    """True when Triton was imported with its interpreter on: its functions then run on CPU tensors, in NumPy."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@dataclass(eq=False)
class InterpretedKernel(CompiledKernel):
    """A generated kernel under Triton's interpreter, for machines without a GPU: right, and very slow."""

    function: Any
    programs: Callable[[Mapping[str, int]], int]
    symbols: tuple[str, ...]
    arguments: tuple[tuple[int | None, int], ...]
    num_buffers: int
    resources: Resources = field(default_factory=Resources)

    def __call__(self, *args: Any) -> None:
        tensors, sizes = args[: self.num_buffers], args[self.num_buffers :]
        count = self.programs(dict(zip(self.symbols, sizes, strict=True)))
        passed = [rest if buffer is None else _from(tensors[buffer], rest) for buffer, rest in self.arguments]
        if count:
            _assert_when_interpreted()
            self.function[(count,)](*passed, *sizes)


def _assert_when_interpreted() -> None:
    """Have Triton's interpreter check assertions, which it leaves out by default."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, debug=True, sanitize_overflow=False)


def _from(tensor: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """A tensor that begins so many bytes into another."""
    if offset_bytes == 0:
        return tensor
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset_bytes // tensor.element_size())
