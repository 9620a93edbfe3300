"""Matmuls of few rows on CPUs: what counts is how fast the weights come from memory, each row of them read once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuseplan.kernels.cpp.emitter import prelude
from fuseplan.kernels.cpp.launch import RunSettings, load_kernel
from fuseplan.kernels.cpp.types import STORAGE_TYPE
from fuseplan.kernels.ir.backend import fused_call
from fuseplan.kernels.ir.index import row_major_strides
from fuseplan.kernels.ir.ir import Buffer, KernelIR
from fuseplan.kernels.native.build import Compiler, default_cache_dir, required_compiler

#: Rows of activations above which libraries, whose tiles reuse the weights, are faster.
MAX_ROWS = 16


@dataclass(frozen=True)
class FewRows:
    """``x @ w.T + bias``: x ``[rows, inner]`` contiguous, w ``[cols, inner]`` with ``stride`` between its rows, bias
    ``[cols]`` or none; all of ``dtype``. The result has ``shape`` and is contiguous.
    """

    rows: int
    cols: int
    inner: int
    stride: int
    dtype: str
    bias: bool
    shape: tuple[int, ...]

    def source(self) -> str:
        """The C++ text."""
        macros = {
            "FP_WIDEST": 4, "FP_STREAM": 0, "FP_ROUGH": 0, "FP_TYPE": STORAGE_TYPE[self.dtype], "FP_ROWS": self.rows,
            "FP_COLS": self.cols, "FP_INNER": self.inner, "FP_STRIDE": self.stride, "FP_BIAS": int(self.bias),
            "FP_BF16": int(self.dtype == "bfloat16"), "FP_NAME": "fuseplan_matmul",
        }
        lines = [f"#define {name} {value}" for name, value in macros.items()]
        return "\n".join([*lines, prelude(), (Path(__file__).parent / "cpp_matmul.h").read_text()])

    def build(self, compiler: Compiler | None = None) -> Callable[..., Any]:
        """``call(x, w)`` or ``call(x, w, bias)``; BuildError without a compiler."""
        compiler, folder = compiler or required_compiler(), default_cache_dir()
        ir, settings = self._buffers(), RunSettings(threads=os.cpu_count() or 1, release_gil=True)
        return fused_call(load_kernel(ir, self.source(), settings, compiler, folder), ir)

    def _buffers(self) -> KernelIR:
        def buffer(name: str, *shape: int, is_output: bool = False) -> Buffer:
            return Buffer(name, self.dtype, shape, row_major_strides(shape), is_output)

        given = [buffer("x", self.rows, self.inner), buffer("w", self.cols, self.inner)]
        given += [buffer("bias", self.cols)] if self.bias else []
        return KernelIR((*given, buffer("out", *self.shape, is_output=True)), ())
