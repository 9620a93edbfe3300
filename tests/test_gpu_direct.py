"""Direct launches against a fake driver, which records what cuLaunchKernel would get; tensors are on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ir_samples as samples
import pytest
import torch

from fuseplan.kernels import extension, gpu_direct, gpu_launch
from fuseplan.kernels.backend import SM90, BuildError, Resources
from fuseplan.kernels.cpp_build import find_compiler
from fuseplan.kernels.gpu_direct import Driver, Entry, Launcher, Native, entry_of, ptx_parameter_bits
from fuseplan.kernels.gpu_launch import Geometry, GpuKernel, Variant
from fuseplan.kernels.ninetoothed_backend import NinetoothedBackend
from fuseplan.kernels.triton_backend import TritonBackend

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
both_ways = pytest.mark.parametrize("native", [False, True], ids=["python", "native"])

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
_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
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
        native: Whether streams and outputs come without Python.
        attributes: Of each launch with a configuration: (number, value).
        slow: Launches through Triton's launcher: (variant, programs, arguments).
    """

    addresses: int
    sizes: int = 0
    context: int = 1
    error: int = 0
    stream: int = 7
    check_device: bool = False
    native: bool = False
    stream_error: int = 0
    direct: list[tuple[Any, ...]] = field(default_factory=list)
    slow: list[tuple[Any, ...]] = field(default_factory=list)
    attributes: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._functions = (
            _LAUNCH(self._launch),
            _CONTEXT(self._current),
            _TEXT(self._text),
            _LAUNCH_CONFIG(self._launch_config),
            _STREAM(self._stream),
        )
        *driver, stream = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions)
        self.driver, self._stream_address = Driver(*driver), stream

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

    def _stream(self, device: int, handle: Any) -> int:
        assert device == -1
        handle[0] = self.stream
        return self.stream_error

    def _text(self, error: int, text: Any) -> int:
        text[0] = b"an illegal memory access was encountered"
        return 0

    def launcher(self, allocate: Callable[..., torch.Tensor] | None = None) -> Launcher:
        make = allocate or torch._C._dynamo.guards._empty_strided_cpu
        native = Native()
        if self.native:
            native = dataclasses.replace(gpu_direct.find_native("cpu"), stream=self._stream_address)
            assert native.allocate and native.prepare is not None
        return Launcher(gpu_direct.load_module(), self.driver, make, self._ask_stream, self.check_device, native)

    def _ask_stream(self, device: int) -> int:
        assert not self.native or self.stream_error
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
            def run(*args: Any) -> None:
                self.slow.append((variant, args[0], args[9:]))

            return compiled_kernel(self.bits(variant.wide), run, FUNCTIONS[variant.wide], **changes)

        symbols = tuple("nmk"[: self.sizes])
        return GpuKernel(compile_variant, geometry, symbols, arguments, buffers, Resources(), self.launcher(allocate))


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(gpu_launch, "_raw_stream", lambda _: 3)


def aligned(numel: int, shift: int = 0) -> torch.Tensor:
    """fp32 elements that start ``shift`` elements behind a multiple of 16 bytes."""
    storage = torch.zeros(numel + 8)
    base = next(offset for offset in range(4) if storage[offset:].data_ptr() % 16 == 0)
    return storage[base + shift : base + shift + numel]


BINARY = ((5, 1, 1), (128, 1, 1), 77, 7)


@needs_compiler
def test_the_first_call_goes_to_triton_and_every_other_to_the_driver() -> None:
    machine = Machine(addresses=3)
    kernel = machine.kernel(((0, 0), (None, 128), (0, 64), (1, 0)), 2)
    x, y = aligned(64), aligned(64)
    for _ in range(3):
        kernel(x, y)
    passed = (x.data_ptr(), 128, x.data_ptr() + 64, y.data_ptr())
    assert machine.slow == [(Variant(), 5, passed)]
    # Constants are part of the binary; two null addresses of scratch memory follow.
    launch = (1000, (5, 1, 1), (128, 1, 1), 77, 7, (passed[0], passed[2], passed[3], 0, 0))
    assert machine.direct == [launch, launch]


