"""Attention of one query position in Triton: keys are split among programs, and the last program of a head combines.

The query heads that share keys are rows of one tile, so keys and values are read once. Each split keeps its own maximum
and sum (Flash-Decoding, Dao et al. 2023). Partial results are combined in the order of the splits, whoever is last: the
same call gives the same bits. Keys before the first and behind the last that a mask shows are not read; the others
are shared evenly. A mask that shows all between them is not looked at again. Keys may lie in pages, which a block table
lists for each sequence, and scores may be capped.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Query heads of a tile at least: what tensor cores multiply.
TILE_HEADS = 16
_LOG2_E = tl.constexpr(1.4426950408889634)
#: What PyTorch adds, at most, to the scores of keys that are masked: nothing is left of their weights beside others.
_HIDDEN = tl.constexpr(-65504.0)
#: A number that no score changes, and that float32 can hold.
_LEAST = tl.constexpr(-3e38)
#: Keys whose mask is looked at in one step, and numbers that are combined in one.
_SCANNED, _COMBINED = tl.constexpr(1024), tl.constexpr(8192)
#: Pages that a block of keys may touch whose numbers are loaded one by one.
_FEW_PAGES = tl.constexpr(8)
#: Numbers of pages that are checked in one step.
_LISTED = tl.constexpr(128)


@triton.jit
def attend(
    query, key, value, mask, out, partial, counters, table, length: tl.constexpr, scale: tl.constexpr,
    query_batch: tl.constexpr, query_head: tl.constexpr, key_batch: tl.constexpr, key_head: tl.constexpr,
    key_row: tl.constexpr, value_batch: tl.constexpr, value_head: tl.constexpr, value_row: tl.constexpr,
    mask_batch: tl.constexpr, mask_head: tl.constexpr, mask_row: tl.constexpr, out_batch: tl.constexpr,
    out_head: tl.constexpr, pairs: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr, width: tl.constexpr,
    rows: tl.constexpr, splits: tl.constexpr, key_heads: tl.constexpr, mask_kind: tl.constexpr,
    mask_heads: tl.constexpr, wide: tl.constexpr, overlapped: tl.constexpr, stages: tl.constexpr,
    page: tl.constexpr, pages: tl.constexpr, table_batch: tl.constexpr, table_block: tl.constexpr, cap: tl.constexpr,
    wraps: tl.constexpr,
):
    """``mask_kind``: 0 none, 1 boolean, 2 numbers; ``mask_heads``: heads have masks of their own.

    ``group`` query heads, of ``lanes`` lanes, share a key; ``pairs`` are the heads of keys in the whole batch. Where
    ``page`` is not 0, keys and values lie in ``pages`` pages of so many keys: strides along the batch are then those
    along pages, and the table says which page each block of a sequence is; the device asserts that there is one where
    keys of it are shown. With ``wraps``, negative numbers of pages count from the end. ``cap``: 0 for none.
    """
    program = tl.program_id(0)
    pair = program % pairs
    split = program // pairs
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
    if page == 0:
        keys = key + batch * key_batch + shared * key_head
        values = value + batch * value_batch + shared * value_head
        listed = table
    else:
        keys = key + shared * key_head
        values = value + shared * value_head
        listed = table + batch * table_batch
    given = mask + batch * mask_batch
    first = 0
    last = length
    plain = True
    if mask_kind != 0:
        first, last, plain = _shown(given, own, real, length, mask_head, mask_row, mask_kind, mask_heads)
    block = first // rows
    blocks = tl.cdiv(last, rows) - block
    each = tl.cdiv(blocks, splits)
    start = block + split * each
    end = block + tl.minimum(split * each + each, blocks)
    if plain:
        most, total, found = _attended(
            q, keys, values, given, listed, own, real, start, end, first, last, scale, key_batch, key_row, value_batch,
            value_row, mask_head, mask_row, lanes, width, rows, 0, mask_heads, wide, stages, page, pages, table_block,
            cap, wraps)
    else:
        most, total, found = _attended(
            q, keys, values, given, listed, own, real, start, end, first, last, scale, key_batch, key_row, value_batch,
            value_row, mask_head, mask_row, lanes, width, rows, mask_kind, mask_heads, wide, stages, page, pages,
            table_block, cap, wraps)
    if page != 0:
        _check_pages(
            listed, tl.maximum(start * rows, first), tl.minimum(end * rows, last), page, pages, table_block, wraps)
    place = batch * out_batch + own[:, None] * out_head + column[None, :]
    if splits == 1:
        result = _divided(found, total, cap)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=real[:, None])
    else:
        sums = partial + pairs * splits * group * width
        at = (pair * splits + split) * group + head
        tl.store(partial + at[:, None] * width + column[None, :], found, mask=real[:, None])
        tl.store(sums + at * 2, most, mask=real)
        tl.store(sums + at * 2 + 1, total, mask=real)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + pair, 1, sem="acq_rel")
        if arrived == splits - 1:
            tl.store(counters + pair, 0)
            first_head = out + batch * out_batch + shared * group * out_head
            _combine(
                partial, sums, pair, first_head, out_head, group, triton.next_power_of_2(group), width, splits, cap)


@triton.jit
def _attended(
    q, keys, values, mask, listed, own, real, start, end, first, last, scale, key_page, key_row, value_page, value_row,
    mask_head, mask_row, lanes: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, mask_kind: tl.constexpr,
    mask_heads: tl.constexpr, wide: tl.constexpr, stages: tl.constexpr, page: tl.constexpr, pages: tl.constexpr,
    table_block: tl.constexpr, cap: tl.constexpr, wraps: tl.constexpr,
):
    """Maximum, sum and weighted values of some blocks of keys: [lanes], [lanes], [lanes, width]."""
    column = tl.arange(0, width)
    most = tl.full((lanes,), float("-inf"), tl.float32)
    total = tl.zeros((lanes,), tl.float32)
    found = tl.zeros((lanes, width), tl.float32)
    for block in tl.range(start, end, num_stages=stages):
        row = block * rows + tl.arange(0, rows)
        inside = (row >= first) & (row < last)
        if page == 0:
            k = tl.load(keys + row[:, None] * key_row + column[None, :], mask=inside[:, None], other=0.0)
            v = tl.load(values + row[:, None] * value_row + column[None, :], mask=inside[:, None], other=0.0)
        else:
            number = _page_of(listed, block, row, inside, last, rows, page, pages, table_block, wraps)
            there = tl.where((number >= 0) & (number < pages), inside, False)
            within = row % page
            own_keys = keys + number * key_page + within * key_row
            own_values = values + number * value_page + within * value_row
            k = tl.load(own_keys[:, None] + column[None, :], mask=there[:, None], other=0.0)
            v = tl.load(own_values[:, None] + column[None, :], mask=there[:, None], other=0.0)
        if wide:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = scores * (scale * _LOG2_E) if cap == 0 else _tanh(scores * (scale / cap)) * (cap * _LOG2_E)
        if page != 0:  # Triton copies keys ahead only where this stands; what is stored is nobody's once it asserts
            scores = tl.where((inside & (there == 0))[None, :], float("nan"), scores)
        if mask_kind != 0:
            if mask_heads:
                place = own[:, None] * mask_head + row[None, :] * mask_row
                given = tl.load(mask + place, mask=real[:, None] & inside[None, :], other=0)
            else:
                given = tl.load(mask + row[None, :] * mask_row, mask=inside[None, :], other=0)
            if mask_kind == 1:
                scores = tl.where(given != 0, scores, float("-inf"))
            else:
                added = given.to(tl.float32) * _LOG2_E
                if cap != 0:  # the least finite number stays finite: a row of nothing else is the mean of all values
                    added = tl.where((added < _LEAST) & (given.to(tl.float32) != float("-inf")), _LEAST, added)
                scores += added
        scores = tl.where(inside[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        # Nothing but -inf so far: what is subtracted must be a number.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(scores - base[:, None])
        kept = tl.exp2(most - base)
        total = total * kept + tl.sum(weight, 1)
        found = tl.dot(weight.to(v.dtype), v, found * kept[:, None], input_precision="ieee")
        most = larger
    return most, total, found


@triton.jit
def _check_pages(
    listed, begin, end, page: tl.constexpr, pages: tl.constexpr, table_block: tl.constexpr, wraps: tl.constexpr
):
    """Assert that the page of each key from ``begin`` to ``end`` exists.

    By now the numbers of pages are in the cache. An assertion in the loop would keep it from copying keys ahead.
    """
    least: tl.constexpr = -pages if wraps else 0
    end = tl.where(begin < end, end, 0)
    for at in range(begin // page, tl.cdiv(end, page), _LISTED):
        block = at + tl.arange(0, _LISTED)
        here = block * page < end
        number = tl.load(listed + block * table_block, mask=here, other=0)
        tl.device_assert((number >= least) & (number < pages), "an index is outside its table", mask=here)


@triton.jit
def _page_of(
    listed, block, row, inside, last, rows: tl.constexpr, page: tl.constexpr, pages: tl.constexpr,
    table_block: tl.constexpr, wraps: tl.constexpr,
):
    """The page of each row of a block, one number where the block lies in one page.

    A few numbers are loaded one by one: a block of them would be copied ahead like keys, which then wait for it.
    """
    touched: tl.constexpr = 1 if page % rows == 0 else rows // page if rows % page == 0 else (rows - 2) // page + 2
    if touched <= _FEW_PAGES:
        first = block * rows // page
        number = tl.load(listed + first * table_block)
        for one in tl.static_range(1, touched):
            following = tl.load(listed + (first + one) * table_block, mask=(first + one) * page < last, other=0)
            number = tl.where(row // page == first + one, following, number)
    else:
        number = tl.load(listed + (row // page) * table_block, mask=inside, other=0)
    number = number.to(tl.int64)
    return tl.where(number < 0, number + pages, number) if wraps else number


@triton.jit
def _tanh(x):
    """Hyperbolic tangent: within a unit in the last place of one, which is enough for scores."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2_E)) + 1.0)


