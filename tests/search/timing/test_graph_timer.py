"""The timer of CUDA graphs, on a scripted host and device: what the host does must not be in a kernel's time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fuseplan.search.timing.timers import CudaGraphTimer

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Microseconds that the host needs to start a kernel, and a recorded graph.
LAUNCH_US, REPLAY_US = 8.0, 15.0


class Machine:
    """A host that queues work and a device that runs it in order, each with its own clock."""

    def __init__(self) -> None:
        self.host_us = self.device_us = 0.0
        self.recording: list[float] | None = None
        self.recordings: list[int] = []

    def run(self, time_us: float, host_us: float) -> None:
        self.host_us += host_us
        self.device_us = max(self.device_us, self.host_us) + time_us

    def synchronize(self) -> None:
        self.host_us = max(self.host_us, self.device_us)

    def kernel(self, time_us: float) -> None:
        if self.recording is None:
            self.run(time_us, LAUNCH_US)
        else:
            self.recording.append(time_us)


class Event:
    machine: Machine

    def __init__(self, enable_timing: bool) -> None:
        self.at_us = 0.0

    def record(self) -> None:
        self.machine.run(0.0, 0.0)
        self.at_us = self.machine.device_us

    def synchronize(self) -> None:
        self.machine.synchronize()

    def elapsed_time(self, end: Event) -> float:
        return (end.at_us - self.at_us) * 1e-3


class Graph:
    machine: Machine

    def __init__(self) -> None:
        self.kernels: list[float] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads go on using the device"
        self.machine.recording = self.kernels

    def capture_end(self) -> None:
        self.machine.recording = None
        self.machine.recordings.append(len(self.kernels))

    def replay(self) -> None:
        self.machine.run(sum(self.kernels), REPLAY_US)


class Stream:
    def wait_stream(self, other: object) -> None:
        """Everything is in order already."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    Event.machine = Graph.machine = machine

    @contextmanager
    def stream(stream: object) -> Iterator[None]:
        yield

    fakes: dict[str, Any] = {
        "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "stream": stream, "current_stream": Stream,
        "synchronize": machine.synchronize, "mem_get_info": lambda: (3, 4),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return machine


@pytest.mark.parametrize("time_us", [1.0, 4.0, 50.0, 1000.0])
@pytest.mark.parametrize("sets", [1, 2, 256])
def test_a_kernel_takes_its_own_time_however_slow_the_host(machine: Machine, time_us: float, sets: int) -> None:
    operands = [()] * sets
    sample = CudaGraphTimer().prepare(lambda: machine.kernel(time_us), operands)
    assert sample() == pytest.approx(time_us)
    # Every set is visited in 1 ms, and a replay is long enough for the clock.
    launches = machine.recordings[-1]
    assert launches >= sets or launches * time_us == pytest.approx(1_000.0, rel=0.25)
    assert launches * time_us >= 100.0


def test_a_call_that_is_longer_than_a_replay_is_recorded_once(machine: Machine) -> None:
    CudaGraphTimer().prepare(lambda: machine.kernel(12_000.0), [()] * 256)
    assert machine.recordings == [1]


@pytest.mark.parametrize(("free", "emptied"), [(3, False), (1, False), (0, True)])
def test_cached_memory_is_returned_where_little_else_is_free(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, free: int, emptied: bool
) -> None:
    """What is recorded cannot use what PyTorch has cached."""
    seen: list[bool] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 4))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(machine.recording is None))
    CudaGraphTimer().prepare(lambda: machine.kernel(100.0), [()])
    assert seen == [True] * emptied


def test_a_kernel_that_is_long_enough_is_recorded_once(machine: Machine) -> None:
    CudaGraphTimer().prepare(lambda: machine.kernel(100.0), [()])
    assert machine.recordings == [2]
