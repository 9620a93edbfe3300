"""Segments whose epilogue reads matmuls: which axes are rows of the left side, and which count rows of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from fuseplan.kernels.ir.gathers import footprint
from fuseplan.kernels.ir.index import Index, Size, as_size, product
from fuseplan.kernels.ir.ir import ITEMSIZE, Apply, Const, Dot, KernelIR, Segment
from fuseplan.kernels.ir.rewrite import needed


def with_weight_columns(segment: Segment) -> Segment:
    """The same segment with rows that the left sides of its products tell apart, and all other axes as columns.

    If a projection is read head by head, its heads and their elements both pick rows of the weights. Raises ValueError
    if one axis picks rows and columns, or one sum serves all columns.
    """
    col = segment.col_axis
    dots = [instr.index.axes() for instr in segment.body if isinstance(instr, Dot)]
    if any(col not in axes for axes in dots):
        raise ValueError("its sum is the same in all columns")
    picking = set[int]().union(*dots)
    for side in (one.left for one in segment.products):
        if not picking.isdisjoint(axis for index in side.indices() for axis in index.axes() - {side.col_axis}):
            raise ValueError("an axis picks rows of both sides of a product")
    moved = [axis for axis in range(col) if axis in picking]
    if not moved:
        return segment
    kept = [axis for axis in range(col) if axis not in moved]
    extents = dict(enumerate((*segment.rows, segment.cols)))
    cols = product(extents[axis] for axis in (*moved, col))
    column = Index.coord(len(kept), cols)
    places = {axis: Index.coord(place, extents[axis]) for place, axis in enumerate(kept)}
    inner: Size = 1
    for axis in (col, *reversed(moved)):
        whole = column // inner
        places[axis] = whole if axis == moved[0] else whole % extents[axis]
        inner = as_size(inner * extents[axis])
    rows = tuple(extents[axis] for axis in kept)
    products = tuple(replace(one, left=_with_rows(one.left, rows, places)) for one in segment.products)
    changed = segment.with_indices(lambda index: index.substitute(places))
    return replace(changed, rows=rows, cols=cols, products=products)


def _with_rows(side: Segment, rows: tuple[Size, ...], places: Mapping[int, Index]) -> Segment:
    """A left side over fewer rows; its columns stay."""
    own = {**places, side.col_axis: Index.coord(len(rows), side.cols)}
    return replace(side.with_indices(lambda index: index.substitute(own)), rows=rows)


def factored(side: Segment, value: int) -> tuple[Segment, int, tuple[int, ...]]:
    """Take factors with one number a row (a normalised row's scale) out of a side; they multiply the sum instead.

    Returns the side, its value without the factors, and the factors, both as positions in the side's body.
    """
    body, per_row = list(side.body), side.per_row

    def split(value: int) -> tuple[int, list[int]]:
        """What is left of a value, and its factors; adds to the body what is new."""
        instr = body[value]
        if not isinstance(instr, Apply) or instr.op != "mul" or per_row[value]:
            return value, []
        rest: list[int] = []
        factors: list[int] = []
        for arg in instr.args:
            if per_row[arg] and not isinstance(body[arg], Const):
                factors.append(arg)
                continue
            left, more = split(arg)
            rest.append(left)
            factors += more
        if not factors:
            return value, []
        if len(rest) == 1:
            return rest[0], factors
        body.append(Apply(instr.dtype, "mul", (rest[0], rest[1])))
        return len(body) - 1, factors

    rest, factors = split(value)
    kept, places = needed(body, [rest, *factors])
    return replace(side, body=kept), places[rest], tuple(places[one] for one in factors)


def stored_bytes(ir: KernelIR, side: Segment) -> float:
    """Bytes in memory of one number of a side, with its share of scales and the like."""
    sizes = side.extents()
    loads = {(one.buffer, one.index) for one in side.loads}
    nbytes = sum(footprint(index, sizes) * ITEMSIZE[ir.buffers[buffer].dtype] for buffer, index in loads)
    return nbytes / math.prod(sizes)
