"""ninetoothed kernels: right under the interpreter, and compiled for sm_90 without a GPU."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import ir_samples as samples
import ninetoothed
import pytest
from ir_samples import Sample, label
from paths import SUPPORT
from ptx_paths import ptx_of, vector_bytes

from fuseplan.kernels.ir.backend import SM90, BuildError, MachineError, Target
from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
from fuseplan.kernels.ninetoothed.emitter import Views


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> NinetoothedBackend:
    return NinetoothedBackend(tmp_path_factory.mktemp("ninetoothed"))


def test_every_expressible_kernel_is_right_under_the_interpreter(tmp_path: Path) -> None:
    script = SUPPORT / "interpret_kernels.py"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "ninetoothed", str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows = json.loads(result.stdout)
    run = [row for row in rows if not row["refused"]]
    assert len({row["sample"] for row in run}) >= 42
    assert {row["refused"].split(" ")[0] for row in rows if row["refused"]} == {"dynamic", "an", "a"}
    assert [row for row in run if not row["error"] <= 1.0] == []


def llama_groups() -> list[Sample]:
    return [
        samples.add_rms_norm(1, 2048, "bfloat16"),
        samples.add_rms_norm(16384, 8192, "bfloat16"),
        samples.rms_norm(32, 4096, "bfloat16"),
        samples.swiglu(32, 14336, "bfloat16"),
        samples.swiglu(16384, 28672, "bfloat16"),
        samples.lone_row(4096, "bfloat16"),
        samples.rope(32, 1, 32, 8, 64, "bfloat16"),
        samples.rope(4, 2048, 32, 8, 128, "bfloat16"),
    ]


@pytest.mark.parametrize("sample", llama_groups(), ids=label)
def test_llama_defaults_compile_for_sm90_without_spills(sample: Sample, backend: NinetoothedBackend) -> None:
    assert backend.refuse(sample.ir, SM90) is None
    config = backend.default_config(sample.ir, SM90)
    assert backend.infeasible(sample.ir, config, SM90) is None
    resources = backend.prepare(sample.ir, config, SM90)
    assert resources.spill_bytes == 0
    assert resources.registers is not None and 8 < resources.registers <= 128
    assert vector_bytes(ptx_of(backend, sample.ir, config)) >= 8


@pytest.mark.parametrize("sample", samples.static_samples(), ids=label)
def test_the_default_config_is_a_feasible_point_of_the_space(sample: Sample, backend: NinetoothedBackend) -> None:
    if backend.refuse(sample.ir, SM90):
        pytest.skip("refused")
    default = backend.default_config(sample.ir, SM90)
    tunables = backend.tunables(sample.ir, SM90)
    assert [t.name for t in tunables] == list(default)
    assert all(default[t.name] in t.choices for t in tunables)
    assert backend.infeasible(sample.ir, default, SM90) is None


def test_the_halves_of_a_head_are_two_views() -> None:
    sample = samples.swiglu(4, 128)
    first, second, out = Views(sample.ir).all
    assert (first.name, first.offset, first.shape, first.strides) == ("in0", 0, (4, 128), (256, 1))
    assert (second.name, second.offset, second.shape, second.strides) == ("in0_1", 128, (4, 128), (256, 1))
    assert (out.name, out.buffer) == ("out0", 1)


def test_a_broadcast_operand_is_a_view_without_rows() -> None:
    views = {view.name: view for view in Views(samples.rms_norm(4, 64).ir).all}
    assert views["in1"].shape == (1, 64) and not views["in1"].on_rows


def test_refusals_say_why(backend: NinetoothedBackend) -> None:
    assert "CUDA" in str(backend.refuse(samples.swiglu(2, 8).ir, Target("cpu", "native", 4)))
    assert "dynamic sizes (n)" in str(backend.refuse(samples.dynamic_samples()[0].ir, SM90))
    assert "128256" in str(backend.refuse(samples.softmax(2, 128256).ir, SM90))
    assert "32 bits" in str(backend.refuse(samples.swiglu(2**19, 4096, "bfloat16").ir, SM90))
    assert "empty" in str(backend.refuse(samples.swiglu(0, 16).ir, SM90))


def test_a_block_that_cannot_hold_a_row_is_infeasible(backend: NinetoothedBackend) -> None:
    sample = samples.rms_norm(4, 4096)
    narrow = {**backend.default_config(sample.ir, SM90), "block_cols": 1024}
    assert "does not hold" in str(backend.infeasible(sample.ir, narrow, SM90))


def test_a_full_disk_is_no_fault_of_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ninetoothed, "make", full)
    sample, backend = samples.swiglu(5, 32), NinetoothedBackend(tmp_path)
    with pytest.raises(MachineError, match=r"could not generate the kernel: OSError.*No space left on device"):
        backend.prepare(sample.ir, backend.default_config(sample.ir, SM90), SM90)


def test_loading_needs_a_device(backend: NinetoothedBackend) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    sample = samples.swiglu(3, 128)
    with pytest.raises(BuildError, match="no CUDA device"):
        backend.load(sample.ir, backend.default_config(sample.ir, SM90), SM90)


def test_the_source_reads_like_a_hand_written_kernel(backend: NinetoothedBackend) -> None:
    sample = samples.softmax(8, 100)
    source = backend.source(sample.ir, backend.default_config(sample.ir, SM90))
    functions = [line for line in source.splitlines() if line.startswith("def ")]
    assert functions == [
        "def _exp(x):", "def _row_max(x, axis, keep_dims):", "def arrangement(in0, out0):",
        "def application(in0, out0):", "def premake():",
    ]
    assert "triton" not in source.split('"""')[2]  # ninetoothed turns ntl into Triton by itself
    assert backend.unavailable() is None
