"""Values of a segment as Triton-language statements: what the Triton and ninetoothed emitters share.

How a tile is laid out, and how memory is reached, is left to the two subclasses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from fuseplan.kernels.gpu.launch import interpreter_is_on
from fuseplan.kernels.gpu.tile import tile_of
from fuseplan.kernels.ir.backend import Config
from fuseplan.kernels.ir.gathers import value_axes
from fuseplan.kernels.ir.index import Index, divides
from fuseplan.kernels.ir.ir import (
    Apply,
    Buffer,
    Cast,
    Const,
    Instr,
    Iota,
    Load,
    Reduce,
    Round,
    Scan,
    Segment,
    Store,
    operands,
)
from fuseplan.kernels.ir.ops import REDUCTIONS, fold_identity, op_spec
from fuseplan.kernels.ir.reduction_loops import Phase, reduction_depths, schedule
from fuseplan.kernels.ir.rewrite import ancestors, without_repeated_clamps
from fuseplan.kernels.triton.index import triton_size

#: What a device says where a lookup or a write by data fails.
OUTSIDE = "an index is outside its table"

_OTHER_NAMES = {"bool": "int1", "float8_e4m3fn": "float8e4nv"}
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
    return f"tl.{_OTHER_NAMES.get(dtype, dtype)}"


def literal(value: float | int | bool, dtype: str) -> str:
    """Source text of a constant of register type ``dtype``."""
    if dtype == "bool":
        return str(bool(value))
    if dtype.startswith("int"):
        return str(int(value))
    number = float(value)
    return repr(number) if math.isfinite(number) else f'float("{number}")'


def as_emitted(segment: Segment, buffers: Sequence[Buffer]) -> Segment:
    """The segment without clamps that conversions repeat: compiled ones do, those of Triton's interpreter do not."""
    return segment if interpreter_is_on() else without_repeated_clamps(segment, buffers)


