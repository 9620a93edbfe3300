"""Where the elements of a tensor lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from fuseplan.kernels.ir.index import evaluate_all
from fuseplan.kernels.ir.ir import Buffer

#: Shape and strides.
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def same_layout(one: Layout, other: Layout) -> bool:
    """Equal, except for strides over a single element, which are free."""
    return one[0] == other[0] and all(
        own == its for extent, own, its in zip(one[0], one[1], other[1], strict=True) if extent != 1
    )


def layout_of(buffer: Buffer, symbols: Mapping[str, int | float]) -> Layout:
    """Shape and strides of a buffer for these sizes."""
    return evaluate_all(buffer.shape, symbols), evaluate_all(buffer.strides, symbols)


def laid_out(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor itself when its strides are those, else a copy that has them."""
    if same_layout((tuple(tensor.shape), tuple(tensor.stride())), (shape, strides)):
        return tensor
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
