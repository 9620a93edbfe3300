"""Values of a kernel under construction: recipes are formulas of them, which emit the kernel's instructions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import and_
from typing import Any, Self, final

import sympy
import torch

from fuseplan.kernels.ir import ir
from fuseplan.kernels.ir.index import Index, Size, as_size, is_static, known_less_equal
from fuseplan.kernels.ir.ir import Const, Instr, Iota, Product, RegisterType, Segment, Store
from fuseplan.kernels.ir.ops import OPS, torch_dtype
from fuseplan.kernels.ir.rewrite import identity
from fuseplan.planner.errors import NotLowerable
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.ops.positions import Position, broadcast


class AcrossColumns(NotLowerable):
    """A reduction was asked for at every column: what its rows are is another dimension of the group's space."""


@dataclass
class Group:
    """The group being lowered, and what pulling values from it has found so far."""

    graph: DataflowGraph
    #: Names of the group's compute ops.
    members: frozenset[str]
    numerics: str
    #: Values of half precision that are rounded where the group reads them, under any numerics.
    rounds: frozenset[str]
    #: Values from outside, in buffer order.
    inputs: list[str] = field(default_factory=list)
    #: Columns at which a ``cat`` changes operand, in the space being filled.
    boundaries: set[int] = field(default_factory=set)

    def input_buffer(self, value: str) -> int:
        """Number of the buffer that holds an outside value."""
        if value not in self.inputs:
            self.inputs.append(value)
        return self.inputs.index(value)


@dataclass
class IterationSpace:
    """One iteration space under construction."""

    rows: tuple[Size, ...]
    cols: Size
    #: Copies of the columns that are unrolled side by side.
    pieces: int = 1
    body: list[Instr] = field(default_factory=list)
    known: dict[object, int] = field(default_factory=dict)
    pulled: dict[tuple[str, Position, int | None], Value] = field(default_factory=dict)
    stores: list[Store] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    #: Elements that were looked up by data.
    lookups: int = 0
    #: Whether numbers are carried from column to column.
    scans: bool = False
    #: For each row that a reduction was asked for, the axes that its position depends on.
    folded: list[frozenset[int]] = field(default_factory=list)

    @property
    def width(self) -> Size:
        """Columns of one piece."""
        return self.cols if self.pieces == 1 else self.cols // self.pieces

    def emit(self, instr: Instr) -> Value:
        place = self.known.setdefault(identity(instr), len(self.body))
        if place == len(self.body):
            self.body.append(instr)
        return Value(self, place, instr.dtype)

    def value(self, place: int) -> Value:
        """The value of an instruction."""
        return Value(self, place, self.body[place].dtype)

    def const(self, number: Any, dtype: RegisterType) -> Value:
        """A number that is the same everywhere: a Python number, or an expression in what changes between calls."""
        if not isinstance(number, sympy.Expr):
            kind = float if dtype.startswith("float") else bool if dtype == "bool" else int
            return self.emit(Const(dtype, kind(number)))
        value = self.iota(Index(number))
        if number.is_integer:
            return value.to(dtype)
        if dtype == "float64":
            raise NotLowerable(f"{number} is no integer and changes between calls; kernels take it as float32")
        return value.to("int32").as_float().to(dtype)

    def iota(self, index: Index) -> Value:
        """The integer value of an index expression, as int64."""
        if not index.terms and isinstance(index.const, int):
            return self.emit(Const("int64", index.const))
        return self.emit(Iota("int64", index))

    def apply(self, op: str, *operands: Any) -> Value:
        """A scalar op of the op table on values of one register type, and numbers, which are taken as of that type."""
        result, dtype = OPS[op].result, [one.dtype for one in operands if type(one) is Value][-1]
        args = tuple([one.id if type(one) is Value else self.const(one, dtype).id for one in operands])
        return self.emit(ir.Apply(dtype if result == "same" else result, op, args))


def _operator(op: str) -> Callable[[Value, Any], Value]:
    return lambda value, other: value.space.apply(op, value, other)


