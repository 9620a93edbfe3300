"""Recipes of activations: one operand, bounds and slopes as numbers."""

from __future__ import annotations

import math

import torch

from fuseplan.kernels.ir.dtypes import torch_dtype
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.lowering.body import BodyBuilder
from fuseplan.planner.lowering.recipe import INTEGERS, Recipe, float_result, result_type
from fuseplan.planner.lowering.views import Position, Specs


def _silu(p: BodyBuilder, node: OpNode, position: Position) -> int:
    x = p.operand(node, 0, position, result_type(p, node))
    return p.apply("mul", x, p.apply("sigmoid", x))


def _gelu(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """0.5 x (1 + erf(x / sqrt 2)), or the tanh approximation (Hendrycks & Gimpel, arXiv:1606.08415).

    The latter is 0.5 x (1 + tanh u), which is x sigmoid(2u): one exponential, and nothing cancels where it is small.
    """
    dtype = result_type(p, node)
    x = p.operand(node, 0, position, dtype)
    if node.attrs.get("approximate", "none") == "tanh":
        double = 2.0 * math.sqrt(2.0 / math.pi)
        curve = p.apply("mul", p.apply("mul", x, x), p.const(0.044715 * double, dtype))
        inner = p.apply("mul", x, p.apply("add", curve, p.const(double, dtype)))
        return p.apply("mul", x, p.apply("sigmoid", inner))
    curve = p.apply("erf", p.apply("mul", x, p.const(math.sqrt(0.5), dtype)))
    half = p.apply("mul", x, p.const(0.5, dtype))
    return p.apply("mul", half, p.apply("add", curve, p.const(1.0, dtype)))


def _relu(p: BodyBuilder, node: OpNode, position: Position) -> int:
    dtype = result_type(p, node)
    return p.apply("maximum", p.operand(node, 0, position, dtype), p.const(0, dtype))


def _clamp(p: BodyBuilder, node: OpNode, position: Position) -> int:
    dtype = result_type(p, node)
    x = p.operand(node, 0, position, dtype)
    low = node.attrs.get("min", node.attrs.get("min_val"))
    high = node.attrs.get("max", node.attrs.get("max_val"))
    if low is not None:
        x = p.apply("maximum", x, p.const(low, dtype))
    return x if high is None else p.apply("minimum", x, p.const(high, dtype))


def _clamp_refuse(node: OpNode, specs: Specs) -> str | None:
    if len(node.inputs) != 1:
        return f"{node.op}: tensor bounds are not supported"
    dtype = specs[node.outputs[0]].dtype
    if dtype not in INTEGERS:
        return None
    limits = torch.iinfo(torch_dtype(dtype))
    bounds = (node.attrs.get(name) for name in ("min", "max", "min_val", "max_val"))
    outside = [bound for bound in bounds if isinstance(bound, int) and not limits.min <= bound <= limits.max]
    return f"{node.op}: ATen wraps the bound {outside[0]} around to {dtype}" if outside else None


def _bounded(p: BodyBuilder, x: int, low: float, high: float) -> int:
    dtype = p.dtype_of(x)
    return p.apply("minimum", p.apply("maximum", x, p.const(low, dtype)), p.const(high, dtype))


def _relu6(p: BodyBuilder, node: OpNode, position: Position) -> int:
    return _bounded(p, p.operand(node, 0, position, result_type(p, node)), 0.0, 6.0)


def _hard_sigmoid(p: BodyBuilder, x: int) -> int:
    """min(max(x + 3, 0), 6) / 6 (Howard et al., arXiv:1905.02244)."""
    dtype = p.dtype_of(x)
    bounded = _bounded(p, p.apply("add", x, p.const(3.0, dtype)), 0.0, 6.0)
    return p.apply("div", bounded, p.const(6.0, dtype))


def _hardsigmoid(p: BodyBuilder, node: OpNode, position: Position) -> int:
    return _hard_sigmoid(p, p.operand(node, 0, position, result_type(p, node)))


def _hardswish(p: BodyBuilder, node: OpNode, position: Position) -> int:
    x = p.operand(node, 0, position, result_type(p, node))
    return p.apply("mul", x, _hard_sigmoid(p, x))


def _leaky_relu(p: BodyBuilder, node: OpNode, position: Position) -> int:
    dtype = result_type(p, node)
    x = p.operand(node, 0, position, dtype)
    small = p.apply("mul", x, p.const(node.attrs.get("negative_slope", 0.01), dtype))
    return p.apply("where", p.apply("gt", x, p.const(0.0, dtype)), x, small)


def _log_of_one_plus_exp(p: BodyBuilder, x: int) -> int:
    return p.apply("log1p", p.apply("exp", x))


def _softplus(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """log(1 + exp(beta x)) / beta, and x where beta x is above the threshold."""
    dtype = result_type(p, node)
    x = p.operand(node, 0, position, dtype)
    beta = node.attrs.get("beta", 1)
    scaled = x if beta == 1 else p.apply("mul", x, p.const(beta, dtype))
    smooth = _log_of_one_plus_exp(p, scaled)
    if beta != 1:
        smooth = p.apply("div", smooth, p.const(beta, dtype))
    straight = p.apply("gt", scaled, p.const(node.attrs.get("threshold", 20), dtype))
    return p.apply("where", straight, x, smooth)


def _mish(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """x tanh(log(1 + exp(x))) (Misra, arXiv:1908.08681)."""
    x = p.operand(node, 0, position, result_type(p, node))
    return p.apply("mul", x, p.apply("tanh", _log_of_one_plus_exp(p, x)))


def _log_sigmoid(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """min(x, 0) - log(1 + exp(-|x|)): no exponential overflows."""
    dtype = result_type(p, node)
    x = p.operand(node, 0, position, dtype)
    smooth = _log_of_one_plus_exp(p, p.apply("neg", p.apply("abs", x)))
    return p.apply("sub", p.apply("minimum", x, p.const(0.0, dtype)), smooth)


def activation_recipes() -> dict[str, Recipe]:
    """Rows of the recipe table, by ATen op."""
    rows: dict[str, Recipe] = {"aten.relu.default": Recipe(_relu), "aten.relu6.default": Recipe(_relu6)}
    for name, build in (("silu", _silu), ("gelu", _gelu), ("hardsigmoid", _hardsigmoid), ("hardswish", _hardswish),
                        ("leaky_relu", _leaky_relu), ("softplus", _softplus), ("mish", _mish),
                        ("log_sigmoid", _log_sigmoid)):
        rows[f"aten.{name}.default"] = Recipe(build, refuse=float_result)
    for name in ("clamp.default", "clamp_min.default", "clamp_max.default", "hardtanh.default"):
        rows[f"aten.{name}"] = Recipe(_clamp, refuse=_clamp_refuse)
    return rows