@needs_compiler
@both_ways
def test_the_current_stream_is_asked_in_every_call(native: bool) -> None:
    machine = Machine(addresses=1, native=native)
    kernel = machine.kernel(((0, 0),), 1)
    for stream in (0, 5, 0, 2**63 + 5):
        machine.stream = stream
        kernel(aligned(4))
    assert [one[4] for one in machine.direct] == [5, None, 2**63 + 5]
    machine.stream_error, machine.stream = 1, 6  # then Python is asked
    kernel(aligned(4))
    assert machine.direct[-1][4] == 6


@needs_compiler
def test_sizes_choose_the_grid() -> None:
    machine = Machine(addresses=1, sizes=2)
    kernel = machine.kernel(((0, 0),), 1, lambda sizes: Geometry(sizes["n"] // 2, False))
    x = aligned(4)
    for n in (8, 8, 6, 8, 6, 1, 1):  # the last has no programs: it is never launched
        kernel(x, n, -n)
    assert [one[1] for one in machine.slow] == [4, 3]
    assert [(one[1][0], one[5][1:]) for one in machine.direct] == [
        (4, (8, -8, 0, 0)), (4, (8, -8, 0, 0)), (3, (6, -6, 0, 0))
    ]


@needs_compiler
def test_sizes_choose_the_index_width() -> None:
    machine = Machine(addresses=1, sizes=1)
    kernel = machine.kernel(((0, 0),), 1, lambda sizes: Geometry(1, sizes["n"] >= 2**31))
    x, large = aligned(4), 2**40 + 3
    for n in (7, large, 7, large):
        kernel(x, n)
    assert [one[0] for one in machine.slow] == [Variant(wide=False), Variant(wide=True)]
    assert [(one[0], one[5][1]) for one in machine.direct] == [(FUNCTIONS[False], 7), (FUNCTIONS[True], large)]


@needs_compiler
def test_more_sizes_than_the_table_holds_still_run() -> None:
    machine = Machine(addresses=1, sizes=1)
    kernel = machine.kernel(((0, 0),), 1, lambda sizes: Geometry(sizes["n"], False))
    x = aligned(4)
    for n in [*range(1, 151), *range(1, 151)]:
        kernel(x, n)
        kernel(x, n)
    programs = [one[1] for one in machine.slow] + [one[1][0] for one in machine.direct]
    assert sorted(programs) == sorted([*range(1, 151)] * 4)
    assert all(one[1][0] == one[5][1] for one in machine.direct)
    assert len(machine.direct) >= 300  # at least the second call in a row is direct


@needs_compiler
def test_alignment_of_any_buffer_chooses_the_binary() -> None:
    machine = Machine(addresses=2)
    kernel = machine.kernel(((0, 0), (1, 0)), 2)
    even, odd = aligned(8), aligned(8, shift=1)
    for args in ((even, even), (even, odd), (odd, even), (even, even)):
        kernel(*args)
    assert [one[0] for one in machine.slow] == [Variant(aligned=True), Variant(aligned=False)]
    assert [one[5][:2] for one in machine.direct] == [
        (odd.data_ptr(), even.data_ptr()), (even.data_ptr(), even.data_ptr())
    ]


@needs_compiler
def test_another_context_gets_a_binary_of_its_own() -> None:
    machine = Machine(addresses=1)
    kernel = machine.kernel(((0, 0),), 1)
    for context in (1, 1, 2, 2, 1, 0, 0):  # 0: a thread that has none yet
        machine.context = context
        if context:
            kernel(aligned(4))
        else:
            with pytest.raises(RuntimeError, match="no CUDA context is current"):
                kernel(aligned(4))
    assert len(machine.direct) == 3


@needs_compiler
def test_tensors_on_another_device_take_the_slow_path() -> None:
    machine = Machine(addresses=1, check_device=True)
    kernel = machine.kernel(((0, 0),), 1)

    class Elsewhere(torch.Tensor):
        def get_device(self) -> int:
            return 5

    here, there = aligned(4), aligned(4).as_subclass(Elsewhere)
    for tensor in (here, here, there, there, here):
        kernel(tensor)
    assert len(machine.direct) == 2 and len(machine.slow) == 3


@needs_compiler
def test_a_refused_launch_says_why() -> None:
    machine = Machine(addresses=1)
    kernel = machine.kernel(((0, 0),), 1)
    kernel(aligned(4))
    machine.error = 700
    message = r"CUDA error 700 \(an illegal memory access was encountered\) when launching 5 programs of 128 threads"
    with pytest.raises(RuntimeError, match=message):
        kernel(aligned(4))


@needs_compiler
def test_kernels_that_wait_for_the_one_in_front_are_launched_overlapped() -> None:
    machine = Machine(addresses=2, sizes=1)
    kernel = machine.kernel(((0, 0), (1, 0)), 2, launch_pdl=True)
    x, y = aligned(4), aligned(4)
    for n in (5, 5, 5):
        kernel(x, y, n)
    launch = (1000, (5, 1, 1), (128, 1, 1), 77, 7)
    addresses = (x.data_ptr(), y.data_ptr())
    assert len(machine.slow) == 1
    assert machine.direct == [(*launch, (*addresses, 5, 0, 0))] * 2
    assert machine.attributes == [[(6, 1)]] * 2  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    machine.error = 9
    with pytest.raises(RuntimeError, match="CUDA error 9"):
        kernel(x, y, 5)


@needs_compiler
def test_other_kernels_are_not_launched_overlapped() -> None:
    machine = Machine(addresses=1)
    kernel = machine.kernel(((0, 0),), 1)
    for _ in range(3):
        kernel(aligned(4))
    assert len(machine.direct) == 2 and machine.attributes == []


@needs_compiler
@both_ways
@pytest.mark.parametrize("count", [1, 2])
def test_fused_allocates_what_the_layout_says(count: int, native: bool) -> None:
    machine = Machine(addresses=1 + count, sizes=1, native=native)
    kernel = machine.kernel(tuple((n, 0) for n in range(1 + count)), 1 + count)
    asked: list[tuple[int, ...]] = []

    def layout(sizes: tuple[int, ...]) -> tuple[gpu_direct.Layout, ...]:
        asked.append(sizes)
        return tuple(((sizes[0], 3), (1, sizes[0] + n), torch.bfloat16) for n in range(count))

    call, x = kernel.fused(1, layout), aligned(4)
    for n in (4, 4, 9, 4):
        made = call(x, n)
        made = (made,) if count == 1 else made
        assert isinstance(made, tuple) and len(made) == count
        assert [(tuple(t.shape), t.stride(), t.dtype) for t in made] == list(layout((n,)))
    direct = [one[5] for one in machine.direct]
    assert len(machine.slow) == 2 and [values[1 + count] for values in direct] == [4, 4]
    assert direct[-1][: 1 + count] == tuple(t.data_ptr() for t in (x, *made))


@needs_compiler
@both_ways
@pytest.mark.parametrize("reuse", [{0: 1}, {1: 0}, {2: 2, 0: 0}, {0: 0, 1: 2, 2: 1}], ids=str)
def test_fused_returns_the_inputs_whose_place_outputs_take(reuse: dict[int, int], native: bool) -> None:
    machine = Machine(addresses=6, sizes=1, native=native)
    kernel = machine.kernel(tuple((n, 0) for n in range(6)), 6)
    rest = [number for number in range(3) if number not in reuse]
    call = kernel.fused(3, lambda sizes: tuple(((*sizes, 1 + n), (1, 1), torch.int16) for n in rest), reuse)
    inputs = [aligned(4), aligned(8), aligned(12)]
    held = [sys.getrefcount(one) for one in inputs]
    for _ in range(3):
        made = call(*inputs, 5)
        assert all(made[number] is inputs[place] for number, place in reuse.items())
        assert [tuple(made[number].shape) for number in rest] == [(5, 1 + number) for number in rest]
        passed = tuple(one.data_ptr() for one in (*inputs, *made))
        assert (machine.direct[-1][5] if machine.direct else machine.slow[-1][2])[:6] == passed
        del made
    assert len(machine.slow) == 1 and len(machine.direct) == 2
    assert [sys.getrefcount(one) for one in inputs] == held
    machine.error = 1
    with pytest.raises(RuntimeError):
        call(*inputs, 5)
    assert [sys.getrefcount(one) for one in inputs] == held


@needs_compiler
def test_places_that_are_none_are_errors() -> None:
    launcher = Machine(addresses=2).launcher()
    for reuse in ({0: 1}, {0: -2}):
        with pytest.raises(ValueError, match="an output takes the place of an input that the kernel does not have"):
            launcher.bind((1, 1, 0), [(0, 0), (1, 0)], print, print, reuse)


@needs_compiler
@both_ways
def test_fused_with_a_new_alignment_keeps_its_outputs(native: bool) -> None:
    machine = Machine(addresses=2, native=native)
    call = machine.kernel(((0, 0), (1, 0)), 2).fused(1, lambda _: (((4,), (1,), torch.float32),))
    even, odd = aligned(8), aligned(8, shift=1)
    results = [call(x) for x in (even, odd, odd)]
    assert machine.slow[1][2] == (odd.data_ptr(), results[1].data_ptr())
    assert machine.direct[0][5][:2] == (odd.data_ptr(), results[2].data_ptr())
    assert len(machine.slow) == 2 and len(machine.direct) == 1


@needs_compiler
@both_ways
def test_empty_outputs_are_made_and_nothing_is_launched(native: bool) -> None:
    machine = Machine(addresses=2, native=native)
    kernel = machine.kernel(((0, 0), (1, 0)), 2, lambda _: Geometry(0, False))
    call = kernel.fused(1, lambda _: (((0, 4), (4, 1), torch.float32),))
    for _ in range(3):
        assert call(torch.zeros(0, 4)).shape == (0, 4)
    assert machine.slow == machine.direct == []


@needs_compiler
def test_mistakes_are_errors_and_lose_no_memory() -> None:
    def allocate(shape: Any, strides: Any, dtype: Any) -> torch.Tensor:
        if fail:
            raise MemoryError("out of memory")
        return torch.empty_strided(shape, strides, dtype=dtype)

    fail = False
    machine = Machine(addresses=3)
    kernel = machine.kernel(((0, 0), (1, 0), (2, 0)), 3, allocate=allocate)
    one: gpu_direct.Layout = ((4,), (1,), torch.float32)
    call, x = kernel.fused(1, lambda _: (one, one)), aligned(4)
    call(x)
    held = sys.getrefcount(x)
    for _ in range(50):
        fail = True
        with pytest.raises(MemoryError, match="out of memory"):
            call(x)
        fail, machine.error = False, 1
        with pytest.raises(RuntimeError, match="CUDA error 1"):
            call(x)
        machine.error = 0
        with pytest.raises(TypeError, match="takes 1 tensors and 0 sizes, got 2 arguments"):
            call(x, x)
        with pytest.raises((TypeError, AttributeError)):
            call("a string")
    assert sys.getrefcount(x) == held


@needs_compiler
@both_ways
def test_a_dropped_kernel_is_freed_with_its_binaries(native: bool) -> None:
    machine = Machine(addresses=1, native=native)
    kernel = machine.kernel(((0, 0),), 2)
    call = kernel.fused(1, lambda _: (((4,), (1,), torch.float32),))
    kernel(aligned(4), aligned(4))
    call(aligned(4))
    held = [weakref.ref(kernel._loader), weakref.ref(kernel)]
    gc.disable()
    try:
        del kernel, call
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


@needs_compiler
@both_ways
def test_threads_share_a_kernel(native: bool) -> None:
    machine = Machine(addresses=2, sizes=1, native=native)
    kernel = machine.kernel(((0, 0), (1, 0)), 2, lambda sizes: Geometry(sizes["n"], False))
    call = kernel.fused(1, lambda sizes: (((sizes[0],), (1,), torch.float32),))
    x = aligned(4)

    def work(start: int) -> None:
        for n in range(start, start + 100):
            assert call(x, n).shape == (n,)

    threads = [threading.Thread(target=work, args=(start,)) for start in (1, 40, 80)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(machine.direct) + len(machine.slow) == 300
    assert all(one[1][0] == one[5][2] for one in machine.direct)


# -- outputs made without Python ------------------------------------------------------------------------------


def _native_kernel(machine: Machine, *layouts: gpu_direct.Layout, allocate: Any = None) -> Callable[..., Any]:
    """A call whose outputs have the layouts, known to its direct path already."""
    count = len(layouts)
    kernel = machine.kernel(tuple((n, 0) for n in range(1 + count)), 1 + count, allocate=allocate)
    call = kernel.fused(1, lambda _: layouts)
    call(aligned(4))
    return call


def _refuse(*_: Any) -> Any:
    raise MemoryError("asked in Python")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), ()), ((1,), (1,)), ((3, 127), (127, 1)), ((4097,), (2,)), ((2, 3, 5), (1, 2, 6)), ((0, 4), (4, 1)),
     ((3, 4), (0, 1))],
)  # fmt: skip
def test_native_outputs_are_what_empty_strided_makes(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> None:
    machine = Machine(addresses=2, native=True)
    call = _native_kernel(machine, (shape, strides, dtype), allocate=_refuse)
    made, expected = call(aligned(4)), torch.empty_strided(shape, strides, dtype=dtype)
    assert type(made) is torch.Tensor and not made.requires_grad and made.device == expected.device
    assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), dtype)
    assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    assert made.is_contiguous() == expected.is_contiguous()
    made.zero_()
    assert machine.direct[-1][5][1] == made.data_ptr()
    with torch.inference_mode():
        assert call(aligned(4)).is_inference()


