"""Fakes for the search tests: a subject, a back end with a synthetic cost surface and faults, a virtual clock."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import (
    Backend,
    BuildError,
    CompiledKernel,
    Config,
    Resources,
    Target,
    Tunable,
    config_key,
)
from fuseplan.kernels.ir.index import Index, row_major_strides
from fuseplan.kernels.ir.ir import Apply, Buffer, KernelIR, Load, Segment, Store
from fuseplan.search.timing.timers import HostTimer

CPU = Target("cpu", "native", 2, l2_bytes=4096)


class VirtualClock:
    """Time that passes only when a fake kernel says so, with a little deterministic jitter."""

    def __init__(self) -> None:
        self.now = 0.0
        self.disturbances = 0
        self._state = 1

    def advance(self, us: float, jitter: float = 0.0) -> None:
        self._state = (self._state * 1103515245 + 12345) % 2**31
        self.now += us * 1e-6 * (1 + jitter * (self._state / 2**31 - 0.5))


CLOCK = VirtualClock()


class VirtualTimer(HostTimer):
    """The host timer on the virtual clock."""

    def clock(self) -> float:
        return CLOCK.now

    def disturbances(self) -> int:
        return CLOCK.disturbances


class ShortTimer(VirtualTimer):
    """Times call by call, so that a tune of fakes makes few of them."""

    batch_us = 1.0


def muladd_ir(rows: int, cols: int, dtype: str = "float32") -> KernelIR:
    """``out = a * b + w`` with ``w`` broadcast over rows."""
    shape, strides = (rows, cols), row_major_strides((rows, cols))
    row, col = Index.coord(0, rows), Index.coord(1, cols)
    at = row * cols + col
    return KernelIR(
        (
            Buffer("a", dtype, shape, strides),
            Buffer("b", dtype, shape, strides),
            Buffer("w", dtype, (cols,), (1,)),
            Buffer("out", dtype, shape, strides, is_output=True),
        ),
        (
            Segment(
                (rows,), cols,
                (
                    Load("float32", 0, at), Load("float32", 1, at), Load("float32", 2, col),
                    Apply("float32", "mul", (0, 1)), Apply("float32", "add", (3, 2)),
                ),
                (Store(3, at, 4),),
            ),
        ),
    )


@dataclass(frozen=True)
class FakeSubject:
    """``a * b + w``; the unfused chain takes ``eager_us`` of virtual time."""

    key: str = "subject-1"
    label: str = "muladd 3x127"
    rows: int = 3
    cols: int = 127
    eager_us: float = 100.0
    jitter: float = 0.0
    broken: str = ""

    hot_inputs: tuple[bool, ...] = (True, True, False)
    work: Work = field(default_factory=Work)

    @property
    def ir(self) -> KernelIR:
        return muladd_ir(self.rows, self.cols)

    @property
    def positions(self) -> Mapping[int, int]:
        return {}

    def make_inputs(self, seed: int, device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(self.rows, self.cols), (self.rows, self.cols), (self.cols,)]
        return [torch.randn(shape, generator=generator) for shape in shapes]

    def allocate_outputs(self, device: str) -> list[torch.Tensor]:
        return [torch.empty(self.rows, self.cols)]

    def eager(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if self.broken == "eager":
            raise RuntimeError("the chain does not run")
        CLOCK.advance(self.eager_us, self.jitter)
        a, b, w = inputs
        return [a * b + w]

    def reference(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        a, b, w = (tensor.double() for tensor in inputs)
        out = a * b + w
        return [out * torch.nan] if self.broken == "nan" else [out]


class FakeKernel(CompiledKernel):
    """Computes ``a * b + w``, takes the config's virtual time, and misbehaves as told."""

    def __init__(self, ir: KernelIR, us: float, jitter: float, fault: str) -> None:
        self.resources = Resources(registers=32, spill_bytes=0)
        self._ir, self._us, self._jitter, self._fault = ir, us, jitter, fault

    def __call__(self, *args: torch.Tensor | int) -> None:
        CLOCK.advance(self._us, self._jitter)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        inputs, outputs = tensors[: len(self._ir.inputs)], tensors[len(self._ir.inputs) :]
        if self._fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._fault == "exit":
            os._exit(3)
        if self._fault == "hang":
            time.sleep(3600)
        if self._fault == "raise":
            raise RuntimeError("launch failed")
        a, b, w = inputs
        outputs[0].copy_(a * b + w)
        misbehave(self._fault, inputs, outputs)


