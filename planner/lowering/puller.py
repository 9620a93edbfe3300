"""Pulling values: "what is this value at this position", answered by emitting instructions. Recipes drive it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce as fold
from operator import add, mul

import torch

from fuseplan.kernels.ir import ir
from fuseplan.kernels.ir.contraction import factored
from fuseplan.kernels.ir.index import Coord, Index, Size, flatten
from fuseplan.kernels.ir.ir import ITEMSIZE, NARROW, Apply, Instr, Load, Product, Round, Segment, register_type
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.kernels.ir.rewrite import ancestors, needed
from fuseplan.planner.errors import NotLowerable
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.ops.builder import BodyBuilder, Group, IterationSpace, Value
from fuseplan.planner.ops.op import HALVES
from fuseplan.planner.ops.positions import Position, along, reshape_position
from fuseplan.planner.ops.table import is_address_map, kind_of, op_of, why_refused, written_dim, written_value

#: Stands for the first coordinate that data gives, while an address is made; further ones count down from it.
_DATA_AXIS = -1
#: Look-ups of a kernel at most: each holds registers until its element is there, and compiling more takes seconds.
MOST_LOOKUPS = 40
#: Storage types narrower than the register that holds their values.
_ROUNDED = NARROW | HALVES


def check_writes(group: Group) -> None:
    """Raise NotLowerable for a group that may read memory to which it writes, seen before or after the write."""
    graph = group.graph
    written = [node for name in group.members if written_value(node := graph.op(name)) is not None]
    read = {base for value in group.inputs for base in _bases(group, value)} if written else set()
    for node in written:
        bases = _bases(group, node.inputs[0])
        if any(graph.producer(base) in group.members for base in bases):
            raise NotLowerable(f"{node.op} ({node.name}) writes to what the group makes")
        if not read.isdisjoint(bases):
            raise NotLowerable(f"{node.op} ({node.name}) writes to memory that the group may read")


def writer(group: Group, value: str) -> OpNode | None:
    """The op of the group that writes to an operand and returns it as ``value``."""
    node = group.graph.maker(value)
    return node if node is not None and node.name in group.members and written_value(node) is not None else None


def stored_spec(group: Group, value: str) -> TensorSpec:
    """What is stored of an output: all of it, or what an op writes into it, with the strides in which that lies."""
    node, specs = writer(group, value), group.graph.specs
    if node is None:
        return specs[value]
    target = specs[node.inputs[0]]
    return target if written_dim(node, specs) is None else replace(target, shape=specs[node.inputs[-1]].shape)


def _bases(group: Group, value: str) -> frozenset[str]:
    """Values in whose memory ``value`` may lie: behind views, writes, and ops of which nothing is known."""
    graph = group.graph
    found: set[str] = set()
    pending = [value]
    while pending:
        one = pending.pop()
        node = graph.maker(one)
        if node is None or node.name in group.members:
            found.add(one)
        elif written_value(node) is not None:
            pending.append(node.inputs[0])
        elif op_of(node.op).may_copy or kind_of(node, graph.specs) in ("view", "opaque"):
            pending.extend(node.inputs)
        else:
            found.add(one)
    return frozenset(found)


def looks_through(group: Group, node: OpNode) -> bool:
    """Whether the kernel reads an op's operand instead of its result: of a view, or a ``reshape`` of the group's."""
    graph = group.graph
    if is_address_map(node, graph.specs):
        return True
    if node.name in group.members or not op_of(node.op).may_copy:
        return False
    while (behind := graph.maker(node.inputs[0])) is not None and behind.name not in group.members:
        node = behind
        if op_of(node.op).view is None:
            return False
    return behind is not None


class Puller(BodyBuilder):
    def pull(self, value: str, position: Position) -> Value:
        key, pulled = (value, position, self._mask and self._mask.id), self._space.pulled
        found = pulled.get(key)
        if found is None:  # one look-up where it is known: a position takes long to hash
            found = pulled[key] = self._produce(value, position)
        return found

    def stored(self, value: str, position: Position) -> Value:
        """What a store of ``value`` writes: the store itself narrows it to the stored type."""
        node, dtype = self._member(value), self.specs[value].dtype
        if node is None or (dtype not in _ROUNDED and written_value(node) is None):
            return self.pull(value, position).to(register_type(dtype))
        return self._computed(node, value, position).to(register_type(dtype))

    def store(self, buffer: int, value: str, position: Position) -> ir.Store:
        """A store of ``value`` at a position of its :func:`stored_spec`."""
        stored, strides, node = self.stored(value, position), self.specs[value].strides, self._member(value)
        dim = written_dim(node, self.specs) if node is not None else None
        if node is None or dim is None:
            return ir.Store(buffer, flatten(position, strides), stored.id)
        at = self.pull(node.inputs[1], (position[dim],)).to("int64")
        if not self.is_per_row(at):
            raise NotLowerable(f"{node.op} ({node.name}) places the columns of the group one by one")
        rest, extent = flatten(along(position, dim, Index(0)), strides), self.specs[value].shape[dim]
        check = self.inside({dim: at}, {dim: extent})
        return ir.Store(buffer, rest, stored.id, ir.Gather(at.id, strides[dim], extent, check and check.id))

    def _produce(self, value: str, position: Position) -> Value:
        graph = self._group.graph
        node = self._member(value)
        if node is not None:
            if written_value(node) is not None:
                raise NotLowerable(f"{node.op} ({node.name}) writes what the group reads")
            return self._rounded(self._computed(node, value, position), value)
        view = graph.maker(value)
        if view is not None and (through := op_of(view.op).view) and looks_through(self._group, view):
            return self.pull(view.inputs[0], through(view, value, position, graph.specs))
        spec = self.specs[value]
        index = flatten(position, spec.strides)
        buffer = self._group.input_buffer(value)
        return self._space.emit(Load(register_type(spec.dtype), buffer, index, self._mask and self._mask.id))

    def _member(self, value: str) -> OpNode | None:
        """The op of the group that computes ``value``."""
        node = self._group.graph.maker(value)
        inside = node is not None and node.name in self._group.members and not is_address_map(node, self.specs)
        return node if inside else None

    def _computed(self, node: OpNode, value: str, position: Position) -> Value:
        # A plan is made for numbers; where a size is dynamic its recipe may refuse what it took.
        op = op_of(node.op)
        reason = None if op.is_contraction else why_refused(node, self.specs)
        if op.build is None or reason is not None:
            raise NotLowerable(reason or f"{node.op} has no recipe: it stays a library call")
        recipes, number = (op.build, *op.others), node.outputs.index(value)
        if number >= len(recipes):
            raise NotLowerable(f"{node.op} ({node.name}): no kernel computes its result {number}")
        return recipes[number](self, node, position)

    def _rounded(self, value: Value, name: str) -> Value:
        """What is left of a value in the dtype of ``name``, where that matters to those who read it."""
        dtype, group = self.specs[name].dtype, self._group
        if dtype not in NARROW and (dtype not in HALVES or (group.numerics != "eager" and name not in group.rounds)):
            return value
        value = value.to(register_type(dtype))
        return value if self._fits(value, dtype) else self._space.emit(Round(value.dtype, value.id, dtype))

    def _fits(self, value: Value, dtype: str) -> bool:
        """True when a value is known to be one that ``dtype`` holds."""
        instr = value.instr
        if dtype in HALVES and self._is_byte(self._space.body, value.id):
            return True
        if isinstance(instr, Load):
            return self.specs[self._group.inputs[instr.buffer]].dtype == dtype
        if isinstance(instr, Apply) and instr.op == "where":
            return all(self._fits(value.space.value(arg), dtype) for arg in instr.args[1:])
        if dtype in NARROW and "int" in dtype:
            limits, (least, most) = torch.iinfo(torch_dtype(dtype)), self.known_range(value)
            return limits.min <= least and most <= limits.max
        return isinstance(instr, Round) and instr.to == dtype

    def dot(self, node: OpNode, numbers: tuple[int, int], column: Index, rows: Position, transposed: bool) -> Value:
        space = self._space
        if self._mask is not None:
            raise NotLowerable(f"{node.op} ({node.name}) feeds only part of a cat")
        if any(len(space.rows) in index.axes() for index in rows):
            raise NotLowerable(f"{node.op} ({node.name}): its rows run across the columns of the group")
        left, right = (node.inputs[number] for number in numbers)
        inner, result, dtype = self.specs[left].shape[-1], self.specs[node.outputs[0]], self.specs[right].dtype
        width = result.shape[-1]
        sides: list[tuple[Segment, int, tuple[int, ...]]] = []
        for value, own in ((left, space.rows), (right, (width,))):
            side = IterationSpace(own, inner)
            k = Index.coord(len(own), inner)
            at = Index.coord(0, width)
            position = (*rows, k) if value == left and not sides else (at, k) if transposed else (k, at)
            held = Puller(self._group, side)
            pulled = held.pull(value, position).to("float64" if result.dtype == "float64" else "float32").id
            whole = Segment(own, inner, tuple(side.body), ())
            if whole.has_scan():
                raise NotLowerable(f"{node.op} ({node.name}): what it multiplies is scanned")
            split = factored(whole, pulled)
            # What is not scaled yet need not fit float16, in which tensor cores would multiply it; a byte does.
            fits = dtype != "float16" or self._is_byte(split[0].body, split[1])
            sides.append(split if fits else (whole, pulled, ()))
        (activations, multiplied, ones), (other, rest, others) = sides
        if other.has_reduction():
            raise NotLowerable(f"{node.op} ({node.name}): rows of its weights are folded")
        body, places = needed(other.body, [rest])
        product = Product(activations, multiplied, replace(other, body=body), places[rest], dtype)
        if product not in space.products:
            space.products.append(product)
        number, wide = space.products.index(product), register_type(result.dtype)
        total = space.emit(ir.Dot(wide, number, column))
        factors = [space.emit(ir.RowValue(wide, number, factor)) for factor in ones]
        factors += [self._brought(other, factor, column) for factor in others]
        return fold(mul, factors, total)

    def _is_byte(self, body: Sequence[Instr], value: int) -> bool:
        """Whether a value is stored in one byte: any half holds it."""
        instr = body[value]
        while isinstance(instr, ir.Cast):
            instr = body[instr.arg]
        return isinstance(instr, Load) and ITEMSIZE[self.specs[self._group.inputs[instr.buffer]].dtype] == 1

    def _brought(self, side: Segment, value: int, row: Index) -> Value:
        """A number that row ``row`` of a side has, as a value of this space."""
        moved = side.with_indices(lambda index: index.substitute({0: row}))
        places: dict[int, int] = {}
        for one in ancestors(side.body, [value]):
            places[one] = self._space.emit(ir.renamed(moved.body[one], places.__getitem__)).id
        return self._space.value(places[value])

    def row_shape(self, node: OpNode) -> tuple[Size, ...]:
        return op_of(node.op).row_shape(node, self.specs)

    def folded_dims(self, node: OpNode) -> tuple[int, ...]:
        return op_of(node.op).folded_dims(node, self.specs)

    def element(self, node: OpNode, row: Position, column: Index) -> Value:
        walk, source = op_of(node.op).walk_of(node, self.specs), node.inputs[0]
        if walk is not None:
            return self.pull(source, walk((*row, column)))
        return self.pull(source, reshape_position((*row, column), self.row_shape(node), self.specs[source].shape))

    def lookup(self, node: OpNode, value: str, position: Position, picked: Mapping[int, Value]) -> Value:
        graph = self._group.graph
        self._space.lookups += 1
        if self._space.lookups > MOST_LOOKUPS:
            raise NotLowerable(f"{node.op}: a kernel looks up {MOST_LOOKUPS} elements at most")
        extents = {dim: self.specs[value].shape[dim] for dim in picked}
        axes = {dim: _DATA_AXIS - number for number, dim in enumerate(picked)}
        position = tuple(
            Index(0, ((Coord(axes[dim], extents[dim]), 1),)) if dim in picked else index
            for dim, index in enumerate(position)
        )
        while (maker := graph.maker(value)) is not None and is_address_map(maker, graph.specs):
            view = op_of(maker.op).view
            assert view is not None
            value, position = maker.inputs[0], view(maker, value, position, graph.specs)
        if maker is not None and maker.name in self._group.members:
            raise NotLowerable(f"{node.op} looks up {value}, which the group computes")
        spec = self.specs[value]
        index = flatten(position, spec.strides)
        if not all(index.is_affine_in(axis) for axis in axes.values()):
            raise NotLowerable(f"{node.op} looks up {value} through a view that cuts the dimension up")
        ids = {dim: at.to("int64") for dim, at in picked.items()}
        mask, check = self._mask, self.inside(ids, extents)
        for dim, at in ids.items():
            mask = self._both(mask, self._is_inside(at, extents[dim]))
        dtype = register_type(spec.dtype)
        missing = math.nan if dtype.startswith("float") else 0.0
        strides = {dim: index.coefficient(axis) for dim, axis in axes.items()}
        gather = replace(self._gather(ids, strides, extents), check=check and check.id)
        rest = index.substitute({axis: Index(0) for axis in axes.values()})
        return self._space.emit(Load(dtype, self._group.input_buffer(value), rest, mask and mask.id, missing, gather))

    def _gather(self, ids: Mapping[int, Value], strides: Mapping[int, Size], extents: Mapping[int, Size]) -> ir.Gather:
        """One term of an address for all coordinates that are data: their distance from the first element."""
        first = next(iter(ids))
        if len(ids) == 1:
            return ir.Gather(ids[first].id, strides[first], extents[first])
        total = fold(add, [at * self.iota(Index(strides[dim])) for dim, at in ids.items()])
        known = [extent for extent in extents.values() if isinstance(extent, int)]
        return ir.Gather(total.id, 1, min(known, default=extents[first]))
