"""How each ATen op is computed, one row per op: the semantic half of the lowering.

A recipe emits the op's value at one position through a :class:`~fuseplan.planner.lower.Puller`. Ops without a recipe
(matmul, attention, gathers, in-place updates) are *extern*: they stay ATen and bound the regions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from fuseplan.kernels.index import Index, Size, as_size, product
from fuseplan.kernels.ir import RegisterType, register_type
from fuseplan.planner.graph import OpNode, TensorSpec
from fuseplan.planner.views import MAY_COPY, VIEW_MAPS, Position, Specs, is_address_map, normalise_dim

if TYPE_CHECKING:
    from fuseplan.planner.lower import Puller

OpKind: TypeAlias = Literal["view", "compute", "extern"]
Build: TypeAlias = Callable[["Puller", OpNode, Position], int]


@dataclass(frozen=True)
class Recipe:
    """How an op is lowered.

    Attributes:
        build: Emits the value at a position of the op's result.
        reduced_dim: Gives the dimensions the op folds; None for pointwise ops.
        refuse: Gives the reason when this instance cannot be lowered (an unsupported attribute), else None.
    """

    build: Build
    reduced_dim: Callable[[OpNode, Specs], tuple[int, ...]] | None = None
    refuse: Callable[[OpNode, Specs], str | None] | None = None

    def reduced_size(self, node: OpNode, specs: Specs) -> Size:
        """Number of elements folded into each result."""
        assert self.reduced_dim is not None
        shape = specs[node.inputs[0]].shape
        return product(shape[dim] for dim in self.reduced_dim(node, specs))


RECIPES: dict[str, Recipe] = {}

_FLOATS = ("float64", "float32", "bfloat16", "float16")


def find_recipe(op: str) -> Recipe | None:
    """The recipe of an ATen op, None when it has none."""
    return RECIPES.get(op)


def mutates(node: OpNode) -> bool:
    """True when the op writes to one of its operands (ATen names end in ``_``, or it has an ``out``)."""
    name = node.op.split(".")[1] if node.op.count(".") >= 1 else node.op
    return (name.endswith("_") and not name.endswith("__")) or node.op.endswith(".out")


def kind_of(node: OpNode, specs: Specs) -> OpKind:
    """``view``: an address map. ``compute``: a kernel can absorb it. ``extern``: it stays a library call."""
    if is_address_map(node, specs):
        return "view"
    return "extern" if why_extern(node, specs) else "compute"


def why_extern(node: OpNode, specs: Specs) -> str | None:
    """Why no generated kernel can absorb the op, None when one can."""
    recipe = RECIPES.get(node.op)
    if recipe is None:
        return f"{node.op} has no recipe: it stays a library call"
    for value in (*node.inputs, *node.outputs):
        if specs[value].dtype not in (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool"):
            return f"{node.op}: dtype {specs[value].dtype} is not handled"
    if recipe.reduced_dim is not None:
        rank = len(specs[node.inputs[0]].shape)
        dims = recipe.reduced_dim(node, specs)
        if sorted(dims) != list(range(rank - len(dims), rank)) or len(dims) != 1:
            return f"{node.op}: reduces dimensions {dims} of {rank}; only the last one is supported"
    return recipe.refuse(node, specs) if recipe.refuse is not None else None


# -- helpers ----------------------------------------------------------------------------------------------


def _result_type(p: Puller, node: OpNode) -> RegisterType:
    return register_type(p.specs[node.outputs[0]].dtype)


def _argument(p: Puller, node: OpNode, name: str, number: int, position: Position, dtype: RegisterType) -> int:
    """Operand ``number``, or the scalar attribute ``name`` where a number stands in its place."""
    if name in node.attrs:
        return p.const(node.attrs[name], dtype)
    return p.operand(node, number, position, dtype)


def _promoted(p: Puller, node: OpNode) -> RegisterType:
    """Register type in which a comparison's operands meet."""
    types = [register_type(p.specs[value].dtype) for value in node.inputs]
    types += ["float32" for key in ("other", "self") if isinstance(node.attrs.get(key), float)]
    order: tuple[RegisterType, ...] = ("float64", "float32", "int64", "int32", "bool")
    best = min(order.index(t) for t in types)
    if "other" in node.attrs and order[best] == "bool":
        return "int64"
    return order[best]


def _unary(op: str) -> Recipe:
    def build(p: Puller, node: OpNode, position: Position) -> int:
        return p.apply(op, p.operand(node, 0, position, _result_type(p, node)))

    return Recipe(build)


