"""Run Triton's kernels of matmul groups on CPU tensors under its interpreter and print how wrong they are, as JSON.

A program of its own, as :mod:`interpret_kernels` is: ``python interpret_matmuls.py FOLDER [tiles]``, with groups of
many rows where ``tiles`` is given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from interpret_kernels import round_to_nearest
from matmul_groups import errors, groups, tiled_groups

from fuseplan.kernels.triton.backend import TritonBackend


def main(cache_dir: str, which: str = "") -> None:
    round_to_nearest()
    backend, halves = TritonBackend(cache_dir), (torch.bfloat16, torch.float16)
    given = [(dtype, tiled_groups(dtype)) for dtype in halves] if which == "tiles" else [
        (dtype, groups(dtype)) for dtype in (*halves, torch.float32)]
    print(json.dumps([one for dtype, several in given for one in errors(backend, dtype, "cpu", several)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
