"""Pulling values: "what is this value at this position", answered by emitting instructions. Recipes drive it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fuseplan.kernels.index import Index, Size, as_size, flatten, known_less_equal
from fuseplan.kernels.ir import (
    Apply,
    Cast,
    Const,
    Instr,
    Iota,
    Load,
    Reduce,
    RegisterType,
    Round,
    Store,
    register_type,
)
from fuseplan.kernels.ops import OPS
from fuseplan.planner.graph import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.recipes import VIEW_MAPS, find_recipe, kind_of
from fuseplan.planner.views import Position


class NotLowerable(Exception):
    """The group cannot be one kernel; the message says why, naming the op."""


@dataclass
class Group:
    """The group being lowered, and what pulling values from it has found so far.

    Attributes:
        graph: The dataflow graph.
        members: Names of the group's compute ops.
        numerics: ``"fp32"`` or ``"eager"``.
        inputs: Values from outside, in buffer order.
        boundaries: Columns at which a ``cat`` changes operand, in the space being filled.
    """

    graph: DataflowGraph
    members: frozenset[str]
    numerics: str
    inputs: list[str] = field(default_factory=list)
    boundaries: set[int] = field(default_factory=set)

    def input_buffer(self, value: str) -> int:
        """Number of the buffer that holds an outside value."""
        if value not in self.inputs:
            self.inputs.append(value)
        return self.inputs.index(value)


@dataclass
class Space:
    """One iteration space under construction. ``pieces`` copies of the columns are unrolled side by side."""

    rows: tuple[Size, ...]
    cols: Size
    pieces: int = 1
    body: list[Instr] = field(default_factory=list)
    known: dict[Instr, int] = field(default_factory=dict)
    pulled: dict[tuple[str, Position, int | None], int] = field(default_factory=dict)
    stores: list[Store] = field(default_factory=list)

    @property
    def width(self) -> Size:
        """Columns of one piece."""
        return self.cols if self.pieces == 1 else self.cols // self.pieces

    def emit(self, instr: Instr) -> int:
        if instr not in self.known:
            self.known[instr] = len(self.body)
            self.body.append(instr)
        return self.known[instr]


def column(space: Space, piece: int) -> Index:
    """The column coordinate in one piece of the row."""
    return Index.coord(len(space.rows), space.width) + Index(as_size(piece * space.width))


class Puller:
    """Answers "what is this value at this position" by emitting instructions into a space. Recipes drive it."""

    def __init__(self, group: Group, space: Space, mask: int | None = None) -> None:
        self._group = group
        self._space = space
        self._mask = mask
        self.specs: Mapping[str, TensorSpec] = group.graph.specs

    def pull(self, value: str, position: Position) -> int:
        """Value id of ``value`` at ``position``."""
        key = (value, position, self._mask)
        if key not in self._space.pulled:
            self._space.pulled[key] = self._produce(value, position)
        return self._space.pulled[key]

    def _produce(self, value: str, position: Position) -> int:
        graph = self._group.graph
        producer = graph.producer(value)
        if producer is not None:
            node = graph.op(producer)
            if kind_of(node, graph.specs) == "view":
                source, moved = VIEW_MAPS[node.op](node, value, position, graph.specs)
                return self.pull(source, moved)
            if producer in self._group.members:
                recipe = find_recipe(node.op)
                if recipe is None:
                    raise NotLowerable(f"{node.op} has no lowering")
                return self._rounded(recipe.build(self, node, position), self.specs[value].dtype)
        spec = self.specs[value]
        index = flatten(position, spec.strides)
        return self._space.emit(Load(register_type(spec.dtype), self._group.input_buffer(value), index, self._mask))

    def _rounded(self, value: int, dtype: str) -> int:
        if self._group.numerics == "eager" and dtype in ("bfloat16", "float16"):
            return self._space.emit(Round("float32", self.cast(value, "float32"), dtype))
        return value

    # -- what recipes use ---------------------------------------------------------------------------------

    def operand(self, node: OpNode, number: int, position: Position, dtype: RegisterType | None = None) -> int:
        """Operand ``number`` of ``node`` broadcast to the result's ``position`` (converted to ``dtype`` if given)."""
        value = node.inputs[number]
        shape = self.specs[value].shape
        aligned = position[len(position) - len(shape) :] if shape else ()
        moved = tuple(
            Index(0) if isinstance(extent, int) and extent == 1 else index
            for index, extent in zip(aligned, shape, strict=True)
        )
        result = self.pull(value, moved)
        return result if dtype is None else self.cast(result, dtype)

    def dtype_of(self, value: int) -> RegisterType:
        return self._space.body[value].dtype

    def const(self, number: float | int | bool, dtype: RegisterType) -> int:
        if dtype.startswith("float"):
            number = float(number)
        elif dtype == "bool":
            number = bool(number)
        else:
            number = int(number)
        return self._space.emit(Const(dtype, number))

    def iota(self, index: Index) -> int:
        """The integer value of an index expression, as int64."""
        if not index.terms and isinstance(index.const, int):
            return self._space.emit(Const("int64", index.const))
        return self._space.emit(Iota("int64", index))

    def cast(self, value: int, dtype: RegisterType) -> int:
        if self.dtype_of(value) == dtype:
            return value
        source = self._space.body[value]
        if isinstance(source, Const):
            return self.const(source.value, dtype)
        return self._space.emit(Cast(dtype, value))

    def apply(self, op: str, *args: int) -> int:
        """A scalar op of the op table; operands must already share a register type."""
        spec = OPS[op]
        dtype: RegisterType = "bool" if spec.result == "bool" else self.dtype_of(args[-1])
        return self._space.emit(Apply(dtype, op, args))

    def masked(self, mask: int) -> Puller:
        """The same space, with every load guarded by ``mask`` (and by any mask already in force)."""
        combined = mask if self._mask is None else self.apply("logical_and", self._mask, mask)
        return Puller(self._group, self._space, combined)

    def reduce(self, kind: str, node: OpNode, extent: Size, element: Callable[[Index], int]) -> int:
        """Fold ``element(column)`` over ``extent`` columns.

        Raises:
            NotLowerable: When the columns of this space are not what the op reduces.
        """
        space = self._space
        if as_size(extent - space.cols) != 0:
            raise NotLowerable(f"{node.op} folds {extent} elements in a space of {space.cols} columns")
        if self._mask is not None:
            raise NotLowerable(f"{node.op} feeds only part of a cat")
        combine = {"sum": "add", "max": "maximum", "min": "minimum"}[kind]
        total = element(column(space, 0))
        for piece in range(1, space.pieces):
            total = self.apply(combine, total, element(column(space, piece)))
        return space.emit(Reduce(self.dtype_of(total), kind, total))

    def row_position(self, node: OpNode, position: Position) -> Position:
        """Check that ``position`` names one row (mentions no column): a row statistic is asked for once per row."""
        col_axis = len(self._space.rows)
        if any(col_axis in index.axes() for index in position):
            raise NotLowerable(f"{node.op}: its rows run across the columns of the group")
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
