"""Rows to put in order, with ties, NaN and both zeros; and what our kernel makes of them.

Run as a program it does so under Triton's interpreter, and prints what differs as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from decode_attention_samples import placed
from graphs import Builder
from triton_interpreter import mend

from fuseplan.planner.implementations.tunable_group import op_group
from fuseplan.planner.libraries.short_rows import MOST_COLUMNS, ShortRows

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def sources() -> Iterator[tuple[str, torch.Tensor]]:
    """Operands of all types, odd sizes, with gaps between rows and between elements."""
    generator = torch.Generator().manual_seed(0)
    for dtype in TYPES:
        numbers = (torch.randn(3, 37, generator=generator) * 3).round().abs().to(dtype)  # most are there twice
        if dtype.is_floating_point:
            numbers = torch.where(torch.rand(3, 37, generator=generator) < 0.5, -numbers, numbers)
            numbers[1, ::5], numbers[1, 1], numbers[2, 3] = torch.nan, -torch.inf, torch.inf
        yield f"{dtype}", numbers
    wide = torch.randn(2, 3, 129, generator=generator)
    yield "wide", wide
    yield "every other", wide[..., ::2]
    yield "part of rows", wide[..., 5:69]
    yield "one row", torch.randint(0, 8, (127,), generator=generator)
    yield "two elements", torch.tensor([[2.0, 1.0], [1.0, 2.0], [1.0, 1.0]])
    yield "negative NaN", torch.tensor([[1.0, -torch.nan, torch.inf, -torch.inf, torch.nan, 0.0, -0.0]])
    yield "longest", torch.randint(-50, 50, (1, MOST_COLUMNS), generator=generator)


def calls(columns: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for descending in (False, True):
        yield "aten.sort.default", {"dim": -1, "descending": descending}
        yield "aten.sort.stable", {"stable": True, "dim": -1, "descending": descending}
        yield "aten.topk.default", {"k": min(8, columns), "dim": -1, "largest": descending, "sorted": True}


def faults(device: str) -> Iterator[dict[str, Any]]:
    """Of every operand and call, and each of the results that may be needed: what is wrong, "" for nothing."""
    for name, source in sources():
        for op, attrs in calls(source.shape[-1]):
            descending = attrs.get("descending", attrs.get("largest"))
            ordered = torch.sort(source, dim=-1, descending=descending, stable=True)
            wanted = [one[..., : attrs.get("k", source.shape[-1])] for one in ordered]
            for needed in ((0, 1), (0,), (1,)):
                found = run(source, op, attrs, needed, device)
                expected = [wanted[at] for at in needed]
                same = len(found) == len(expected) and all(
                    torch.equal(one.nan_to_num(77.0), other.nan_to_num(77.0))
                    for one, other in zip(found, expected, strict=True))
                yield {"what": f"{name} {op} {attrs} {needed}", "wrong": "" if same else f"{found} for {expected}"}


def run(
    source: torch.Tensor, op: str, attrs: dict[str, Any], needed: tuple[int, ...], device: str
) -> list[torch.Tensor]:
    """The needed results of our kernel for one op; SystemExit where it refuses it."""
    b = Builder(x=source)
    made = b.many(op, "x", outputs=2, **attrs)
    outputs = [made[at] for at in needed]
    group = op_group(b.graph(*outputs), [made[0]], outputs, device)
    if (refusal := ShortRows().refuse(group)) is not None:
        raise SystemExit(f"{op}: {refusal}")
    found = ShortRows().build(group)(placed(source, device))
    return [one.cpu() for one in (found if isinstance(found, tuple) else (found,))]


if __name__ == "__main__":
    mend()
    print(json.dumps(list(faults("cpu"))))