@triton.jit
def _divided(found, total, cap: tl.constexpr):
    """Weighted values by their weights. Where all is hidden PyTorch's attention gives 0, and the chain of ops that caps
    scores NaN.
    """
    if cap == 0:
        total = tl.where(total == 0.0, 1.0, total)
    return found / total[:, None]


@triton.jit
def _shown(
    mask, own, real, length, mask_head, mask_row, mask_kind: tl.constexpr, mask_heads: tl.constexpr,
):
    """The first key that the mask shows to a head of the tile, what follows the last, and whether it shows all between
    them as they are. Where it shows none: no keys, or all of them if it is of numbers, which then weigh them.
    """
    first = length
    last = 0
    count = 0
    for start in range(0, length, _SCANNED):
        row = start + tl.arange(0, _SCANNED)
        inside = row < length
        if mask_heads:
            place = own[:, None] * mask_head + row[None, :] * mask_row
            here = real[:, None] & inside[None, :]
            given = tl.load(mask + place, mask=here, other=0)
            seen = tl.max((here & _is_shown(given, mask_kind)).to(tl.int32), 0) > 0
        else:
            given = tl.load(mask + row * mask_row, mask=inside, other=0)
            seen = inside & _is_shown(given, mask_kind)
            as_it_is = given != 0 if mask_kind == 1 else given == 0
            count += tl.sum((inside & as_it_is).to(tl.int32), 0)
        first = tl.minimum(first, tl.min(tl.where(seen, row, length), 0))
        last = tl.maximum(last, tl.max(tl.where(seen, row + 1, 0), 0))
    if mask_kind == 2:
        last = tl.where(last == 0, length, last)
        first = tl.where(first == length, 0, first)
    first = tl.minimum(first, last)
    return first, last, count == last - first


