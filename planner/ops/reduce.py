"""Recipes of ops that fold dimensions: sums, means, softmax, extremes' positions, normalisations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any

import torch

from fuseplan.kernels.ir.index import Index, Size, as_size, divides, product
from fuseplan.kernels.ir.ir import RegisterType, register_type
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.ops.builder import BodyBuilder, Value
from fuseplan.planner.ops.op import HALVES, Build, Rows, Walk, float_result, no_booleans, result_type, rows
from fuseplan.planner.ops.positions import Position, Specs, is_channels_last, normalise_dim, reshape_position


def reduced_dims(node: OpNode, specs: Specs) -> tuple[int, ...]:
    """The dimensions that an op names: all where it names none."""
    rank = len(specs[node.inputs[0]].shape)
    dims: Any = node.attrs.get("dim")
    if dims is None or dims == ():
        return tuple(range(rank))
    return tuple(normalise_dim(dim, rank) for dim in (dims if isinstance(dims, tuple | list) else (dims,)))


def _last_dims(node: OpNode, specs: Specs, count: int) -> tuple[int, ...]:
    rank = len(specs[node.inputs[0]].shape)
    return tuple(range(rank - count, rank))


def _row_of(p: BodyBuilder, node: OpNode, position: Position) -> Position:
    """The coordinates of the row that the result element at ``position`` comes from."""
    dims = p.folded_dims(node)
    if len(position) == len(p.specs[node.inputs[0]].shape):  # folded ones are kept
        position = tuple(index for dim, index in enumerate(position) if dim not in dims)
    return p.row_position(node, position)


def _fold(
    p: BodyBuilder, node: OpNode, row: Position, kind: str, dtype: RegisterType,
    element: Callable[[Value], Value] = lambda x: x,
) -> Value:
    """Fold ``element(x)`` over the row ``row`` of operand 0."""
    return _fold_columns(p, node, row, kind, lambda x, _: element(x.to(dtype)))


def _fold_columns(
    p: BodyBuilder, node: OpNode, row: Position, kind: str, element: Callable[[Value, Index], Value]
) -> Value:
    """Fold ``element(x, column)`` over the row ``row`` of operand 0."""
    return p.reduce(kind, node, p.row_shape(node)[-1], lambda col: element(p.element(node, row, col), col))


def _float_type(p: BodyBuilder, node: OpNode) -> RegisterType:
    dtypes = (p.specs[value].dtype for value in (node.inputs[0], node.outputs[0]))  # the second one may be asked for
    return "float64" if "float64" in dtypes else "float32"


def across(factor: float) -> Callable[[OpNode, Specs], float]:
    """A factor of folds and scans along other dimensions than the last."""
    return lambda node, specs: 1.0 if len(specs[node.inputs[0]].shape) - 1 in reduced_dims(node, specs) else factor


def _plain_fold(kind: str) -> Build:
    return lambda p, node, position: _fold(p, node, _row_of(p, node, position), kind, result_type(p, node))


def _mean_of(p: BodyBuilder, total: Value, count: Size, correction: float = 0.0) -> Value:
    """``total / (count - correction)``."""
    if isinstance(count, int):
        return total * (math.inf if count <= correction else 1.0 / (count - correction))
    number = p.iota(Index(count)).to(total.dtype)
    return total / (number - correction if correction else number)


def _mean(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    total = _fold(p, node, _row_of(p, node, position), "sum", _float_type(p, node))
    return _mean_of(p, total, p.row_shape(node)[-1])


def _moments(p: BodyBuilder, node: OpNode, row: Position, correction: float = 0.0) -> tuple[Value, Value]:
    """Mean and variance of a row, two passes: the variance of the deviations does not cancel."""
    dtype, extent = _float_type(p, node), p.row_shape(node)[-1]
    mean = _mean_of(p, _fold(p, node, row, "sum", dtype), extent)
    squares = _fold(p, node, row, "sum", dtype, lambda x: (x - mean) * (x - mean))
    return mean, _mean_of(p, squares, extent, correction)


def _var(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    correction = node.attrs.get("correction", 1 if node.attrs.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    return _moments(p, node, _row_of(p, node, position), float(correction))[1]


def _softmax(log: bool) -> Build:
    def build(p: BodyBuilder, node: OpNode, position: Position) -> Value:
        dtype, row = _float_type(p, node), _row_of(p, node, position)
        top = _fold(p, node, row, "max", dtype)
        total = _fold(p, node, row, "sum", dtype, lambda x: (x - top).exp())
        shifted = p.pull(node.inputs[0], position).to(dtype) - top
        if log:
            return shifted - total.log()
        # One division a row, not one an element; the total is at least 1, so that its reciprocal exists.
        return shifted.exp() * total.reciprocal()

    return build


def _log_sum_exp(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """log(sum(exp(x))); of a row whose largest is infinite, no infinity is taken from another."""
    dtype, row = _float_type(p, node), _row_of(p, node, position)
    top = _fold(p, node, row, "max", dtype)
    top = top.abs().eq(math.inf).where(0.0, top)
    return _fold(p, node, row, "sum", dtype, lambda x: (x - top).exp()).log() + top


def _norm(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """linalg_vector_norm of order 2, 1 or infinity."""
    order = node.attrs.get("ord", 2)
    total = _fold(p, node, _row_of(p, node, position), "max" if order == math.inf else "sum", _float_type(p, node),
                  lambda x: x * x if order == 2 else x.abs())
    return total.sqrt() if order == 2 else total


def _norm_refuse(node: OpNode, specs: Specs) -> str | None:
    order = node.attrs.get("ord", 2)
    if order not in (1, 2, math.inf) or node.attrs.get("dtype") is not None:
        return f"of order {order}, or in another dtype"
    return float_result(node, specs)


def _whether(kind: str) -> Build:
    """Whether any element is not 0 (``max``), or all are not (``min``)."""

    return lambda p, node, position: _fold_columns(
        p, node, _row_of(p, node, position), kind, lambda x, _: x if x.dtype == "bool" else x.ne(0))


def _whether_refuse(node: OpNode, specs: Specs) -> str | None:
    return None if specs[node.outputs[0]].dtype == "bool" else "result of dtype uint8"


def _pool_refuse(node: OpNode, specs: Specs) -> str | None:
    whole = all(isinstance(size, int) and size == 1 for size in specs[node.outputs[0]].shape[-2:])
    return float_result(node, specs) if whole else "to another size than 1 x 1"


def _position_of(kind: str) -> Build:
    """The first position of a row's extreme; NaN counts as the most extreme of all, as in ATen."""

    def build(p: BodyBuilder, node: OpNode, position: Position) -> Value:
        dtype = register_type(p.specs[node.inputs[0]].dtype)
        row = _row_of(p, node, position)
        best = _fold(p, node, row, kind, dtype)

        def at(x: Value, column: Index) -> Value:
            hit = x.eq(best) | x.ne(x) if dtype.startswith("float") else x.eq(best)
            return hit.where(p.iota(column), p.iota(Index(p.row_shape(node)[-1])))

        return _fold_columns(p, node, row, "min", at).to(result_type(p, node))

    return build


