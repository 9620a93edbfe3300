"""Layouts that fake tensors get wrong: a trace must lie in memory as eager's tensors will.

PyTorch's fake ``x[i]`` lies as ``x`` does. Eager's goes by the index too where ``x`` tells nothing about the order of
dimensions: those that it replaces have stride 0 for it (``restride_src`` in ATen's ``TensorAdvancedIndexing.cpp``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._prims_common import compute_elementwise_output_strides
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuseplan.planner.trace_edit import follow, set_values, value_of

_INDEX = torch.ops.aten.index.Tensor


def correct_layouts(module: fx.GraphModule) -> None:
    """Give what is indexed with tensors in a pre-dispatch trace, and all that reads it, the layout that eager makes.

    A trace that could not run with it (a ``view`` of what is not laid out for it) stays as it is: eager fails there.

    Raises:
        ValueError: Not even the shape of a fake value is eager's.
    """
    for node in module.graph.find_nodes(op="call_function", target=_INDEX):
        source, result = value_of(node.args[0]), value_of(node)
        indices = {dim: value for dim, one in enumerate(node.args[1]) if (value := value_of(one)) is not None}
        if source is None or result is None or not indices or any(map(_is_mask, indices.values())):
            continue
        mode = torch._guards.detect_fake_mode(result)
        assert mode is not None, f"{node} has no fake value"
        with torch.no_grad(), mode:
            strides = compute_elementwise_output_strides(*_operands(source.detach(), indices))
            if len(strides) != result.dim():  # an index without dimensions, which fake tensors do not broadcast
                raise ValueError(f"{node} has {len(strides)} dimensions, for PyTorch's fake tensors {result.dim()}")
            if _same(strides, result.stride()):
                continue
            made = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
        values = follow(node, made, corrected=True)
        if values is not None:
            set_values(values)


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _operands(source: torch.Tensor, indices: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """What ATen walks together, each in the shape of the result: the source where the indices are 0, and these."""
    shape = torch.broadcast_shapes(*(one.shape for one in indices.values()))
    common = [one.expand(shape) for one in indices.values()]
    at, count = min(indices), len(indices)
    if max(indices) - at + 1 != count:  # a slice parts them: their dimensions come first
        source, at = source.permute(*indices, *(dim for dim in range(source.dim()) if dim not in indices)), 0

    def replaced(of_source: Sequence[Any], of_index: Sequence[Any]) -> tuple[Any, ...]:
        return (*of_source[:at], *of_index, *of_source[at + count :])

    strides = replaced(source.stride(), (0,) * len(shape))
    # Single elements have strides that count: those of ``reshape``, as in ATen.
    aligned, whole = replaced([1] * source.dim(), shape), replaced(source.shape, shape)
    return [source.as_strided(whole, strides), *(one.reshape(aligned).expand(whole) for one in common)]


def _same(strides: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(statically_known_true(one == other) for one, other in zip(strides, others, strict=True))
