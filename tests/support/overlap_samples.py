"""Kernels for the tests of overlap: one of each kind, and steps of a chain whose result tells of every missed write."""

from __future__ import annotations

import ir_samples as samples
import torch
from ir_samples import Body, Sample

from fuseplan.kernels.ir.ir import Buffer, KernelIR


def one_of_each() -> list[Sample]:
    """One segment and several, persistent and looped, gathers, padding, broadcasts, dynamic sizes."""
    kinds = {sample.name: sample for sample in samples.static_samples() + samples.dynamic_samples()}
    return [*kinds.values(), samples.softmax(4, 50000)]


def step(rows: int, cols: int, reduces: bool = False, flips: bool = True) -> KernelIR:
    """``y[r, c] = x[rows - 1 - r, cols - 1 - c] + 1``, exact for integers below 2^24; :func:`stepped` computes it.

    Far apart programs read what one wrote, and a value that was read too early, or written too late, stays wrong.

    Args:
        rows, cols: The sizes.
        reduces: Compute each row's largest value first (and add nothing), which reads the row twice where it is looped.
        flips: Read from the other end; else ``y = x + 1``, which may lie in its input.
    """
    strides = (cols, 1)
    buffers = (Buffer("x", "float32", (rows, cols), strides), Buffer("y", "float32", (rows, cols), strides, True))
    body = Body(buffers, [rows], cols)
    row, col = body.at
    value = body.load("x", [row * -1 + (rows - 1), col * -1 + (cols - 1)] if flips else [row, col])
    result = body("add", value, body.const(1.0))
    if reduces:
        top = body.reduce("max", value)
        result = body("add", result, body("sub", top, top))
    body.store("y", [row, col], result)
    return KernelIR(buffers, (body.segment(),))


def stepped(x: torch.Tensor) -> torch.Tensor:
    """What :func:`step` computes, where it flips."""
    return x.flip(0, 1) + 1
