"""Recipes of activations: one operand, bounds and slopes as numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.ops.builder import BodyBuilder
from fuseplan.planner.ops.op import Rows, float_result, no_booleans, of_one, of_two, result_type, rows
from fuseplan.planner.ops.positions import Position, along, normalise_dim

#: Of a builder, the operand's value in the type of the result, and the op's attributes.
Activation: TypeAlias = Callable[[BodyBuilder, int, Mapping[str, Any]], int]


def _gelu(p: BodyBuilder, x: int, attrs: Mapping[str, Any]) -> int:
    """0.5 x (1 + erf(x / sqrt 2)), or the tanh approximation (Hendrycks & Gimpel, arXiv:1606.08415): x sigmoid(2u)."""
    dtype = p.dtype_of(x)
    if attrs.get("approximate", "none") == "tanh":
        double = 2.0 * math.sqrt(2.0 / math.pi)
        curve = p.apply("mul", p.apply("mul", x, x), p.const(0.044715 * double, dtype))
        inner = p.apply("mul", x, p.apply("add", curve, p.const(double, dtype)))
        return p.apply("mul", x, p.apply("sigmoid", inner))
    curve = p.apply("erf", p.apply("mul", x, p.const(math.sqrt(0.5), dtype)))
    half = p.apply("mul", x, p.const(0.5, dtype))
    return p.apply("mul", half, p.apply("add", curve, p.const(1.0, dtype)))


def _bounded(p: BodyBuilder, x: int, low: Any, high: Any = None) -> int:
    """``x`` from ``low`` to ``high``; None is no bound. Of equal operands the second stays: -0.0 as in ATen."""
    dtype = p.dtype_of(x)
    x = x if low is None else p.apply("maximum", p.const(low, dtype), x)
    return x if high is None else p.apply("minimum", p.const(high, dtype), x)


def _hard_sigmoid(p: BodyBuilder, x: int) -> int:
    """min(max(x + 3, 0), 6) / 6 (Howard et al., arXiv:1905.02244)."""
    dtype = p.dtype_of(x)
    bounded = _bounded(p, p.apply("add", x, p.const(3.0, dtype)), 0.0, 6.0)
    return p.apply("div", bounded, p.const(6.0, dtype))


def _leaky_relu(p: BodyBuilder, x: int, attrs: Mapping[str, Any]) -> int:
    dtype = p.dtype_of(x)
    small = p.apply("mul", x, p.const(attrs.get("negative_slope", 0.01), dtype))
    return p.apply("where", p.apply("gt", x, p.const(0.0, dtype)), x, small)


def _prelu(p: BodyBuilder, node: OpNode, x: int, slope: int) -> int:
    """x, and below 0 as much of it as its channel's slope says (He et al., arXiv:1502.01852)."""
    return p.apply("where", p.apply("gt", x, p.const(0.0, p.dtype_of(x))), x, p.apply("mul", slope, x))


def _log_of_one_plus_exp(p: BodyBuilder, x: int) -> int:
    return p.apply("log1p", p.apply("exp", x))


def _softplus(p: BodyBuilder, x: int, attrs: Mapping[str, Any]) -> int:
    """log(1 + exp(beta x)) / beta, and x where beta x is above the threshold."""
    dtype, beta = p.dtype_of(x), attrs.get("beta", 1)
    scaled = x if beta == 1 else p.apply("mul", x, p.const(beta, dtype))
    smooth = _log_of_one_plus_exp(p, scaled)
    if beta != 1:
        smooth = p.apply("div", smooth, p.const(beta, dtype))
    straight = p.apply("gt", scaled, p.const(attrs.get("threshold", 20), dtype))
    return p.apply("where", straight, x, smooth)


def _log_sigmoid(p: BodyBuilder, x: int, attrs: Mapping[str, Any]) -> int:
    """min(x, 0) - log(1 + exp(-|x|)): no exponential overflows."""
    smooth = _log_of_one_plus_exp(p, p.apply("neg", p.apply("abs", x)))
    return p.apply("sub", p.apply("minimum", x, p.const(0.0, p.dtype_of(x))), smooth)


def _exp_minus_one(p: BodyBuilder, x: int) -> int:
    """exp(x) - 1 = tanh(x / 2) (exp(x) + 1): nothing cancels near 0."""
    dtype = p.dtype_of(x)
    half = p.apply("tanh", p.apply("mul", x, p.const(0.5, dtype)))
    return p.apply("mul", half, p.apply("add", p.apply("exp", x), p.const(1.0, dtype)))