@needs_compiler
def test_native_outputs_are_freed() -> None:
    layout: gpu_direct.Layout = ((2**18,), (1,), torch.float32)
    call, x = _native_kernel(Machine(addresses=3, native=True), layout, layout), aligned(4)
    held = sys.getrefcount(x)
    for _ in range(3):
        first, second = call(x)
        gone = [weakref.ref(first), weakref.ref(second)]
        del first, second
        assert [one() for one in gone] == [None, None]
    assert sys.getrefcount(x) == held


@needs_compiler
def test_what_native_allocation_cannot_make_is_asked_in_python() -> None:
    asked: list[tuple[Any, ...]] = []

    def allocate(*layout: Any) -> torch.Tensor:
        asked.append(layout)
        if len(asked) > 1:
            raise MemoryError("asked in Python")
        return torch.empty(4)

    machine = Machine(addresses=3, native=True)
    small: gpu_direct.Layout = ((4,), (1,), torch.float32)
    vast: gpu_direct.Layout = ((2**60,), (1,), torch.float32)
    kernel = machine.kernel(((0, 0), (1, 0), (2, 0)), 3, allocate=allocate)
    layouts = [(small, small), (small, vast)]
    call, x = kernel.fused(1, lambda _: layouts.pop(0)), aligned(4)
    call(x)  # through Triton's launcher, with outputs that can be made
    held = sys.getrefcount(x)
    assert [one.numel() for one in call(x)] == [4, 4] and asked == [vast]
    for _ in range(20):
        with pytest.raises(MemoryError, match="asked in Python"):
            call(x)
    assert sys.getrefcount(x) == held