def _binary(op: str) -> Recipe:
    def build(p: Puller, node: OpNode, position: Position) -> int:
        dtype = _result_type(p, node)
        a = _argument(p, node, "self", 0, position, dtype)
        b = _argument(p, node, "other", len(node.inputs) - 1, position, dtype)
        alpha = node.attrs.get("alpha", 1)
        if alpha != 1:
            b = p.apply("mul", b, p.const(alpha, dtype))
        return p.apply(op, a, b)

    return Recipe(build)


def _comparison(op: str) -> Recipe:
    def build(p: Puller, node: OpNode, position: Position) -> int:
        dtype = _promoted(p, node)
        a = _argument(p, node, "self", 0, position, dtype)
        return p.apply(op, a, _argument(p, node, "other", len(node.inputs) - 1, position, dtype))

    return Recipe(build)


def _logical(op: str) -> Recipe:
    def build(p: Puller, node: OpNode, position: Position) -> int:
        a = p.operand(node, 0, position, "bool")
        return p.apply(op, a, p.operand(node, len(node.inputs) - 1, position, "bool"))

    return Recipe(build)


def _bools_only(node: OpNode, specs: Specs) -> str | None:
    if any(specs[value].dtype != "bool" for value in node.inputs) or "other" in node.attrs:
        return f"{node.op}: only boolean operands are supported"
    return None


def _float_result(node: OpNode, specs: Specs) -> str | None:
    if specs[node.outputs[0]].dtype not in _FLOATS:
        return f"{node.op}: integer result"
    return None


# -- pointwise --------------------------------------------------------------------------------------------


def _div(p: Puller, node: OpNode, position: Position) -> int:
    dtype = _result_type(p, node)
    a = _argument(p, node, "self", 0, position, dtype)
    other = node.attrs.get("other")
    if other is not None and other != 0 and math.frexp(other)[0] in (0.5, -0.5):
        return p.apply("mul", a, p.const(1.0 / other, dtype))  # exact: a power of two
    return p.apply("div", a, _argument(p, node, "other", 1, position, dtype))


def _rsub(p: Puller, node: OpNode, position: Position) -> int:
    dtype = _result_type(p, node)
    a = p.operand(node, 0, position, dtype)
    alpha = node.attrs.get("alpha", 1)
    if alpha != 1:
        a = p.apply("mul", a, p.const(alpha, dtype))
    return p.apply("sub", _argument(p, node, "other", 1, position, dtype), a)


def power(p: Puller, base: int, exponent: float) -> int:
    """``base ** exponent`` with the cheap exponents spelled out, as ATen's own pow kernel does."""
    dtype = p.dtype_of(base)
    if exponent == 2:
        return p.apply("mul", base, base)
    if exponent == 3:
        return p.apply("mul", p.apply("mul", base, base), base)
    if exponent == 1:
        return base
    if dtype.startswith("float"):
        if exponent == 0.5:
            return p.apply("sqrt", base)
        if exponent == -0.5:
            return p.apply("rsqrt", base)
        if exponent == -1:
            return p.apply("reciprocal", base)
    return p.apply("pow", base, p.const(exponent, dtype))


def _pow_scalar(p: Puller, node: OpNode, position: Position) -> int:
    return power(p, p.operand(node, 0, position, _result_type(p, node)), node.attrs["exponent"])


def _pow_tensor(p: Puller, node: OpNode, position: Position) -> int:
    dtype = _result_type(p, node)
    base = _argument(p, node, "self", 0, position, dtype)
    return p.apply("pow", base, p.operand(node, len(node.inputs) - 1, position, dtype))


def _silu(p: Puller, node: OpNode, position: Position) -> int:
    x = p.operand(node, 0, position, _result_type(p, node))
    return p.apply("mul", x, p.apply("sigmoid", x))


def _gelu(p: Puller, node: OpNode, position: Position) -> int:
    """0.5 x (1 + erf(x / sqrt 2)), or the tanh approximation (Hendrycks & Gimpel, arXiv:1606.08415)."""
    dtype = _result_type(p, node)
    x = p.operand(node, 0, position, dtype)
    if node.attrs.get("approximate", "none") == "tanh":
        cube = p.apply("mul", p.apply("mul", x, x), x)
        inner = p.apply("add", x, p.apply("mul", cube, p.const(0.044715, dtype)))
        curve = p.apply("tanh", p.apply("mul", inner, p.const(math.sqrt(2.0 / math.pi), dtype)))
    else:
        curve = p.apply("erf", p.apply("mul", x, p.const(math.sqrt(0.5), dtype)))
    half = p.apply("mul", x, p.const(0.5, dtype))
    return p.apply("mul", half, p.apply("add", curve, p.const(1.0, dtype)))


