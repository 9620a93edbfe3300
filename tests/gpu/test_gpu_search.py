"""The search on a CUDA device: timers, verification, isolation of device errors, a tune with Triton."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from search_fakes import FakeBackend, FakeKernel, FakeSubject

from fuseplan.kernels.ir.backend import CompiledKernel, Config, Target, config_key
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.registry import local_target
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import TuningRecord
from fuseplan.search.timing.contest import contest, screen
from fuseplan.search.timing.operands import rotating_operands
from fuseplan.search.timing.timers import timer_for
from fuseplan.search.tune.tuner import Budget, Tuner
from fuseplan.search.workers import jobs
from fuseplan.search.workers.worker import WorkerPool

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class CudaSubject(FakeSubject):
    """The muladd subject with its tensors on the device and its oracle there too."""

    def make_inputs(self, seed: int, device: str) -> list[torch.Tensor]:
        return [tensor.to(device) for tensor in super().make_inputs(seed, device)]

    def allocate_outputs(self, device: str) -> list[torch.Tensor]:
        return [torch.empty(self.rows, self.cols, device=device)]


class FaultyKernel(FakeKernel):
    """Runs on the device, and so does its fault: a failing assertion, a store to nowhere, a loop without end."""

    def __call__(self, *args: torch.Tensor | int) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        a, b, w, out = tensors
        if self._fault == "assert":
            a.view(-1)[torch.tensor([a.numel() + 5], device="cuda")]
        if self._fault == "outside":
            store_far_away[(1,)](out, 2**40)
        if self._fault == "endless":
            wait_for_ever[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
        if self._fault:
            torch.cuda.synchronize()  # not where there is none: a good kernel is timed in a CUDA graph, too
        out.copy_(a * b + w)


@triton.jit
def store_far_away(out, distance: tl.int64):  # type: ignore[no-untyped-def]
    tl.store(out + distance, 1.0)


@triton.jit
def wait_for_ever(flag):  # type: ignore[no-untyped-def]
    while tl.load(flag, volatile=True) == 0:
        pass


class CudaFake(FakeBackend):
    """The fake back end on the device."""

    device_type = "cuda"

    def load(self, ir: KernelIR, config: Config, target: Target) -> CompiledKernel:
        return FaultyKernel(ir, self.time_us(config), 0.0, self.faults.get(config_key(config), ""))


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(compilers=8) as pool:
        yield pool


SUBJECT = CudaSubject(rows=512, cols=4096)


@pytest.mark.timed
@pytest.mark.parametrize("regime", ["eager", "graph"])
def test_timers_rank_by_size_and_agree_with_bandwidth(regime: str) -> None:
    small, large = (torch.zeros(n, device="cuda") for n in (1 << 10, 1 << 27))
    timer = timer_for("cuda", regime)
    runs = {"large": lambda x: large + x, "small": lambda x: small + x}
    result = contest(timer, runs, [(torch.ones(1, device="cuda"),)] * 3, seconds=0.2)
    assert result.winner("large", ["small"]) == "small"
    # 1 GiB of traffic: between 1 and 8 TB/s on anything this runs on.
    assert 134 < result.time("large").median_us < 1100


@pytest.mark.timed
def test_a_graph_hides_the_host() -> None:
    x = torch.zeros(64, device="cuda")
    times = {regime: screen(timer_for("cuda", regime), torch.neg, [(x,)], 0.1) for regime in ("eager", "graph")}
    assert times["graph"].median_us < times["eager"].median_us


@pytest.mark.timed
def test_cold_weights_are_slower_than_hot_ones() -> None:
    weight = torch.randn(4 << 20, device="cuda")
    timer = timer_for("cuda", "graph")
    cold = rotating_operands([weight], [False], torch.cuda.get_device_properties(0).L2_cache_size, 4 << 30)
    assert len(cold) > 8
    hot_us, cold_us = (screen(timer, torch.sum, operands, 0.2).median_us for operands in ([(weight,)], cold))
    assert cold_us > hot_us


@pytest.fixture(scope="module", params=["eager", "graph"])
def record(request: pytest.FixtureRequest, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> TuningRecord:
    """A tune with Triton."""
    backend = TritonBackend(tmp_path_factory.mktemp("gpu"))
    tuner = Tuner(
        Database("sqlite://"), local_target("cuda"), (backend,), "gpu-test", Budget(trials=16, seconds=30.0),
        regime=request.param, executor=pool,
    )
    return tuner.tune(replace(SUBJECT, key=request.param))


@pytest.mark.timed
def test_a_tuned_kernel_is_faster_than_the_chain(record: TuningRecord) -> None:
    assert record.fuse, record


def test_triton_kernels_are_tuned(record: TuningRecord) -> None:
    assert record.measured > 4, record
    assert record.fused is not None
    assert record.fused.regime == record.key.regime
    assert record.evidence.versions.triton
    assert record.resources["registers"] > 0


@pytest.mark.faulty
@pytest.mark.parametrize(
    "fault, said", [("assert", "assert"), ("outside", "illegal memory access"), ("endless", "no result within")]
)
def test_a_faulty_kernel_costs_one_config(pool: WorkerPool, fault: str, said: str) -> None:
    faults = {config_key({"tile": 32, "unroll": 1}): fault}
    backend = CudaFake(tiles=(16, 32, 64), unrolls=(1,), best=(0, 0), faults=faults)
    budget = Budget(trials=3, seconds=60.0, job_limit_s=20.0)
    tuner = Tuner(Database("sqlite://"), local_target("cuda"), (backend,), "gpu-test", budget, executor=pool)
    record = tuner.tune(SUBJECT)
    assert record.measured == 2, record.rejected
    assert [dict(rejection.config) for rejection in record.rejected] == [{"tile": 32, "unroll": 1}]
    assert said in record.rejected[0].reason
    # The device works for whoever comes next.
    assert float(torch.ones(8, device="cuda").sum()) == 8.0


def test_memory_that_is_free_is_left_to_other_processes() -> None:
    large = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_reserved()
    del large
    jobs.release()
    assert torch.cuda.memory_reserved() <= held - 2**28
