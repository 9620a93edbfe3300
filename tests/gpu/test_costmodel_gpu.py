"""The probe on a real CUDA device: the numbers are physical and consistent with each other."""

from __future__ import annotations

import pytest
import torch

from fuseplan.costmodel.device import DeviceSpec, current_identity
from fuseplan.costmodel.probe import probe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.timed
def test_probe_of_this_device() -> None:
    spec = probe("cuda")
    assert spec.identity == current_identity("cuda")
    assert DeviceSpec.from_json(spec.to_json()) == spec
    assert spec.graph_us is not None
    # A graph node skips the host; a cache is faster than the memory behind it; tensor cores beat plain fp32.
    assert spec.graph_us < spec.eager_us
    assert spec.bandwidth.ideal_gbps(spec.identity.l2_bytes / 4) > spec.bandwidth.ideal_memory_gbps
    assert spec.peak("bf16_matmul").per_s > spec.peak("fp32").per_s > spec.peak("sfu").per_s
    if torch.cuda.get_device_capability() >= (9, 0):
        # A launch that overlaps the kernel before costs less than one that waits for its end, even when it does work.
        assert spec.launch["overlapped"].best_us < spec.launch["graph"].best_us
        assert spec.launch["overlapped"].us < spec.launch["graph"].us
