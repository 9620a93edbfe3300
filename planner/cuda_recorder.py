"""Recording on a CUDA device. All recordings of a device share one memory pool, so they run one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch

from fuseplan.planner.fallback import failure_reason
from fuseplan.planner.recording import NotRecordable

#: Recordings that failed. The allocator may still ask them whether memory is theirs, so they are never freed.
_FAILED: list[torch.cuda.CUDAGraph] = []


class CudaRecorder:
    """Records and replays on one device (a :class:`~fuseplan.planner.cuda_graphs.Recorder`).

    Args:
        device: Its index.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._pool = torch.cuda.graph_pool_handle()
        self._capture_stream = torch.cuda.Stream(device)
        self._last_stream: torch.cuda.Stream | None = None

    def busy(self) -> bool:
        return torch.cuda.current_device() != self._device or torch.cuda.is_current_stream_capturing()

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock:
            stream = torch.cuda.current_stream(self._device)
            if stream != self._last_stream:
                if self._last_stream is not None:
                    stream.wait_stream(self._last_stream)
                self._last_stream = stream
            yield

    def record(self, function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Callable[[], None]]:
        torch.cuda.synchronize(self._device)  # no work in flight may end, and free memory, while recording
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capture_stream):
            try:
                # Other threads may go on using the device.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = function(*args)
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException as error:
                self._clean_up(graph)
                if isinstance(error, Exception):
                    raise NotRecordable(failure_reason(error)) from error
                raise
        return outputs, graph.replay

    def _clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Undo what an end that failed has left: the allocator's redirection, and the generator's mode."""
        _FAILED.append(graph)
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with suppress(RuntimeError):  # it was ended after all
                end(self._device, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        with suppress(RuntimeError):
            _revive(torch.cuda.default_generators[self._device], torch.device("cuda", self._device))


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