#: Elements that a sum over another dimension than the last adds one by one.
MAX_WRITTEN_OUT = 16


def _short_dim(node: OpNode, specs: Specs) -> int | None:
    """The one dimension that a sum folds, if it is short and another than the last."""
    shape = specs[node.inputs[0]].shape
    dims = reduced_dims(node, specs)
    if len(dims) != 1 or dims[0] >= len(shape) - 1:  # a scalar has a dimension 0 to sum over, and no size
        return None
    extent = shape[dims[0]]
    return dims[0] if isinstance(extent, int) and 0 < extent <= MAX_WRITTEN_OUT else None


def _sum(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """A short sum is written out, element by element."""
    dim = _short_dim(node, p.specs)
    if dim is None:
        return _plain_fold("sum")(p, node, position)
    source, dtype = node.inputs[0], result_type(p, node)
    if dtype == "float32" and p.specs[source].dtype == "float64":
        dtype = "float64"
    rest = position[dim + 1 :] if node.attrs.get("keepdim") else position[dim:]
    extent = p.specs[source].shape[dim]
    return reduce(add, [p.pull(source, (*position[:dim], Index(at), *rest)).to(dtype) for at in range(extent)])


_fold_row = partial(rows, "reduction", reduced_dim=reduced_dims, effort="fold")
_softmax_row = partial(_fold_row, refuse=float_result, effort="whole row")


def _of_nothing(node: OpNode, specs: Specs) -> str | None:
    """Refuses an extreme of no element: ATen raises."""
    spec = specs[node.inputs[0]]
    return "of no element" if any(spec.shape[dim] == 0 for dim in reduced_dims(node, specs)) else None


def _position_refuse(node: OpNode, specs: Specs) -> str | None:
    return no_booleans(node, specs) or _of_nothing(node, specs)


def _extreme(kind: str) -> Rows:
    """A row's extreme, its position, and both."""
    value, position = _plain_fold(kind), _position_of(kind)
    return {
        **_fold_row(f"a{kind} {kind}", value, refuse=_of_nothing),
        **_fold_row(f"{kind}.dim", value, refuse=_position_refuse, others=(position,), effort="position",
                    slow_on_cpu=1.8),
        **_fold_row(f"arg{kind}", position, refuse=_position_refuse, effort="position", slow_on_cpu=3.0),
    }


REDUCTIONS = {
    **_fold_row("prod.dim_int prod", _plain_fold("prod")),
    **_fold_row("sum.dim_IntList sum", _sum, reduced_dim=lambda node, specs: (
        reduced_dims(node, specs) if _short_dim(node, specs) is None else ())),
    **_extreme("max"),
    **_extreme("min"),
    **_fold_row("adaptive_avg_pool2d", _mean, refuse=_pool_refuse, reduced_dim=partial(_last_dims, count=2)),
    **_fold_row("mean.dim mean", _mean, refuse=float_result,
                slow_on_cpu=lambda node, specs: 1.9 if specs[node.inputs[0]].dtype in HALVES else 1.0),
    **_fold_row("var.dim var.correction", _var, refuse=float_result, effort="", slow_on_cpu=15.0),
    **_fold_row("std.correction", lambda p, node, position: _var(p, node, position).sqrt(), refuse=float_result,
                effort="", slow_on_cpu=15.0),
    **_fold_row("any.dim any.dims any", _whether("max"), refuse=_whether_refuse, slow_on_cpu=4.0),
    **_fold_row("all.dim all.dims all", _whether("min"), refuse=_whether_refuse, slow_on_cpu=4.0),
    **_fold_row("linalg_vector_norm", _norm, refuse=_norm_refuse, slow_on_cpu=across(4.0)),
    **_softmax_row("logsumexp", _log_sum_exp, slow_on_cpu=2.0),
    **_softmax_row("softmax.int _softmax special_softmax", _softmax(log=False)),
    **_softmax_row("log_softmax.int _log_softmax", _softmax(log=True)),
}


def _normalised_dims(node: OpNode, specs: Specs) -> tuple[int, ...]:
    return _last_dims(node, specs, len(node.attrs["normalized_shape"]))


def _affine(p: BodyBuilder, node: OpNode, position: Position, value: Value, names: tuple[str, ...]) -> Value:
    """``value * weight + bias`` with the optional operands of a normalisation."""
    number = 1
    for name, op in zip(names, ("mul", "add"), strict=False):
        if name in node.attrs or number >= len(node.inputs):
            continue
        value = p.apply(op, value, p.operand(node, number, position, value.dtype))
        number += 1
    return value


def _standard(p: BodyBuilder, node: OpNode, position: Position, row: Position, affine: Position) -> Value:
    """The element at ``position``, its row brought to mean 0 and variance 1, then weight and bias at ``affine``."""
    mean, variance = _moments(p, node, row)
    scale = (variance + node.attrs.get("eps", 1e-5)).rsqrt()
    x = p.pull(node.inputs[0], position).to(mean.dtype)
    return _affine(p, node, affine, (x - mean) * scale, ("weight", "bias"))


def _rms_norm(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, arXiv:1910.07467)."""
    dtype = _float_type(p, node)
    total = _fold(p, node, _row_of(p, node, position), "sum", dtype, lambda x: x * x)
    eps = node.attrs.get("eps")
    if eps is None:  # ATen's default: the machine epsilon of the type it computes in
        eps = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps
    scale = (_mean_of(p, total, p.row_shape(node)[-1]) + eps).rsqrt()
    return _affine(p, node, position, p.pull(node.inputs[0], position).to(dtype) * scale, ("weight",))


def _group_rows(node: OpNode, specs: Specs) -> tuple[Size, ...]:
    """Rows of a group_norm: samples and groups of channels; a row has all positions of its group's channels."""
    samples, channels, *rest = specs[node.inputs[0]].shape
    groups = node.attrs["num_groups"]
    return samples, groups, as_size(divides(groups, channels) * product(rest))


def _group_walk(node: OpNode, specs: Specs) -> Walk | None:
    """Where channels come last in memory, the channels of a group at one place of the picture follow one another."""
    spec, rows = specs[node.inputs[0]], _group_rows(node, specs)
    channels, *rest = spec.shape[1:]
    per_group = divides(node.attrs["num_groups"], channels)
    if not is_channels_last(spec) or not per_group:
        return None

    def walk(position: Position) -> Position:
        sample, group, *place, channel = reshape_position(position, rows, (*rows[:2], *rest, per_group))
        return (sample, group * per_group + channel, *place)

    return walk


def _affine_refuse(node: OpNode, specs: Specs) -> str | None:
    """ATen takes weights of the operand's dtype, and float32 beside half precision; it raises for others."""
    dtype, *others = (specs[value].dtype for value in node.inputs)
    wide = "float32" if dtype in HALVES else dtype
    mixed = [other for other in others if other not in (dtype, wide)]
    return f"weights of dtype {mixed[0]} for numbers of dtype {dtype}" if mixed else float_result(node, specs)


def _group_refuse(node: OpNode, specs: Specs) -> str | None:
    divided = divides(node.attrs["num_groups"], specs[node.inputs[0]].shape[1])
    return _affine_refuse(node, specs) if divided else "its groups do not divide the channels"


def _group_norm(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """Each group of channels of a sample to mean 0 and variance 1 (Wu & He, arXiv:1803.08494)."""
    per_group = divides(node.attrs["num_groups"], p.specs[node.inputs[0]].shape[1])
    row = p.row_position(node, (position[0], position[1] // per_group))
    return _standard(p, node, position, row, position[1:2])


def _batch_norm(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """(x - mean) / sqrt(variance + eps) * weight + bias with the stored mean and variance of each channel."""
    dtype = _float_type(p, node)
    names = [name for name in ("weight", "bias", "running_mean", "running_var") if name not in node.attrs]
    of_channel = {name: p.operand(node, number, position[1:2], dtype) for number, name in enumerate(names, 1)}
    scale: Value = (of_channel["running_var"] + node.attrs.get("eps", 1e-5)).rsqrt()
    if "weight" in of_channel:
        scale = scale * of_channel["weight"]
    value = (p.operand(node, 0, position, dtype) - of_channel["running_mean"]) * scale
    return value + of_channel["bias"] if "bias" in of_channel else value


def _batch_refuse(node: OpNode, specs: Specs) -> str | None:
    if node.attrs.get("training"):
        return "training mode"
    missing = [name for name in ("running_mean", "running_var") if name in node.attrs]
    return f"without {missing[0]}" if missing else _affine_refuse(node, specs)


_row = partial(rows, "normalisation", effort="whole row")

NORMALISATIONS = {
    **_row("layer_norm", lambda p, node, position: _standard(p, node, position, _row_of(p, node, position), position),
           refuse=_affine_refuse, reduced_dim=_normalised_dims, slow_on_cpu=1.5),
    **_row("rms_norm", _rms_norm, refuse=float_result, reduced_dim=_normalised_dims, slow_on_cpu=1.4),
    **_row("group_norm", _group_norm, refuse=_group_refuse, rows=_group_rows, walk=_group_walk,
           reduced_dim=lambda node, specs: tuple(range(1, len(specs[node.inputs[0]].shape)))),
    **rows("normalisation", "batch_norm", _batch_norm, refuse=_batch_refuse),
}
