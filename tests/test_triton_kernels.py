"""Triton kernels: right under the interpreter, and compiled for sm_90 without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ir_samples as samples
import pytest
from fuseplan.kernels.backend import SM90
from fuseplan.kernels.triton_backend import TritonBackend
from ir_samples import Sample, label

LLAMA_SHAPES = [(1, 2048, 8192), (32, 4096, 14336), (16384, 8192, 28672)]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> TritonBackend:
    return TritonBackend(tmp_path_factory.mktemp("triton"))


def test_every_kernel_is_right_under_the_interpreter(tmp_path: Path) -> None:
    script = Path(__file__).parent / "interpret_kernels.py"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "triton", str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows = json.loads(result.stdout)
    assert len(rows) > 150
    assert [row for row in rows if row["refused"]] == []
    assert [row for row in rows if not row["error"] <= 1.0] == []


def llama_groups() -> list[Sample]:
    groups = []
    for rows, hidden, intermediate in LLAMA_SHAPES:
        groups += [
            samples.rms_norm(rows, hidden, "bfloat16"),
            samples.add_rms_norm(rows, hidden, "bfloat16"),
            samples.swiglu(rows, intermediate, "bfloat16"),
            samples.rope(1, rows, 32, 8, 64 if hidden == 2048 else 128, "bfloat16"),
        ]
    return groups


@pytest.mark.parametrize("sample", llama_groups(), ids=label)
def test_llama_defaults_compile_for_sm90_without_spills(sample: Sample, backend: TritonBackend) -> None:
    config = backend.default_config(sample.ir, SM90)
    assert backend.infeasible(sample.ir, config, SM90) is None
    resources = backend.prepare(sample.ir, config, SM90)
    assert resources.spill_bytes == 0
    assert resources.registers is not None and 8 < resources.registers <= 128
    assert resources.shared_bytes is not None and resources.shared_bytes < 48 * 1024
    # Every access to a whole tile is a vector one: 16 bytes, or 8 where tiles are small.
    assert resources.extra["ptx_vector_bytes"] >= 8
