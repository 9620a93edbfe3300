"""Run Triton's kernels of matmul groups on CPU tensors under its interpreter and print how wrong they are, as JSON.

A program of its own, as :mod:`interpret_kernels` is: ``python interpret_matmuls.py FOLDER``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from interpret_kernels import round_to_nearest
from matmul_groups import groups, lowered_whole

from fuseplan.kernels.ir.backend import SM90, Config
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.triton.backend import TritonBackend


def configs(backend: TritonBackend, ir: KernelIR, rows: int) -> Iterator[Config]:
    """The default, and blocks that end before, at and behind the last row, column and inner element."""
    yield backend.default_config(ir, SM90)
    for cols, inner in ((1, 64), (8, 16), (16, 32)) if rows == 1 else ((16, 16), (32, 64)):
        yield {"block_rows": 1 if rows == 1 else 16, "block_cols": cols, "block_inner": inner, "num_warps": 1}
    for cols, splits in ((16, 2), (32, 4)) if rows > 1 else ():
        yield {"block_rows": 16, "block_cols": cols, "block_inner": 16, "num_warps": 1, "splits": splits}


def main(cache_dir: str) -> None:
    round_to_nearest()
    backend = TritonBackend(cache_dir)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, b, outputs in groups(dtype):
            lowered, expected = lowered_whole(b, *outputs)
            for config in configs(backend, lowered.ir, b.tensors["x"].shape[0]):
                kernel = backend.fused_callable(lowered.ir, config, SM90)
                made = kernel(*(value.clone() for value in b.values(lowered.inputs)))
                made = made if isinstance(made, tuple) else (made,)
                error = max(
                    float((one.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
                    for one, wanted in zip(made, expected, strict=True)
                )
                found.append({"group": name, "dtype": str(dtype), "config": dict(config), "error": error})
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