@needs_compiler
def test_layouts_that_are_none_are_errors() -> None:
    prepare = gpu_direct.find_native("cpu").prepare
    assert prepare is not None
    wrong: Any
    for wrong in ((((4,), (1,), "float32"),), (([4], (1,), torch.float32),), ((("4",), (1,), torch.float32),), None):
        with pytest.raises(TypeError):
            prepare(wrong)
    with pytest.raises(ValueError, match="no allocator for 'tpu'"):
        gpu_direct.load_allocator().prepare("tpu", ())


@needs_compiler
def test_without_pytorch_headers_outputs_are_made_in_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fuseplan")
    monkeypatch.setattr(extension.torch, "__file__", "/nowhere/torch/__init__.py")
    assert gpu_direct.find_native("cpu") == Native()
    assert "PyTorch's headers are missing (/nowhere/torch/include)" in caplog.messages[0]


# -- what cannot be launched directly -----------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    "changes", [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}]
)
def test_special_kernels_stay_with_triton(changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="fuseplan")
    machine = Machine(addresses=1)
    kernel = machine.kernel(((0, 0),), 1, **changes)
    for _ in range(3):
        kernel(aligned(4))
    assert len(machine.slow) == 3 and not machine.direct
    (message,) = caplog.messages  # once, not for every call
    assert message.startswith("a kernel goes through Triton's launcher: it ")


