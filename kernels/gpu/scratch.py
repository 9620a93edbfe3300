"""Memory of a kernel's own: counters by which its programs find out who is last, and what they hand to that one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fuseplan.kernels.ir.backend import NOTHING, CompiledKernel, Layouts
from fuseplan.kernels.ir.in_place import Reuse

_internals: Any = torch._C
#: Counters kept ready for streams that record CUDA graphs, where nothing can be zeroed once for all replays.
_SPARE = 4


@dataclass
class Counters:
    """Zeros that each launch leaves as zeros, so that launches one after another share them.

    Calls on one stream share them, and recordings made on one stream: their graphs are replayed one after another.
    """

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