def _elu(p: BodyBuilder, x: int, attrs: Mapping[str, Any]) -> int:
    """scale x, and below 0 scale alpha (exp(input_scale x) - 1) (Clevert et al., arXiv:1511.07289)."""
    dtype, scale = p.dtype_of(x), attrs.get("scale", 1)
    below = _exp_minus_one(p, p.apply("mul", x, p.const(attrs.get("input_scale", 1), dtype)))
    below = p.apply("mul", below, p.const(attrs.get("alpha", 1) * scale, dtype))
    above = x if scale == 1 else p.apply("mul", x, p.const(scale, dtype))
    return p.apply("where", p.apply("lt", x, p.const(0.0, dtype)), below, above)


def _celu(p: BodyBuilder, x: int, attrs: Mapping[str, Any]) -> int:
    """x, and below 0 alpha (exp(x / alpha) - 1) (Barron, arXiv:1704.07483)."""
    dtype, alpha = p.dtype_of(x), attrs.get("alpha", 1)
    below = p.apply("mul", _exp_minus_one(p, p.apply("div", x, p.const(alpha, dtype))), p.const(alpha, dtype))
    return p.apply("where", p.apply("lt", x, p.const(0.0, dtype)), below, x)


def _shrink(p: BodyBuilder, x: int, attrs: Mapping[str, Any], soft: bool) -> int:
    """0 within ``lambd`` of 0; what is outside stays, or moves nearer by as much where ``soft``."""
    dtype = p.dtype_of(x)
    edge = p.const(attrs.get("lambd", 0.5), dtype)
    above, below = p.apply("gt", x, edge), p.apply("lt", x, p.apply("neg", edge))
    zero = p.const(0.0, dtype)
    if not soft:  # of what is inside no sign is left; NaN stays
        outside = p.apply("logical_or", p.apply("logical_or", above, below), p.apply("ne", x, x))
        return p.apply("where", outside, x, zero)
    moved = p.apply("where", below, p.apply("add", x, edge), p.apply("mul", x, zero))
    return p.apply("where", above, p.apply("sub", x, edge), moved)


def _threshold(p: BodyBuilder, x: int, attrs: Mapping[str, Any]) -> int:
    dtype = p.dtype_of(x)
    below = p.apply("le", x, p.const(attrs["threshold"], dtype))
    return p.apply("where", below, p.const(attrs["value"], dtype), x)


def _glu(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """a sigmoid(b) of the two halves of a dimension (Dauphin et al., arXiv:1612.08083)."""
    at = normalise_dim(node.attrs.get("dim", -1), len(position))
    shifted = along(position, at, position[at] + p.specs[node.outputs[0]].shape[at])
    dtype = result_type(p, node)
    a, b = (p.cast(p.pull(node.inputs[0], one), dtype) for one in (position, shifted))
    return p.apply("mul", a, p.apply("sigmoid", b))


def _clamp(p: BodyBuilder, x: int, attrs: Mapping[str, Any]) -> int:
    return _bounded(p, x, attrs.get("min", attrs.get("min_val")), attrs.get("max", attrs.get("max_val")))


def _row(names: str, activation: Activation, **also: Any) -> Rows:
    return rows("activation", names, of_one(lambda p, node, x: activation(p, x, node.attrs)), **also)


_smooth = partial(_row, refuse=float_result)
_function = partial(_smooth, effort="function")

ACTIVATIONS = {
    **_row("relu", lambda p, x, attrs: _bounded(p, x, 0), refuse=no_booleans),
    **_row("relu6", lambda p, x, attrs: _bounded(p, x, 0.0, 6.0)),
    **_row("clamp clamp_min clamp_max hardtanh", _clamp,
           refuse=lambda node, specs: None if len(node.inputs) == 1 else "tensor bounds are not supported"),
    **_smooth("hardsigmoid", lambda p, x, attrs: _hard_sigmoid(p, x)),
    **_smooth("hardswish", lambda p, x, attrs: p.apply("mul", x, _hard_sigmoid(p, x))),
    **_smooth("leaky_relu", _leaky_relu),
    **_smooth("log_sigmoid", _log_sigmoid),
    **_smooth("hardshrink", partial(_shrink, soft=False)),
    **_smooth("softshrink", partial(_shrink, soft=True)),
    **_smooth("threshold", _threshold),
    **rows("activation", "_prelu_kernel", of_two(_prelu), refuse=float_result),
    **_function("elu", _elu),
    **_function("celu", _celu),
    **rows("activation", "glu", _glu, refuse=float_result, effort="function"),
    **_function("silu", lambda p, x, attrs: p.apply("mul", x, p.apply("sigmoid", x))),
    **_function("gelu", _gelu),
    **_function("softplus", _softplus),
    # x tanh(log(1 + exp(x))) (Misra, arXiv:1908.08681).
    **_function("mish", lambda p, x, attrs: p.apply("mul", x, p.apply("tanh", _log_of_one_plus_exp(p, x)))),
}