class ValueEmitter(ABC):
    """Emits the values of one segment, each as a variable ``v<id>``; a ``prefix`` lets segments share a function."""

    def __init__(self, buffers: Sequence[Buffer], segment: Segment, config: Config, prefix: str = "") -> None:
        segment = as_emitted(segment, buffers)
        self.buffers, self.segment, self.config, self.prefix = buffers, segment, config, prefix
        self.tile = tile_of(segment, config)
        self.depths = reduction_depths(segment)
        #: For each value, whether its tensor has the tile's rows, and the tile's columns.
        self.extent = [(not axes <= {segment.col_axis}, segment.col_axis in axes) for axes in value_axes(segment)]
        self.masks_cols = divides(self.tile.cols, segment.cols) is None
        #: Row coordinates and row-level values are scalars, and tiles have one dimension.
        self.flat = self.tile.flat
        #: Tiles are [cols, rows].
        self.turned = False
        #: Values loaded ahead of their use, still in storage type.
        self.loaded: set[int] = set()
        self.done: set[int] = set()
        self.unchecked = set(segment.checks)
        #: Folds that scans go on from.
        self.totals = {instr.total for instr in segment.body if isinstance(instr, Scan)}

    @abstractmethod
    def load(self, instr: Load) -> str:
        """An expression that loads, in storage type."""

    @abstractmethod
    def store(self, store: Store, value: str) -> str:
        """A statement that stores ``value``, which has the buffer's type."""

    @abstractmethod
    def check(self, value: int) -> str:
        """A statement that fails unless ``value``, a bool, is true in all lanes that are real."""

    @abstractmethod
    def position(self, index: Index) -> str:
        """An index expression over the tile's coordinates."""

    # -- values -------------------------------------------------------------------------------------------

    def name(self, value: int) -> str:
        return f"{self.prefix}v{value}"

    def operand(self, value: int) -> str:
        """A variable, or a literal that takes its type from what it meets."""
        instr = self.segment.body[value]
        return literal(instr.value, instr.dtype) if isinstance(instr, Const) else self.name(value)

    def tensor(self, value: int) -> str:
        """An operand that must not be a bare literal."""
        instr = self.segment.body[value]
        if isinstance(instr, Const):
            return f"tl.full((), {literal(instr.value, instr.dtype)}, {tl_type(instr.dtype)})"
        return self.name(value)

    def values(self, values: Iterable[int]) -> list[str]:
        """Statements for those of ``values`` that do not exist yet."""
        lines: list[str] = []
        for value in values:
            instr = self.segment.body[value]
            if value in self.done or isinstance(instr, Const | Reduce):
                continue
            self.done.add(value)
            if isinstance(instr, Load):
                if value not in self.loaded:
                    lines.append(self.early_load(value, instr))
                lines += self._widened(value, instr)
                continue
            if isinstance(instr, Scan):
                lines += self.scanned(value, instr)
                continue
            text = self._expression(instr)
            if instr.dtype == "bool" and self._is_scalar(value):
                # Triton's interpreter types a scalar comparison by its operands, and then rejects it as a mask.
                text = f"tl.where({text}, True, False)"
            lines.append(f"{self.name(value)} = {text}")
        return lines

    def checks(self, values: Iterable[int]) -> list[str]:
        """Assertions of the checks among ``values``, once each: after the stores, so that no load waits for them."""
        found = [value for value in values if value in self.unchecked]
        self.unchecked.difference_update(found)
        return [self.check(value) for value in found]

    def early_load(self, value: int, instr: Load) -> str:
        """``x<id> = ...``: the loaded value in storage type; ``v<id>`` itself where no conversion follows."""
        self.loaded.add(value)
        return f"{self._raw(value, instr)} = {self.load(instr)}"

    def _raw(self, value: int, instr: Load) -> str:
        converts = self.buffers[instr.buffer].dtype != instr.dtype or (instr.dtype == "bool" and self._is_scalar(value))
        return f"{self.prefix}x{value}" if converts else self.name(value)

    def _widened(self, value: int, instr: Load) -> list[str]:
        raw, stored = self._raw(value, instr), self.buffers[instr.buffer].dtype
        if raw == self.name(value):
            return []
        text = f"tl.where({raw}, True, False)" if instr.dtype == "bool" else _converted(raw, stored, instr.dtype)
        return [f"{self.name(value)} = {text}"]

    def _is_scalar(self, value: int) -> bool:
        on_rows, on_cols = self.extent[value]
        return not on_cols and (self.flat or not on_rows)

    def _expression(self, instr: Instr) -> str:
        if isinstance(instr, Iota):
            if not instr.index.terms and isinstance(instr.index.const, int):
                return f"tl.full((), {instr.index.const}, {tl_type(instr.dtype)})"
            return f"({self.position(instr.index)}).to({tl_type(instr.dtype)})"
        if isinstance(instr, Cast):
            text = self.tensor(instr.arg)
            return f"({text} != 0)" if instr.dtype == "bool" else f"{text}.to({tl_type(instr.dtype)})"
        if isinstance(instr, Round):
            return _rounded(self.tensor(instr.arg), instr)
        assert isinstance(instr, Apply)
        return self._apply(instr)

    def _apply(self, instr: Apply) -> str:
        body, first = self.segment.body, 1 if instr.op == "where" else 0
        if instr.op == "pow":
            exponent = body[instr.args[1]]
            if isinstance(exponent, Const) and float(exponent.value) in _SIMPLE_POWERS:
                return _SIMPLE_POWERS[float(exponent.value)].format(self.tensor(instr.args[0]))
        if instr.op == "neg" and instr.dtype.startswith("float"):  # Triton's minus is 0 - x, which loses the sign of 0
            return f"({self.tensor(instr.args[0])} * -1.0)"
        # A literal takes its type from a tensor beside it: at least one operand must be one.
        alone = all(isinstance(body[arg], Const) for arg in instr.args[first:])
        needed = {"pow": (0, 1), "where": (0, 1) if alone else (0,)}.get(instr.op, (0,) if alone else ())
        arguments = (self.tensor(arg) if n in needed else self.operand(arg) for n, arg in enumerate(instr.args))
        return op_spec(instr.op).triton.format(*arguments)

    def stores(self, positions: Iterable[int]) -> list[str]:
        """Statements for the stores at ``positions`` of the segment's list."""
        lines: list[str] = []
        for position in positions:
            store = self.segment.stores[position]
            value = self.tensor(store.value)
            held, dtype = self.segment.body[store.value].dtype, self.buffers[store.buffer].dtype
            if dtype != held:
                value = f"({value} != 0)" if dtype == "bool" else _converted(value, held, dtype)
            lines.append(self.store(store, value))
        return lines

    # -- reductions ---------------------------------------------------------------------------------------

    def reduction(self, value: int) -> Reduce | Scan:
        instr = self.segment.body[value]
        assert isinstance(instr, Reduce | Scan)
        return instr

    def fold_type(self, value: int) -> str:
        """Register type in which a reduction is folded (a bool as an integer)."""
        dtype = self.segment.body[value].dtype
        return "int32" if dtype == "bool" else dtype

    def accumulator(self, value: int, cols: int, name: str = "acc") -> str:
        """The beginning of a fold, with ``cols`` numbers for each row."""
        dtype = self.fold_type(value)
        identity = literal(fold_identity(self.reduction(value).kind, dtype), dtype)
        shape = (cols,) if self.flat else (cols, self.tile.rows) if self.turned else (self.tile.rows, cols)
        return f"{name}{self.prefix}{value} = tl.full({shape}, {identity}, {tl_type(dtype)})"

    def combined(self, value: int, operand: str) -> str:
        """Take more numbers into a fold."""
        total = f"acc{self.prefix}{value}"
        return f"{total} = {REDUCTIONS[self.reduction(value).kind].triton_combine.format(total, operand)}"

    def masked_operand(self, value: int) -> str:
        """The operand of a reduction, with the identity in lanes beyond the last column."""
        reduce = self.reduction(value)
        text, dtype = self.operand(reduce.arg), self.fold_type(value)
        if self.segment.body[reduce.arg].dtype != dtype:
            text = f"{text}.to({tl_type(dtype)})"
        if not self.masks_cols:
            return text
        return f"tl.where({self.prefix}in_cols, {text}, {literal(fold_identity(reduce.kind, dtype), dtype)})"

    def scanned(self, value: int, instr: Scan) -> list[str]:
        """``v<value> = ...``: scan the columns of a tile, which has all of a row."""
        text = self.tensor(instr.arg)
        if not self.extent[instr.arg][1]:
            text = f"tl.broadcast_to({text}, {self.shape(value, self.tile.cols)})"
        axis = 0 if self.flat or self.turned else 1
        return [f"{self.name(value)} = {REDUCTIONS[instr.kind].triton_scan}({text}, {axis})"]

    def shape(self, value: int, cols: int) -> tuple[int, ...]:
        """The shape of a tensor that has the rows of a value, and so many columns."""
        rows = self.tile.rows if self.extent[value][0] else 1
        return (cols,) if self.flat else (cols, rows) if self.turned else (rows, cols)

    def fold(self, value: int, text: str) -> list[str]:
        """``v<value> = ...``: fold the columns of a tile."""
        reduce, name = self.reduction(value), self.name(value)
        lines = [f"{name} = {self.folded(value, text)}"]
        return [*lines, f"{name} = ({name} != 0)"] if reduce.dtype == "bool" else lines

    def folded(self, value: int, text: str) -> str:
        """``text`` folded over the columns of a tile, as the reduction or the scan ``value`` does."""
        # By position, and never left out: ninetoothed knows neither names nor defaults of the helpers it inlines.
        axis = "0, False" if self.flat else "0, True" if self.turned else "1, True"
        return f"{REDUCTIONS[self.reduction(value).kind].triton_reduce}({text}, {axis})"

    def fold_per_row(self, value: int) -> str:
        """A fold of equal values: the length times the value, or the value itself."""
        reduce, name = self.reduction(value), self.name(value)
        text = self.tensor(reduce.arg)
        if reduce.kind != "sum":
            return f"{name} = {text}"
        text = f"{text}.to({tl_type(self.fold_type(value))}) * {triton_size(self.segment.cols)}"
        return f"{name} = ({text} != 0)" if reduce.dtype == "bool" else f"{name} = {text}"

    def split_reductions(self, phase: Phase) -> tuple[list[int], list[int]]:
        """Reductions of per-element values, and those of per-row values."""
        per_row = self.segment.per_row
        once = [value for value in phase.reductions if per_row[self.reduction(value).arg] and value not in self.totals]
        return [value for value in phase.reductions if value not in once], once

    # -- one pass -----------------------------------------------------------------------------------------

    def single_pass(self) -> list[str]:
        """All of a segment whose columns fit the tile (or that reduces nothing): every value once."""
        lines = self._early_loads() if self.config.get("loads") == "early" else []
        for phase in schedule(self.segment):
            folds, row_folds = self.split_reductions(phase)
            lines += self.values(sorted((*phase.rows, *phase.elements)))
            for value in folds:
                lines += self.fold(value, self.masked_operand(value))
            lines += [self.fold_per_row(value) for value in row_folds]
            lines += self.stores((*phase.stores, *phase.row_stores))
        return [*lines, *self.checks(self.segment.checks)]

    def _early_loads(self) -> list[str]:
        """Every load that waits for no reduction, kept in storage type until it is used."""
        lines: list[str] = []
        for value, instr in enumerate(self.segment.body):
            if isinstance(instr, Load) and self.depths[value] == 0 and value not in self.loaded:
                for operand in operands(instr):
                    lines += self.values(ancestors(self.segment.body, [operand]))
                lines.append(self.early_load(value, instr))
        return lines


def _rounded(text: str, instr: Round) -> str:
    """``text`` rounded to a storage type and back.

    Of four float8 numbers that are also stored as one word, ptxas 12.8 and 12.9 (sm_90) read half back from a register
    never written; the mirror image is another conversion than the stored one's, and as exact.
    """
    mirror = " * -1.0" if instr.to == "float8_e4m3fn" else ""
    text = f"({text}{mirror})" if mirror else text
    return _converted(_converted(text, instr.dtype, instr.to), instr.to, instr.dtype) + mirror


def _converted(text: str, given: str, wanted: str) -> str:
    """``text``, which has type ``given``, in another type."""
    if (given, wanted) == ("bfloat16", "float32"):
        return f"_float_of_bfloat16({text})"
    # Triton knows no conversion between float64 and float8: by way of float32, as in ATen.
    if {given, wanted} == {"float64", "float8_e4m3fn"}:
        text = f"{text}.to(tl.float32)"
    return f"{text}.to({tl_type(wanted)})"


def index_extent(segment: Segment, index: Index) -> tuple[bool, bool]:
    """Whether an index mentions a row coordinate, and the column."""
    axes = index.axes()
    return any(axis != segment.col_axis for axis in axes), segment.col_axis in axes
