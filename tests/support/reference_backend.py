"""A kernel back end without a compiler, for dispatch tests: it interprets kernels in torch, or fails on demand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from kernel_reference import run_reference

from fuseplan.kernels.ir.backend import Backend, BuildError, CompiledKernel, Config, Resources, Target, Tunable
from fuseplan.kernels.ir.ir import KernelIR


@dataclass
class ReferenceKernel(CompiledKernel):
    ir: KernelIR
    calls: list[int]
    fails_in_call: bool = False
    resources: Resources = field(default_factory=Resources)

    def __call__(self, *args: Any) -> None:
        self.calls.append(len(args))
        if self.fails_in_call:
            raise RuntimeError("illegal instruction\nwith details")
        inputs, outputs = len(self.ir.inputs), len(self.ir.outputs)
        sizes = dict(zip(self.ir.symbols, args[inputs + outputs :], strict=True))
        results = run_reference(self.ir, args[:inputs], sizes, torch.float64)
        for made, result in zip(args[inputs : inputs + outputs], results, strict=True):
            made.copy_(result.to(made.dtype))


class ReferenceBackend(Backend):
    """Interprets kernels with fp64 registers. ``calls`` counts launches.

    Args:
        missing: Why the back end is unavailable.
        refusal: Why it refuses every kernel.
        build_failure: What ``load`` raises.
        fails_in_call: Whether kernels raise when called.
        matmuls: Whether it takes kernels with a matmul.
    """

    name: ClassVar[str] = "cpp"
    device_type: ClassVar[str] = "cpu"
    raises_outside: ClassVar[bool] = True

    def __init__(
        self,
        missing: str | None = None,
        refusal: str | None = None,
        build_failure: str | None = None,
        fails_in_call: bool = False,
        matmuls: bool = False,
    ) -> None:
        self.matmuls = matmuls
        self.missing = missing
        self.refusal = refusal
        self.build_failure = build_failure
        self.fails_in_call = fails_in_call
        self.calls: list[int] = []
        self.loaded: list[KernelIR] = []

    def unavailable(self) -> str | None:
        return self.missing

    def refuse(self, ir: KernelIR, target: Target) -> str | None:
        if not self.matmuls and any(segment.products for segment in ir.segments):
            return "a matmul"
        return self.refusal

    def tunables(self, ir: KernelIR, target: Target) -> tuple[Tunable, ...]:
        return (Tunable("unroll", (1, 2)),)

    def infeasible(self, ir: KernelIR, config: Config, target: Target) -> str | None:
        return None

    def default_config(self, ir: KernelIR, target: Target) -> Config:
        return {"unroll": 1}

    def source(self, ir: KernelIR, config: Config) -> str:
        return repr(ir)

    def prepare(self, ir: KernelIR, config: Config, target: Target) -> Resources:
        return Resources()

    def load(self, ir: KernelIR, config: Config, target: Target) -> CompiledKernel:
        if self.build_failure is not None:
            raise BuildError(self.build_failure)
        self.loaded.append(ir)
        return ReferenceKernel(ir, self.calls, self.fails_in_call)


def use(monkeypatch: Any, backend: Backend) -> Backend:
    """Make ``backend`` the only one for CPUs."""

    def backends(device_type: str) -> tuple[Backend, ...]:
        return (backend,)

    monkeypatch.setattr("fuseplan.planner.tuning.session.backends_for", backends)
    return backend


