"""Run our attention of one query position under Triton's interpreter and print how wrong it is, as JSON.

A program of its own, as :mod:`interpret_kernels` is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from decode_attention_samples import errors
from interpret_kernels import round_to_nearest

if __name__ == "__main__":
    round_to_nearest()
    print(json.dumps([one for dtype in (torch.float32, torch.bfloat16) for one in errors(dtype, "cpu")]))
