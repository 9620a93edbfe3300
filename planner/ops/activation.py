"""Recipes of activations: one operand, bounds and slopes as numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.ops.builder import BodyBuilder, Value
from fuseplan.planner.ops.op import Rows, float_result, no_booleans, of_two, result_type, rows
from fuseplan.planner.ops.positions import Position, along, normalise_dim

#: Of the operand's value in the type of the result, and the op's attributes.
Activation: TypeAlias = Callable[[Value, Mapping[str, Any]], Value]


def _gelu(x: Value, attrs: Mapping[str, Any]) -> Value:
    """0.5 x (1 + erf(x / sqrt 2)), or the tanh approximation (Hendrycks & Gimpel, arXiv:1606.08415): x sigmoid(2u)."""
    if attrs.get("approximate", "none") == "tanh":
        double = 2.0 * math.sqrt(2.0 / math.pi)
        return x * (x * (x * x * (0.044715 * double) + double)).sigmoid()
    curve = (x * math.sqrt(0.5)).erf()
    return x * 0.5 * (curve + 1.0)


def _bounded(x: Value, low: Any, high: Any = None) -> Value:
    """``x`` from ``low`` to ``high``; None is no bound. Of equal operands the second stays: -0.0 as in ATen."""
    x = x if low is None else x.space.apply("maximum", low, x)
    return x if high is None else x.space.apply("minimum", high, x)


def _hard_sigmoid(x: Value) -> Value:
    """min(max(x + 3, 0), 6) / 6 (Howard et al., arXiv:1905.02244)."""
    return _bounded(x + 3.0, 0.0, 6.0) / 6.0


def _leaky_relu(x: Value, attrs: Mapping[str, Any]) -> Value:
    small = x * attrs.get("negative_slope", 0.01)
    return (x > 0.0).where(x, small)


def _softplus(x: Value, attrs: Mapping[str, Any]) -> Value:
    """log(1 + exp(beta x)) / beta, and x where beta x is above the threshold."""
    beta = attrs.get("beta", 1)
    scaled = x if beta == 1 else x * beta
    smooth = scaled.exp().log1p()
    smooth = smooth if beta == 1 else smooth / beta
    straight: Value = scaled > attrs.get("threshold", 20)
    return straight.where(x, smooth)


def _log_sigmoid(x: Value, attrs: Mapping[str, Any]) -> Value:
    """min(x, 0) - log(1 + exp(-|x|)): no exponential overflows."""
    smooth = x.abs().neg().exp().log1p()
    return x.minimum(0.0) - smooth


def _exp_minus_one(x: Value) -> Value:
    """exp(x) - 1 = tanh(x / 2) (exp(x) + 1): nothing cancels near 0."""
    half = (x * 0.5).tanh()
    return half * (x.exp() + 1.0)


def _elu(x: Value, attrs: Mapping[str, Any]) -> Value:
    """scale x, and below 0 scale alpha (exp(input_scale x) - 1) (Clevert et al., arXiv:1511.07289)."""
    scale = attrs.get("scale", 1)
    below = _exp_minus_one(x * attrs.get("input_scale", 1)) * (attrs.get("alpha", 1) * scale)
    above = x if scale == 1 else x * scale
    return (x < 0.0).where(below, above)


def _celu(x: Value, attrs: Mapping[str, Any]) -> Value:
    """x, and below 0 alpha (exp(x / alpha) - 1) (Barron, arXiv:1704.07483)."""
    alpha = attrs.get("alpha", 1)
    below = _exp_minus_one(x / alpha) * alpha
    return (x < 0.0).where(below, x)


def _shrink(x: Value, attrs: Mapping[str, Any], soft: bool) -> Value:
    """0 within ``lambd`` of 0; what is outside stays, or moves nearer by as much where ``soft``."""
    edge = x.space.const(attrs.get("lambd", 0.5), x.dtype)
    above, below = x > edge, x < edge.neg()
    if not soft:  # of what is inside no sign is left; NaN stays
        return (above | below | x.ne(x)).where(x, 0.0)
    moved = below.where(x + edge, x * 0.0)
    return above.where(x - edge, moved)


def _threshold(x: Value, attrs: Mapping[str, Any]) -> Value:
    below: Value = x <= attrs["threshold"]
    return below.where(attrs["value"], x)


def _glu(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """a sigmoid(b) of the two halves of a dimension (Dauphin et al., arXiv:1612.08083)."""
    at = normalise_dim(node.attrs.get("dim", -1), len(position))
    shifted = along(position, at, position[at] + p.specs[node.outputs[0]].shape[at])
    a, b = (p.pull(node.inputs[0], one).to(result_type(p, node)) for one in (position, shifted))
    return a * b.sigmoid()


def _clamp(x: Value, attrs: Mapping[str, Any]) -> Value:
    return _bounded(x, attrs.get("min", attrs.get("min_val")), attrs.get("max", attrs.get("max_val")))


def _row(names: str, activation: Activation, **also: Any) -> Rows:
    return rows("activation", names, lambda p, node, position: activation(
        p.operand(node, 0, position, result_type(p, node)), node.attrs), **also)


_smooth = partial(_row, refuse=float_result)
_function = partial(_smooth, effort="function")

ACTIVATIONS = {
    **_row("relu", lambda x, attrs: _bounded(x, 0), refuse=no_booleans),
    **_row("relu6", lambda x, attrs: _bounded(x, 0.0, 6.0)),
    **_row("clamp clamp_min clamp_max hardtanh", _clamp,
           refuse=lambda node, specs: None if len(node.inputs) == 1 else "tensor bounds are not supported"),
    **_smooth("hardsigmoid", lambda x, attrs: _hard_sigmoid(x)),
    **_smooth("hardswish", lambda x, attrs: x * _hard_sigmoid(x)),
    **_smooth("leaky_relu", _leaky_relu),
    **_smooth("log_sigmoid", _log_sigmoid),
    **_smooth("hardshrink", partial(_shrink, soft=False)),
    **_smooth("softshrink", partial(_shrink, soft=True)),
    **_smooth("threshold", _threshold),
    # x, and below 0 as much of it as its channel's slope says (He et al., arXiv:1502.01852).
    **rows("activation", "_prelu_kernel", of_two(lambda p, node, x, slope: (x > 0.0).where(x, slope * x)),
           refuse=float_result),
    **_function("elu", _elu, slow_on_cpu=1.6),
    **_function("celu", _celu, slow_on_cpu=1.6),
    **rows("activation", "glu", _glu, refuse=float_result, effort="function"),
    **_function("silu", lambda x, attrs: x * x.sigmoid()),
    **_function("gelu", _gelu, slow_on_cpu=lambda node, specs: 3.0 if node.attrs.get("approximate") == "tanh" else 1.0),
    **_function("softplus", _softplus),
    # x tanh(log(1 + exp(x))) (Misra, arXiv:1908.08681).
    **_function("mish", lambda x, attrs: x * x.exp().log1p().tanh(), slow_on_cpu=2.0),
}
