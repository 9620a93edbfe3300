"""Launching compiled Triton kernels with little work per call, on whatever device and stream the caller is on."""

from __future__ import annotations

import contextvars
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from fuseplan.kernels.gpu.direct import DriverEntry, Launcher, entry_of, find_launcher
from fuseplan.kernels.ir.backend import NOTHING, BuildError, CompiledKernel, Layouts, Resources, allocating
from fuseplan.kernels.ir.in_place import Reuse

logger = logging.getLogger(__name__)


#: Of each argument before the dynamic sizes: a buffer and the bytes to add to its address, or None and the value of a
#: compile-time argument (Triton's launcher expects those in their places).
Arguments: TypeAlias = tuple[tuple[int | None, Any], ...]


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
    after one warm-up call. Without a ``launcher`` calls go through Triton's. ``resources`` are the default variant's.
    """

    def __init__(self, loader: Loader, resources: Resources, launcher: Launcher | None = None) -> None:
        self.resources, self._loader, self._launcher = resources, loader, launcher
        direct = self._bind(loader.num_buffers, 0, loader.run)
        self.run: Callable[..., None] = functools.partial(loader.run, None) if direct is None else direct.run

    def __call__(self, *args: Any) -> None:
        self.run(*args)

    def fused(self, inputs: int, layouts: Layouts, reuse: Reuse = NOTHING) -> Callable[..., Any]:
        loader = self._loader

        def slow(direct: Any, *args: Any) -> Any:
            sizes = args[inputs:]
            result = allocating(functools.partial(loader.run, direct), inputs, layouts, reuse, "cuda")(*args)
            direct.add_grid(sizes, *loader.geometry(sizes), layouts(sizes))
            return result

        direct = self._bind(inputs, loader.num_buffers - inputs, slow, reuse)
        call: Callable[..., Any] = (
            allocating(self.run, inputs, layouts, reuse, "cuda") if direct is None else direct.fused)
        return call

    def _bind(self, inputs: int, outputs: int, slow_fused: Callable[..., Any], reuse: Reuse = NOTHING) -> Any | None:
        """A direct call path, None without a launcher. It knows the loader but not this object: no cycle."""
        if self._launcher is None:
            return None
        loader = self._loader
        addresses = [(buffer, offset) for buffer, offset in loader.arguments if buffer is not None]
        return self._launcher.bind((inputs, outputs, len(loader.symbols)), addresses, loader.run, slow_fused, reuse)


def _known(direct: Any, key: tuple[int, bool, bool], entry: DriverEntry) -> bool:
    """Tell a direct call path how to launch a kernel in the current context; whether that was new."""
    try:
        return bool(direct.add_binary(*key, *entry))
    except RuntimeError:  # a thread has no context until it first asks the device for anything
        torch.cuda.mem_get_info(key[0])
        return bool(direct.add_binary(*key, *entry))


@dataclass(eq=False)
class Loader:
    """Binaries of one kernel, by device and variant, and calls of them through Triton's launcher.

    A direct call path comes here with what it does not know yet; it is told, and launches. ``binary`` gives Triton's
    ``CompiledKernel`` or, under the interpreter, the function.
    """

    binary: Callable[[Variant], Any]
    #: By the values of ``symbols``.
    geometry: Callable[[tuple[int, ...]], Geometry]
    symbols: tuple[str, ...]
    arguments: Arguments
    num_buffers: int
    #: Triton's ``CompiledKernel``, and what a direct call needs (None: impossible).
    _binaries: dict[tuple[int, bool, bool], tuple[Any, DriverEntry | None]] = field(default_factory=dict)

    def run(self, direct: Any, *args: Any) -> None:
        """A call; ``direct`` is the extension's ``Kernel`` that it came from, or None."""
        tensors, sizes = args[: self.num_buffers], args[self.num_buffers :]
        programs, wide = self.geometry(sizes)
        learns = direct is not None and direct.add_grid(sizes, programs, wide, None)
        if programs == 0:
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        passed = [rest if buffer is None else addresses[buffer] + rest for buffer, rest in self.arguments]
        device = tensors[0].get_device()
        key = (device, wide, all(address % 16 == 0 for address in addresses))
        with torch.cuda.device(device):
            if key not in self._binaries:
                compiled = self.binary(Variant(*key[1:]))
                self._binaries[key] = compiled, None if direct is None else self._entry(compiled, key[1])
            compiled, entry = self._binaries[key]
            if direct is not None and entry is not None:
                learns = _known(direct, key, entry) or learns
            if learns and entry is not None:
                direct.run(*args)
            else:
                self._launch(compiled, key[0], programs, (*passed, *sizes))

    def _launch(self, compiled: Any, device: int, programs: int, arguments: tuple[int, ...]) -> None:
        # Triton's compiled launcher takes addresses as integers, and skips the inspection of arguments.
        launch, stream = compiled.run, torch.cuda.current_stream(device).cuda_stream  # loads it, where that is not done
        given = (compiled.function, compiled.packed_metadata, None, None, None, *arguments)
        run = functools.partial(launch, programs, 1, 1, stream, *given)
        if getattr(compiled.metadata, "global_scratch_size", 0):
            contextvars.copy_context().run(_with_memory, run, device)
        else:
            run()

    def _entry(self, compiled: Any, wide: bool) -> DriverEntry | None:
        addresses = sum(buffer is not None for buffer, _ in self.arguments)
        try:
            return entry_of(compiled, [64] * addresses + [64 if wide else 32] * len(self.symbols))
        except BuildError as error:
            logger.info("a kernel goes through Triton's launcher: %s", error)
            return None