def test_unexpected_parameters_stay_with_triton() -> None:
    def entry(bits: list[int], expected: list[int]) -> Entry:
        return entry_of(compiled_kernel(bits, print), expected)

    assert entry([64, 64, 32, 64, 64], [64, 64, 32]) == Entry(1, 128, 77)
    assert entry([64, 64, 32], [64, 64, 32]) == Entry(1, 128, 77)
    for bits, expected in (([64, 32], [64, 64]), ([64], [64, 64]), ([64, 32], [64]), ([64] * 5, [64, 64]), ([], [64])):
        with pytest.raises(BuildError, match="its parameters have"):
            entry(bits, expected)


def test_without_a_compiler_or_a_driver_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, fresh_search: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fuseplan")
    monkeypatch.setattr(gpu_direct, "find_compiler", lambda: None)
    for _ in range(2):
        assert gpu_direct.find_launcher() is None
        assert gpu_direct.launcher_problem() == "no C++ compiler (c++, g++ or clang++) was found on PATH"
    assert len(caplog.messages) == 1


@needs_compiler
def test_a_launcher_that_does_not_build_is_a_reason(monkeypatch: pytest.MonkeyPatch, fresh_search: None) -> None:
    def refuse(*_: Any) -> Any:
        raise BuildError("cpp: c++ failed: error: no")

    monkeypatch.setattr(gpu_direct, "load_extension", refuse)
    assert gpu_direct.find_launcher() is None
    assert gpu_direct.launcher_problem() == "cpp: c++ failed: error: no"