@triton.jit
def _is_shown(given, mask_kind: tl.constexpr):
    # NaN is shown.
    return given != 0 if mask_kind == 1 else tl.where(given.to(tl.float32) <= _HIDDEN, False, True)


@triton.jit
def _combine(
    partial, sums, pair, out, out_head, group: tl.constexpr, heads: tl.constexpr, width: tl.constexpr,
    splits: tl.constexpr, cap: tl.constexpr,
):
    """Store the result of all splits of a pair's heads."""
    head = tl.arange(0, heads)
    column = tl.arange(0, width)
    real = head < group
    chunk: tl.constexpr = min(splits, max(1, _COMBINED // (heads * width)))
    most = tl.full((heads,), float("-inf"), tl.float32)
    total = tl.zeros((heads,), tl.float32)
    found = tl.zeros((heads, width), tl.float32)
    for start in range(0, splits, chunk):
        at = (pair * splits + start + tl.arange(0, chunk))[:, None] * group + head[None, :]
        part = tl.load(partial + at[:, :, None] * width + column[None, None, :], mask=real[None, :, None], other=0.0,
                       cache_modifier=".cg")
        theirs = tl.load(sums + at * 2, mask=real[None, :], other=0.0, cache_modifier=".cg")
        added = tl.load(sums + at * 2 + 1, mask=real[None, :], other=0.0, cache_modifier=".cg")
        larger = tl.maximum(most, tl.max(theirs, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        kept = tl.exp2(most - base)
        taken = tl.exp2(theirs - base[None, :])
        total = total * kept + tl.sum(added * taken, 0)
        found = found * kept[:, None] + tl.sum(part * taken[:, :, None], 0)
        most = larger
    result = _divided(found, total, cap)
    place = head[:, None] * out_head + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=real[:, None])