@final
class Value:
    """A value of a kernel: instruction ``id`` of a space. Every scalar op is a method: ``x.exp()``, ``a.maximum(b)``.

    What it meets is another value of its register type, or a number. ``&`` and ``|`` are those of booleans.
    """

    __slots__ = ("dtype", "id", "space")

    def __init__(self, space: IterationSpace, place: int, dtype: RegisterType) -> None:
        self.space, self.id, self.dtype = space, place, dtype

    @property
    def instr(self) -> Instr:
        return self.space.body[self.id]

    def to(self, dtype: RegisterType) -> Value:
        """The value in another register type."""
        if self.dtype == dtype:
            return self
        instr = self.instr
        return self.space.const(instr.value, dtype) if isinstance(instr, Const) else self.space.emit(
            ir.Cast(dtype, self.id))

    def __getattr__(self, op: str) -> Callable[..., Value]:
        if op not in OPS:
            raise AttributeError(op)
        return partial(self.space.apply, op, self)

    __add__, __sub__, __mul__, __truediv__ = map(_operator, ("add", "sub", "mul", "div"))
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("lt", "le", "gt", "ge"))
    __and__, __or__ = map(_operator, ("logical_and", "logical_or"))

    def __rsub__(self, other: Any) -> Value:
        return self.space.apply("sub", other, self)


def column(space: IterationSpace, piece: int) -> Index:
    """The column coordinate in one piece of the row."""
    return Index.coord(len(space.rows), space.width) + Index(as_size(piece * space.width))


