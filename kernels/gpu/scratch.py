"""Memory of a kernel's own: counters by which its programs find out who is last, and what they hand to that one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fuseplan.kernels.ir.backend import CompiledKernel


@dataclass
class Counters:
    """Zeros that each launch leaves as zeros, so that launches one after another share them."""

    count: int
    _by_stream: dict[tuple[torch.device, int | None], torch.Tensor] = field(default_factory=dict)

    def of(self, beside: torch.Tensor) -> torch.Tensor:
        """Those of the current stream, or of all recordings in CUDA graphs, which are replayed one after another."""
        capturing = beside.is_cuda and torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(beside.device).cuda_stream if beside.is_cuda and not capturing else None
        found = self._by_stream.get((beside.device, stream))
        if found is None:
            found = torch.zeros(self.count, dtype=torch.int32, device=beside.device)
            if not capturing:  # memory of a graph is not ours to keep
                self._by_stream[beside.device, stream] = found
                self._by_stream.setdefault((beside.device, None), torch.zeros_like(found))
        return found


class ScratchKernel(CompiledKernel):
    """A kernel that takes, behind its inputs, float32 numbers of its own and counters."""

    def __init__(self, kernel: CompiledKernel, inputs: int, numbers: int, counters: int) -> None:
        self.kernel, self.inputs, self.numbers = kernel, inputs, numbers
        self.resources = kernel.resources
        self._counters = Counters(counters)

    def __call__(self, *args: Any) -> None:
        self.given(self.kernel)(*args)

    def given(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call(*inputs, ...)`` of a call that takes the kernel's memory behind its inputs."""
        inputs, numbers, counters = self.inputs, self.numbers, self._counters

        def run(*args: Any) -> Any:
            first = args[0]
            held = torch.empty(numbers, dtype=torch.float32, device=first.device)
            return call(*args[:inputs], held, counters.of(first), *args[inputs:])

        return run
