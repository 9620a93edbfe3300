"""Recipes of ops that fold the last dimension: sums, means, softmax, normalisations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fuseplan.kernels.index import Index, Size
from fuseplan.kernels.ir import RegisterType
from fuseplan.planner.graph import OpNode
from fuseplan.planner.recipe import Recipe, float_result, result_type
from fuseplan.planner.views import Position, Specs, normalise_dim

if TYPE_CHECKING:
    from fuseplan.planner.puller import Puller


def _reduced_dims(node: OpNode, specs: Specs) -> tuple[int, ...]:
    rank = len(specs[node.inputs[0]].shape)
    dims: Any = node.attrs.get("dim")
    if dims is None or dims == ():
        return tuple(range(rank))
    return tuple(normalise_dim(dim, rank) for dim in (dims if isinstance(dims, tuple | list) else (dims,)))


def _normalised_dims(node: OpNode, specs: Specs) -> tuple[int, ...]:
    rank = len(specs[node.inputs[0]].shape)
    return tuple(range(rank - len(node.attrs["normalized_shape"]), rank))


def _row_of(p: Puller, node: OpNode, position: Position) -> Position:
    """The leading coordinates of the row that the result element at ``position`` comes from."""
    rank = len(p.specs[node.inputs[0]].shape)
    return p.row_position(node, position[: rank - 1])


def _fold(p: Puller, node: OpNode, row: Position, kind: str, element: Callable[[int], int], dtype: RegisterType) -> int:
    """Fold ``element(x)`` over the row ``row`` of operand 0."""
    extent = p.specs[node.inputs[0]].shape[-1]
    return p.reduce(kind, node, extent, lambda col: element(p.cast(p.pull(node.inputs[0], (*row, col)), dtype)))


def _float_type(p: Puller, node: OpNode) -> RegisterType:
    return "float64" if p.specs[node.inputs[0]].dtype == "float64" else "float32"


def _plain_fold(kind: str) -> Recipe:
    def build(p: Puller, node: OpNode, position: Position) -> int:
        return _fold(p, node, _row_of(p, node, position), kind, lambda x: x, result_type(p, node))

    return Recipe(build, _reduced_dims)


def _mean_of(p: Puller, total: int, count: Size, correction: float = 0.0) -> int:
    """``total / (count - correction)``."""
    dtype = p.dtype_of(total)
    if isinstance(count, int):
        return p.apply("mul", total, p.const(1.0 / max(count - correction, 0.0) if count != correction else math.inf,
                                             dtype))
    number = p.cast(p.iota(Index(count)), dtype)
    if correction:
        number = p.apply("sub", number, p.const(correction, dtype))
    return p.apply("div", total, number)


def _mean(p: Puller, node: OpNode, position: Position) -> int:
    total = _fold(p, node, _row_of(p, node, position), "sum", lambda x: x, _float_type(p, node))
    return _mean_of(p, total, p.specs[node.inputs[0]].shape[-1])


def _moments(p: Puller, node: OpNode, row: Position, correction: float = 0.0) -> tuple[int, int]:
    """Mean and variance of a row, two passes: the variance of the deviations does not cancel."""
    dtype = _float_type(p, node)
    extent = p.specs[node.inputs[0]].shape[-1]
    mean = _mean_of(p, _fold(p, node, row, "sum", lambda x: x, dtype), extent)

    def squared(x: int) -> int:
        deviation = p.apply("sub", x, mean)
        return p.apply("mul", deviation, deviation)

    return mean, _mean_of(p, _fold(p, node, row, "sum", squared, dtype), extent, correction)


def _var(p: Puller, node: OpNode, position: Position) -> int:
    correction = node.attrs.get("correction", 1 if node.attrs.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    return _moments(p, node, _row_of(p, node, position), float(correction))[1]


def _softmax(log: bool) -> Recipe:
    def build(p: Puller, node: OpNode, position: Position) -> int:
        dtype = _float_type(p, node)
        row = _row_of(p, node, position)
        top = _fold(p, node, row, "max", lambda x: x, dtype)
        total = _fold(p, node, row, "sum", lambda x: p.apply("exp", p.apply("sub", x, top)), dtype)
        shifted = p.apply("sub", p.cast(p.pull(node.inputs[0], position), dtype), top)
        if log:
            return p.apply("sub", shifted, p.apply("log", total))
        # One division a row, not one an element; the total is at least 1, so that its reciprocal exists.
        return p.apply("mul", p.apply("exp", shifted), p.apply("reciprocal", total))

    return Recipe(build, _reduced_dims, float_result)


def _affine(p: Puller, node: OpNode, position: Position, value: int, names: tuple[str, ...]) -> int:
    """``value * weight + bias`` with the optional operands of a normalisation."""
    dtype = p.dtype_of(value)
    number = 1
    for name, op in zip(names, ("mul", "add"), strict=False):
        if name in node.attrs or number >= len(node.inputs):
            continue
        value = p.apply(op, value, p.operand(node, number, position, dtype))
        number += 1
    return value


def _layer_norm(p: Puller, node: OpNode, position: Position) -> int:
    dtype = _float_type(p, node)
    mean, variance = _moments(p, node, _row_of(p, node, position))
    scale = p.apply("rsqrt", p.apply("add", variance, p.const(node.attrs.get("eps", 1e-5), dtype)))
    x = p.cast(p.pull(node.inputs[0], position), dtype)
    return _affine(p, node, position, p.apply("mul", p.apply("sub", x, mean), scale), ("weight", "bias"))


def _rms_norm(p: Puller, node: OpNode, position: Position) -> int:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, arXiv:1910.07467)."""
    dtype = _float_type(p, node)
    total = _fold(p, node, _row_of(p, node, position), "sum", lambda x: p.apply("mul", x, x), dtype)
    eps = node.attrs.get("eps")
    if eps is None:  # ATen's default: the machine epsilon of the type it computes in
        eps = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps
    mean = _mean_of(p, total, p.specs[node.inputs[0]].shape[-1])
    scale = p.apply("rsqrt", p.apply("add", mean, p.const(eps, dtype)))
    x = p.cast(p.pull(node.inputs[0], position), dtype)
    return _affine(p, node, position, p.apply("mul", x, scale), ("weight",))


def reducing_recipes() -> dict[str, Recipe]:
    """Rows of the recipe table, by ATen op."""
    rows: dict[str, Recipe] = {}
    rows["aten.sum.dim_IntList"] = _plain_fold("sum")
    rows["aten.amax.default"], rows["aten.amin.default"] = _plain_fold("max"), _plain_fold("min")
    rows["aten.mean.dim"] = Recipe(_mean, _reduced_dims, float_result)
    for name in ("var.dim", "var.correction"):
        rows[f"aten.{name}"] = Recipe(_var, _reduced_dims, float_result)
    for name in ("softmax.int", "_softmax.default", "special_softmax.default"):
        rows[f"aten.{name}"] = _softmax(log=False)
    for name in ("log_softmax.int", "_log_softmax.default"):
        rows[f"aten.{name}"] = _softmax(log=True)
    rows["aten.layer_norm.default"] = Recipe(_layer_norm, _normalised_dims, float_result)
    rows["aten.rms_norm.default"] = Recipe(_rms_norm, _normalised_dims, float_result)
    return rows