class BodyBuilder(ABC):
    """Emits instructions into a space; recipes call it. Where a value comes from is :meth:`pull`'s to say."""

    def __init__(self, group: Group, space: IterationSpace, mask: Value | None = None) -> None:
        self._group = group
        self._space = space
        self._mask = mask
        self.const, self.iota, self.apply = space.const, space.iota, space.apply
        self.specs: Mapping[str, TensorSpec] = group.graph.specs

    @abstractmethod
    def pull(self, value: str, position: Position) -> Value:
        """``value`` at ``position``."""

    @abstractmethod
    def dot(self, node: OpNode, numbers: tuple[int, int], column: Index, rows: Position, transposed: bool) -> Value:
        """Element ``(*rows, column)`` of the matmul of two operands, of which the second may be ``transposed``."""

    @abstractmethod
    def lookup(self, node: OpNode, value: str, position: Position, picked: Mapping[int, Value]) -> Value:
        """``value`` at ``position``, where the coordinates along the dimensions ``picked`` are data.

        Where an index is outside ``value``, the kernel reads nothing and the call fails, as ATen's op does.
        NotLowerable where the group computes ``value``, or reads it through a view that cuts such a dimension up.
        """

    @abstractmethod
    def row_shape(self, node: OpNode) -> tuple[Size, ...]:
        """Operand 0's shape as a folding op walks it: what counts its rows, then the number of elements of a row."""

    @abstractmethod
    def folded_dims(self, node: OpNode) -> tuple[int, ...]:
        """The dimensions of operand 0 that a folding op folds."""

    @abstractmethod
    def element(self, node: OpNode, row: Position, column: Index) -> Value:
        """An element of operand 0 that a folding op meets in a row."""

    def computed_by(self, value: str) -> OpNode | None:
        """The op that computes ``value``, inside the group or not; None for a graph input."""
        return self._group.graph.maker(value)

    def known_range(self, value: Value) -> tuple[float, float]:
        """Least and greatest number an integer value can be, infinite where that is not known."""
        instr, unknown = value.instr, (-math.inf, math.inf)
        match instr:
            case ir.Load() | ir.Round():
                dtype = instr.to if isinstance(instr, ir.Round) else self.specs[self._group.inputs[instr.buffer]].dtype
                if dtype in ir.NARROW and "int" in dtype:
                    limits = torch.iinfo(torch_dtype(dtype))
                    return float(limits.min), float(limits.max)
            case ir.Apply(op="bit_and" | "shift_right"):
                one, other = (self.known_range(value.space.value(arg)) for arg in instr.args)
                if instr.op == "bit_and":
                    tops = [most for least, most in (one, other) if least >= 0]
                    return (0.0, min(tops)) if tops else unknown
                if min(one[0], other[0]) >= 0:
                    return 0.0, one[1] if math.isinf(one[1]) else float(int(one[1]) >> int(other[0]))
            case ir.Cast():
                return self.known_range(value.space.value(instr.arg))
            case Const():
                return float(instr.value), float(instr.value)
            case Iota():
                least, most = instr.index.const, instr.index.maximum()
                if is_static(least, most) and all(coefficient > 0 for _, coefficient in instr.index.terms):
                    return float(least), float(most)
        return unknown

    def operand(self, node: OpNode, number: int, position: Position, dtype: RegisterType | None = None) -> Value:
        """Operand ``number`` of ``node`` broadcast to the result's ``position`` (converted to ``dtype`` if given)."""
        value = node.inputs[number]
        result = self.pull(value, broadcast(position, self.specs[value].shape))
        return result if dtype is None else result.to(dtype)

    def is_per_row(self, value: Value) -> bool:
        """Whether a value is the same in every column."""
        space = self._space
        return Segment(space.rows, space.width, tuple(space.body), ()).per_row[value.id]

    def masked(self, mask: Value) -> Self:
        """The same space, with every load guarded by ``mask`` (and by any mask already in force)."""
        return type(self)(self._group, self._space, self._both(self._mask, mask))

    def _both(self, mask: Value | None, other: Value) -> Value:
        return other if mask is None else mask & other

    def refuse_part_of_cat(self, node: OpNode) -> None:
        """NotLowerable where the op is asked for by a piece of a cat alone: all programs would do its work."""
        if self._mask is not None:
            raise NotLowerable(f"{node.op} feeds only part of a cat")

    def reduce(self, kind: str, node: OpNode, extent: Size, element: Callable[[Index], Value]) -> Value:
        """Fold ``element(column)`` over ``extent`` columns; NotLowerable where the space has others."""
        space = self._space
        if as_size(extent - space.cols) != 0:
            raise NotLowerable(f"{node.op} folds {extent} elements in a space of {space.cols} columns")
        self.refuse_part_of_cat(node)
        combine = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "mul"}[kind]
        total = element(column(space, 0))
        for piece in range(1, space.pieces):
            total = self.apply(combine, total, element(column(space, piece)))
        if kind == "prod" and self.is_per_row(total):
            raise NotLowerable(f"{node.op} multiplies a number by itself {extent} times")
        return space.emit(ir.Reduce(total.dtype, kind, total.id))

    def scan(self, kind: str, node: OpNode, position: Position, dim: int, value: Value) -> Value:
        """Fold ``value``, what is at ``position``, along dimension ``dim`` up to there.

        NotLowerable where the columns of the space are not all of that dimension, and its rows all others.
        """
        space, col_axis = self._space, len(self._space.rows)
        self.refuse_part_of_cat(node)
        if space.pieces > 1:
            raise NotLowerable(f"{node.op} scans pieces of a cat, one after another")
        others = frozenset[int]().union(*(index.axes() for at, index in enumerate(position) if at != dim))
        if position[dim] != column(space, 0) or col_axis in others:
            raise AcrossColumns(f"{node.op}: what it scans is not the columns of the group")
        if any(extent != 1 and axis not in others for axis, extent in enumerate(space.rows)):
            raise NotLowerable(f"{node.op} would scan a row again for others of the group")
        space.scans = True
        return space.emit(ir.Scan(value.dtype, kind, value.id))

    def inside(self, ids: Mapping[int, Value], extents: Mapping[int, Size]) -> Value | None:
        """A check that numbers are positions of their dimensions, or masked out; None where they are known to be."""
        checks = [self._is_inside(at, extents[dim]) for dim, at in ids.items() if not self._exists(at, extents[dim])]
        if not checks:
            return None
        every = reduce(and_, checks)
        return every if self._mask is None else self._mask.logical_not() | every

    def _is_inside(self, at: Value, extent: Size) -> Value:
        below = at < self.iota(Index(extent))
        return (at >= 0) & below

    def _exists(self, at: Value, extent: Size) -> bool:
        least, most = self.known_range(at)
        return isinstance(extent, int) and least >= 0 and most < extent

    def row_position(self, node: OpNode, position: Position) -> Position:
        """Check that ``position`` names one row (mentions no column): a row statistic is asked for once per row."""
        axes = frozenset[int]().union(*(index.axes() for index in position))
        self._space.folded.append(axes)
        if len(self._space.rows) in axes:
            raise AcrossColumns(f"{node.op}: its rows run across the columns of the group")
        return position

    def split_at(self, index: Index, boundary: Size) -> bool | None:
        """Is ``index < boundary``? None when it depends on the coordinate (a boundary along the columns is noted)."""
        if known_less_equal(index.maximum() + 1, boundary):
            return True
        if known_less_equal(boundary, index.const):  # coefficients are non-negative: const is the minimum
            return False
        col_axis = len(self._space.rows)
        only_col = index.axes() == {col_axis} and index.coefficient(col_axis) == 1
        if only_col and isinstance(boundary, int) and isinstance(index.const, int) and self._space.pieces == 1:
            edge = boundary - index.const
            if isinstance(self._space.cols, int) and 0 < edge < self._space.cols:
                self._group.boundaries.add(edge)
        return None