def _relu(p: Puller, node: OpNode, position: Position) -> int:
    dtype = _result_type(p, node)
    return p.apply("maximum", p.operand(node, 0, position, dtype), p.const(0, dtype))


def _clamp(p: Puller, node: OpNode, position: Position) -> int:
    dtype = _result_type(p, node)
    x = p.operand(node, 0, position, dtype)
    low = node.attrs.get("min", node.attrs.get("min_val"))
    high = node.attrs.get("max", node.attrs.get("max_val"))
    if low is not None:
        x = p.apply("maximum", x, p.const(low, dtype))
    return x if high is None else p.apply("minimum", x, p.const(high, dtype))


def _clamp_refuse(node: OpNode, specs: Specs) -> str | None:
    return None if len(node.inputs) == 1 else f"{node.op}: tensor bounds are not supported"


def _where(p: Puller, node: OpNode, position: Position) -> int:
    dtype = _result_type(p, node)
    condition = p.operand(node, 0, position, "bool")
    first = _argument(p, node, "self", 1, position, dtype)
    second = _argument(p, node, "other", len(node.inputs) - 1, position, dtype)
    return p.apply("where", condition, first, second)


def _masked_fill(p: Puller, node: OpNode, position: Position) -> int:
    dtype = _result_type(p, node)
    mask = p.operand(node, 1, position, "bool")
    filled = _argument(p, node, "value", 2, position, dtype)
    return p.apply("where", mask, filled, p.operand(node, 0, position, dtype))


def _logical_not(p: Puller, node: OpNode, position: Position) -> int:
    return p.apply("logical_not", p.operand(node, 0, position, "bool"))


def _convert(p: Puller, node: OpNode, position: Position) -> int:
    """to, _to_copy, type_as, clone, contiguous, dropout at inference: the value itself, converted."""
    value = p.operand(node, 0, position)
    target = p.specs[node.outputs[0]].dtype
    if target == "bool" and p.dtype_of(value) != "bool":
        return p.apply("ne", value, p.const(0, p.dtype_of(value)))
    return p.cast(value, register_type(target))


def _convert_refuse(node: OpNode, specs: Specs) -> str | None:
    source, target = specs[node.inputs[0]].dtype, specs[node.outputs[0]].dtype
    if target in ("int8", "uint8", "int16") and source != target:
        return f"{node.op}: conversion {source} to {target} wraps around"
    return None


def _dropout_refuse(node: OpNode, specs: Specs) -> str | None:
    return f"{node.op}: training mode" if node.attrs.get("train") and node.attrs.get("p") else None


def _fill(p: Puller, node: OpNode, position: Position) -> int:
    return p.const(node.attrs.get("fill_value", 0), _result_type(p, node))


def _ones(p: Puller, node: OpNode, position: Position) -> int:
    return p.const(1, _result_type(p, node))


def _scalar_tensor(p: Puller, node: OpNode, position: Position) -> int:
    return p.const(node.attrs["s"], _result_type(p, node))


def _arange(p: Puller, node: OpNode, position: Position) -> int:
    start, step = node.attrs.get("start", 0), node.attrs.get("step", 1)
    return p.cast(p.iota(position[0] * step + start), _result_type(p, node))


def _arange_refuse(node: OpNode, specs: Specs) -> str | None:
    if any(isinstance(node.attrs.get(name), float) for name in ("start", "step")):
        return f"{node.op}: float start or step"
    step = node.attrs.get("step", 1)
    return f"{node.op}: step {step} is not positive" if isinstance(step, int) and step <= 0 else None


def _triangle(keep: str) -> Recipe:
    def build(p: Puller, node: OpNode, position: Position) -> int:
        dtype = _result_type(p, node)
        diagonal = node.attrs.get("diagonal", 0)
        row, col = p.iota(position[-2] + max(diagonal, 0)), p.iota(position[-1] + max(-diagonal, 0))
        kept = p.apply("le", col, row) if keep == "lower" else p.apply("ge", col, row)
        return p.apply("where", kept, p.operand(node, 0, position, dtype), p.const(0, dtype))

    return Recipe(build)


def _cat(p: Puller, node: OpNode, position: Position) -> int:
    dtype = _result_type(p, node)
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
    dtype = _result_type(p, node)
    dim = normalise_dim(node.attrs.get("dim", 0), len(position))
    inner = position[:dim] + position[dim + 1 :]
    starts: list[Size] = list(range(len(node.inputs) + 1))
    return _choose(p, position[dim], starts, lambda q, k: q.cast(q.pull(node.inputs[k], inner), dtype), 0)


