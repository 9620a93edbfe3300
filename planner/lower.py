"""Pull-based lowering: a fusion group of the dataflow graph becomes one :class:`KernelIR`.

Each group output is asked for its value at an index; the answer asks its operands, and so on to the group's inputs
(Halide's and TorchInductor's inline functions). View ops only change the index, a reduction becomes a fold over the
columns, ``cat`` a choice between operands. What cannot be expressed raises :class:`NotLowerable` with the reason,
which is how the planner tells a legal group from an illegal one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from fuseplan.kernels.index import Index, Size, as_size, flatten, known_less_equal
from fuseplan.kernels.ir import (
    ITEMSIZE,
    Apply,
    Buffer,
    Cast,
    Const,
    Instr,
    Iota,
    KernelIR,
    Load,
    Reduce,
    RegisterType,
    Round,
    Segment,
    Store,
    register_type,
    validate,
)
from fuseplan.kernels.ops import OPS
from fuseplan.planner.coalesce import coalesce
from fuseplan.planner.graph import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.recipes import VIEW_MAPS, find_recipe, kind_of

#: A position in a tensor: one index expression per dimension.
Position = tuple[Index, ...]

#: ``cat`` pieces along the columns that are unrolled into one body instead of being selected by a mask.
MAX_PIECES = 4


class NotLowerable(Exception):
    """The group cannot be one kernel; the message says why, naming the op."""


@dataclass(frozen=True)
class Lowered:
    """A lowered group: the kernel, and the graph values its buffers stand for (inputs, then outputs)."""

    ir: KernelIR
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def lower(
    graph: DataflowGraph, ops: Iterable[str], numerics: str = "fp32", outputs: Sequence[str] | None = None
) -> Lowered:
    """Lower the group of compute ops ``ops`` to one kernel.

    Args:
        graph: The dataflow graph.
        ops: Names of the compute ops; view ops among or before them are followed as address maps.
        numerics: ``"fp32"`` keeps intermediates in fp32; ``"eager"`` rounds after every op as ATen would.
        outputs: Values to store; by default those used outside the group.

    Raises:
        NotLowerable: With the reason, naming the op.
    """
    members = frozenset(ops)
    wanted = tuple(outputs) if outputs is not None else group_outputs(graph, members)
    if not wanted:
        raise NotLowerable("nothing outside the group uses its results")
    return _Lowering(graph, members, numerics).run(wanted)


def group_outputs(graph: DataflowGraph, members: frozenset[str]) -> tuple[str, ...]:
    """Values of the group that something outside needs, in graph order.

    A view op that reads a member is outside (its result must exist) unless every reader of it is inside.
    """
    graph_outputs = set(graph.outputs)

    def escapes(value: str) -> bool:
        if value in graph_outputs:
            return True
        for consumer in graph.consumers(value):
            if consumer in members:
                continue
            node = graph.op(consumer)
            if kind_of(node, graph.specs) != "view" or any(escapes(out) for out in node.outputs):
                return True
        return False

    order = {name: position for position, name in enumerate(graph.graph)} if len(members) > 1 else {}
    names = sorted(members, key=lambda name: order.get(name, 0))
    return tuple(value for name in names for value in graph.op(name).outputs if escapes(value))


@dataclass
class _Space:
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


@dataclass(frozen=True)
class _Plan:
    """The iteration space chosen for one output: which of its dimensions are rows, and what the columns are."""

    rows: tuple[Size, ...]
    cols: Size
    #: For each tensor dimension the axis that walks it, None when it stays at 0.
    axes: tuple[int | None, ...]
    reduces: bool


class _Lowering:
    def __init__(self, graph: DataflowGraph, members: frozenset[str], numerics: str) -> None:
        self.graph = graph
        self.members = members
        self.numerics = numerics
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.boundaries: set[int] = set()

    def run(self, wanted: tuple[str, ...]) -> Lowered:
        self.outputs = list(wanted)
        planned = [(value, self._plan_space(value)) for value in wanted]
        spaces: dict[tuple[tuple[Size, ...], Size], list[tuple[str, _Plan]]] = {}
        for value, plan in planned:
            spaces.setdefault((plan.rows, plan.cols), []).append((value, plan))
        segments = [self._segment(rows, cols, members) for (rows, cols), members in spaces.items()]
        for value in self._leaves(wanted):
            self.input_buffer(value)  # an operand whose elements nobody reads (zeros_like) is still an argument
        buffers = self._buffers()
        ir = KernelIR(buffers, tuple(coalesce(self._renumber(segment)) for segment in segments))
        validate(ir)
        return Lowered(ir, tuple(self.inputs), tuple(self.outputs))

    # -- iteration spaces ---------------------------------------------------------------------------------

    def _plan_space(self, value: str) -> _Plan:
        spec = self.graph.specs[value]
        reduced = self._reduced_size(value)
        rank = len(spec.shape)
        if reduced is None:
            order = _memory_order(spec)
            if not order:
                return _Plan((), 1, (), False)
            axes: list[int | None] = [0] * rank
            for axis, dim in enumerate(order):
                axes[dim] = axis
            return _Plan(tuple(spec.shape[dim] for dim in order[:-1]), spec.shape[order[-1]], tuple(axes), False)
        if rank and spec.shape[-1] == reduced:
            return _Plan(spec.shape[:-1], reduced, tuple(range(rank)), True)
        if rank and isinstance(spec.shape[-1], int) and spec.shape[-1] == 1:
            return _Plan(spec.shape[:-1], reduced, (*range(rank - 1), None), True)
        return _Plan(spec.shape, reduced, tuple(range(rank)), True)

    def _reduced_size(self, value: str) -> Size | None:
        """Length of the rows folded on the way to ``value`` (None without reductions)."""
        sizes: list[Size] = []
        seen: set[str] = set()
        stack = [value]
        while stack:
            current = stack.pop()
            producer = self.graph.producer(current)
            if current in seen or producer is None:
                continue
            seen.add(current)
            node = self.graph.op(producer)
            if producer not in self.members and kind_of(node, self.graph.specs) != "view":
                continue
            if producer in self.members:
                recipe = find_recipe(node.op)
                if recipe is not None and recipe.reduced_dim is not None:
                    sizes.append(recipe.reduced_size(node, self.graph.specs))
            stack.extend(node.inputs)
        distinct = list(dict.fromkeys(sizes))
        if len(distinct) > 1:
            raise NotLowerable(f"reductions over rows of different lengths ({distinct[0]} and {distinct[1]})")
        return distinct[0] if distinct else None

    def _leaves(self, wanted: tuple[str, ...]) -> list[str]:
        """Values from outside that the ops name as operands, views looked through."""
        found: dict[str, None] = {}
        seen: set[str] = set()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            producer = self.graph.producer(value)
            inside = producer is not None and (
                producer in self.members or kind_of(self.graph.op(producer), self.graph.specs) == "view"
            )
            if producer is not None and inside:
                stack.extend(self.graph.op(producer).inputs)
            else:
                found[value] = None
        return sorted(found)

    def _segment(self, rows: tuple[Size, ...], cols: Size, members: list[tuple[str, _Plan]]) -> Segment:
        self.boundaries = set()
        try:
            space = self._fill(_Space(rows, cols), members)
        except NotLowerable:
            if _equal_pieces(self.boundaries, cols) == 1:
                raise
        pieces = _equal_pieces(self.boundaries, cols)
        if pieces > 1:
            # Unroll at the cat boundaries: every choice is then decided at build time and each operand is loaded once.
            space = self._fill(_Space(rows, cols, pieces), members)
        return Segment(rows, space.width, tuple(space.body), tuple(space.stores))

    def _fill(self, space: _Space, members: list[tuple[str, _Plan]]) -> _Space:
        col_axis = len(space.rows)
        for value, plan in members:
            spec = self.graph.specs[value]
            for piece in range(space.pieces):
                position: Position = tuple(
                    Index(0) if axis is None
                    else _col_position(space, piece) if axis == col_axis
                    else Index.coord(axis, space.rows[axis])
                    for axis in plan.axes
                )
                if piece > 0 and col_axis not in plan.axes:
                    break
                puller = Puller(self, space)
                result = puller.pull(value, position)
                stored = puller.cast(result, register_type(spec.dtype))
                space.stores.append(Store(self._output_buffer(value), flatten(position, spec.strides), stored))
        return space

    # -- buffers ------------------------------------------------------------------------------------------

    def input_buffer(self, value: str) -> int:
        if value not in self.inputs:
            self.inputs.append(value)
        return self.inputs.index(value)

    def _output_buffer(self, value: str) -> int:
        # Outputs are numbered from -1 down until the number of inputs is known.
        return -1 - self.outputs.index(value)

    def _renumber(self, segment: Segment) -> Segment:
        first = len(self.inputs)
        stores = tuple(replace(store, buffer=first - 1 - store.buffer) for store in segment.stores)
        return replace(segment, stores=stores)

    def _buffers(self) -> tuple[Buffer, ...]:
        def buffer(value: str, is_output: bool) -> Buffer:
            spec = self.graph.specs[value]
            if spec.dtype not in ITEMSIZE:
                raise NotLowerable(f"value {value} has dtype {spec.dtype}, which kernels do not handle")
            return Buffer(value, spec.dtype, spec.shape, spec.strides, is_output)

        return (*(buffer(v, False) for v in self.inputs), *(buffer(v, True) for v in self.outputs))


def _col_position(space: _Space, piece: int) -> Index:
    return Index.coord(len(space.rows), space.width) + Index(as_size(piece * space.width))


def _memory_order(spec: TensorSpec) -> list[int]:
    """Dimensions from slowest to fastest in memory, so that columns are contiguous where the output is."""
    dims = list(range(len(spec.shape)))
    if not spec.is_static:
        return dims
    return sorted(dims, key=lambda dim: (-spec.strides[dim] if spec.shape[dim] != 1 else -(2**62), dim))


def _equal_pieces(boundaries: set[int], cols: Size) -> int:
    """Number of equal column pieces that the cat boundaries cut a row into (1: not equal, or too many)."""
    if not boundaries or not isinstance(cols, int):
        return 1
    edges = [0, *sorted(boundaries), cols]
    widths = {b - a for a, b in pairwise(edges)}
    return len(edges) - 1 if len(widths) == 1 and len(edges) - 1 <= MAX_PIECES else 1


class Puller:
    """Answers "what is this value at this position" by emitting instructions into a space. Recipes drive it."""

    def __init__(self, lowering: _Lowering, space: _Space, mask: int | None = None) -> None:
        self._lowering = lowering
        self._space = space
        self._mask = mask
        self.specs: Mapping[str, TensorSpec] = lowering.graph.specs

    def pull(self, value: str, position: Position) -> int:
        """Value id of ``value`` at ``position``."""
        key = (value, position, self._mask)
        if key not in self._space.pulled:
            self._space.pulled[key] = self._produce(value, position)
        return self._space.pulled[key]

    def _produce(self, value: str, position: Position) -> int:
        graph = self._lowering.graph
        producer = graph.producer(value)
        if producer is not None:
            node = graph.op(producer)
            if kind_of(node, graph.specs) == "view":
                source, moved = VIEW_MAPS[node.op](node, value, position, graph.specs)
                return self.pull(source, moved)
            if producer in self._lowering.members:
                recipe = find_recipe(node.op)
                if recipe is None:
                    raise NotLowerable(f"{node.op} has no lowering")
                return self._rounded(recipe.build(self, node, position), self.specs[value].dtype)
        spec = self.specs[value]
        index = flatten(position, spec.strides)
        return self._space.emit(Load(register_type(spec.dtype), self._lowering.input_buffer(value), index, self._mask))

    def _rounded(self, value: int, dtype: str) -> int:
        if self._lowering.numerics == "eager" and dtype in ("bfloat16", "float16"):
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

    def round_to(self, value: int, dtype: str) -> int:
        """Convert to storage type ``dtype``: a register conversion, plus rounding under eager numerics."""
        return self._rounded(self.cast(value, register_type(dtype)), dtype)

    def apply(self, op: str, *args: int) -> int:
        """A scalar op of the op table; operands must already share a register type."""
        spec = OPS[op]
        dtype: RegisterType = "bool" if spec.result == "bool" else self.dtype_of(args[-1])
        return self._space.emit(Apply(dtype, op, args))

    def masked(self, mask: int) -> Puller:
        """The same space, with every load guarded by ``mask`` (and by any mask already in force)."""
        combined = mask if self._mask is None else self.apply("logical_and", self._mask, mask)
        return Puller(self._lowering, self._space, combined)

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
        total = element(_col_position(space, 0))
        for piece in range(1, space.pieces):
            total = self.apply(combine, total, element(_col_position(space, piece)))
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
                self._lowering.boundaries.add(edge)
        return None
