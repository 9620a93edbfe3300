"""Scans of few long rows that programs share in several launches: which kernels do, right, and compiled for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Builder
from paths import SUPPORT
from shared_scans import SHARED_SCANS, lowered_scan

from fuseplan.kernels.gpu.tile import launches, programs
from fuseplan.kernels.ir.backend import SM90
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.planner.lowering.lower import lower

#: A tile of several rows, one row, one whose last split has fewer columns than a block and of which others have none,
#: a chunk to each thread.
CONFIGS: tuple[Mapping[str, int], ...] = (
    {"block_rows": 4, "block_cols": 32, "num_warps": 1, "splits": 4},
    {"block_rows": 1, "block_cols": 64, "num_warps": 2, "splits": 8, "num_stages": 2},
    {"block_rows": 2, "block_cols": 256, "num_warps": 1, "splits": 8},
    {"block_rows": 1, "block_cols": 128, "num_warps": 1, "splits": 16},
)
#: The most that a running sum is off, beside the largest of its row; of a product, each factor has been rounded.
MOST_ERROR = {"products": 1e-5, "halves": 4e-3, "doubles": 1e-13, "doubles across": 1e-13}


@pytest.fixture
def backend(tmp_path: Path) -> TritonBackend:
    return TritonBackend(tmp_path)


def interpreted(folder: Path, cases: list[tuple[str, int, Mapping[str, int] | None]]) -> list[dict[str, Any]]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "shared_scans.py"), str(folder), json.dumps(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    assert len(rows) == len(cases)
    return [row for row in rows if not row["error"] <= MOST_ERROR.get(row["name"], 2e-6) or not row["repeats"]
            or row["launches"] < 2]


def test_they_are_right_under_the_interpreter(tmp_path: Path) -> None:
    """Against float64, and the same bits again."""
    assert interpreted(tmp_path, [(name, 1031, config) for name in SHARED_SCANS for config in CONFIGS]) == []


@pytest.mark.parametrize("length", [127, 4097])
def test_they_are_right_at_other_sizes(length: int, tmp_path: Path) -> None:
    config = {"block_rows": 1, "block_cols": 64, "num_warps": 1, "splits": 64}
    assert interpreted(tmp_path, [(name, length, config) for name in ("rows", "across", "tails", "folded")]) == []


@pytest.mark.parametrize("name", ["rows", "across"])
def test_defaults_are_right_at_a_hundred_thousand(name: str, tmp_path: Path) -> None:
    assert interpreted(tmp_path, [(name, 100003, None)]) == []


def test_short_scans_are_launched_once(backend: TritonBackend) -> None:
    for name in SHARED_SCANS:
        for length in (1, 3, 127, 4096):
            ir = lowered_scan(name, length).ir
            config = backend.default_config(ir, SM90)
            assert launches(ir, config) == 1 and backend.scratch(ir, config) == (0, 0)


@pytest.mark.parametrize("name", SHARED_SCANS)
def test_programs_share_them_where_there_would_be_few(name: str, backend: TritonBackend) -> None:
    ir = lowered_scan(name, 128256).ir
    config = backend.default_config(ir, SM90)
    assert SM90.cores <= programs(ir, config, {}) <= 4 * SM90.cores
    assert launches(ir, config) > 1 and backend.infeasible(ir, config, SM90) is None
    resources = backend.prepare(ir, config, SM90)
    assert resources.spill_bytes == 0 and resources.registers is not None and resources.registers <= 128
    alone = {**config, "splits": 1}
    assert launches(ir, alone) == 1 and backend.scratch(ir, alone) == (0, 0) != backend.scratch(ir, config)


def scanned(shape: tuple[int, int], dim: int, dtype: torch.dtype) -> KernelIR:
    with torch.device("meta"):
        b = Builder(x=torch.empty(shape, dtype=dtype))
    value = b("aten.cumsum.default", "x", dim=dim)
    return lower(b.graph(value), {value}, "fp32", (value,)).ir


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(("shape", "dim"), [((1, 128256), 1), ((16, 100000), 1), ((65536, 16), 0), ((16384, 64), 0)])
def test_few_rows_and_few_columns_fill_a_gpu_without_spills(
    shape: tuple[int, int], dim: int, dtype: torch.dtype, backend: TritonBackend
) -> None:
    ir = scanned(shape, dim, dtype)
    config = backend.default_config(ir, SM90)
    assert 0.9 * SM90.cores <= programs(ir, config, {}) and launches(ir, config) == 2
    resources = backend.prepare(ir, config, SM90)
    assert resources.spill_bytes == 0 and resources.registers is not None and resources.registers <= 128
    assert backend.infeasible(ir, config, SM90) is None


@pytest.mark.parametrize(("shape", "dim"), [((4096, 4096), 0), ((4096, 4096), 1), ((64, 20000), 1), ((4, 4096), 1)])
def test_rows_that_fill_a_gpu_or_are_short_are_scanned_by_a_program_each(
    shape: tuple[int, int], dim: int, backend: TritonBackend
) -> None:
    ir = scanned(shape, dim, torch.float32)
    assert launches(ir, backend.default_config(ir, SM90)) == 1
