"""Pull-based lowering: a fusion group of the dataflow graph becomes one :class:`KernelIR`.

Each group output is asked for its value at an index; the answer asks its operands, and so on to the group's inputs.
What cannot be expressed raises :class:`NotLowerable`: so a legal group is told from an illegal one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fuseplan.kernels.ir.coalesce import coalesce, split_words
from fuseplan.kernels.ir.contraction import with_weight_columns
from fuseplan.kernels.ir.index import Index, Size, as_size, divides, known_less_equal, product
from fuseplan.kernels.ir.ir import ITEMSIZE, Buffer, KernelIR, Segment
from fuseplan.kernels.ir.rewrite import cheaper_arithmetic
from fuseplan.planner.errors import NotLowerable
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.lowering.puller import Puller, check_writes, looks_through, stored_spec, writer
from fuseplan.planner.lowering.roundings import is_rounding_cast
from fuseplan.planner.ops.builder import AcrossColumns, Group, IterationSpace, column
from fuseplan.planner.ops.positions import Position, reshape_position
from fuseplan.planner.ops.table import op_of, why_refused, written_value

__all__ = ["Lowered", "NotLowerable", "lower"]

#: ``cat`` pieces along the columns that are unrolled into one body instead of being selected by a mask.
MAX_PIECES = 4


@dataclass(frozen=True)
class Lowered:
    """A lowered group: the kernel, and the graph values its buffers stand for (inputs, then outputs)."""

    ir: KernelIR
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def lower(graph: DataflowGraph, ops: Iterable[str], numerics: str, outputs: Iterable[str]) -> Lowered:
    """Lower a group to one kernel that stores ``outputs``; NotLowerable says why not, and names the op.

    Args:
        ops: Names of the compute ops; view ops among or before them are followed as address maps.
        numerics: ``"fp32"`` keeps intermediates in fp32, except roundings that the program can see;
            ``"eager"`` rounds after every op as ATen would.
    """
    members, wanted, passed = frozenset(ops), tuple(outputs), Counter[str]()
    if not wanted:
        raise NotLowerable("nothing outside the group uses its results")
    for node in map(graph.op, members):
        # A plan is made for numbers; where a size is dynamic, the rows of what its recipe refuses may have no size.
        if op_of(node.op).reduced_dim is not None and (reason := why_refused(node, graph.specs)) is not None:
            raise NotLowerable(reason)
    while True:
        lowering = _Lowering(graph, members, numerics, passed)
        try:
            return lowering.run(wanted)
        except AcrossColumns:
            passed[lowering.storing] += 1
            if passed[lowering.storing] == len(lowering.spaces(lowering.storing)):
                raise


@dataclass(frozen=True)
class _Plan:
    """The iteration space chosen for one output: which of its dimensions are rows, and what the columns are."""

    rows: tuple[Size, ...]
    cols: Size
    #: For each tensor dimension the axis that walks it, None when it stays at 0.
    axes: tuple[int | None, ...]
    #: The shape whose dimensions those are, where a folded row is several of the value's own (row-major) dimensions.
    viewed: tuple[Size, ...] | None = None
    #: The op that folds such rows in an order of its own, which is that of the columns.
    walker: OpNode | None = None


class _Lowering:
    """One attempt at a group: it passes over some spaces of each value; ``storing`` is the output being asked for."""

    def __init__(self, graph: DataflowGraph, members: frozenset[str], numerics: str, passed: Mapping[str, int]) -> None:
        self.graph = graph
        self.members = members
        self.passed = passed
        self.group = Group(graph, members, numerics, graph.rounds)
        self.outputs: list[str] = []
        self.storing = ""

    def run(self, wanted: tuple[str, ...]) -> Lowered:
        self.outputs = list(wanted)
        # What is stored of a cast is rounded, and others read that: so is what the group reads of it.
        self.group.rounds |= {value for value in wanted if is_rounding_cast(self.graph, value)}
        spaces: dict[tuple[tuple[Size, ...], Size, bool], list[tuple[str, _Plan]]] = {}
        plans = self._plan_spaces(wanted)
        across = [plan for value, plan in plans.items() if self._walks_across(value)]
        for value, plan in plans.items():
            # In a square tensor, a fold across memory and a store along it have equal extents, but share no load.
            spaces.setdefault((plan.rows, plan.cols, plan in across), []).append((value, plan))
        segments = [
            self._segment(rows, cols, part) for (rows, cols, _), members in spaces.items()
            for part in self._apart(members)
        ]
        check_writes(self.group)
        for value in sorted(value for value, node in self._behind(wanted).items() if node is None):
            self.group.input_buffer(value)  # an operand whose elements nobody reads (zeros_like) is still an argument
        buffers = self._buffers()
        # Outputs are numbered from -1 down until the number of inputs is known.
        first = len(self.group.inputs)
        segments = [
            replace(segment, stores=tuple(replace(store, buffer=first - 1 - store.buffer) for store in segment.stores))
            for segment in segments
        ]
        if self.group.numerics != "eager":
            segments = [cheaper_arithmetic(segment) for segment in segments]
        ir = KernelIR(buffers, tuple(map(_fitted, segments)))
        return Lowered(ir, tuple(self.group.inputs), tuple(self.outputs))

    def _plan_spaces(self, wanted: Sequence[str]) -> dict[str, _Plan]:
        plans: dict[str, _Plan] = {}
        for value in wanted:  # without rows of size one, whose place differs between outputs that share a segment
            plan = self.spaces(value)[self.passed.get(value, 0)]
            plans[value] = _with_rows(plan, [axis for axis, extent in enumerate(plan.rows) if extent != 1])
        folding: dict[tuple[tuple[Size, ...], Size], list[str]] = {}
        for value in wanted:
            if self._reduced_size(value) is not None:
                folding.setdefault((plans[value].rows, plans[value].cols), []).append(value)
        # The rows of reductions are walked as the largest result lies in memory, in one order for all that walk the
        # same rows, so that they keep sharing a segment; another's new order may look like what was planned first.
        ordered: dict[str, _Plan] = {}
        for sharing in folding.values():
            largest = max(sharing, key=lambda value: math.prod(
                size for size in self.graph.specs[value].shape if isinstance(size, int)))
            order = _row_order(plans[largest], self.graph.specs[largest])
            beside = [value for value in wanted if plans[value] == plans[largest]]
            ordered |= {value: _with_rows(plans[value], order) for value in (*sharing, *beside)}
            if plans[largest].viewed is not None or len(plans[largest].rows) in plans[largest].axes[:-1]:
                # A result beside it that folds nothing walks the same rows, not rows of its own.
                shape = self.graph.specs[largest].shape
                ordered |= {
                    value: ordered[largest] for value in wanted
                    if self._reduced_size(value) is None and self.graph.specs[value].shape == shape
                }
        return plans | ordered

    def spaces(self, value: str) -> list[_Plan]:
        """The iteration spaces to try for an output, in order.

        A size that equals the folded one may be a coincidence (``x.sum(-1)`` of a square x).
        """
        spec = stored_spec(self.group, value)
        reduced = self._reduced_size(value)
        rank = len(spec.shape)
        if reduced is None:
            order = _memory_order(spec)
            if not order:
                return [_Plan((), 1, ())]
            shape = tuple(spec.shape[dim] for dim in order)
            return [_Plan(shape[:-1], shape[-1], tuple(map(order.index, range(rank))))]
        found = [_along(spec.shape, dim) for dim in reversed(range(rank)) if spec.shape[dim] == reduced]
        # A row folded on the way may be more than one dimension of an operand.
        specs, folds = self.graph.specs, self._folds(value)
        if any(op_of(node.op).folds_several(node, specs) for node, _ in folds):
            walkers = [(node, shape) for node, shape in folds if op_of(node.op).walk_of(node, specs) is not None
                       and specs[node.inputs[0]].shape == spec.shape]
            walker, viewed = walkers[0] if walkers else (None, _viewed_as_rows(spec.shape, reduced))
            if viewed is not None:
                last = [plan for plan in found if plan.axes[-1] == rank - 1]
                found = [*last, _Plan(viewed[:-1], reduced, tuple(range(len(viewed))), viewed, walker),
                         *(plan for plan in found if plan not in last)]
        # A walk of its own folds a row again for each element of a value that has more of them than there are rows.
        if any(not known_less_equal(product(spec.shape), product(shape[:-1])) for node, shape in folds
               if op_of(node.op).walk_of(node, specs) is not None):
            if not found:
                raise NotLowerable(f"{value} would fold a row again for each of its elements")
            return found
        if rank and spec.shape[-1] == 1:
            return [*found, _Plan(spec.shape[:-1], reduced, (*range(rank - 1), None))]
        return [*found, _Plan(spec.shape, reduced, tuple(range(rank)))]

    def _reduced_size(self, value: str) -> Size | None:
        """Length of the rows folded on the way to ``value`` (None without reductions)."""
        distinct = list(dict.fromkeys(shape[-1] for _, shape in self._folds(value)))
        if len(distinct) > 1:
            raise NotLowerable(f"reductions over rows of different lengths ({distinct[0]} and {distinct[1]})")
        return distinct[0] if distinct else None

    def _walks_across(self, value: str) -> bool:
        """Whether rows are folded on the way to ``value``, and the elements of none lie side by side in memory."""
        folds, specs = self._folds(value), self.graph.specs
        return bool(folds) and not any(
            {*_memory_order(specs[node.inputs[0]])[-1:]} <= {*op_of(node.op).folded_dims(node, specs)}
            for node, _ in folds)

    def _folds(self, value: str) -> list[tuple[OpNode, tuple[Size, ...]]]:
        """The group's ops that fold rows on the way to ``value``, each with its operand's shape as it walks it."""
        found = []
        for node in filter(None, self._behind([value], through=False).values()):
            op = op_of(node.op)
            if node.name in self.members and op.reduced_size(node, self.graph.specs) is not None:
                found.append((node, op.row_shape(node, self.graph.specs)))
        return found

    def _behind(self, wanted: Sequence[str], through: bool = True) -> dict[str, OpNode | None]:
        """Values on the way to ``wanted``, each with its op in the group or looked through; None: from outside.

        Unless ``through`` matmuls, what they multiply is left out: it has an iteration space of its own.
        """
        found: dict[str, OpNode | None] = {}
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if value in found:
                continue
            node = self.graph.maker(value)
            if node is None or (node.name not in self.members and not looks_through(self.group, node)):
                found[value] = None
                continue
            found[value] = node
            if not through and op_of(node.op).is_contraction:
                continue
            target = written_value(node) if node.name in self.members else None
            if target is not None:
                found[target] = None
            stack.extend(one for one in node.inputs if one != target)
        return found

    def _apart(self, members: list[tuple[str, _Plan]]) -> list[list[tuple[str, _Plan]]]:
        """Outputs of one space by the matmuls that they read: a program has the sums of one part to hold."""
        parts: list[tuple[frozenset[str], list[tuple[str, _Plan]]]] = []
        for member in members:
            behind = filter(None, self._behind([member[0]], through=False).values())
            inside = (node for node in behind if node.name in self.members)
            anchors = frozenset(node.name for node in inside if op_of(node.op).is_contraction)
            joined = [part for part in parts if part[0] & anchors or part[0] == anchors]
            parts = [part for part in parts if part not in joined]
            parts.append((
                anchors.union(*(names for names, _ in joined)), [*(one for _, ones in joined for one in ones), member],
            ))
        return [ones for _, ones in parts]

    def _segment(self, rows: tuple[Size, ...], cols: Size, members: list[tuple[str, _Plan]]) -> Segment:
        self.group.boundaries = set()
        space = None
        try:
            space = self._fill(IterationSpace(rows, cols), members)
        except NotLowerable:
            if _equal_pieces(self.group.boundaries, cols) == 1:
                raise
        pieces = _equal_pieces(self.group.boundaries, cols)
        if pieces > 1:
            # Unroll at the cat boundaries: every choice is then decided at build time and each operand is loaded once.
            unrolled = IterationSpace(rows, cols, pieces)
            space = space if space is not None and space.scans else self._fill(unrolled, members)
        assert space is not None
        return Segment(rows, space.width, tuple(space.body), tuple(space.stores), tuple(space.products))

    def _fill(self, space: IterationSpace, members: list[tuple[str, _Plan]]) -> IterationSpace:
        col_axis = len(space.rows)
        for value, plan in members:
            self.storing, folded = value, len(space.folded)
            spec, specs = stored_spec(self.group, value), self.graph.specs
            for piece in range(space.pieces):
                position: Position = tuple(
                    Index(0) if axis is None
                    else column(space, piece) if axis == col_axis
                    else Index.coord(axis, space.rows[axis])
                    for axis in plan.axes
                )
                walk = op_of(plan.walker.op).walk_of(plan.walker, specs) if plan.walker is not None else None
                if walk is not None:
                    position = walk(position)
                elif plan.viewed is not None:
                    position = reshape_position(position, plan.viewed, spec.shape)
                if piece > 0 and col_axis not in plan.axes:
                    break
                buffer = -1 - self.outputs.index(value)
                space.stores.append(Puller(self.group, space).store(buffer, value, position))
            last = next((axis for axis in reversed(plan.axes) if axis is not None), None)
            again = self.passed.get(value) and last is not None and col_axis not in plan.axes
            if again and any(last not in axes for axes in space.folded[folded:]):
                raise NotLowerable(f"{value} would fold a row again for each of its elements")
        return space

    def _buffers(self) -> tuple[Buffer, ...]:
        def buffer(value: str, is_output: bool) -> Buffer:
            spec = self.graph.specs[value]
            if spec.dtype not in ITEMSIZE:
                raise NotLowerable(f"value {value} has dtype {spec.dtype}, which kernels do not handle")
            node = writer(self.group, value) if is_output else None
            over = None if node is None else self.group.input_buffer(node.inputs[0])
            return Buffer(value, spec.dtype, spec.shape, spec.strides, is_output, over)

        return (*(buffer(v, False) for v in self.group.inputs), *(buffer(v, True) for v in self.outputs))


def _fitted(segment: Segment) -> Segment:
    """The segment with the axes that a kernel walks."""
    if not segment.products:
        return coalesce(split_words(segment))
    if segment.has_reduction():
        raise NotLowerable("what follows a matmul folds its columns, which are in several programs")
    try:
        return with_weight_columns(segment)
    except ValueError as error:
        raise NotLowerable(f"matmul: {error}") from None


def _along(shape: tuple[Size, ...], dim: int) -> _Plan:
    """The space of a value whose dimension ``dim`` is the columns."""
    axes = (*range(dim), len(shape) - 1, *range(dim, len(shape) - 1))
    return _Plan((*shape[:dim], *shape[dim + 1 :]), shape[dim], axes)


def _viewed_as_rows(shape: tuple[Size, ...], length: Size) -> tuple[Size, ...] | None:
    """``shape`` with its last dimensions as rows of ``length`` elements each; None where one or none of them fits."""
    inner: Size = 1
    for kept in reversed(range(len(shape))):
        count = divides(length, as_size(shape[kept] * inner))
        if count is not None and count != 0 and kept < len(shape) - 1 and divides(inner, length) is not None:
            return (*shape[:kept], count, length)
        inner = as_size(shape[kept] * inner)
    return None


def _memory_order(spec: TensorSpec) -> list[int]:
    """Dimensions from slowest to fastest in memory, so that columns are contiguous where the output is."""
    dims = list(range(len(spec.shape)))
    if not spec.is_static:
        return dims
    return sorted(dims, key=lambda dim: (-spec.strides[dim] if spec.shape[dim] != 1 else -(2**62), dim))


def _row_order(plan: _Plan, spec: TensorSpec) -> list[int]:
    """The row axes of ``plan`` from slowest to fastest in the memory of its value."""
    if plan.viewed is not None:
        return list(range(len(plan.rows)))
    axes = [plan.axes[dim] for dim in _memory_order(spec)]
    return [axis for axis in axes if axis is not None and axis < len(plan.rows)]


def _with_rows(plan: _Plan, kept: Sequence[int]) -> _Plan:
    """The same space with these of its row axes, in this order."""
    places: dict[int | None, int] = {axis: place for place, axis in enumerate((*kept, len(plan.rows)))}
    rows = tuple(plan.rows[axis] for axis in kept)
    return replace(plan, rows=rows, axes=tuple(places.get(axis) for axis in plan.axes))


def _equal_pieces(boundaries: set[int], cols: Size) -> int:
    """Number of equal column pieces that have every cat boundary between two of them (1 when that takes too many)."""
    if not boundaries or not isinstance(cols, int):
        return 1
    pieces = cols // math.gcd(cols, *boundaries)
    return pieces if pieces <= MAX_PIECES else 1


def group_nodes(graph: DataflowGraph, lowered: Lowered) -> tuple[OpNode, ...]:
    """The group's ops and the views on the way from the kernel's inputs to them and to its outputs, topological."""
    available = set(lowered.inputs)
    needed: dict[str, None] = {}

    def visit(value: str) -> None:
        node = graph.maker(value)
        if value in available or node is None or node.name in needed:
            return
        for operand in node.inputs:
            visit(operand)
        needed[node.name] = None

    for value in lowered.outputs:
        visit(value)
    return tuple(graph.op(name) for name in needed)
