"""Recording on a CUDA device. All recordings of a device share one memory pool, so they run one after another."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from fuseplan.planner.errors import failure_reason
from fuseplan.planner.runtime.replay_arguments import NotRecordable

#: Recordings that failed. The allocator may still ask them whether memory is theirs, so they are never freed.
_FAILED: list[torch.cuda.CUDAGraph] = []


@dataclass(frozen=True, eq=False)
class _Pool:
    """Memory that recordings share, and an empty graph that keeps it alive for whoever can name it.

    The allocator refuses to record into a pool that no CUDA graph holds. The pool goes with the last recording.
    """

    handle: Any
    keeper: torch.cuda.CUDAGraph


class CudaRecorder:
    """Records and replays on one device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._turn = _Turn(device)
        self._capture_stream = torch.cuda.Stream(device)
        self._pool: Callable[[], _Pool | None] = lambda: None

    def busy(self) -> bool:
        """True when the caller records already, or works on another device: then calls must be plain."""
        return torch.cuda.current_device() != self._device or torch.cuda.is_current_stream_capturing()

    def turn(self) -> AbstractContextManager[Any]:
        """One recording or replay at a time: all share memory, so one on another stream waits for the last one."""
        return self._turn

    def record(self, function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Callable[[], None]]:
        """What ``function(*args)`` returned (memory that each replay overwrites), and what replays its kernels.

        NotRecordable where it did something that cannot be recorded.
        """
        torch.cuda.synchronize(self._device)  # no work in flight may end, and free memory, while recording
        pool = self._pool() or self._new_pool()
        # Kernels that are launched overlapped need nothing here: capturing makes a programmatic edge where one follows
        # a kernel. Behind a copy, behind a join of streams and at the start of the graph there is no kernel to overlap
        # with, so the edge is a full one or none, and the whole replay comes after what the stream did before it, such
        # as filling the inputs.
        outputs, graph = self._capture(lambda: function(*args), pool.handle)
        return outputs, partial(_replay, graph, pool)

    def _new_pool(self) -> _Pool:
        handle = torch.cuda.graph_pool_handle()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph is meant to be empty
            _, keeper = self._capture(lambda: None, handle)
        pool = _Pool(handle, keeper)
        self._pool = weakref.ref(pool)
        return pool

    def _capture(self, work: Callable[[], Any], pool: Any) -> tuple[Any, torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capture_stream):
            try:
                # Other threads may go on using the device.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    outputs = work()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException as error:
                self._clean_up(graph, pool)
                if isinstance(error, Exception):
                    raise NotRecordable(failure_reason(error)) from error
                raise
        return outputs, graph

    def _clean_up(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Undo what an end that failed has left: the allocator's redirection, and the generator's mode."""
        _FAILED.append(graph)
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with suppress(RuntimeError):  # it was ended after all
                end(self._device, pool)
        self._pool = lambda: None
        with suppress(RuntimeError):
            _revive(torch.cuda.default_generators[self._device], torch.device("cuda", self._device))


def _replay(graph: torch.cuda.CUDAGraph, pool: _Pool) -> None:
    """Replay ``graph``; whoever can do so holds ``pool``."""
    graph.replay()


class _Turn:
    """The right to use the recordings of a device. One on another stream than the last waits for what that one did."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._last: torch.cuda.Stream | None = None
        self._last_handle = -1

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if torch._C._cuda_getCurrentRawStream(self._device) != self._last_handle:
                self._hand_over()
        except BaseException:
            self._lock.release()
            raise

    def _hand_over(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None:
            stream.wait_stream(self._last)
        self._last, self._last_handle = stream, stream.cuda_stream

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def _revive(generator: torch.Generator, device: torch.device) -> None:
    """A generator that still believes it is recorded gets a copy of its state that does not."""
    offset = generator.get_offset()
    try:
        torch.empty(1, device=device).uniform_()
    except RuntimeError:
        generator.graphsafe_set_state(generator.clone_state())
    generator.set_offset(offset)


@lru_cache(maxsize=16)
def cuda_recorder(device: int) -> CudaRecorder:
    """The recorder of a device; one in this process, because its recordings share memory."""
    return CudaRecorder(device)
