"""Who sees which GPU, and how the workers of a host are told."""

from __future__ import annotations

import pytest
import torch

from fuseplan.planner.errors import DeviceError
from fuseplan.planner.fleet import cluster


@pytest.mark.parametrize(("visible", "there", "seen"), [
    (None, 3, ["0", "1", "2"]), ("2,5", 2, ["2", "5"]), ("GPU-aa,GPU-bb", 2, ["GPU-aa", "GPU-bb"]), ("1", 1, ["1"]),
])
def test_each_worker_sees_one_of_the_gpus_that_are_visible_here(
    visible: str | None, there: int, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(cluster, "usable_cores", lambda: 9)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nannies = cluster.nannies("cuda")
    assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in nannies] == seen
    assert len({one["name"] for one in nannies}) == there
    (compilers,) = {one["preload_argv"][one["preload_argv"].index("--compilers") + 1] for one in nannies}
    assert int(compilers) * there <= 9, "the host's cores are shared"


def test_a_host_without_a_gpu_is_told_so_and_one_cpu_is_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="--device cpu"):
        cluster.nannies("cuda")
    (only,) = cluster.nannies("cpu")
    assert only["env"] == {} and only["memory_limit"] is None
