"""Attention of one query position with masks of all kinds, and how wrong our kernel is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from graphs import Builder

from fuseplan.planner.implementations.tunable_group import op_group
from fuseplan.planner.libraries.decode_attention import SplitAttention

#: Batch, query heads, heads of keys, keys, width.
SIZES = ((1, 8, 2, 257, 16), (2, 6, 3, 64, 32), (3, 2, 1, 1, 64), (1, 4, 2, 127, 128))
TOLERANCE = {"torch.float32": 2e-6, "torch.float16": 1.5e-3, "torch.bfloat16": 1.2e-2}


def masks(batch: int, heads: int, keys: int) -> dict[str, torch.Tensor | None]:
    """None, booleans that hide whole blocks, or everything of one batch, ranges, numbers, and numbers for each head."""
    hidden = torch.rand(batch, 1, 1, keys) > 0.4
    hidden[..., : keys // 2] = False
    hidden[..., -1] = True
    nothing = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
    nothing[0] = False
    between = torch.zeros(batch, 1, 1, keys, dtype=torch.bool)
    between[..., keys // 3 : keys - keys // 4] = True
    return {
        "none": None, "hidden": hidden, "nothing seen": nothing, "between": between,
        "between, numbers": torch.zeros(batch, 1, 1, keys).masked_fill(~between, float("-inf")),
        "between, finite": torch.zeros(batch, 1, 1, keys).masked_fill(~between, -65504.0),
        "nothing seen, finite": torch.full((batch, 1, 1, keys), -65504.0),
        "numbers": torch.randn(1, 1, 1, keys), "each head": torch.randn(batch, heads, 1, keys),
    }


def errors(
    dtype: torch.dtype, device: str, sizes: Sequence[tuple[int, int, int, int, int]] = SIZES
) -> Iterator[dict[str, Any]]:
    """How wrong each result is, whether a second call gives the same bits, and whether it lies as PyTorch's does."""
    torch.manual_seed(0)
    for batch, heads, shared, keys, width in sizes:
        query = torch.randn(batch, 1, heads, width).to(dtype).transpose(1, 2)
        cache = {name: torch.randn(batch, shared, keys + 3, width).to(dtype)[:, :, :keys] for name in ("k", "v")}
        for name, mask in masks(batch, heads, keys).items():
            mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
            given = {"q": query, **cache, **({} if mask is None else {"mask": mask})}
            b = Builder(**given)
            out = b("aten.scaled_dot_product_attention.default", *given, enable_gqa=True)
            first, second = called_twice(b, out, device)
            wide = [value.double() if value.is_floating_point() else value for value in given.values()]
            wanted = torch.nn.functional.scaled_dot_product_attention(*wide, enable_gqa=True).nan_to_num(0.0)
            error = float((first.cpu().double() - wanted).abs().max())
            # Scores far below zero are rounded, in eager too.
            allowed = max(TOLERANCE[str(dtype)], 4.0 * float((b.tensors[out].nan_to_num(0.0) - wanted).abs().max()))
            yield {
                "sizes": (batch, heads, shared, keys, width), "mask": name, "dtype": str(dtype), "error": error,
                "right": error <= allowed, "same": bool(torch.equal(first, second)),
                "strides": walked(first) == walked(b.tensors[out]),
            }


def called_twice(b: Builder, out: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results of our kernel for the op that makes ``out``; SystemExit where it refuses it."""
    graph = b.graph(out)
    group = op_group(graph, [node.name for node in graph], [out], device)
    refusal = SplitAttention().refuse(group)
    if refusal is not None:
        raise SystemExit(refusal)
    call = SplitAttention().build(group)
    inputs = [placed(b.tensors[value], device) for value in group.inputs]
    return call(*inputs), call(*inputs)


def placed(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides, which ``to`` gives up for part of a cache."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)


def walked(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have several elements."""
    return [stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True) if extent > 1]