def _with_memory(run: Callable[[], None], device: int) -> None:
    """Launch a kernel that asks for memory, such as for descriptors: in a context whose allocator may be set."""
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))

    triton.set_allocator(allocate)
    run()


def interpreter_is_on() -> bool:
    """True when Triton was imported with its interpreter on: its functions then run on CPU tensors, in NumPy."""
    try:
        import triton
    except ImportError:  # it comes with ``fuseplan[gpu]``
        return False
    return bool(triton.knobs.runtime.interpret)


@dataclass(eq=False)
class InterpretedKernel(CompiledKernel):
    """A generated kernel under Triton's interpreter, for machines without a GPU: right, and very slow."""

    loader: Loader

    def __call__(self, *args: Any) -> None:
        loader = self.loader
        tensors, sizes = args[: loader.num_buffers], args[loader.num_buffers :]
        passed = [rest if buffer is None else _from(tensors[buffer], rest) for buffer, rest in loader.arguments]
        if count := loader.geometry(sizes).programs:
            _assert_when_interpreted()
            loader.binary(Variant())[(count,)](*passed, *sizes)


def loaded_kernel(loader: Loader, resources: Resources) -> CompiledKernel:
    """A kernel as this process runs it: on a GPU, or under Triton's interpreter."""
    return InterpretedKernel(loader) if interpreter_is_on() else GpuKernel(loader, resources, find_launcher())


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


# -- memory of a kernel's own: counters by which its programs find out who is last, and what they hand to that one -----

_internals: Any = torch._C
#: Counters kept ready for streams that record CUDA graphs, where nothing can be zeroed once for all replays.
_SPARE = 4


@dataclass
class Counters:
    """Zeros that each launch leaves as zeros: launches, and replays, that follow one another on a stream share them."""

    count: int
    #: By device number, stream, and whether that records.
    _known: dict[tuple[int, int, bool], torch.Tensor] = field(default_factory=dict)
    _spare: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def of(self, beside: torch.Tensor) -> torch.Tensor:
        """Those for a launch on the current stream of a tensor's device."""
        number, stream, recording = beside.get_device(), 0, False  # -1 on a CPU
        if number >= 0:  # in every call: PyTorch's own wrappers make objects that nobody wants
            stream = _internals._cuda_getCurrentRawStream(number)
            recording = _internals._cuda_isCurrentStreamCapturing()
        key = number, stream, recording
        if key not in self._known:
            device = beside.device
            if not recording:
                self._spare.setdefault(number, [self._zeros(device) for _ in range(_SPARE)])
            elif not self._spare.get(number):
                return self._zeros(device)  # a graph's own: each replay makes them anew
            self._known[key] = self._spare[number].pop() if recording else self._zeros(device)
        return self._known[key]

    def _zeros(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.count, dtype=torch.int32, device=device)


class RepeatedKernel(CompiledKernel):
    """A kernel that is launched several times, and told the number of each launch behind its dynamic sizes."""

    def __init__(self, kernel: CompiledKernel, launches: int) -> None:
        self.kernel, self.launches, self.resources = kernel, launches, kernel.resources

    def __call__(self, *args: Any) -> None:
        for number in range(self.launches):
            self.kernel(*args, number)


class ScratchKernel(CompiledKernel):
    """A kernel that takes, behind its inputs, float32 numbers of its own and counters."""

    def __init__(self, kernel: CompiledKernel, inputs: int, numbers: int, counters: int) -> None:
        self.kernel, self.inputs, self.numbers = kernel, inputs, numbers
        self.resources = kernel.resources
        self._counters = Counters(counters)

    def __call__(self, *args: Any) -> None:
        self._given(self.kernel)(*args)

    def fused(self, inputs: int, layouts: Layouts, reuse: Reuse = NOTHING) -> Callable[..., Any]:
        return self._given(self.kernel.fused(inputs + 2, layouts, reuse))

    def _given(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` without the kernel's memory, which is given to it behind the inputs; it keeps this kernel loaded."""
        inputs, counters = self.inputs, self._counters

        def run(*args: Any) -> Any:
            first = args[0]
            held = torch.empty(self.numbers, dtype=torch.float32, device=first.device)
            return call(*args[:inputs], held, counters.of(first), *args[inputs:])

        return run
