"""What the measuring process does: kernels are checked on memory that nothing has written to."""

from __future__ import annotations

from dataclasses import replace

import torch
from search_fakes import CPU, FakeBackend, FakeSubject, VirtualTimer

from fuseplan.kernels.ir.backend import CompiledKernel, Config, Resources, Target
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.search.store.record import RecordKey, Trial
from fuseplan.search.workers import jobs

BENCH = jobs.Bench(CPU, VirtualTimer(), screen_s=0.01, decide_s=0.02)


class Writes(FakeSubject):
    """Writes ``b + w`` over ``a``, as a cache is written to."""

    @property
    def ir(self) -> KernelIR:
        *inputs, out = super().ir.buffers
        return replace(super().ir, buffers=(*inputs, replace(out, over=0)))

    def eager(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        super().eager(*inputs)
        a, b, w = inputs
        return [a.copy_(b + w)]

    def reference(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        _, b, w = (tensor.double() for tensor in inputs)
        return [b + w]


class Kernel(CompiledKernel):
    """The same; nothing of it where it ``idles``."""

    def __init__(self, idles: bool) -> None:
        self.resources, self._subject, self._idles = Resources(), Writes(), idles

    def __call__(self, *args: torch.Tensor | int) -> None:
        *inputs, out = (one for one in args if isinstance(one, torch.Tensor))
        made, = self._subject.eager(inputs[0].clone(), *inputs[1:])
        if not self._idles:
            out.copy_(made)


class Writer(FakeBackend):
    """Kernels of tiles of 16 idle."""

    def load(self, ir: KernelIR, config: Config, target: Target) -> CompiledKernel:
        return Kernel(config["tile"] == 16)


def test_a_kernel_that_writes_nothing_is_refused_whatever_wrote_before_it() -> None:
    key = RecordKey("w", "dev")
    idle, right = (Trial(key, "fake", {"tile": tile, "unroll": 1}) for tile in (16, 32))
    jobs.release()
    try:
        jobs.time_unfused(BENCH, Writes())
        found = [jobs.screen_config(BENCH, Writes(), Writer(), blank) for blank in (idle, right, idle)]
        assert [one.reason.partition(":")[0] for one in found] == ["wrong result", "", "wrong result"]
    finally:
        jobs.release()
