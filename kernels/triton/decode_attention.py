"""Attention of one query position in Triton: keys are split among programs, and the last program of a head combines.

The query heads that share keys are rows of one tile, so keys and values are read once. Each split keeps its own maximum
and sum (Flash-Decoding, Dao et al. 2023). Partial results are combined in the order of the splits, whoever is last: the
same call gives the same bits. Blocks of keys that a boolean mask hides from all heads are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Query heads of a tile at least: what tensor cores multiply.
TILE_HEADS = 16
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    query, key, value, mask, partial, sums, counters, out, length, scale,
    query_batch, query_head, key_batch, key_head, key_row, value_batch, value_head, value_row,
    mask_batch, mask_head, mask_row, out_batch, out_head,
    group: tl.constexpr, lanes: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, splits: tl.constexpr,
    key_heads: tl.constexpr, mask_kind: tl.constexpr, wide: tl.constexpr, overlapped: tl.constexpr,
):
    """``mask_kind``: 0 none, 1 boolean, 2 numbers. ``group`` query heads, of ``lanes`` lanes, share a key."""
    pair = tl.program_id(0)
    split = tl.program_id(1)
    batch = (pair // key_heads).to(tl.int64)
    shared = (pair % key_heads).to(tl.int64)
    head = tl.arange(0, lanes)
    column = tl.arange(0, width)
    real = head < group
    own = shared * group + head
    at = batch * query_batch + own[:, None] * query_head + column[None, :]
    if overlapped:
        gdc_launch_dependents()
        gdc_wait()
    q = tl.load(query + at, mask=real[:, None], other=0.0)
    if wide:
        q = q.to(tl.float32)
    most = tl.full((lanes,), float("-inf"), tl.float32)
    total = tl.zeros((lanes,), tl.float32)
    found = tl.zeros((lanes, width), tl.float32)
    blocks = tl.cdiv(length, rows)
    each = tl.cdiv(blocks, splits)
    for block in range(split * each, tl.minimum(split * each + each, blocks)):
        row = block * rows + tl.arange(0, rows)
        inside = row < length
        seen = tl.max(inside.to(tl.int32), 0)
        if mask_kind == 1:
            where = batch * mask_batch + own[:, None] * mask_head + row[None, :] * mask_row
            shown = tl.load(mask + where, mask=real[:, None] & inside[None, :], other=0) != 0
            seen = tl.max(tl.max(shown.to(tl.int32), 1), 0)
        if seen > 0:
            k = tl.load(key + batch * key_batch + shared * key_head + row[:, None] * key_row + column[None, :],
                        mask=inside[:, None], other=0.0)
            if wide:
                k = k.to(tl.float32)
            scores = tl.trans(tl.dot(k, tl.trans(q))) * (scale * _LOG2_E)
            if mask_kind == 2:
                where = batch * mask_batch + own[:, None] * mask_head + row[None, :] * mask_row
                added = tl.load(mask + where, mask=real[:, None] & inside[None, :], other=0.0)
                scores += added.to(tl.float32) * _LOG2_E
            if mask_kind == 1:
                scores = tl.where(shown, scores, float("-inf"))
            scores = tl.where(inside[None, :], scores, float("-inf"))
            larger = tl.maximum(most, tl.max(scores, 1))
            # Nothing but -inf so far: what is subtracted must be a number.
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weight = tl.exp2(scores - base[:, None])
            kept = tl.exp2(most - base)
            total = total * kept + tl.sum(weight, 1)
            v = tl.load(value + batch * value_batch + shared * value_head + row[:, None] * value_row + column[None, :],
                        mask=inside[:, None], other=0.0)
            if wide:
                v = v.to(tl.float32)
            found = found * kept[:, None] + tl.dot(weight.to(v.dtype), v)
            most = larger
    place = (pair * splits + split) * lanes + head
    tl.store(partial + place[:, None] * width + column[None, :], found)
    tl.store(sums + place * 2, most)
    tl.store(sums + place * 2 + 1, total)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + pair, 1, sem="acq_rel")
    if arrived == splits - 1:
        tl.store(counters + pair, 0)
        most = tl.full((lanes,), float("-inf"), tl.float32)
        total = tl.zeros((lanes,), tl.float32)
        found = tl.zeros((lanes, width), tl.float32)
        for other in range(splits):
            place = (pair * splits + other) * lanes + head
            theirs = tl.load(sums + place * 2, cache_modifier=".cg")
            larger = tl.maximum(most, theirs)
            base = tl.where(larger == float("-inf"), 0.0, larger)
            kept, taken = tl.exp2(most - base), tl.exp2(theirs - base)
            total = total * kept + tl.load(sums + place * 2 + 1, cache_modifier=".cg") * taken
            part = tl.load(partial + place[:, None] * width + column[None, :], cache_modifier=".cg")
            found = found * kept[:, None] + part * taken[:, None]
            most = larger
        result = found / tl.where(total == 0.0, 1.0, total)[:, None]
        at = batch * out_batch + own[:, None] * out_head + column[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=real[:, None])
