"""Who sees which GPU, and how the workers of a host are told."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import torch
from fleet_samples import fleet

from fuseplan.planner.errors import DeviceError
from fuseplan.planner.fleet import cluster, worker_state
from fuseplan.planner.fleet.terms import capturing, measuring


@pytest.mark.parametrize("cores", [1, 9, 16, 200])
@pytest.mark.parametrize(("visible", "there", "seen"), [
    (None, 3, ["0", "1", "2"]), ("2,5", 2, ["2", "5"]), ("GPU-aa,GPU-bb", 2, ["GPU-aa", "GPU-bb"]), ("1", 1, ["1"]),
])
def test_each_worker_sees_one_of_the_gpus_that_are_visible_here(
    visible: str | None, there: int, seen: list[str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(cluster, "usable_cores", lambda: cores)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nannies = cluster.nannies("cuda")
    workers = Counter(one["env"]["CUDA_VISIBLE_DEVICES"] for one in nannies)
    assert list(workers) == seen
    assert len(set(workers.values())) == 1, "no GPU has more workers than another"
    assert len({one["name"] for one in nannies}) == len(nannies)
    (compilers,) = {one["preload_argv"][one["preload_argv"].index("--compilers") + 1] for one in nannies}
    assert int(compilers) * len(nannies) <= max(cores, len(nannies)), "the host's cores are shared"
    assert len(nannies) == there or len(nannies) <= cores / 2, "workers need cores to compile on"


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C ends this process afterwards, as it did before: a worker ignores it."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("gigabytes", "measure"), [(4, 1), (8, 1), (16, 2), (24, 3), (80, 3)])
def test_workers_of_a_gpu_with_little_memory_do_not_measure(
    gigabytes: int, measure: int, interrupts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(uuid="a-gpu", total_memory=int(gigabytes * 0.98 * 2**30))  # drivers keep some
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    monkeypatch.setattr(worker_state, "current_identity", lambda kind: SimpleNamespace(key=lambda: "cuda-x-1"))
    monkeypatch.setattr(worker_state.tuner, "make_pool", lambda kind: SimpleNamespace(start=lambda: None))
    offered = []
    for beside in range(3):
        offers = dict[str, float]()
        state = SimpleNamespace(total_resources=offers, available_resources={})
        worker = SimpleNamespace(state=state, plugin_add=AsyncMock())
        asyncio.run(worker_state.dask_setup.callback(worker, "cuda", 4, beside))
        assert offers[capturing("cuda")] >= 1
        offered.append(measuring("cuda-x-1") in offers)
    assert offered == [number < measure for number in range(3)]


def test_workers_that_share_a_gpu_own_one_device() -> None:
    with fleet(5, ("cpu-a-1", "cpu-a-1", "cpu-b-1", "cuda-c-1"), units=("x", "x", "y", "z")) as client:
        assert cluster.devices_here(client, "cpu") == 2
        assert cluster.devices_here(client, "cuda") == 1
        assert sorted(map(len, cluster.device_workers(client, "cpu").values())) == [1, 3]


def test_a_host_without_a_gpu_is_told_so_and_one_cpu_is_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="use device cpu"):
        cluster.nannies("cuda")
    (only,) = cluster.nannies("cpu")
    assert only["env"] == {} and only["memory_limit"] is None
