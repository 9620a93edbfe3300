"""The pool of CUDA recordings against a fake allocator that refuses what PyTorch's refuses."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuseplan.planner.runtime.cuda_recorder import CudaRecorder
from fuseplan.planner.runtime.replay_arguments import NotRecordable


class Allocator:
    """Counts the graphs that hold each pool; a pool that was let go cannot be recorded into again."""

    def __init__(self) -> None:
        self.holders: Counter[int] = Counter()
        self.known: set[int] = set()
        self.graphs = 0
        self.end_fails = False

    def hold(self, pool: int) -> None:
        if pool in self.known and not self.holders[pool]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.known.add(pool)
        self.holders[pool] += 1


def fake_graph(allocator: Allocator) -> type[Any]:
    class Graph:
        pool: int | None = None
        ended = False

        def capture_begin(self, pool: int, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            allocator.hold(pool)
            self.pool = pool
            allocator.graphs += 1

        def capture_end(self) -> None:
            if allocator.end_fails:
                raise RuntimeError("capture was invalidated")
            self.ended = True

        def replay(self) -> None:
            assert self.pool is not None and allocator.holders[self.pool]

        def __del__(self) -> None:
            if self.pool is not None:
                allocator.graphs -= 1
                if self.ended:
                    allocator.holders[self.pool] -= 1

    return Graph


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[CudaRecorder, Allocator]]]:
    def made() -> tuple[CudaRecorder, Allocator]:
        allocator, handles = Allocator(), itertools.count()
        generator = SimpleNamespace(get_offset=lambda: 0, set_offset=lambda offset: None)
        for name, value in {
            "CUDAGraph": fake_graph(allocator),
            "graph_pool_handle": lambda: next(handles),
            "Stream": lambda device: object(),
            "stream": lambda stream: contextlib.nullcontext(),
            "synchronize": lambda device: None,
            "default_generators": [generator],
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: None, raising=False)
        monkeypatch.setattr("fuseplan.planner.runtime.cuda_recorder._revive", lambda generator, device: None)
        monkeypatch.setattr("fuseplan.planner.runtime.cuda_recorder._FAILED", [])
        return CudaRecorder(0), allocator

    yield made


def fails(error: type[BaseException]) -> Any:
    raise error("no")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(["record", "drop first", "drop last", "fail", "fail to end"]), max_size=20))
def test_recordings_come_and_go_in_any_order(make: Callable[[], Any], steps: list[str]) -> None:
    recorder, allocator = make()
    alive: list[Callable[[], None]] = []
    for step in steps:
        if step == "record":
            alive.append(recorder.record(lambda x: x + 1, (3,))[1])
        elif step.startswith("fail"):
            allocator.end_fails = step == "fail to end"
            with pytest.raises(NotRecordable, match=r"ValueError: no|capture was invalidated"):
                recorder.record(fails, (ValueError,))
            allocator.end_fails = False
        elif alive:
            alive.pop(0 if step == "drop first" else -1)
        for number in range(len(alive)):
            alive[number]()


def test_recordings_share_a_pool_which_goes_with_the_last(make: Callable[[], Any]) -> None:
    recorder, allocator = make()
    recordings = [recorder.record(lambda: 1, ())[1] for _ in range(3)]
    assert allocator.holders == {0: 4}
    del recordings[:2]
    recordings.append(recorder.record(lambda: 1, ())[1])
    assert allocator.holders == {0: 3}
    recordings.clear()
    gc.collect()
    assert +allocator.holders == {} and allocator.graphs == 0
    recordings.append(recorder.record(lambda: 1, ())[1])
    assert +allocator.holders == {1: 2}


def test_a_recorder_that_cannot_even_make_a_pool_says_so(make: Callable[[], Any]) -> None:
    recorder, allocator = make()
    allocator.end_fails = True
    with pytest.raises(NotRecordable, match="capture was invalidated"):
        recorder.record(lambda: 1, ())
    allocator.end_fails = False
    assert recorder.record(lambda: 1, ())[0] == 1


def test_an_interrupt_passes_and_the_next_recording_works(make: Callable[[], Any]) -> None:
    recorder, _ = make()
    with pytest.raises(KeyboardInterrupt):
        recorder.record(fails, (KeyboardInterrupt,))
    assert recorder.record(lambda: 1, ())[0] == 1
