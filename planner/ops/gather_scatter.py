"""Recipes of ops that look elements up by data (embeddings, selections), or write where data says (caches)."""

from __future__ import annotations

from functools import partial, reduce
from operator import add

from fuseplan.kernels.ir.index import Index, as_size
from fuseplan.planner.errors import NotLowerable
from fuseplan.planner.graph.dataflow import OpNode, Ref
from fuseplan.planner.ops.builder import BodyBuilder, Value
from fuseplan.planner.ops.op import FLOATS, INTEGERS, result_type, rows
from fuseplan.planner.ops.positions import Position, Specs, normalise_dim

#: Rows of a bag at most: a kernel reads one after another.
MOST_IN_A_BAG = 16


def _bag(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """Sums or means of as many rows of a table each: indices [bags * n], offsets ``arange(0, bags * n, n)``."""
    p.refuse_part_of_cat(node)
    size, dtype = _bag_size(p, node), result_type(p, node)
    rows = (p.pull(node.inputs[1], (position[0] * size + at,)) for at in range(size))
    total = reduce(add, (p.lookup(node, node.inputs[0], (Index(0), position[1]), {0: row}).to(dtype) for row in rows))
    return total * (1.0 / size) if node.attrs.get("mode") == 1 else total


def _bag_size(p: BodyBuilder, node: OpNode) -> int:
    maker = p.computed_by(node.inputs[2])
    if maker is None or not maker.op.startswith("aten.arange") or maker.attrs.get("start", 0) != 0:
        raise NotLowerable(f"{node.op} ({node.name}): its bags are not known to be of one size")
    size, given, bags = maker.attrs.get("step", 1), *(p.specs[value].shape[0] for value in node.inputs[1:3])
    if not isinstance(size, int) or as_size(bags * size - given) != 0:
        raise NotLowerable(f"{node.op} ({node.name}): its last bag is of another size")
    if not 0 < size <= MOST_IN_A_BAG:
        raise NotLowerable(f"{node.op} ({node.name}): {size} rows in a bag")
    return size


def _bag_refuse(node: OpNode, specs: Specs) -> str | None:
    if node.attrs.get("mode", 0) not in (0, 1) or node.attrs.get("include_last_offset"):
        return "other than sums and means of bags, or with the end of the last"
    if len(node.inputs) > 3 or node.attrs.get("padding_idx") is not None:
        return "with weights, or rows that do not count"
    if len(specs[node.inputs[1]].shape) != 1 or specs[node.inputs[0]].dtype not in FLOATS:
        return "of no list of rows of floats"
    return _positions_refuse(node, specs, "int32")


def _along_dim(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """``gather``, whose index has the result's shape, and ``index_select``, whose index has one dimension."""
    dim = normalise_dim(node.attrs["dim"], len(position))
    at = (position[dim],) if node.op == "aten.index_select.default" else position
    return p.lookup(node, node.inputs[0], position, {dim: p.pull(node.inputs[1], at)})


def _ranks_refuse(node: OpNode, specs: Specs) -> str | None:
    rank, other = (len(specs[value].shape) for value in node.inputs[:2])
    wanted = 1 if node.op == "aten.index_select.default" else rank
    if not rank or other != wanted:
        return f"ranks {rank} and {other}"
    return _positions_refuse(node, specs, "int32")


def _positions_refuse(node: OpNode, specs: Specs, *others: str) -> str | None:
    """ATen raises for positions of other types than int64 and ``others``."""
    dtype = specs[node.inputs[1]].dtype
    return None if dtype in ("int64", *others) else f"positions of dtype {dtype}"


def _indexed_dims(node: OpNode) -> dict[int, int]:
    """For each dimension of the operand that a tensor indexes, the number of that tensor among the op's operands."""
    given = enumerate(node.attrs["indices"])
    return {dim: entry.position for dim, entry in given if isinstance(entry, Ref)}


def _index(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """``x[i, :, j]``: the index tensors are broadcast together; a negative index counts from the end.

    Their common dimensions stand where the first of them does, or first of all where a slice parts them.
    """
    source = node.inputs[0]
    shape = p.specs[source].shape
    numbers = _indexed_dims(node)
    common = max(len(p.specs[node.inputs[number]].shape) for number in numbers.values())
    first, last = min(numbers), max(numbers)
    at = first if last - first + 1 == len(numbers) else 0
    inner, rest = position[at : at + common], iter((*position[:at], *position[at + common :]))
    picked = {dim: _from_start(p, p.operand(node, number, inner), shape[dim]) for dim, number in numbers.items()}
    moved = tuple(Index(0) if dim in numbers else next(rest) for dim in range(len(shape)))
    return p.lookup(node, source, moved, picked)


def _from_start(p: BodyBuilder, at: Value, extent: object) -> Value:
    """The position that a possibly negative index means."""
    at = at.to("int64")
    if p.known_range(at)[0] >= 0:
        return at
    wrapped = at + p.iota(Index(extent))
    return (at < 0).where(wrapped, at)


def _index_refuse(node: OpNode, specs: Specs) -> str | None:
    dtypes = [specs[node.inputs[number]].dtype for number in _indexed_dims(node).values()]
    masks = [dtype for dtype in dtypes if dtype not in INTEGERS or dtype == "uint8"]
    if masks:
        return f"an index of dtype {masks[0]} picks as many elements as are true in it"
    return None if dtypes else "no dimension is indexed"


def _index_copy_refuse(node: OpNode, specs: Specs) -> str | None:
    target, index = (specs[value] for value in node.inputs[:2])
    if not target.shape or len(index.shape) != 1:
        return f"ranks {len(target.shape)} and {len(index.shape)}"
    if (dtype := specs[node.inputs[2]].dtype) != target.dtype:
        return f"writes numbers of dtype {dtype} to one of {target.dtype}"
    return _positions_refuse(node, specs) or _target_refuse(node, specs)


def _target_refuse(node: OpNode, specs: Specs) -> str | None:
    target, source = specs[node.inputs[0]], node.inputs[-1]
    if any(stride == 0 and extent != 1 for extent, stride in zip(target.shape, target.strides, strict=True)):
        return "writes elements that lie in one place"
    return f"writes {source} to itself" if source == node.inputs[0] else None


_lookup = partial(rows, "lookup", effort="gather")
_row = partial(_lookup, rearranges=True)

#: They look elements of operand 0 up by data: all of it has to exist before.
LOOKUPS = {
    **_row("embedding", lambda p, node, position: p.lookup(
        node, node.inputs[0], (Index(0), position[-1]), {0: p.operand(node, 1, position[:-1])}),
           rows_by=1, new_memory=True),
    **_lookup("embedding_bag embedding_bag.padding_idx", _bag, refuse=_bag_refuse, new_memory=True),
    **_row("index_select", _along_dim, refuse=_ranks_refuse, rows_by=2, wraps=True),
    **_row("gather", _along_dim, refuse=_ranks_refuse, slow_on_cpu=3.0),
    **_row("index.Tensor", _index, refuse=_index_refuse, rows_by=1),
}
WRITES = {
    **rows("write", "index_copy_", lambda p, node, position: p.pull(node.inputs[2], position),
           refuse=_index_copy_refuse, effort="scatter", wraps=True,
           writes=lambda node, specs: normalise_dim(node.attrs["dim"], len(specs[node.inputs[0]].shape))),
    **rows("write", "copy_", lambda p, node, position: p.operand(node, 1, position), refuse=_target_refuse,
           writes=lambda node, specs: None),
    **rows("write", "index_put_.* scatter_.*"),
    **rows("write", "index_add_.*", wraps=True),
    **rows("scatter", "index_add.* index_copy.* index_fill.* index_reduce.* scatter.* scatter_add.* scatter_reduce.*"),
}