def _copy_reshape(p: Puller, node: OpNode, position: Position) -> int:
    source, moved = VIEW_MAPS[node.op](node, node.outputs[0], position, p.specs)
    return p.pull(source, moved)


# -- reductions over the last dimension -------------------------------------------------------------------


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
        return _fold(p, node, _row_of(p, node, position), kind, lambda x: x, _result_type(p, node))

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
        return p.apply("div", p.apply("exp", shifted), total)

    return Recipe(build, _reduced_dims, _float_result)


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


# -- the table --------------------------------------------------------------------------------------------


def _table() -> Mapping[str, Recipe]:
    rows: dict[str, Recipe] = {}
    for name in ("exp", "exp2", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf", "reciprocal"):
        rows[f"aten.{name}.default"] = _unary(name)
    for name in ("neg", "abs", "floor", "ceil"):
        rows[f"aten.{name}.default"] = _unary(name)
    for name in ("add", "sub", "mul"):
        rows[f"aten.{name}.Tensor"] = rows[f"aten.{name}.Scalar"] = _binary(name)
    for name in ("div", "true_divide"):
        rows[f"aten.{name}.Tensor"] = rows[f"aten.{name}.Scalar"] = Recipe(_div, refuse=_float_result)
    rows["aten.maximum.default"], rows["aten.minimum.default"] = _binary("maximum"), _binary("minimum")
    rows["aten.rsub.Scalar"] = rows["aten.rsub.Tensor"] = Recipe(_rsub)
    rows["aten.pow.Tensor_Scalar"] = Recipe(_pow_scalar, refuse=_float_result)
    rows["aten.pow.Tensor_Tensor"] = rows["aten.pow.Scalar"] = Recipe(_pow_tensor, refuse=_float_result)
    rows["aten.square.default"] = Recipe(
        lambda p, node, position: power(p, p.operand(node, 0, position, _result_type(p, node)), 2))
    rows["aten.silu.default"], rows["aten.gelu.default"] = Recipe(_silu), Recipe(_gelu)
    rows["aten.relu.default"] = Recipe(_relu)
    for name in ("clamp.default", "clamp_min.default", "clamp_max.default", "hardtanh.default"):
        rows[f"aten.{name}"] = Recipe(_clamp, refuse=_clamp_refuse)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        rows[f"aten.{name}.Tensor"] = rows[f"aten.{name}.Scalar"] = _comparison(name)
    for name, op in (("and", "logical_and"), ("or", "logical_or"), ("xor", "ne")):
        rows[f"aten.logical_{name}.default"] = _logical(op)
        for spelling in (f"aten.bitwise_{name}.Tensor", f"aten.__{name}__.Tensor"):
            rows[spelling] = Recipe(_logical(op).build, refuse=_bools_only)
    rows["aten.logical_not.default"] = Recipe(_logical_not)
    rows["aten.bitwise_not.default"] = Recipe(_logical_not, refuse=_bools_only)
    for name in ("self", "ScalarSelf", "ScalarOther", "Scalar"):
        rows[f"aten.where.{name}"] = Recipe(_where)
    rows["aten.masked_fill.Scalar"] = rows["aten.masked_fill.Tensor"] = Recipe(_masked_fill)
    for name in ("to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy.default", "type_as.default",
                 "clone.default", "contiguous.default", "lift_fresh_copy.default"):
        rows[f"aten.{name}"] = Recipe(_convert, refuse=_convert_refuse)
    rows["aten.dropout.default"] = Recipe(_convert, refuse=_dropout_refuse)
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
    for name in MAY_COPY:
        rows[name] = Recipe(_copy_reshape)
    rows["aten.sum.dim_IntList"] = _plain_fold("sum")
    rows["aten.amax.default"], rows["aten.amin.default"] = _plain_fold("max"), _plain_fold("min")
    rows["aten.mean.dim"] = Recipe(_mean, _reduced_dims, _float_result)
    for name in ("var.dim", "var.correction"):
        rows[f"aten.{name}"] = Recipe(_var, _reduced_dims, _float_result)
    for name in ("softmax.int", "_softmax.default", "special_softmax.default"):
        rows[f"aten.{name}"] = _softmax(log=False)
    for name in ("log_softmax.int", "_log_softmax.default"):
        rows[f"aten.{name}"] = _softmax(log=True)
    rows["aten.layer_norm.default"] = Recipe(_layer_norm, _normalised_dims, _float_result)
    rows["aten.rms_norm.default"] = Recipe(_rms_norm, _normalised_dims, _float_result)
    return rows


RECIPES.update(_table())

__all__ = ["RECIPES", "VIEW_MAPS", "OpKind", "Recipe", "TensorSpec", "find_recipe", "kind_of", "mutates", "why_extern"]
