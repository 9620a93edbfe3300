"""What one Triton program does: its tile of one segment, as statements.

With one row to a tile the code is one-dimensional and row coordinates are scalars; otherwise tensors are ``[rows, 1]``,
``[1, cols]`` or ``[rows, cols]``. A row reduction either holds its row in registers (every value is computed once) or
walks it in blocks, one loop for each phase of the schedule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from fuseplan.kernels.backend import Config
from fuseplan.kernels.index import Index, divides
from fuseplan.kernels.ir import Apply, Buffer, Cast, Const, Instr, Iota, Load, Reduce, Round, Segment, Store, operands
from fuseplan.kernels.ops import REDUCTIONS, op_spec
from fuseplan.kernels.schedule import Phase, reduction_depths, schedule
from fuseplan.kernels.triton_index import Coordinates, size_text
from fuseplan.kernels.triton_tile import tile_of

_INDENT = "    "
_SMALLEST = {"int32": -(2**31), "int64": -(2**63)}
#: Powers that are cheaper, and more exact, as products and roots.
_SIMPLE_POWERS = {
    2.0: "({0} * {0})",
    3.0: "({0} * {0} * {0})",
    4.0: "(({0} * {0}) * ({0} * {0}))",
    0.5: "tl.sqrt({0})",
    -0.5: "tl.rsqrt({0})",
    -1.0: "(1.0 / {0})",
}


def tl_type(dtype: str) -> str:
    """``"bfloat16"`` -> ``"tl.bfloat16"``."""
    return "tl.int1" if dtype == "bool" else f"tl.{dtype}"


def literal(value: float | int | bool, dtype: str) -> str:
    """Source text of a constant of register type ``dtype``."""
    if dtype == "bool":
        return str(bool(value))
    if dtype.startswith("int"):
        return str(int(value))
    number = float(value)
    return repr(number) if math.isfinite(number) else f'float("{number}")'


def _identity(kind: str, dtype: str) -> float | int:
    """The neutral element of a fold over values of ``dtype``."""
    identity = REDUCTIONS[kind].identity
    if dtype in _SMALLEST and not math.isfinite(identity):
        return _SMALLEST[dtype] if identity < 0 else -(_SMALLEST[dtype] + 1)
    return identity


class SegmentEmitter:
    """Emits a segment for a program number ``pid`` that counts from 0 within the segment."""

    def __init__(self, buffers: Sequence[Buffer], names: Sequence[str], segment: Segment, config: Config) -> None:
        self.buffers, self.names, self.segment, self.config = buffers, names, segment, config
        self.tile = tile_of(segment, config)
        self.coordinates = Coordinates(segment)
        self.depths = reduction_depths(segment)
        self.masks_rows = not self.tile.flat and divides(self.tile.rows, segment.num_rows) is None
        self.masks_cols = divides(self.tile.cols, segment.cols) is None
        self.extent = _extents(segment)
        #: Values loaded ahead of their use, still in storage type.
        self.loaded: set[int] = set()
        self.done: set[int] = set()

    def lines(self) -> list[str]:
        """The statements; ``pid``, the buffers and the dynamic sizes are in scope."""
        body = self._looped() if self.tile.looped else self._single_pass()
        body = [*self.coordinates.definitions(), *body]
        return [*self._geometry("\n".join(body)), *body]

    # -- positions ----------------------------------------------------------------------------------------

    def _geometry(self, body: str) -> list[str]:
        """Definitions of ``row`` and ``col`` (and their bounds), where ``body`` uses them."""
        tile, lines = self.tile, []
        row_block, col_block = "pid", "pid"
        one_row = isinstance(self.segment.num_rows, int) and self.segment.num_rows == 1
        if self.segment.has_reduction() or (isinstance(tile.col_blocks, int) and tile.col_blocks == 1):
            col_block = ""
        elif one_row:
            row_block = "0"
        else:
            blocks = size_text(tile.col_blocks)
            row_block, col_block = f"pid // {blocks}", f"(pid % {blocks})"
        if re.search(r"\b(row|in_rows)\b", body):
            wide_block = row_block if row_block.isidentifier() else f"({row_block})"
            lines.append(
                f"row = {row_block}"
                if tile.flat
                else f"row = ({wide_block} * {tile.rows} + tl.arange(0, {tile.rows}))[:, None]"
            )
        if re.search(r"\bin_rows\b", body):
            lines.append(f"in_rows = row < {size_text(self.segment.num_rows)}")
        if not tile.looped and re.search(r"\b(col|in_cols)\b", body):
            lines += self._columns(f"{col_block} * {tile.cols} + " if col_block else "")
        return lines

    def _columns(self, start: str) -> list[str]:
        arange = f"tl.arange(0, {self.tile.cols})"
        lines = [f"col = {start}{arange}" if self.tile.flat else f"col = ({start}{arange})[None, :]"]
        if self.masks_cols:
            lines.append(f"in_cols = col < {size_text(self.segment.cols)}")
        return lines

    def _mask(self, on_rows: bool, on_cols: bool, condition: int | None = None) -> list[str]:
        """The conditions under which lanes of this extent are real."""
        conditions = []
        if on_rows and self.masks_rows:
            conditions.append("in_rows")
        if on_cols and self.masks_cols:
            conditions.append("in_cols")
        if condition is not None:
            conditions.append(self._operand(condition))
        return conditions

    def _pointer(self, buffer: int, index: Index, widen: tuple[bool, bool] = (False, False)) -> str:
        """Address of ``index``, broadcast to rows / columns that the index itself does not mention."""
        terms = self.coordinates.terms(index)
        on_rows, on_cols = _index_extent(self.segment, index)
        if widen[0] and not on_rows:
            terms.append("row * 0")
        if widen[1] and not on_cols:
            terms.append("col * 0")
        return " + ".join([self.names[buffer], *terms])

    # -- values -------------------------------------------------------------------------------------------

    def _operand(self, value: int) -> str:
        instr = self.segment.body[value]
        return literal(instr.value, instr.dtype) if isinstance(instr, Const) else f"v{value}"

    def _tensor(self, value: int) -> str:
        """An operand that must not be a bare literal."""
        instr = self.segment.body[value]
        if isinstance(instr, Const):
            return f"tl.full((), {literal(instr.value, instr.dtype)}, {tl_type(instr.dtype)})"
        return f"v{value}"

    def _values(self, values: Iterable[int]) -> list[str]:
        lines: list[str] = []
        for value in values:
            instr = self.segment.body[value]
            if value not in self.done and not isinstance(instr, Const | Reduce):
                self.done.add(value)
                text = self._expression(value, instr)
                if instr.dtype == "bool" and self._is_scalar(value):
                    # Triton folds this select away; its interpreter types a scalar comparison by its operands, and
                    # then rejects it as a mask.
                    text = f"tl.where({text}, True, False)"
                lines.append(f"v{value} = {text}")
        return lines

    def _is_scalar(self, value: int) -> bool:
        on_rows, on_cols = self.extent[value]
        return not on_cols and (self.tile.flat or not on_rows)

    def _expression(self, value: int, instr: Instr) -> str:
        if isinstance(instr, Load):
            text = f"x{value}" if value in self.loaded else self._load(instr)
            return text if self.buffers[instr.buffer].dtype == instr.dtype else f"{text}.to({tl_type(instr.dtype)})"
        if isinstance(instr, Iota):
            if not instr.index.terms and isinstance(instr.index.const, int):
                return f"tl.full((), {instr.index.const}, {tl_type(instr.dtype)})"
            return f"({self.coordinates.text(instr.index)}).to({tl_type(instr.dtype)})"
        if isinstance(instr, Cast):
            text = self._tensor(instr.arg)
            return f"({text} != 0)" if instr.dtype == "bool" else f"{text}.to({tl_type(instr.dtype)})"
        if isinstance(instr, Round):
            return f"{self._tensor(instr.arg)}.to({tl_type(instr.to)}).to({tl_type(instr.dtype)})"
        assert isinstance(instr, Apply)
        return self._apply(instr)

    def _load(self, instr: Load) -> str:
        on_rows, on_cols = _index_extent(self.segment, instr.index)
        if instr.mask is None:
            mask = self._mask(on_rows, on_cols)
            suffix = f", mask={' & '.join(mask)}" if mask else ""
            return f"tl.load({self._pointer(instr.buffer, instr.index)}{suffix})"
        widen = self.extent[instr.mask]
        mask = self._mask(on_rows or widen[0], on_cols or widen[1], instr.mask)
        other = literal(instr.other, "float32" if instr.dtype.startswith("float") else "int32")
        return f"tl.load({self._pointer(instr.buffer, instr.index, widen)}, mask={' & '.join(mask)}, other={other})"

    def _apply(self, instr: Apply) -> str:
        body = self.segment.body
        arguments = [self._operand(arg) for arg in instr.args]
        if instr.op == "pow":
            exponent = body[instr.args[1]]
            if isinstance(exponent, Const) and float(exponent.value) in _SIMPLE_POWERS:
                return _SIMPLE_POWERS[float(exponent.value)].format(self._tensor(instr.args[0]))
            arguments = [self._tensor(arg) for arg in instr.args]
        # A literal takes its type from a tensor beside it: at least one operand must be one.
        first = 1 if instr.op == "where" else 0
        if all(isinstance(body[arg], Const) for arg in instr.args[first:]):
            arguments[first] = self._tensor(instr.args[first])
        if instr.op == "where":
            arguments[0] = self._tensor(instr.args[0])
        return op_spec(instr.op).triton.format(*arguments)

    def _store(self, store: Store) -> str:
        on_rows, on_cols = _index_extent(self.segment, store.index)
        value = f"{self._tensor(store.value)}"
        dtype = self.buffers[store.buffer].dtype
        if dtype != self.segment.body[store.value].dtype:
            value = f"({value} != 0)" if dtype == "bool" else f"{value}.to({tl_type(dtype)})"
        mask = self._mask(on_rows, on_cols)
        suffix = f", mask={' & '.join(mask)}" if mask else ""
        return f"tl.store({self._pointer(store.buffer, store.index)}, {value}{suffix})"

    def _stores(self, positions: Iterable[int]) -> list[str]:
        return [self._store(self.segment.stores[position]) for position in positions]

    # -- reductions ---------------------------------------------------------------------------------------

    def _fold_type(self, value: int) -> str:
        """Register type in which a reduction is folded (a bool as an integer)."""
        dtype = self.segment.body[value].dtype
        return "int32" if dtype == "bool" else dtype

    def _masked(self, value: int, arg: int) -> str:
        """The operand of a reduction, with the identity in lanes beyond the last column."""
        text = self._operand(arg)
        dtype = self._fold_type(value)
        if self.segment.body[arg].dtype != dtype:
            text = f"{text}.to({tl_type(dtype)})"
        if not self.masks_cols:
            return text
        reduce = self.segment.body[value]
        assert isinstance(reduce, Reduce)
        return f"tl.where(in_cols, {text}, {literal(_identity(reduce.kind, dtype), dtype)})"

    def _fold(self, value: int, text: str) -> str:
        """``v<value> = ...``: fold the columns of a tile."""
        reduce = self.segment.body[value]
        assert isinstance(reduce, Reduce)
        axis = "0" if self.tile.flat else "1, keep_dims=True"
        folded = f"{REDUCTIONS[reduce.kind].triton_reduce}({text}, {axis})"
        return f"v{value} = ({folded} != 0)" if reduce.dtype == "bool" else f"v{value} = {folded}"

    def _fold_per_row(self, value: int) -> str:
        """A fold of equal values: the length times the value, or the value itself."""
        reduce = self.segment.body[value]
        assert isinstance(reduce, Reduce)
        text = self._tensor(reduce.arg)
        if reduce.kind == "sum":
            dtype = self._fold_type(value)
            text = f"{text}.to({tl_type(dtype)}) * {size_text(self.segment.cols)}"
            return f"v{value} = ({text} != 0)" if reduce.dtype == "bool" else f"v{value} = {text}"
        return f"v{value} = {text}"

    def _split_reductions(self, phase: Phase) -> tuple[list[int], list[int]]:
        """Reductions of per-element values, and those of per-row values."""
        per_row = self.segment.per_row()
        pairs = [(value, operands(self.segment.body[value])[0]) for value in phase.reductions]
        return [v for v, arg in pairs if not per_row[arg]], [v for v, arg in pairs if per_row[arg]]

    # -- passes -------------------------------------------------------------------------------------------

    def _single_pass(self) -> list[str]:
        lines = self._early_loads() if self.config.get("loads") == "early" else []
        for phase in schedule(self.segment):
            folds, row_folds = self._split_reductions(phase)
            lines += self._values(sorted((*phase.rows, *phase.elements)))
            lines += [self._fold(value, self._masked(value, operands(self.segment.body[value])[0])) for value in folds]
            lines += [self._fold_per_row(value) for value in row_folds]
            lines += self._stores((*phase.stores, *phase.row_stores))
        return lines

    def _early_loads(self) -> list[str]:
        """Every load that waits for no reduction, kept in storage type until it is used."""
        lines: list[str] = []
        for value, instr in enumerate(self.segment.body):
            if isinstance(instr, Load) and self.depths[value] == 0:
                if instr.mask is not None:
                    lines += self._values(_ancestors(self.segment.body, instr.mask))
                lines.append(f"x{value} = {self._load(instr)}")
                self.loaded.add(value)
        return lines

    def _looped(self) -> list[str]:
        lines: list[str] = []
        for phase in schedule(self.segment):
            folds, row_folds = self._split_reductions(phase)
            lines += self._values(phase.rows)
            lines += self._stores(phase.row_stores)
            lines += [self._accumulator(value) for value in folds]
            if folds or phase.stores:
                lines += self._loop(phase, folds)
            lines += [self._fold(value, f"acc{value}") for value in folds]
            lines += [self._fold_per_row(value) for value in row_folds]
        return lines

    def _accumulator(self, value: int) -> str:
        reduce = self.segment.body[value]
        assert isinstance(reduce, Reduce)
        dtype = self._fold_type(value)
        shape = f"({self.tile.cols},)" if self.tile.flat else f"({self.tile.rows}, {self.tile.cols})"
        return f"acc{value} = tl.full({shape}, {literal(_identity(reduce.kind, dtype), dtype)}, {tl_type(dtype)})"

    def _loop(self, phase: Phase, folds: Iterable[int]) -> list[str]:
        self.done.difference_update(phase.elements)
        body = self._columns("start + ")
        body += self._values(phase.elements)
        for value in folds:
            reduce = self.segment.body[value]
            assert isinstance(reduce, Reduce)
            combined = REDUCTIONS[reduce.kind].triton_combine.format(
                f"acc{value}", self._masked(value, reduce.arg)
            )
            body.append(f"acc{value} = {combined}")
        body += self._stores(phase.stores)
        bounds = f"0, {size_text(self.segment.cols)}, {self.tile.cols}"
        head = f"for start in tl.range({bounds}, num_stages={self.config.get('num_stages', 1)}):"
        return [head, *(_INDENT + line for line in body)]


def _ancestors(body: Sequence[Instr], value: int) -> list[int]:
    """``value`` and all it is computed from, in body order."""
    found, pending = set[int](), [value]
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending.extend(operands(body[current]))
    return sorted(found)


def _index_extent(segment: Segment, index: Index) -> tuple[bool, bool]:
    """Whether an index mentions a row coordinate, and the column."""
    axes = index.axes()
    return any(axis != segment.col_axis for axis in axes), segment.col_axis in axes


def _extents(segment: Segment) -> list[tuple[bool, bool]]:
    """For each value, whether its tensor has the tile's rows, and the tile's columns."""
    extents: list[tuple[bool, bool]] = []
    for instr in segment.body:
        own = _index_extent(segment, instr.index) if isinstance(instr, Load | Iota) else (False, False)
        below = [extents[arg] for arg in operands(instr)]
        on_rows = own[0] or any(rows for rows, _ in below)
        on_cols = (own[1] or any(cols for _, cols in below)) and not isinstance(instr, Reduce)
        extents.append((on_rows, on_cols))
    return extents
