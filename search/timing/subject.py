"""What the search tunes: one fusion group, seen only through this protocol (the planner implements it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.ir import KernelIR


class Subject(Protocol):
    """A fusion group with concrete sizes. Picklable: it travels to the measuring process."""

    @property
    def key(self) -> str:
        """Canonical workload key (structure, shapes, dtypes, strides; no device)."""

    @property
    def label(self) -> str:
        """Short name for people (``add+mul+rsqrt 32x2048 bfloat16``)."""

    @property
    def ir(self) -> KernelIR:
        """The fused kernel, static (symbols bound)."""

    @property
    def work(self) -> Work:
        """Bytes, flops and launches of the fused kernel."""

    @property
    def hot_inputs(self) -> tuple[bool, ...]:
        """Per input: True for an activation just produced on the device, False for a weight, cold in memory."""

    @property
    def positions(self) -> Mapping[int, int]:
        """By the number of an input of integers that pick elements: all below this are positions that exist."""

    def make_inputs(self, seed: int, device: str) -> list[torch.Tensor]:
        """Fresh random tensors, one per IR input buffer, with the buffer's dtype, shape and strides."""

    def allocate_outputs(self, device: str) -> list[torch.Tensor]:
        """Uninitialised tensors, one per IR output buffer, with its dtype, shape and strides."""

    def eager(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The unfused chain: the ATen ops one by one, allocating as PyTorch does."""

    def reference(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The same maths with every float op in float64 and no intermediate rounding (on any device)."""
