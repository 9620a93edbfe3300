"""Kernel arguments of a ninetoothed kernel: every affine access of the IR as a strided view of the iteration space.

A ninetoothed kernel indexes nothing: it receives tensors whose blocks line up. So each distinct load or store becomes
one argument, the view of its buffer that has the segment's own dimensions as its dimensions, with stride 0 folded into
size 1 where the access does not mention rows (or the column). Halves of a rotated head are simply two views. What has
no such view (data masks, divisions in an index) reads the flat buffer by address.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.kernels.ir.index import Index, is_static
from fuseplan.kernels.ir.ir import Instr, KernelIR, Load, Segment, Store
from fuseplan.kernels.triton.emitter import buffer_names


@dataclass(frozen=True)
class View:
    """One tensor argument.

    Attributes:
        buffer: Position of the buffer it looks at.
        offset: Elements between the buffer's first element and the view's.
        shape: Its dimensions: the segment's rows and columns, 1 where it does not vary.
        on_rows: It has the segment's row dimensions.
        on_cols: It has the segment's columns.
    """

    name: str
    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    segment: int
    on_rows: bool
    on_cols: bool


class Views:
    """The arguments of one kernel, in the order in which its accesses ask for them."""

    def __init__(self, ir: KernelIR) -> None:
        self._ir = ir
        self._names = buffer_names(ir)
        self._found: dict[tuple[int, int, Index | None], View] = {}
        self.by_access: dict[tuple[int, Instr | Store], View] = {}
        for number, segment in enumerate(ir.segments):
            for access in (*segment.body, *segment.stores):
                if isinstance(access, Load | Store):
                    self.by_access[number, access] = self._view(number, segment, access)
            self._add_anchor(number, segment)

    @property
    def all(self) -> tuple[View, ...]:
        return tuple(self._found.values())

    def anchor(self, number: int) -> View:
        """An argument of segment ``number`` with all its dimensions: the source of its coordinates."""
        return next(view for view in self.all if self._is_full(number, view))

    def _is_full(self, number: int, view: View) -> bool:
        has_rows = view.on_rows or not self._ir.segments[number].rows
        return view.segment == number and has_rows and view.on_cols

    def _view(self, number: int, segment: Segment, access: Load | Store) -> View:
        index = access.index if has_view(segment, access) else None
        key = (number, access.buffer, index)
        if key not in self._found:
            same = sum(view.buffer == access.buffer for view in self.all)
            name = self._names[access.buffer] + (f"_{same}" if same else "")
            self._found[key] = _view_of(name, number, segment, access.buffer, index)
        return self._found[key]

    def _add_anchor(self, number: int, segment: Segment) -> None:
        if any(self._is_full(number, view) for view in self.all):
            return
        # Every coordinate at stride 0: only its positions are used.
        sizes = (*segment.rows, segment.cols)
        buffer = segment.stores[0].buffer
        name = f"{self._names[buffer]}_space{number}"
        view = View(name, buffer, 0, sizes, (0,) * len(sizes), number, True, True)
        self._found[number, buffer, Index(-1)] = view


def has_view(segment: Segment, access: Load | Store) -> bool:
    """True when an access is affine, unmasked and walks forward, so that a strided view describes it."""
    if isinstance(access, Load) and access.mask is not None:
        return False
    index = access.index
    sizes = [index.const, *(index.coefficient(axis) for axis in range(len(segment.rows) + 1))]
    affine = all(index.is_affine_in(axis) for axis in index.axes())
    return affine and is_static(*sizes) and all(size >= 0 for size in sizes)


def _view_of(name: str, number: int, segment: Segment, buffer: int, index: Index | None) -> View:
    rank = len(segment.rows) + 1
    if index is None:
        return View(name, buffer, 0, (1,) * rank, (1,) * rank, number, False, False)
    axes = index.axes()
    on_rows, on_cols = any(axis != segment.col_axis for axis in axes), segment.col_axis in axes
    sizes = [extent if on_rows else 1 for extent in segment.rows] + [segment.cols if on_cols else 1]
    strides = [index.coefficient(axis) for axis in range(rank)]
    return View(name, buffer, index.const, tuple(sizes), tuple(strides), number, on_rows, on_cols)
