"""A sample of kernels, compiled for GPUs that are not here: what each takes is read back. None of them is run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import ir_samples as samples
import matmul_groups
import pytest
import torch

from fuseplan.costmodel.devices import NoDeviceError, architecture
from fuseplan.kernels.gpu.targets import read_resources
from fuseplan.kernels.ir.backend import SM90, BuildError, Target, gpu_target
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.registry import local_target
from fuseplan.kernels.triton.backend import TritonBackend

TARGETS = {arch: gpu_target(arch, cores) for arch, cores in (
    ("sm_80", 108), ("sm_90", 132), ("sm_100", 148), ("sm_120", 170), ("gfx942", 304), ("gfx950", 256))}


def gated(rows: int) -> KernelIR:
    b, outputs = matmul_groups.gated(rows, 4096, 2048, torch.bfloat16)
    return matmul_groups.lowered_whole(b, *outputs)[0].ir


SAMPLES = {
    "row": samples.swiglu(64, 4096, "bfloat16").ir, "reduction": samples.softmax(64, 32768, "bfloat16").ir,
    "matmul of one row": gated(1), "matmul of 16 rows": gated(16),
}


@pytest.fixture
def backend(tmp_path: Path) -> TritonBackend:
    return TritonBackend(tmp_path)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_kernels_compile_for_every_architecture(backend: TritonBackend, target: Target, name: str) -> None:
    vendor = {"cuda": "nvidia", "hip": "amd"}[target.gpu.vendor]
    if find_spec(f"triton.backends.{vendor}") is None:
        pytest.skip(f"this Triton has no back end for {vendor}")
    ir = SAMPLES[name]
    assert backend.refuse(ir, target) is None
    config = backend.default_config(ir, target)
    resources = backend.prepare(ir, config, target)
    assert resources.spill_bytes == 0
    assert resources.registers is not None and 0 < resources.registers <= target.gpu.registers
    assert resources.shared_bytes is not None and resources.shared_bytes <= target.gpu.shared_bytes
    assert target.gpu.warp * int(config["num_warps"]) <= target.gpu.most_threads


def test_spills_and_registers_are_read_from_amds_assembly() -> None:
    """As LLVM writes them: vector registers alone lie in memory when they are spilled."""
    told = "    .sgpr_spill_count: 7\n    .vgpr_count:     128\n    .vgpr_spill_count: 3\n"
    metadata = SimpleNamespace(target=SimpleNamespace(backend="hip"), shared=4096)
    found = read_resources(SimpleNamespace(asm={"amdgcn": told}, metadata=metadata))
    assert (found.registers, found.spill_bytes, found.shared_bytes) == (128, 12, 4096)


def test_what_an_architecture_lacks_is_refused(backend: TritonBackend) -> None:
    quantised = samples.dequantised(3, 72).ir
    assert any(buffer.dtype == "float8_e4m3fn" for buffer in quantised.buffers)
    assert backend.refuse(quantised, SM90) is None
    assert backend.refuse(quantised, TARGETS["sm_80"]) == "sm_80 has no float8_e4m3fn"
    b, outputs = matmul_groups.attention_inputs(1, 40, torch.bfloat16)
    looked_up = matmul_groups.lowered_whole(b, *outputs)[0].ir
    assert backend.refuse(looked_up, SM90) is None
    assert "PTX" in (backend.refuse(looked_up, TARGETS["gfx942"]) or "")


def test_blocks_on_their_way_fit_a_smaller_shared_memory(backend: TritonBackend) -> None:
    ir = SAMPLES["matmul of 16 rows"]
    config, small = backend.default_config(ir, SM90), TARGETS["gfx942"]
    assert backend.infeasible(ir, config, SM90) is None
    assert "shared memory" in (backend.infeasible(ir, config, small) or "")
    assert "shared memory" not in (backend.infeasible(ir, backend.default_config(ir, small), small) or "")


@pytest.mark.parametrize("name", ["sm_9x", "gfx90a", "native"])
def test_an_unknown_architecture_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        architecture(name)
    with pytest.raises(BuildError, match=name):
        _ = Target("cuda", name, 1).gpu


def test_an_amd_gpu_is_told_apart_where_pytorch_calls_it_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(NoDeviceError, match=r"MI300X: .*none has run on one.*use the CPU"):
        local_target("cuda")
