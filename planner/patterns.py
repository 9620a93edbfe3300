"""Named patterns: small graphs that inference engines fuse by hand, for tests and as tuning shortcuts.

A pattern is spelled as Hugging Face models spell it, so its plan serves those models too. The planner has no special
case for any of them.

>>> graph, specs = pattern("swiglu", "32x4096", "bfloat16")
>>> graph.input_names, graph.output_names
(('gate', 'up'), ('out',))
>>> specs["gate"].shape
(32, 4096)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fuseplan.kernels.ir import ITEMSIZE
from fuseplan.planner.errors import ShapeError, UnknownPatternError
from fuseplan.planner.graph import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.subgraph import SubGraph

Shape = tuple[int, ...]
Built = tuple[list[OpNode], dict[str, TensorSpec], tuple[str, ...]]


@dataclass(frozen=True)
class Pattern:
    """A named pattern.

    Attributes:
        build: Nodes, input specs and output names for a shape and dtype.
        dims: What the dimensions of the shape mean.
        example: A shape.
        ranks: Numbers of dimensions it takes.
        summary: Its formula.
    """

    build: Callable[[Shape, str], Built]
    dims: str
    example: str
    ranks: tuple[int, ...]
    summary: str


def parse_shape(text: str, example: str = "32x4096") -> Shape:
    """``"32x4096"`` as a tuple.

    Raises:
        ShapeError: The text is no shape, or a size is zero.

    >>> parse_shape("32x4096")
    (32, 4096)
    """
    parts = re.split(r"[x×,]", text.strip().lower().strip("()[]"))
    numbers = [part.strip() for part in parts]
    if not all(re.fullmatch(r"\d+", number) for number in numbers):
        raise ShapeError(f"cannot read shape {text!r}; write sizes joined by x, such as {example}")
    shape = tuple(int(number) for number in numbers)
    if 0 in shape:
        raise ShapeError(f"shape {text!r} has an empty dimension; every size is at least 1, as in {example}")
    return shape


def pattern(name: str, shape: str | Sequence[int], dtype: str = "bfloat16") -> tuple[SubGraph, dict[str, TensorSpec]]:
    """A named pattern at one shape: the graph, and the layout of each of its inputs.

    Raises:
        UnknownPatternError: No pattern has that name.
        ShapeError: The shape cannot be read, or does not fit the pattern; or the dtype is unknown.
    """
    found = PATTERNS.get(name)
    if found is None:
        raise UnknownPatternError(name, PATTERNS)
    sizes = parse_shape(shape, found.example) if isinstance(shape, str) else tuple(int(size) for size in shape)
    if len(sizes) not in found.ranks:
        raise ShapeError(
            f"pattern {name} takes {found.dims}, not {len(sizes)} sizes ({'x'.join(map(str, sizes))}); "
            f"try {found.example}"
        )
    if dtype not in ITEMSIZE or not (dtype.startswith("float") or dtype == "bfloat16"):
        raise ShapeError(f"pattern {name} cannot be built in dtype {dtype!r}; use bfloat16, float16 or float32")
    nodes, specs, outputs = found.build(sizes, dtype)
    return SubGraph(tuple(nodes), tuple(specs), outputs), specs


def pattern_graph(name: str, shape: str | Sequence[int], dtype: str = "bfloat16") -> DataflowGraph:
    """The normalised graph of a pattern, as ``plan tune --pattern`` plans it.

    Raises:
        UnknownPatternError: No pattern has that name.
        ShapeError: The shape or dtype does not fit.
    """
    from fuseplan.planner.subgraph import trace_subgraph

    graph, specs = pattern(name, shape, dtype)
    return trace_subgraph(graph, specs).graph


# -- building blocks --------------------------------------------------------------------------------------


def _op(name: str, inputs: Sequence[str], output: str, **attrs: Any) -> OpNode:
    return OpNode(f"aten.{name}", tuple(inputs), (output,), attrs)


def _dense(shape: Shape, dtype: str) -> TensorSpec:
    return TensorSpec.contiguous(shape, dtype)


def _swiglu(shape: Shape, dtype: str) -> Built:
    nodes = [_op("silu.default", ["gate"], "act"), _op("mul.Tensor", ["act", "up"], "out")]
    return nodes, {"gate": _dense(shape, dtype), "up": _dense(shape, dtype)}, ("out",)


def _geglu(approximate: str) -> Callable[[Shape, str], Built]:
    def build(shape: Shape, dtype: str) -> Built:
        nodes = [
            _op("gelu.default", ["gate"], "act", approximate=approximate),
            _op("mul.Tensor", ["act", "up"], "out"),
        ]
        return nodes, {"gate": _dense(shape, dtype), "up": _dense(shape, dtype)}, ("out",)

    return build


def _norm_nodes(source: str, dtype: str, epsilon: float = 1e-6) -> list[OpNode]:
    """Hugging Face's RMSNorm of ``source``: statistics in fp32, the weight applied in the model's dtype."""
    return [
        _op("to.dtype", [source], "wide", dtype="float32"),
        _op("pow.Tensor_Scalar", ["wide"], "square", exponent=2),
        _op("mean.dim", ["square"], "variance", dim=(-1,), keepdim=True),
        _op("add.Tensor", ["variance"], "shifted", other=epsilon),
        _op("rsqrt.default", ["shifted"], "scale"),
        _op("mul.Tensor", ["wide", "scale"], "normal"),
        _op("to.dtype", ["normal"], "narrow", dtype=dtype),
        _op("mul.Tensor", ["weight", "narrow"], "out"),
    ]


def _rms_norm(shape: Shape, dtype: str) -> Built:
    specs = {"x": _dense(shape, dtype), "weight": _dense(shape[-1:], dtype)}
    return _norm_nodes("x", dtype), specs, ("out",)


def _add_rms_norm(shape: Shape, dtype: str) -> Built:
    specs = {"residual": _dense(shape, dtype), "x": _dense(shape, dtype), "weight": _dense(shape[-1:], dtype)}
    nodes = [_op("add.Tensor", ["residual", "x"], "hidden"), *_norm_nodes("hidden", dtype)]
    return nodes, specs, ("hidden", "out")


def _layer_norm(shape: Shape, dtype: str) -> Built:
    width = shape[-1:]
    node = _op("layer_norm.default", ["x", "weight", "bias"], "out", normalized_shape=width, eps=1e-5)
    return [node], {"x": _dense(shape, dtype), "weight": _dense(width, dtype), "bias": _dense(width, dtype)}, ("out",)


def _rope(shape: Shape, dtype: str) -> Built:
    """Half-split rotary embedding of q and k, which come as [B, S, H, D] and are used as [B, H, S, D]."""
    batch, heads, tokens, dim = shape
    if dim % 2:
        raise ShapeError(f"pattern rope rotates pairs, so the head dimension must be even, not {dim}")
    projected = _dense((batch, tokens, heads, dim), dtype)
    table = _dense((batch, tokens, dim), dtype)
    nodes = [_op("unsqueeze.default", ["cos"], "cos_row", dim=1), _op("unsqueeze.default", ["sin"], "sin_row", dim=1)]
    for name in ("q", "k"):
        head = f"{name}_head"
        nodes += [
            _op("transpose.int", [name], head, dim0=1, dim1=2),
            _op("mul.Tensor", [head, "cos_row"], f"{name}_cos"),
            _op("slice.Tensor", [head], f"{name}_low", dim=3, start=0, end=dim // 2),
            _op("slice.Tensor", [head], f"{name}_high", dim=3, start=dim // 2, end=dim),
            _op("neg.default", [f"{name}_high"], f"{name}_minus"),
            _op("cat.default", [f"{name}_minus", f"{name}_low"], f"{name}_turned", dim=-1),
            _op("mul.Tensor", [f"{name}_turned", "sin_row"], f"{name}_sin"),
            _op("add.Tensor", [f"{name}_cos", f"{name}_sin"], f"{name}_out"),
        ]
    return nodes, {"q": projected, "k": projected, "cos": table, "sin": table}, ("q_out", "k_out")


def _causal_softmax(shape: Shape, dtype: str) -> Built:
    """Scaled, masked softmax of attention scores [..., S, T]: query ``s`` sees keys up to ``s + T - S``."""
    queries, keys = shape[-2:]
    if keys < queries:
        raise ShapeError(f"pattern causal_softmax needs at least as many keys as queries, not {queries}x{keys}")
    nodes = [
        _op("mul.Tensor", ["scores"], "scaled", other=0.125),
        _op("arange.default", [], "row", end=queries),
        _op("unsqueeze.default", ["row"], "row_column", dim=1),
        _op("add.Tensor", ["row_column"], "last", other=keys - queries),
        _op("arange.default", [], "key", end=keys),
        _op("le.Tensor", ["key", "last"], "seen"),
        _op("logical_not.default", ["seen"], "hidden"),
        _op("masked_fill.Scalar", ["scaled", "hidden"], "masked", value=float("-inf")),
        _op("softmax.int", ["masked"], "wide", dim=-1, dtype="float32"),
        _op("to.dtype", ["wide"], "out", dtype=dtype),
    ]
    return nodes, {"scores": _dense(shape, dtype)}, ("out",)


_ROWS = "rows x columns (or batch x rows x columns)"

#: Every named pattern.
PATTERNS: Mapping[str, Pattern] = MappingProxyType({
    "swiglu": Pattern(_swiglu, _ROWS, "32x4096", (2, 3), "silu(gate) * up"),
    "geglu": Pattern(_geglu("none"), _ROWS, "32x4096", (2, 3), "gelu(gate) * up, with erf"),
    "geglu_tanh": Pattern(_geglu("tanh"), _ROWS, "32x4096", (2, 3), "gelu(gate) * up, with tanh"),
    "rms_norm": Pattern(_rms_norm, _ROWS, "32x4096", (2, 3), "x / sqrt(mean(x^2) + eps) * weight"),
    "add_rms_norm": Pattern(_add_rms_norm, _ROWS, "32x4096", (2, 3), "h = residual + x; h and rms_norm(h)"),
    "layer_norm": Pattern(_layer_norm, _ROWS, "32x4096", (2, 3), "(x - mean) / sqrt(var + eps) * weight + bias"),
    "rope": Pattern(_rope, "batch x heads x tokens x head dimension", "1x32x128x64", (4,), "x cos + rotate(x) sin"),
    "causal_softmax": Pattern(
        _causal_softmax, "... x queries x keys", "1x32x128x128", (2, 3, 4), "softmax(scores / 8, later keys masked)"
    ),
})