def test_a_missing_driver_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(BuildError, match=r"driver cannot be used: libcuda\.so\.1"):
        gpu_direct.cuda_driver()


@pytest.fixture
def fresh_search() -> Iterator[None]:
    gpu_direct._search.cache_clear()
    yield
    gpu_direct._search.cache_clear()


# -- what Triton really compiles ----------------------------------------------------------------------------


def test_compiled_kernels_have_the_parameters_that_launches_pass() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("ninetoothed")
    dynamic, static = samples.dynamic_samples()[4].ir, samples.swiglu(3, 20).ir
    triton, ninetoothed = TritonBackend(), NinetoothedBackend()
    for wide in (False, True):
        compiled = triton._compile(dynamic, triton.default_config(dynamic, SM90), SM90, Variant(wide))
        found = ptx_parameter_bits(compiled.asm["ptx"])
        assert found[:3] == (64, 64, 64 if wide else 32) and set(found[3:]) <= {64}
    for backend in (triton, ninetoothed):
        compiled = backend._compile(static, backend.default_config(static, SM90), SM90, Variant())
        compiled.function = 12
        # Without a device the handle is missing, nothing else.
        addresses = len(compiled.src.signature) - list(compiled.src.signature.values()).count("constexpr")
        entry = entry_of(compiled, [64] * addresses)
        assert entry.function == 12 and entry.threads == 32 * compiled.metadata.num_warps


@needs_compiler
def test_addresses_are_read_in_one_call() -> None:
    launcher = Machine(addresses=0).launcher()
    tensors = tuple(aligned(4, shift) for shift in range(5))
    other = torch.empty(0)
    read = launcher.address_reader((4, 0, 2), (other,))
    found = list(memoryview(read((*tensors, "unused"))).cast("N"))
    assert found == [tensors[4].data_ptr(), tensors[0].data_ptr(), tensors[2].data_ptr(), other.data_ptr()]
    moved = (aligned(4), *tensors[1:])
    assert read(tensors) == read(tensors) != read(moved)
    assert launcher.address_reader((), ())(tensors) == b""
    assert list(memoryview(launcher.module.addresses(0, tensors, (1,), ())).cast("N")) == [tensors[1].data_ptr()]


@needs_compiler
def test_addresses_of_what_is_no_tensor_are_an_error() -> None:
    read = Machine(addresses=0).launcher().address_reader((0, 1), ())
    x = aligned(4)
    held = sys.getrefcount(x)
    with pytest.raises((TypeError, AttributeError)):
        read((x, "a string"))
    with pytest.raises(IndexError):
        read((x,))
    with pytest.raises(TypeError, match="takes a number and three tuples"):
        read([x, x])
    assert sys.getrefcount(x) == held
