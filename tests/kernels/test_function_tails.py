"""The tails of every function: at every bfloat16 and float16, and densely over float32, on every back end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from function_tails import DTYPES, complaints
from paths import SUPPORT

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import Target
from fuseplan.kernels.ir.ir import KernelIR

CPU = Target("cpu", "native", 1)


@pytest.mark.skipif(CppBackend().unavailable() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("numerics", ["fp32", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_kernels_lose_no_more_than_eager(dtype: torch.dtype, numerics: str, tmp_path: Path) -> None:
    backend = CppBackend(tmp_path)

    def run(ir: KernelIR, x: torch.Tensor) -> list[torch.Tensor]:
        made = backend.fused_callable(ir, backend.default_config(ir, CPU), CPU)(x)
        return list(made) if isinstance(made, tuple) else [made]

    assert list(complaints(run, numerics, dtype)) == []


@pytest.mark.parametrize("name", ["triton", "ninetoothed"])
def test_gpu_kernels_lose_no_more_than_eager_under_the_interpreter(name: str, tmp_path: Path) -> None:
    script = SUPPORT / "function_tails.py"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), name, str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout) == []
