"""Attention of few query rows on CPUs: what counts is how fast keys and values come from memory, each read once."""

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
from fuseplan.kernels.ir.ir import Buffer, KernelIR
from fuseplan.kernels.native.build import Compiler, default_cache_dir, required_compiler

#: Query rows that read one head of keys above which matrix products are faster, and elements of a head at most.
MAX_ROWS, MAX_WIDTH = 16, 256
#: Ranges of keys that are enough for the threads of any machine, the keys of the shortest one and what all are
#: multiples of, and elements of keys and values that are worth waking a thread.
_ENOUGH_TASKS, _LEAST_KEYS, _BLOCK, _GRAIN = 256, 512, 64, 32 * 1024


@dataclass(frozen=True)
class FewRowsAttention:
    """``softmax(scale * q @ k.T + mask) @ v`` over static sizes.

    Attributes:
        dtype: Of all but the mask.
        query, key, value, result: Shape ``[batch, heads, rows, elements]`` and strides; elements lie side by side.
            Heads of keys are those of queries, or fewer that divide them.
        mask: Type (``"bool"``: which keys count) and strides by batch, head, row and key; None without one.
    """

    dtype: str
    query: Buffer
    key: Buffer
    value: Buffer
    result: Buffer
    mask: Buffer | None
    mask_strides: tuple[int, int, int, int]
    scale: float

    def source(self) -> str:
        """The C++ text."""
        batch, heads, positions, width = map(int, self.query.shape)
        shared, keys = int(self.key.shape[1]), int(self.key.shape[2])
        strides = [one.strides[:3] for one in (self.query, self.key, self.value, self.result)]
        mask = "bool" if self.mask is None else self.mask.dtype
        macros = {
            "FP_WIDEST": 4, "FP_STREAM": 0, "FP_ROUGH": 0, "FP_NAME": "fuseplan_attention",
            "FP_TYPE": STORAGE_TYPE[self.dtype], "FP_KEYS": keys, "FP_RANGE": key_range(batch * shared, keys),
            "FP_HEADS": shared, "FP_PAIRS": batch * shared, "FP_GROUP": heads // shared, "FP_POSITIONS": positions,
            "FP_WIDTH": width, "FP_DEPTH": self.value.shape[3], "FP_STRIDES": _braced(map(_braced, strides)),
            "FP_MASK": 0 if self.mask is None else 1 if mask == "bool" else 2, "FP_MASK_TYPE": STORAGE_TYPE[mask],
            "FP_MASK_STRIDES": _braced(self.mask_strides[:3]), "FP_MASK_KEY": self.mask_strides[3],
            "FP_SCALE": repr(self.scale),
        }
        lines = [f"#define {name} {value}" for name, value in macros.items()]
        return "\n".join([*lines, prelude(), (Path(__file__).parent / "few_rows.h").read_text()])

    def build(self, compiler: Compiler | None = None) -> Callable[..., Any]:
        """``call(query, key, value)`` or ``call(query, key, value, mask)``; BuildError without a compiler."""
        compiler, folder = compiler or required_compiler(), default_cache_dir()
        given = [self.query, self.key, self.value, *([] if self.mask is None else [self.mask])]
        ir = KernelIR((*given, self.result), ())
        settings = RunSettings(threads=os.cpu_count() or 1, grain=_GRAIN, release_gil=True)
        return fused_call(load_kernel(ir, self.source(), settings, compiler, folder), ir)


def key_range(pairs: int, keys: int) -> int:
    """Keys of one task, where there are so many heads of keys. Sizes alone decide: threads change no bit of a result.
    """
    ranges = max(1, min(_ENOUGH_TASKS // pairs, keys // _LEAST_KEYS))
    return -(-keys // (ranges * _BLOCK)) * _BLOCK


def _braced(items: Any) -> str:
    return f"{{{', '.join(map(str, items))}}}"
