"""Long folds whose columns several programs share: which kernels have such, compiled for sm_90, and right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from long_folds import LONG_FOLDS, WHOLE_FOLDS, lowered_fold
from paths import SUPPORT

from fuseplan.kernels.gpu.tile import programs
from fuseplan.kernels.ir.backend import SM90
from fuseplan.kernels.triton.backend import TritonBackend

#: A tile of several rows, one row, one whose third split has fewer columns than a block and whose fourth has none, and
#: one of which splits have nothing to do.
CONFIGS: tuple[Mapping[str, int], ...] = (
    {"block_rows": 4, "block_cols": 32, "num_warps": 1, "splits": 4},
    {"block_rows": 1, "block_cols": 64, "num_warps": 2, "splits": 8, "num_stages": 2},
    {"block_rows": 1, "block_cols": 256, "num_warps": 1, "splits": 4},
    {"block_rows": 2, "block_cols": 2048, "num_warps": 2, "splits": 4},
)


@pytest.fixture
def backend(tmp_path: Path) -> TritonBackend:
    return TritonBackend(tmp_path)


def test_they_are_right_under_the_interpreter(tmp_path: Path) -> None:
    """Against float64, and the same bits again: counters are as they were before."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "long_folds.py"), str(tmp_path), json.dumps(CONFIGS)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows = json.loads(result.stdout)
    assert len(rows) == len((*LONG_FOLDS, *WHOLE_FOLDS)) * len(CONFIGS)
    assert [row for row in rows if not row["error"] <= 1.0 or not row["repeats"]] == []


@pytest.mark.parametrize("name", LONG_FOLDS)
def test_programs_share_them_where_there_would_be_few(name: str, backend: TritonBackend) -> None:
    ir = lowered_fold(name, 2**22).ir
    config = backend.default_config(ir, SM90)
    assert SM90.cores <= programs(ir, config, {}) <= 4 * SM90.cores
    assert backend.infeasible(ir, config, SM90) is None
    assert backend.prepare(ir, config, SM90).spill_bytes == 0
    alone = {**config, "splits": 1}
    assert programs(ir, alone, {}) < SM90.cores and backend.scratch(ir, alone) == (0, 0) != backend.scratch(ir, config)


@pytest.mark.parametrize("name", WHOLE_FOLDS)
def test_what_needs_its_fold_before_it_goes_on_is_not_shared(name: str, backend: TritonBackend) -> None:
    ir = lowered_fold(name, 2**22).ir
    default = backend.default_config(ir, SM90)
    assert "splits" not in default and backend.prepare(ir, default, SM90).spill_bytes == 0
    config = {"block_rows": 1, "block_cols": 1024, "num_warps": 4, "splits": 4}
    assert "splits" in (backend.infeasible(ir, config, SM90) or "") and backend.scratch(ir, config) == (0, 0)


def test_short_rows_are_not_shared(backend: TritonBackend) -> None:
    assert "splits" not in backend.default_config(lowered_fold("sum", 4096).ir, SM90)
