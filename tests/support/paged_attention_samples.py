"""Attention of one query position over pages of all sizes, with and without a cap: how wrong our kernel is there."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from decode_attention_samples import TOLERANCE, called_twice, masks, placed, walked
from graphs import Builder

from fuseplan.planner.implementations.tunable_group import op_group
from fuseplan.planner.libraries.decode_attention import SplitAttention
from fuseplan.planner.libraries.library_call import Call

DECODE_ATTENTION = "fuseplan.decode_attention.default"
#: Batch, query heads, heads of keys, blocks of a sequence, keys of a page, width.
SIZES = (
    (2, 4, 2, 7, 16, 16), (1, 2, 1, 5, 32, 32), (2, 6, 3, 5, 48, 16), (3, 4, 4, 3, 64, 16), (1, 8, 2, 3, 128, 64),
    (2, 2, 1, 1, 256, 16), (1, 4, 2, 77, 1, 16), (1, 2, 2, 30, 5, 16), (1, 4, 2, 1, 130, 16),
)
DTYPES = torch.float32, torch.bfloat16, torch.float16
CAP = 3.0


def pool(
    batch: int, shared: int, blocks: int, page: int, width: int, heads_last: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages of keys and of values, [pages, kv heads, rows, width], and a table that takes them in no order.

    Sequences share their first page where they have several, and the last number counts from the end.
    """
    count = batch * blocks + 3
    kept = []
    for _ in range(2):
        if heads_last:
            kept.append(torch.randn(count, page, shared, width).transpose(1, 2))
        else:
            kept.append(torch.randn(count, shared, page, width))
    table = torch.randperm(count)[: batch * blocks].view(batch, blocks)
    if blocks > 1:
        table[:, 0] = table[0, 0]
    table[-1, -1] -= count
    return kept[0], kept[1], table


def one_after_another(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[batch, kv heads, blocks * rows, width], page by page."""
    return torch.stack([torch.cat([pages[int(page)] for page in row], 1) for row in table])


def exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, cap: float | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention by its formula in float64; rows that see nothing are NaN."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (one.double() for one in (query, key, value))
    key, value = (one.repeat_interleave(group, 1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * (scale or 1.0 / math.sqrt(query.shape[3]))
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    return torch.softmax(scores, -1) @ value


def errors(device: str) -> Iterator[dict[str, Any]]:
    """How wrong each result is, whether a second call gives the same bits, and whether it lies as the op's does."""
    torch.manual_seed(0)
    for number, (batch, heads, shared, blocks, page, width) in enumerate(SIZES):
        dtype = DTYPES[number % 3]
        length = blocks * page
        key, value, table = pool(batch, shared, blocks, page, width, heads_last=number % 2 == 1)
        key, value = key.to(dtype), value.to(dtype)
        query = torch.randn(batch, 1, heads, width).to(dtype).transpose(1, 2)
        table = table.to(torch.int32) if number % 3 else table
        static = one_after_another(key, table), one_after_another(value, table)
        kinds = masks(batch, heads, length)
        wanted = ("none", "hidden", "nothing seen", "between", "between, numbers", "each head")
        kinds = {name: kinds[name] for name in (wanted if number < 2 else wanted[2:4])}
        kinds["least number"] = torch.full((batch, 1, 1, length), torch.finfo(dtype).min)
        for (name, mask), cap, paged in itertools.product(kinds.items(), (None, CAP), (True, False)):
            if (cap is None and (not paged or name == "least number")) or (not paged and number > 1):
                continue
            mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
            given = {"q": query, "k": key, "v": value, "t": table} if paged else {
                "q": query, "k": static[0], "v": static[1]}
            given |= {} if mask is None else {"m": mask}
            attrs = {"block_table": None} if not paged else {"attn_mask": None} if mask is None else {}
            found = _judged(given, {**attrs, "cap": cap}, exact(query, *static, mask, cap), device)
            yield {"sizes": SIZES[number], "mask": name, "cap": cap, "paged": paged, "dtype": str(dtype), **found}


def missing_pages(device: str) -> Iterator[dict[str, Any]]:
    """Whether a call fails that is shown keys of a page that does not exist, and no other one.

    Not for a GPU: what fails there fails all that follows.
    """
    torch.manual_seed(0)
    for (page, blocks), wraps in itertools.product(((16, 5), (64, 2), (3, 9)), (True, False)):
        key, value, table = pool(3, 2, blocks, page, 16)
        query, mask = torch.randn(3, 4, 1, 16), torch.ones(3, 1, 1, blocks * page, dtype=torch.bool)
        mask[0, ..., :page] = False
        table %= len(key)  # counted from the start
        b = Builder(q=query, k=key, v=value, t=table, m=mask)
        out = b(DECODE_ATTENTION, "q", "k", "v", "t", "m", wraps=wraps)
        graph = b.graph(out)
        call = SplitAttention().build(op_group(graph, [node.name for node in graph], [out], device))
        wanted = exact(query, one_after_another(key, table), one_after_another(value, table), mask)
        run = functools.partial(_with_page, call, [b.tensors[one] for one in ("q", "k", "v", "t", "m")], device)
        hidden, negative = run(0, 0, number=len(key)), run(1, 0, number=int(table[1, 0]) - len(key))
        found = [one for one in (hidden, negative if wraps else hidden) if one is not None]
        error = max((float((one - wanted).abs().max()) for one in found), default=math.inf)
        failing = [run(1, blocks - 1, number=len(key)), run(2, 0, number=-len(key) - 1), *([] if wraps else [negative])]
        right = len(found) == 2 and error <= TOLERANCE["torch.float32"] and failing == [None] * len(failing)
        yield {"page": page, "mask": "missing", "error": error, "right": right, "same": True, "strides": True}


def _with_page(call: Call, given: Sequence[torch.Tensor], device: str, *at: int, number: int) -> torch.Tensor | None:
    """The result with another number in the table, the fourth operand; None where the call fails."""
    changed = [one.clone() for one in given]
    changed[3][at] = number
    try:
        return call(*(placed(one, device) for one in changed)).cpu().double()
    except Exception as error:
        if "outside its table" not in str(error):
            raise
        return None


def _judged(given: dict[str, torch.Tensor], attrs: dict[str, Any], wanted: torch.Tensor, device: str) -> dict[str, Any]:
    b = Builder(**given)
    out = b(DECODE_ATTENTION, *given, **attrs)
    first, second = called_twice(b, out, device)
    if attrs["cap"] is None:
        wanted = wanted.nan_to_num(0.0)
    result, eager = first.cpu().double(), b.tensors[out]
    same = (result - wanted).abs().masked_fill(result.isnan() & wanted.isnan(), 0.0)
    worst = (eager - wanted).abs().masked_fill(eager.isnan() & wanted.isnan(), 0.0)
    # Scores far below zero are rounded, in eager too. Weights of one page are few: what they sum rounds little.
    error, allowed = float(same.max()), max(TOLERANCE[str(first.dtype)], 4.0 * float(worst.max()))
    return {
        "error": error, "right": error <= allowed, "same": bool(torch.equal(first.isnan(), second.isnan()))
        and bool(torch.equal(first.nan_to_num(0.0), second.nan_to_num(0.0))), "strides": walked(first) == walked(eager),
    }
