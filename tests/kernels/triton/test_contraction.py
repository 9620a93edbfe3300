"""Triton's kernels of matmul groups: right under the interpreter, compiled for a GPU that is not there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graphs import Builder
from matmul_groups import attention_inputs, gated, is_right, lowered_whole, residual
from ptx_paths import ptx_of
from quantised_groups import FORMATS, quantised

from fuseplan.kernels.ir.backend import SM90, BuildError
from fuseplan.kernels.ir.ir import RowValue
from fuseplan.kernels.triton.backend import TritonBackend

pytest.importorskip("triton")
SUPPORT = Path(__file__).parents[2] / "support"


def test_kernels_are_right_under_the_interpreter_and_repeat_themselves(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "interpret_matmuls.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    wrong = [one for one in found if not is_right(one)]
    assert not wrong, wrong[:5]
    names = {one["group"] for one in found}
    assert all(any(name.startswith(kind) for name in names) for kind in ("residual", "gated", "large", *FORMATS))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("group", ["residual", "gated", "attention inputs"])
def test_defaults_compile_without_spills(tmp_path: Path, group: str, rows: int) -> None:
    b, outputs = {
        "residual": lambda: residual(rows, 256, 512, torch.bfloat16),
        "gated": lambda: gated(rows, 256, 512, torch.bfloat16),
        "attention inputs": lambda: attention_inputs(rows, 512, torch.bfloat16),
    }[group]()
    backend, (lowered, _) = TritonBackend(tmp_path), lowered_whole(b, *outputs)
    assert backend.refuse(lowered.ir, SM90) is None
    resources = backend.prepare(lowered.ir, backend.default_config(lowered.ir, SM90), SM90)
    assert resources.spill_bytes == 0


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("name", FORMATS)
def test_kernels_of_narrow_weights_compile_without_spills(tmp_path: Path, name: str, rows: int) -> None:
    backend, (lowered, _) = TritonBackend(tmp_path), lowered_whole(quantised(name, rows, 256, 512, torch.bfloat16))
    config = backend.default_config(lowered.ir, SM90)
    assert backend.refuse(lowered.ir, SM90) is None
    assert backend.prepare(lowered.ir, config, SM90).spill_bytes == 0
    # One row of weights [inner, width] would be single words of memory: they are tiles for one row, too.
    tiled = rows > 1 or "AWQ" in name or "by columns" in name
    assert bool(re.search(r"mma\.\S*\.bf16\.bf16", ptx_of(backend, lowered.ir, config))) == tiled


def test_words_and_scales_are_loaded_once_for_all_that_share_them(tmp_path: Path) -> None:
    backend = TritonBackend(tmp_path)

    def loads(name: str) -> int:
        lowered, _ = lowered_whole(quantised(name, 16, 256, 512, torch.bfloat16))
        ptx = ptx_of(backend, lowered.ir, backend.default_config(lowered.ir, SM90))
        return len(re.findall(r"\bld\.global|\bcp\.async\.c[ag]", ptx))

    counts = {name: loads(name) for name in FORMATS}
    assert max(counts.values()) < 1.5 * counts["bfloat16, widened"], counts


def test_sums_that_wait_for_their_rows_are_not_split(tmp_path: Path) -> None:
    """In float16 rows are normalised first: what is not normalised yet need not fit."""
    b, outputs = gated(16, 2048, 512, torch.float16)
    backend, (lowered, _) = TritonBackend(tmp_path), lowered_whole(b, *outputs)
    assert not any(isinstance(instr, RowValue) for segment in lowered.ir.segments for instr in segment.body)
    config = {**backend.default_config(lowered.ir, SM90), "block_inner": 32, "splits": 2}
    assert "wait" in (backend.infeasible(lowered.ir, config, SM90) or "")
    with pytest.raises(BuildError, match="wait"):
        backend.source(lowered.ir, config)


def test_kernels_are_alike_whatever_follows_their_matmuls(tmp_path: Path) -> None:
    backend = TritonBackend(tmp_path)

    def likeness(built: tuple[Builder, tuple[str, ...]]) -> object:
        b, outputs = built
        return backend.likeness(lowered_whole(b, *outputs)[0].ir)

    def rows_of(count: int, width: int = 33, inner: int = 40) -> object:
        return likeness(residual(count, width, inner, torch.bfloat16))

    followed = residual(3, 33, 40, torch.bfloat16)[0]
    activated = followed("aten.silu.default", followed("aten.linear.default", "x", "w"))
    assert rows_of(3) == rows_of(16) == likeness((followed, (activated,))) is not None
    assert len({rows_of(1), rows_of(3), rows_of(17), rows_of(3, width=34), rows_of(3, inner=41)}) == 5
    normed, _ = gated(3, 33, 40, torch.bfloat16)
    gate, up = (normed("aten.linear.default", "x", name) for name in ("gate", "up"))
    without = normed("aten.mul.Tensor", normed("aten.silu.default", gate), up)
    assert likeness((normed, (without,))) != likeness(gated(3, 33, 40, torch.bfloat16))
    assert backend.likeness(lowered_whole(*_sum())[0].ir) is None


def _sum() -> tuple[Builder, str]:
    b = Builder(x=torch.randn(3, 8), y=torch.randn(3, 8))
    return b, b("aten.add.Tensor", "x", "y")
