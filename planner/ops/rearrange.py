"""Recipes of ops that create, place or join elements: fills, ranges, triangles, ``cat``, copying reshapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fuseplan.kernels.ir.index import Index, Size, as_size, divides, known_less_equal, product
from fuseplan.kernels.ir.ir import RegisterType, register_type
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.ops.builder import BodyBuilder, Value
from fuseplan.planner.ops.op import FLOATS, Build, is_float, no_booleans, result_type, rows
from fuseplan.planner.ops.positions import Position, Specs, along, normalise_dim, reshape_position, without


def _filled(number: Callable[[OpNode], Any]) -> Build:
    return lambda p, node, position: p.const(number(node), result_type(p, node))


def _arange(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    start, step = node.attrs.get("start", 0), node.attrs.get("step", 1)
    return p.iota(position[0] * step + start).to(result_type(p, node))


def _arange_refuse(node: OpNode, specs: Specs) -> str | None:
    step = node.attrs.get("step", 1)
    if is_float(node.attrs.get("start")) or is_float(step):
        return "float start or step"
    return f"step {step} is not positive" if isinstance(step, int) and step <= 0 else None


def _triangle(keep: str) -> Build:
    def build(p: BodyBuilder, node: OpNode, position: Position) -> Value:
        diagonal = node.attrs.get("diagonal", 0)
        row, col = p.iota(position[-2] + max(diagonal, 0)), p.iota(position[-1] + max(-diagonal, 0))
        kept = col <= row if keep == "lower" else col >= row
        return kept.where(p.operand(node, 0, position, result_type(p, node)), 0)

    return build


def _cat(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    dim = normalise_dim(node.attrs.get("dim", 0), len(position))
    return _joined(p, node.inputs, dim, position, result_type(p, node))


def _joined(p: BodyBuilder, values: Sequence[str], dim: int, position: Position, dtype: RegisterType) -> Value:
    """What lies at ``position`` of ``values`` put one after another along ``dim``."""
    index = position[dim]
    # ATen skips empty parts, and one-dimensional empty ones whatever the rank of the others.
    shapes = {value: p.specs[value].shape for value in values}
    parts = [value for value in values if len(shapes[value]) == len(position) and shapes[value][dim] != 0]
    if not parts:
        return p.const(0, dtype)  # of a result without elements, nobody asks for one
    starts: list[Size] = [0]
    for value in parts:
        starts.append(as_size(starts[-1] + shapes[value][dim]))

    def piece(puller: BodyBuilder, number: int) -> Value:
        moved = along(position, dim, index + as_size(-starts[number]))
        return puller.pull(parts[number], moved).to(dtype)

    return _choose(p, index, starts, piece, 0)


def _diff(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """The next element less this one, along a dimension at whose ends other tensors may be put on."""
    dtype = result_type(p, node)
    dim = normalise_dim(node.attrs.get("dim", -1), len(position))
    itself, *others = node.inputs
    before = [] if "prepend" in node.attrs or not others else [others.pop(0)]
    values = (*before, itself, *others)
    here = _joined(p, values, dim, position, dtype)
    return _joined(p, values, dim, along(position, dim, position[dim] + 1), dtype) - here


def _diff_refuse(node: OpNode, specs: Specs) -> str | None:
    if node.attrs.get("n", 1) != 1:
        return f"differences of order {node.attrs['n']}"
    return no_booleans(node, specs)


def _margins(node: OpNode, specs: Specs) -> list[tuple[Size, Size]]:
    """For each dimension, how much a pad puts before and after it (below zero: takes away)."""
    given, rank = node.attrs["pad"], len(specs[node.inputs[0]].shape)
    pairs = [(given[at], given[at + 1]) for at in range(0, len(given), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def padded(
    p: BodyBuilder, source: str, margins: Sequence[tuple[Size, Size]], position: Position, value: float = 0
) -> Value:
    """Element ``position`` of ``source`` with so much of a constant before and after it along each dimension."""
    dtype, shape = register_type(p.specs[source].dtype), p.specs[source].shape

    def at(puller: BodyBuilder, moved: Position) -> Value:
        dim = len(moved)
        if dim == len(shape):
            return puller.pull(source, moved).to(dtype)
        before, after = margins[dim]
        end = as_size(before + shape[dim])
        adds_before, adds_after = (not isinstance(margin, int) or margin > 0 for margin in (before, after))
        starts = [0, *([before] if adds_before else []), *([end] if adds_after else []), as_size(end + after)]
        inside = (*moved, position[dim] + as_size(-before))

        def piece(q: BodyBuilder, number: int) -> Value:
            return at(q, inside) if number == adds_before else q.const(value, dtype)

        return _choose(puller, position[dim], starts, piece, 0)

    return at(p, ())


def _pad(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    value = node.attrs.get("value")
    return padded(p, node.inputs[0], _margins(node, p.specs), position, 0 if value is None else value)


def _pad_refuse(node: OpNode, specs: Specs) -> str | None:
    mode = node.attrs.get("mode", "constant")
    if mode != "constant":
        return f"mode {mode}"
    sizes = (size for pair in _margins(node, specs) for size in pair)
    known = all(isinstance(size, int) or known_less_equal(0, size) for size in sizes)
    return None if known else "whether it adds or takes away is not known"


def _repeat(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    shape = p.specs[node.inputs[0]].shape
    first = len(position) - len(shape)
    own = zip(position[first:], shape, node.attrs["repeats"][first:], strict=True)
    return p.pull(node.inputs[0], tuple(
        index if isinstance(times, int) and times == 1 else index % extent for index, extent, times in own
    ))


def _roll(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """What leaves at one end comes back at the other; without dimensions, of all elements as one row."""
    shape = p.specs[node.inputs[0]].shape
    shifts, dims = (_numbers(node, name) for name in ("shifts", "dims"))
    if not dims:
        total = product(shape)
        (moved,) = _rolled(reshape_position(position, shape, (total,)), (total,), shifts, (0,))
        return p.pull(node.inputs[0], reshape_position((moved,), (total,), shape))
    return p.pull(node.inputs[0], _rolled(position, shape, shifts, dims))


def _rolled(position: Position, shape: Sequence[Size], shifts: Sequence[int], dims: Sequence[int]) -> Position:
    for shift, dim in zip(shifts, dims, strict=True):
        extent, at = shape[dim], normalise_dim(dim, len(shape))
        if extent:  # of nothing, nobody asks for an element
            position = along(position, at, (position[at] + -shift % extent) % extent)
    return position


def _numbers(node: OpNode, name: str) -> tuple[int, ...]:
    """An argument that may be given as one number."""
    given = node.attrs.get(name, ())
    return (given,) if isinstance(given, int) else tuple(given)


def _roll_refuse(node: OpNode, specs: Specs) -> str | None:
    numbers = (*specs[node.inputs[0]].shape, *_numbers(node, "shifts"))
    return None if all(isinstance(number, int) for number in numbers) else "by or along a dynamic size"


def _flip(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    shape = p.specs[node.inputs[0]].shape
    for dim in _numbers(node, "dims"):
        at = normalise_dim(dim, len(shape))
        position = along(position, at, Index(shape[at] - 1) - position[at])
    return p.pull(node.inputs[0], position)


def _upsample(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    pairs = zip(position, growth(node, p.specs), strict=True)
    return p.pull(node.inputs[0], tuple(index // factor for index, factor in pairs))


def growth(node: OpNode, specs: Specs) -> list[Size]:
    """How many times each dimension grows; 0 where that is no whole number, or not the one that the call asks for."""
    shapes = (specs[value].shape for value in (node.inputs[0], node.outputs[0]))
    found = [divides(size, grown) or 0 for size, grown in zip(*shapes, strict=True)]
    names = ["scales"] if len(found) == 3 else [f"scales_{side}" for side in "dhw"[5 - len(found) :]]
    asked = node.attrs.get("scale_factors") or [node.attrs.get(name) for name in names]
    for at, factor in enumerate(asked, len(found) - len(asked)):
        found[at] = found[at] if factor in (None, found[at]) else 0
    return found


def refuse_upsampling(node: OpNode, specs: Specs) -> str | None:
    if specs[node.outputs[0]].dtype not in (*FLOATS, "uint8"):
        return f"of dtype {specs[node.outputs[0]].dtype}"
    # ATen multiplies by a float, which is exact for these.
    if all(isinstance(factor, int) and factor > 0 and factor & (factor - 1) == 0 for factor in growth(node, specs)):
        return None
    return "a size does not grow by a power of two"


def _choose(
    p: BodyBuilder, index: Index, starts: list[Size], piece: Callable[[BodyBuilder, int], Value], first: int,
    masked: bool = True
) -> Value:
    """The piece of a cat that holds ``index``, decided now where possible, else selected; ``masked``: under masks."""
    if first == len(starts) - 2:
        return piece(p, first)
    below = p.split_at(index, starts[first + 1])
    if below is True:
        return piece(p, first)
    if below is False:
        return _choose(p, index, starts, piece, first + 1, masked)
    inside = p.iota(index) < p.iota(Index(starts[first + 1]))
    here = piece(p.masked(inside) if masked else p, first)
    other = p.masked(inside.logical_not()) if masked else p
    return inside.where(here, _choose(other, index, starts, piece, first + 1, masked))


def _stack(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    dtype = result_type(p, node)
    dim = normalise_dim(node.attrs.get("dim", 0), len(position))
    inner = without(position, dim)
    starts: list[Size] = list(range(len(node.inputs) + 1))
    # Every part has an element there. Where neighbours are of different parts, all are read anyway, and one word that
    # the parts take apart only once.
    apart = dim + 1 < len(position)
    return _choose(p, position[dim], starts, lambda q, k: q.pull(node.inputs[k], inner).to(dtype), 0, apart)


def _repeat_interleave(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    source, repeats = node.inputs[0], node.attrs["repeats"]
    shape = p.specs[source].shape
    if node.attrs.get("dim") is None:
        return p.pull(source, reshape_position((position[0] // repeats,), (product(shape),), shape))
    dim = normalise_dim(node.attrs["dim"], len(shape))
    return p.pull(source, along(position, dim, position[dim] // repeats))


def _pixel_shuffle(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """Each square of pixels is the channels that the operand has at one pixel."""
    side, (*batch, channel, row, column) = node.attrs["upscale_factor"], position
    within = row % side * side + column % side
    return p.pull(node.inputs[0], (*batch, channel * side**2 + within, row // side, column // side))


def _pixel_unshuffle(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    side, (*batch, channel, row, column) = node.attrs["downscale_factor"], position
    within = channel % side**2
    moved = (channel // side**2, row * side + within // side, column * side + within % side)
    return p.pull(node.inputs[0], (*batch, *moved))


_made, _moved = partial(rows, "rearrangement"), partial(rows, "rearrangement", rearranges=True)
_GIVEN, _ONES = _filled(lambda node: node.attrs.get("fill_value", 0)), _filled(lambda node: 1)

REARRANGEMENTS = {
    **_made("full zeros new_zeros new_full", _GIVEN),
    **_made("full_like zeros_like zero", _GIVEN, like=True),
    **_made("fill.Scalar", _filled(lambda node: node.attrs["value"]), like=True),
    **_made("fill.Tensor", lambda p, node, position: p.operand(node, 1, (), result_type(p, node)), like=True),
    **_made("ones new_ones", _ONES),
    **_made("ones_like", _ONES, like=True),
    **_made("scalar_tensor", _filled(lambda node: node.attrs["s"])),
    **_made("arange arange.start arange.start_step", _arange, refuse=_arange_refuse),
    **_made("diff", _diff, refuse=_diff_refuse),
    **_made("upsample_nearest1d upsample_nearest1d.vec upsample_nearest2d upsample_nearest2d.vec upsample_nearest3d "
            "upsample_nearest3d.vec", _upsample, refuse=refuse_upsampling, grows=True),
    **_moved("tril", _triangle("lower"), slow_on_cpu=2.9),
    **_moved("triu", _triangle("upper"), slow_on_cpu=2.9),
    **_moved("cat concat", _cat),
    **_moved("stack", _stack),
    **_moved("pad constant_pad_nd", _pad, refuse=_pad_refuse),
    **_moved("repeat", _repeat),
    **_moved("roll", _roll, refuse=_roll_refuse),
    **_moved("flip", _flip, refuse=_roll_refuse),
    **_moved("repeat_interleave.self_int", _repeat_interleave),
    **_moved("pixel_shuffle", _pixel_shuffle),
    **_moved("pixel_unshuffle", _pixel_unshuffle),
}
