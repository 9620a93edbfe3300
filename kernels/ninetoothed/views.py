"""Kernel arguments of a ninetoothed kernel: every affine access of the IR as a strided view of the iteration space.

A ninetoothed kernel indexes nothing: it receives tensors whose blocks line up. So each distinct load or store becomes
one argument, the view of its buffer that has the segment's own dimensions, of size 1 where the access does not mention
rows (or the column). What has no such view (data masks, divisions in an index) reads the flat buffer by address.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.kernels.ir.index import Coord, Index, is_static
from fuseplan.kernels.ir.ir import Instr, KernelIR, Load, Segment, Store
from fuseplan.kernels.triton.emitter import buffer_names
from fuseplan.kernels.triton.values import index_extent


@dataclass(frozen=True)
class View:
    """One tensor argument."""

    name: str
    #: Position of the buffer it looks at.
    buffer: int
    #: Elements between the buffer's first element and the view's.
    offset: int
    #: The segment's rows and columns, 1 where it does not vary.
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
            if not any(self._is_full(number, view) for view in self.all):
                # Every coordinate at stride 0: only its positions are used.
                sizes, buffer = (*segment.rows, segment.cols), segment.stores[0].buffer
                name, strides = f"{self._names[buffer]}_space{number}", (0,) * len(sizes)
                self._found[number, buffer, Index(-1)] = View(name, buffer, 0, sizes, strides, number, True, True)

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


def has_view(segment: Segment, access: Load | Store) -> bool:
    """True when an access is affine, unmasked and walks forward, so that a strided view describes it."""
    if isinstance(access, Load) and access.mask is not None:
        return False
    sizes = [access.index.const, *(coefficient for _, coefficient in access.index.terms)]
    affine = all(isinstance(atom, Coord) for atom, _ in access.index.terms)
    return affine and is_static(*sizes) and all(size >= 0 for size in sizes)


def _view_of(name: str, number: int, segment: Segment, buffer: int, index: Index | None) -> View:
    rank = len(segment.rows) + 1
    if index is None:
        return View(name, buffer, 0, (1,) * rank, (1,) * rank, number, False, False)
    on_rows, on_cols = index_extent(segment, index)
    sizes = [extent if on_rows else 1 for extent in segment.rows] + [segment.cols if on_cols else 1]
    strides = [index.coefficient(axis) for axis in range(rank)]
    return View(name, buffer, index.const, tuple(sizes), tuple(strides), number, on_rows, on_cols)
