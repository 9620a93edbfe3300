"""Run Triton's kernels of matmul groups on CPU tensors under its interpreter and print how wrong they are, as JSON.

A program of its own, as :mod:`interpret_kernels` is: ``python interpret_matmuls.py FOLDER [tiles] [--all]``, with
groups of many rows where ``tiles`` is given. A group runs with one of its configurations; ``--all``: with all.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from matmul_groups import dynamic_errors, errors, groups, plain_groups, tiled_groups
from triton_interpreter import mend

from fuseplan.kernels.gpu.launch import Variant
from fuseplan.kernels.ir.backend import Config
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.triton.backend import TritonBackend


class Misaligned(TritonBackend):
    """Kernels as for memory that begins at any address."""

    def _function(self, ir: KernelIR, config: Config, variant: Variant) -> Any:
        return super()._function(ir, config, replace(variant, aligned=False))


def main(cache_dir: str, *which: str) -> None:
    mend()
    backend, halves = TritonBackend(cache_dir), (torch.bfloat16, torch.float16)
    given = [(backend, torch.bfloat16, groups(torch.bfloat16))]
    given += [(backend, dtype, plain_groups(dtype)) for dtype in (torch.float16, torch.float32)]
    if "tiles" in which:
        backends = zip((backend, Misaligned(cache_dir)), halves, strict=True)
        given = [(made, dtype, tiled_groups(dtype)) for made, dtype in backends]
    found = [
        one for made, dtype, several in given
        for one in errors(made, dtype, "cpu", several, None if "--all" in which else 1)
    ]
    if "tiles" in which:
        found += dynamic_errors(backend, torch.bfloat16, "cpu")
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
