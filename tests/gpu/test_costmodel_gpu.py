"""The probe on a real CUDA device: the numbers are physical and consistent with each other."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe.probe import probe
from fuseplan.costmodel.probe.timing import GraphTimer
from fuseplan.search.store.rows import device_spec

pytestmark = pytest.mark.gpu


def test_a_timer_captures_while_another_thread_allocates() -> None:
    def call() -> None:
        with ThreadPoolExecutor(1) as other:  # a new size each time: the allocator has to ask the driver
            sizes.append(sizes[-1] + 2**21)
            assert other.submit(lambda: int(torch.ones(sizes[-1], device="cuda")[-1])).result() == 1
        values.add_(1)

    sizes, values = [2**24], torch.zeros(7, device="cuda")
    assert GraphTimer(sample_us=1.0, repeats=1).prepare(call)(1.0)
    assert len(set(values.tolist())) == 1 and values[0] > 3


@pytest.mark.timed
def test_probe_of_this_device() -> None:
    spec = probe("cuda")
    assert spec.identity == current_identity("cuda")
    assert device_spec(json.loads(spec.to_json())) == spec
    assert "graph" in spec.launch
    # A graph node skips the host; a cache is faster than the memory behind it; tensor cores beat plain fp32.
    assert spec.launch["graph"].us < spec.launch["eager"].us
    assert spec.bandwidth.ideal_gbps(spec.identity.l2_bytes / 4) > spec.bandwidth.points[-1].best_gbps
    assert spec.peak("bf16_matmul").per_s > spec.peak("fp32").per_s > spec.peak("sfu").per_s
    if torch.cuda.get_device_capability() >= (9, 0):
        # A launch that overlaps the kernel before costs less than one that waits for its end, even when it does work.
        assert spec.launch["overlapped"].best_us < spec.launch["graph"].best_us
        assert spec.launch["overlapped"].us < spec.launch["graph"].us
