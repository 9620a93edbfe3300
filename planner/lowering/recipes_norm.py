"""Recipes of normalisations: of rows (layer_norm, rms_norm), of groups of channels, and with stored statistics."""

from __future__ import annotations

import torch

from fuseplan.kernels.ir.index import Size, as_size, divides, product
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.lowering.body import BodyBuilder
from fuseplan.planner.lowering.recipe import Recipe, float_result
from fuseplan.planner.lowering.recipes_reduce import float_type, fold, last_dims, mean_of, moments, row_of
from fuseplan.planner.lowering.views import Position, Specs


def _normalised_dims(node: OpNode, specs: Specs) -> tuple[int, ...]:
    return last_dims(node, specs, len(node.attrs["normalized_shape"]))


def _affine(p: BodyBuilder, node: OpNode, position: Position, value: int, names: tuple[str, ...]) -> int:
    """``value * weight + bias`` with the optional operands of a normalisation."""
    dtype = p.dtype_of(value)
    number = 1
    for name, op in zip(names, ("mul", "add"), strict=False):
        if name in node.attrs or number >= len(node.inputs):
            continue
        value = p.apply(op, value, p.operand(node, number, position, dtype))
        number += 1
    return value


def _standard(p: BodyBuilder, node: OpNode, position: Position, row: Position, affine: Position) -> int:
    """The element at ``position``, its row brought to mean 0 and variance 1, then weight and bias at ``affine``."""
    dtype = float_type(p, node)
    mean, variance = moments(p, node, row)
    scale = p.apply("rsqrt", p.apply("add", variance, p.const(node.attrs.get("eps", 1e-5), dtype)))
    x = p.cast(p.pull(node.inputs[0], position), dtype)
    return _affine(p, node, affine, p.apply("mul", p.apply("sub", x, mean), scale), ("weight", "bias"))


def _rms_norm(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, arXiv:1910.07467)."""
    dtype = float_type(p, node)
    total = fold(p, node, row_of(p, node, position), "sum", lambda x: p.apply("mul", x, x), dtype)
    eps = node.attrs.get("eps")
    if eps is None:  # ATen's default: the machine epsilon of the type it computes in
        eps = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps
    mean = mean_of(p, total, p.row_shape(node)[-1])
    scale = p.apply("rsqrt", p.apply("add", mean, p.const(eps, dtype)))
    x = p.cast(p.pull(node.inputs[0], position), dtype)
    return _affine(p, node, position, p.apply("mul", x, scale), ("weight",))


def _group_rows(node: OpNode, specs: Specs) -> tuple[Size, ...]:
    """Rows of a group_norm: samples and groups of channels; a row has all positions of its group's channels."""
    samples, channels, *rest = specs[node.inputs[0]].shape
    groups = node.attrs["num_groups"]
    return samples, groups, as_size(divides(groups, channels) * product(rest))


def _group_refuse(node: OpNode, specs: Specs) -> str | None:
    divided = divides(node.attrs["num_groups"], specs[node.inputs[0]].shape[1])
    return float_result(node, specs) if divided else f"{node.op}: its groups do not divide the channels"


def _group_norm(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """Each group of channels of a sample to mean 0 and variance 1 (Wu & He, arXiv:1803.08494)."""
    per_group = divides(node.attrs["num_groups"], p.specs[node.inputs[0]].shape[1])
    row = p.row_position(node, (position[0], position[1] // per_group))
    return _standard(p, node, position, row, position[1:2])


def _batch_norm(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """(x - mean) / sqrt(variance + eps) * weight + bias with the stored mean and variance of each channel."""
    dtype = float_type(p, node)
    names = [name for name in ("weight", "bias", "running_mean", "running_var") if name not in node.attrs]
    of_channel = {name: p.operand(node, number, position[1:2], dtype) for number, name in enumerate(names, 1)}
    scale = p.apply("rsqrt", p.apply("add", of_channel["running_var"], p.const(node.attrs.get("eps", 1e-5), dtype)))
    if "weight" in of_channel:
        scale = p.apply("mul", scale, of_channel["weight"])
    x = p.operand(node, 0, position, dtype)
    value = p.apply("mul", p.apply("sub", x, of_channel["running_mean"]), scale)
    return p.apply("add", value, of_channel["bias"]) if "bias" in of_channel else value


def _batch_refuse(node: OpNode, specs: Specs) -> str | None:
    if node.attrs.get("training"):
        return f"{node.op}: training mode"
    missing = [name for name in ("running_mean", "running_var") if name in node.attrs]
    return f"{node.op}: without {missing[0]}" if missing else float_result(node, specs)


def normalising_recipes() -> dict[str, Recipe]:
    return {
        "aten.layer_norm.default": Recipe(
            lambda p, node, position: _standard(p, node, position, row_of(p, node, position), position),
            _normalised_dims, float_result,
        ),
        "aten.rms_norm.default": Recipe(_rms_norm, _normalised_dims, float_result),
        "aten.group_norm.default": Recipe(
            _group_norm, lambda node, specs: tuple(range(1, len(specs[node.inputs[0]].shape))), _group_refuse,
            rows=_group_rows,
        ),
        "aten.batch_norm.default": Recipe(_batch_norm, refuse=_batch_refuse),
    }
