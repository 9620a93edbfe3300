"""Run our attention of one query position under Triton's interpreter and print how wrong it is, as JSON.

A program of its own, as :mod:`interpret_kernels` is. ``python interpret_attention.py paged`` runs it over pages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import decode_attention_samples as static
import paged_attention_samples as paged
from triton_interpreter import mend

if __name__ == "__main__":
    mend()
    if sys.argv[1:] == ["paged"]:
        found = [*paged.errors("cpu"), *paged.missing_pages("cpu")]
    else:
        found = [*static.errors(torch.float32, "cpu"), *static.errors(torch.bfloat16, "cpu", static.SIZES[1:3])]
    print(json.dumps(found))
