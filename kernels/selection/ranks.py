"""Short rows in order, in Triton: each element counts those that come before it, and is stored at that place.

One program does a row, in one launch. Equal elements keep their order, so the same row always gives the same places.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Elements that all others are compared with in one step.
_STEP = tl.constexpr(32)


@triton.jit
def _keys(element):
    """Integers in the order of the elements: NaN is greater than all others, and zeros are equal."""
    if element.dtype.is_floating():
        wide = element if element.dtype == tl.float64 else element.to(tl.float32)
        wide = tl.where(wide == 0.0, 0.0, wide)
        if wide.dtype == tl.float64:
            bits = wide.to(tl.int64, bitcast=True)
            keys = tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
            keys = tl.where(wide != wide, 0x7FFFFFFFFFFFFFFF, keys)
        else:
            bits = wide.to(tl.int32, bitcast=True)
            keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            keys = tl.where(wide != wide, 0x7FFFFFFF, keys)
    else:
        keys = element.to(tl.int64)
    return keys


@triton.jit
def put_in_order(
    source, values, places, columns: tl.constexpr, lanes: tl.constexpr, row_stride: tl.constexpr,
    column_stride: tl.constexpr, kept: tl.constexpr, descending: tl.constexpr, gives_values: tl.constexpr,
    gives_places: tl.constexpr,
):
    """Of each row of ``columns`` elements, on as many ``lanes`` or more, the first ``kept`` in order, row after row:
    the elements, and where in the row they were.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, lanes)
    start = source + row * row_stride
    element = tl.load(start + at * column_stride, mask=at < columns, other=0)
    own = _keys(element)
    rank = tl.zeros((lanes,), tl.int32)
    for first in tl.static_range(0, columns, _STEP):
        other = first + tl.arange(0, _STEP)
        theirs = _keys(tl.load(start + other * column_stride, mask=other < columns, other=0))
        ahead = theirs[None, :] > own[:, None] if descending else theirs[None, :] < own[:, None]
        ahead |= (theirs[None, :] == own[:, None]) & (other[None, :] < at[:, None])
        rank += tl.sum((ahead & (other < columns)[None, :]).to(tl.int32), axis=1)
    is_kept = (at < columns) & (rank < kept)
    if gives_values:
        tl.store(values + row * kept + rank, element, mask=is_kept)
    if gives_places:
        tl.store(places + row * kept + rank, at.to(tl.int64), mask=is_kept)
