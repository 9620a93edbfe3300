"""Recipes of ops that create, place or join elements: fills, ranges, triangles, ``cat``, copying reshapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fuseplan.kernels.index import Index, Size, as_size, product
from fuseplan.planner.graph import OpNode
from fuseplan.planner.recipe import Recipe, result_type
from fuseplan.planner.views import MAY_COPY, VIEW_MAPS, Position, Specs, normalise_dim, reshape_position

if TYPE_CHECKING:
    from fuseplan.planner.puller import Puller


def _fill(p: Puller, node: OpNode, position: Position) -> int:
    return p.const(node.attrs.get("fill_value", 0), result_type(p, node))


def _ones(p: Puller, node: OpNode, position: Position) -> int:
    return p.const(1, result_type(p, node))


def _scalar_tensor(p: Puller, node: OpNode, position: Position) -> int:
    return p.const(node.attrs["s"], result_type(p, node))


def _arange(p: Puller, node: OpNode, position: Position) -> int:
    start, step = node.attrs.get("start", 0), node.attrs.get("step", 1)
    return p.cast(p.iota(position[0] * step + start), result_type(p, node))


def _arange_refuse(node: OpNode, specs: Specs) -> str | None:
    if any(isinstance(node.attrs.get(name), float) for name in ("start", "step")):
        return f"{node.op}: float start or step"
    step = node.attrs.get("step", 1)
    return f"{node.op}: step {step} is not positive" if isinstance(step, int) and step <= 0 else None


def _triangle(keep: str) -> Recipe:
    def build(p: Puller, node: OpNode, position: Position) -> int:
        dtype = result_type(p, node)
        diagonal = node.attrs.get("diagonal", 0)
        row, col = p.iota(position[-2] + max(diagonal, 0)), p.iota(position[-1] + max(-diagonal, 0))
        kept = p.apply("le", col, row) if keep == "lower" else p.apply("ge", col, row)
        return p.apply("where", kept, p.operand(node, 0, position, dtype), p.const(0, dtype))

    return Recipe(build)


def _cat(p: Puller, node: OpNode, position: Position) -> int:
    dtype = result_type(p, node)
    dim = normalise_dim(node.attrs.get("dim", 0), len(position))
    index = position[dim]
    # ATen skips empty parts, and one-dimensional empty ones whatever the rank of the others.
    shapes = {value: p.specs[value].shape for value in node.inputs}
    parts = [value for value in node.inputs if len(shapes[value]) == len(position) and shapes[value][dim] != 0]
    starts: list[Size] = [0]
    for value in parts:
        starts.append(as_size(starts[-1] + shapes[value][dim]))

    def piece(puller: Puller, number: int) -> int:
        moved = (*position[:dim], index + as_size(-starts[number]), *position[dim + 1 :])
        return puller.cast(puller.pull(parts[number], moved), dtype)

    return _choose(p, index, starts, piece, 0)


def _choose(p: Puller, index: Index, starts: list[Size], piece: Callable[[Puller, int], int], first: int) -> int:
    """The piece of a cat that holds ``index``, decided now where possible, else selected under masks."""
    if first == len(starts) - 2:
        return piece(p, first)
    below = p.split_at(index, starts[first + 1])
    if below is True:
        return piece(p, first)
    if below is False:
        return _choose(p, index, starts, piece, first + 1)
    inside = p.apply("lt", p.iota(index), p.iota(Index(starts[first + 1])))
    here = piece(p.masked(inside), first)
    rest = _choose(p.masked(p.apply("logical_not", inside)), index, starts, piece, first + 1)
    return p.apply("where", inside, here, rest)


def _stack(p: Puller, node: OpNode, position: Position) -> int:
    dtype = result_type(p, node)
    dim = normalise_dim(node.attrs.get("dim", 0), len(position))
    inner = position[:dim] + position[dim + 1 :]
    starts: list[Size] = list(range(len(node.inputs) + 1))
    return _choose(p, position[dim], starts, lambda q, k: q.cast(q.pull(node.inputs[k], inner), dtype), 0)


def _copy_reshape(p: Puller, node: OpNode, position: Position) -> int:
    source, moved = VIEW_MAPS[node.op](node, node.outputs[0], position, p.specs)
    return p.pull(source, moved)


def _repeat_interleave(p: Puller, node: OpNode, position: Position) -> int:
    source, repeats = node.inputs[0], node.attrs["repeats"]
    shape = p.specs[source].shape
    if node.attrs.get("dim") is None:
        return p.pull(source, reshape_position((position[0] // repeats,), (product(shape),), shape))
    dim = normalise_dim(node.attrs["dim"], len(shape))
    return p.pull(source, (*position[:dim], position[dim] // repeats, *position[dim + 1 :]))


def _embedding(p: Puller, node: OpNode, position: Position) -> int:
    """Rows of a table. An index outside it, which ATen refuses, gives NaN and reads nothing."""
    row = p.operand(node, 1, position[:-1])
    return p.lookup(node, node.inputs[0], (Index(0), position[-1]), 0, row)


def _index_select(p: Puller, node: OpNode, position: Position) -> int:
    dim = normalise_dim(node.attrs["dim"], len(position))
    return p.lookup(node, node.inputs[0], position, dim, p.pull(node.inputs[1], (position[dim],)))


def _gather(p: Puller, node: OpNode, position: Position) -> int:
    dim = normalise_dim(node.attrs["dim"], len(position))
    return p.lookup(node, node.inputs[0], position, dim, p.pull(node.inputs[1], position))


def _ranks_refuse(node: OpNode, specs: Specs) -> str | None:
    ranks = [len(specs[value].shape) for value in node.inputs]
    if node.op == "aten.index_select.default":
        return None if ranks[0] and ranks[1] == 1 else f"{node.op}: ranks {ranks[0]} and {ranks[1]}"
    return None if ranks[0] == ranks[1] != 0 else f"{node.op}: ranks {ranks[0]} and {ranks[1]}"


def rearranging_recipes() -> dict[str, Recipe]:
    """Rows of the recipe table, by ATen op."""
    rows: dict[str, Recipe] = {}
    for name in ("full.default", "full_like.default", "zeros.default", "zeros_like.default", "new_zeros.default",
                 "new_full.default"):
        rows[f"aten.{name}"] = Recipe(_fill)
    for name in ("ones.default", "ones_like.default", "new_ones.default"):
        rows[f"aten.{name}"] = Recipe(_ones)
    rows["aten.scalar_tensor.default"] = Recipe(_scalar_tensor)
    for name in ("default", "start", "start_step"):
        rows[f"aten.arange.{name}"] = Recipe(_arange, refuse=_arange_refuse)
    rows["aten.tril.default"], rows["aten.triu.default"] = _triangle("lower"), _triangle("upper")
    rows["aten.cat.default"] = rows["aten.concat.default"] = Recipe(_cat)
    rows["aten.stack.default"] = Recipe(_stack)
    rows["aten.embedding.default"] = Recipe(_embedding)
    rows["aten.index_select.default"] = Recipe(_index_select, refuse=_ranks_refuse)
    rows["aten.gather.default"] = Recipe(_gather, refuse=_ranks_refuse)
    rows["aten.repeat_interleave.self_int"] = Recipe(_repeat_interleave)
    for name in MAY_COPY:
        rows[name] = Recipe(_copy_reshape)
    return rows