def misbehave(fault: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Spoil a result in the way ``fault`` names."""
    out = outputs[0]
    if fault == "nan":
        out.view(-1)[0] = torch.nan
    elif fault == "partial":
        out.view(-1)[-1] = torch.nan
    elif fault == "inf":
        out.view(-1)[0] = torch.inf
    elif fault == "wrong":
        out.view(-1)[0] += 0.25
    elif fault == "after":
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0.0)
    elif fault == "before":
        out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0.0)
    elif fault == "input":
        inputs[0].view(-1)[0] += 1.0
    elif fault == "overread":
        source = inputs[0]
        out.view(-1)[-1] += source.as_strided((1,), (1,), source.storage_offset() + source.numel())[0]
    elif fault not in ("", "spill"):
        raise AssertionError(f"unknown fault {fault}")


@dataclass(frozen=True)
class FakeBackend(Backend):
    """Configs ``tile`` x ``unroll`` with a bowl-shaped cost surface.

    Attributes:
        best: The fastest (tile, unroll), by position.
        floor_us: Its time.
        slope_us: Added for each step away from it.
        faults: What goes wrong, by config key.
        journal: File to which every compile and every load appends a line.
    """

    best: tuple[int, int] = (3, 2)
    floor_us: float = 10.0
    slope_us: float = 5.0
    jitter: float = 0.0
    faults: Mapping[str, str] = field(default_factory=dict)
    journal: str = ""
    tiles: tuple[int, ...] = (16, 32, 64, 128, 256)
    unrolls: tuple[int, ...] = (1, 2, 4, 8)
    refusal: str = ""
    absent: str = ""

    name = "fake"
    device_type = "cpu"

    def unavailable(self) -> str | None:
        return self.absent or None

    def refuse(self, ir: KernelIR, target: Target) -> str | None:
        return self.refusal or None

    def tunables(self, ir: KernelIR, target: Target) -> tuple[Tunable, ...]:
        return (Tunable("tile", self.tiles), Tunable("unroll", self.unrolls))

    def infeasible(self, ir: KernelIR, config: Config, target: Target) -> str | None:
        return "tile x unroll too large" if int(config["tile"]) * int(config["unroll"]) > 1024 else None

    def default_config(self, ir: KernelIR, target: Target) -> Config:
        return {"tile": self.tiles[0], "unroll": self.unrolls[0]}

    def source(self, ir: KernelIR, config: Config) -> str:
        return f"// {config_key(config)}"

    def time_us(self, config: Config) -> float:
        tile, unroll = self.tiles.index(int(config["tile"])), self.unrolls.index(int(config["unroll"]))
        return self.floor_us + self.slope_us * (abs(tile - self.best[0]) + abs(unroll - self.best[1]))

    def prepare(self, ir: KernelIR, config: Config, target: Target) -> Resources:
        self._log("compile", config)
        fault = self.faults.get(config_key(config), "")
        if fault == "build":
            raise BuildError("fake: syntax error")
        return Resources(registers=32, spill_bytes=64 if fault == "spill" else 0)

    def load(self, ir: KernelIR, config: Config, target: Target) -> CompiledKernel:
        self._log("load", config)
        return FakeKernel(ir, self.time_us(config), self.jitter, self.faults.get(config_key(config), ""))

    def _log(self, what: str, config: Config) -> None:
        if self.journal:
            with Path(self.journal).open("a") as file:
                file.write(f"{what} {config_key(config)}\n")


class OtherBackend(FakeBackend):
    """A second back end."""

    name = "other"


def taking(us: float, jitter: float = 0.0, calls: list[tuple[torch.Tensor, ...]] | None = None) -> Callable[..., None]:
    def run(*inputs: torch.Tensor) -> None:
        if calls is not None:
            calls.append(inputs)
        CLOCK.advance(us, jitter)

    return run


OPERANDS = [(torch.zeros(1),), (torch.ones(1),), (torch.full((1,), 2.0),)]


def disturbed_every(us: float, period: int, stall_us: float = 8000.0) -> Callable[..., None]:
    """Takes ``us``, but every ``period``-th call loses the processor for a time slice."""
    calls = iter(range(10**9))

    def run(*inputs: torch.Tensor) -> None:
        stalled = next(calls) % period == 0
        CLOCK.disturbances += stalled
        CLOCK.advance(us + stall_us * stalled)

    return run
