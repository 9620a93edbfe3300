"""Direct launches against a fake driver: which binary is launched, on what stream and grid, with what parameters."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
from fake_driver import FUNCTIONS, Machine, aligned, needs_compiler, pretend_cuda

from fuseplan.kernels.gpu.launch import Geometry, Variant


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)


@needs_compiler
def test_every_call_goes_to_the_driver() -> None:
    machine = Machine(addresses=3)
    kernel = machine.kernel(((0, 0), (None, 128), (0, 64), (1, 0)), 2)
    x, y = aligned(64), aligned(64)
    for _ in range(3):
        kernel(x, y)
    passed = (x.data_ptr(), 128, x.data_ptr() + 64, y.data_ptr())
    # Constants are part of the binary; two null addresses of scratch memory follow.
    launch = (1000, (5, 1, 1), (128, 1, 1), 77, 7, (passed[0], passed[2], passed[3], 0, 0))
    assert machine.direct == [launch] * 3 and not machine.slow


@needs_compiler
def test_the_current_stream_is_asked_in_every_call() -> None:
    machine = Machine(addresses=1)
    kernel = machine.kernel(((0, 0),), 1)
    for stream in (0, 5, 0, 2**63 + 5):
        machine.stream = stream
        kernel(aligned(4))
    assert [one[4] for one in machine.direct] == [None, 5, None, 2**63 + 5]


@needs_compiler
def test_sizes_choose_the_grid() -> None:
    machine = Machine(addresses=1, sizes=2)
    kernel = machine.kernel(((0, 0),), 1, lambda sizes: Geometry(sizes[0] // 2, False))
    x = aligned(4)
    for n in (8, 8, 6, 8, 6, 1, 1):  # the last has no programs: it is never launched
        kernel(x, n, -n)
    assert [(one[1][0], one[5][1:]) for one in machine.direct] == [
        (4, (8, -8, 0, 0)), (4, (8, -8, 0, 0)), (3, (6, -6, 0, 0)), (4, (8, -8, 0, 0)), (3, (6, -6, 0, 0))
    ]


@needs_compiler
def test_sizes_choose_the_index_width() -> None:
    machine = Machine(addresses=1, sizes=1)
    kernel = machine.kernel(((0, 0),), 1, lambda sizes: Geometry(1, sizes[0] >= 2**31))
    x, large = aligned(4), 2**40 + 3
    for n in (7, large, 7, large):
        kernel(x, n)
    assert [(one[0], one[5][1]) for one in machine.direct] == [(FUNCTIONS[False], 7), (FUNCTIONS[True], large)] * 2


@needs_compiler
def test_more_sizes_than_the_table_holds_still_run() -> None:
    machine = Machine(addresses=1, sizes=1)
    kernel = machine.kernel(((0, 0),), 1, lambda sizes: Geometry(sizes[0], False))
    x = aligned(4)
    for n in [*range(1, 151), *range(1, 151)]:
        kernel(x, n)
        kernel(x, n)
    assert [one[1][0] for one in machine.direct] == sorted([*range(1, 151)] * 2) * 2
    assert all(one[1][0] == one[5][1] for one in machine.direct) and not machine.slow


@needs_compiler
def test_alignment_of_any_buffer_chooses_the_binary() -> None:
    machine = Machine(addresses=2)
    kernel = machine.kernel(((0, 0), (1, 0)), 2)
    even, odd = aligned(8), aligned(8, shift=1)
    calls = ((even, even), (even, odd), (odd, even), (even, even))
    for args in calls:
        kernel(*args)
    assert machine.compiled == [Variant(aligned=True), Variant(aligned=False)]
    assert [one[5][:2] for one in machine.direct] == [
        (one.data_ptr(), other.data_ptr()) for one, other in calls
    ]


@needs_compiler
def test_another_context_gets_a_binary_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, asked = Machine(addresses=1), list[int]()

    def ask_device(number: int) -> None:
        asked.append(number)
        machine.context = 3

    monkeypatch.setattr(torch.cuda, "mem_get_info", ask_device)
    kernel = machine.kernel(((0, 0),), 1)
    for context in (1, 1, 2, 2, 1, 0, 3, 0):  # 0: a thread that has none yet
        machine.context = context
        kernel(aligned(4))
    assert len(machine.direct) == 7 and len(machine.slow) == 1 and asked == [-1, -1]


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
    assert len(machine.direct) == 3 and len(machine.slow) == 2


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
    assert not machine.slow
    assert machine.direct == [(*launch, (*addresses, 5, 0, 0))] * 3
    assert machine.attributes == [[(6, 1)]] * 3  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    machine.error = 9
    with pytest.raises(RuntimeError, match="CUDA error 9"):
        kernel(x, y, 5)


@needs_compiler
def test_other_kernels_are_not_launched_overlapped() -> None:
    machine = Machine(addresses=1)
    kernel = machine.kernel(((0, 0),), 1)
    for _ in range(3):
        kernel(aligned(4))
    assert len(machine.direct) == 3 and machine.attributes == []


@needs_compiler
def test_a_dropped_kernel_is_freed_with_its_binaries() -> None:
    machine = Machine(addresses=1)
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
def test_threads_share_a_kernel() -> None:
    machine = Machine(addresses=2, sizes=1)
    kernel = machine.kernel(((0, 0), (1, 0)), 2, lambda sizes: Geometry(sizes[0], False))
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
    # What another thread was just told about is left to Triton's launcher.
    assert len(machine.direct) + len(machine.slow) == 300
    assert all(one[1][0] == one[5][2] for one in machine.direct)


# -- the addresses of tensors -----------------------------------------------------------------------------


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
