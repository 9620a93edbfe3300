"""Segments whose vectors hold rows: folds over columns that lie apart in memory, of rows that lie side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fuseplan.kernels.ir.gathers import value_axes
from fuseplan.kernels.ir.index import Size, as_size
from fuseplan.kernels.ir.ir import Reduce, Scan, Segment, operands
from fuseplan.kernels.ir.reduction_loops import folds_across


@dataclass(frozen=True)
class RowVectors(Segment):
    """A segment whose columns, along which vectors lie, are its last row axis, with a loop over what is ``folded``.

    Coordinates keep their numbers: that of the fold comes after that of the columns.
    """

    folded: Size = 1

    @cached_property
    def whole(self) -> Segment:
        """The segment that it was."""
        return Segment((*self.rows, self.cols), self.folded, self.body, self.stores)

    @cached_property
    def per_row(self) -> tuple[bool, ...]:
        """For each value: True when all lanes of a vector have the same."""
        found: list[bool] = []
        for instr, axes in zip(self.body, value_axes(self.whole), strict=True):
            own = isinstance(instr, Reduce | Scan) or self.col_axis in axes
            found.append(not own and all(found[arg] for arg in operands(instr)))
        return tuple(found)


def as_row_vectors(segment: Segment) -> Segment:
    """The segment as :class:`RowVectors` where it folds across memory."""
    if not folds_across(segment) or any(store.scatter is not None for store in segment.stores):
        return segment
    return RowVectors(segment.rows[:-1], segment.rows[-1], segment.body, segment.stores, folded=segment.cols)


def folded_size(segment: Segment) -> Size:
    """How many numbers a reduction of the segment folds."""
    return segment.folded if isinstance(segment, RowVectors) else segment.cols


def task_elements(segment: Segment) -> Size:
    """How many elements the segment has for each of its rows and columns, which tasks share."""
    return as_size(segment.folded) if isinstance(segment, RowVectors) else 1
