"""Rotary embedding of q and k, as models lay them out: projected [B, S, H, D], used as [B, H, S, D]."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fuseplan.planner.errors import ShapeError
from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.patterns.norm import rms_norm
from fuseplan.planner.patterns.pattern import Built, Ops, Pattern, Shape, dense

#: ``turn(ops, value, width)``: the last dimension, of ``width``, with each pair (a, b) replaced by (-b, a).
Turn: TypeAlias = Callable[[Ops, str, int], str]

_LAYOUT = ("batch x heads x tokens x head dimension", "1x32x128x64", (4,))


def _turn_halves(ops: Ops, value: str, width: int) -> str:
    """Hugging Face's ``rotate_half``: pairs are half a head apart."""
    low = ops("slice.Tensor", value, dim=3, start=0, end=width // 2)
    high = ops("slice.Tensor", value, dim=3, start=width // 2, end=width)
    return ops("cat.default", ops("neg.default", high), low, dim=-1)


def _turn_pairs(ops: Ops, value: str, width: int) -> str:
    """GPT-J's ``rotate_every_two``: pairs are neighbours."""
    even = ops("slice.Tensor", value, dim=3, start=0, end=width, step=2)
    odd = ops("slice.Tensor", value, dim=3, start=1, end=width, step=2)
    return ops("flatten.using_ints", ops("stack.default", ops("neg.default", odd), even, dim=-1), start_dim=-2)


def _rotated(ops: Ops, value: str, cos: str, sin: str, turn: Turn, width: int, to: str | None = None) -> str:
    straight = ops("mul.Tensor", value, cos)
    return ops("add.Tensor", straight, ops("mul.Tensor", turn(ops, value, width), sin), to=to)


def _check(name: str, dim: int, share: int = 1) -> None:
    if dim % (2 * share):
        multiple = "even" if share == 1 else f"a multiple of {2 * share}"
        raise ShapeError(f"pattern {name} rotates pairs, so the head dimension must be {multiple}, not {dim}")


def _tables(ops: Ops, spread: bool = False) -> tuple[str, str]:
    """cos and sin, [B, S, D] made [B, 1, S, D]; ``spread`` repeats each angle for the pair it turns."""
    rows = []
    for name in ("cos", "sin"):
        row = ops("repeat_interleave.self_int", name, repeats=2, dim=-1) if spread else name
        rows.append(ops("unsqueeze.default", row, dim=1))
    return rows[0], rows[1]


def _inputs(shape: Shape, dtype: str, angles: int) -> dict[str, TensorSpec]:
    batch, heads, tokens, dim = shape
    projected, table = dense((batch, tokens, heads, dim), dtype), dense((batch, tokens, angles), dtype)
    return {"q": projected, "k": projected, "cos": table, "sin": table}


def _rope(shape: Shape, dtype: str) -> Built:
    dim = shape[-1]
    _check("rope", dim)
    ops = Ops()
    cos, sin = _tables(ops)
    for name in ("q", "k"):
        head = ops("transpose.int", name, dim0=1, dim1=2)
        _rotated(ops, head, cos, sin, _turn_halves, dim, to=f"{name}_out")
    return ops.built(_inputs(shape, dtype, dim), "q_out", "k_out")


def _rope_interleaved(shape: Shape, dtype: str) -> Built:
    """As GPT-J, GLM and Cohere turn neighbouring pairs, each by one angle of a table half as long."""
    dim = shape[-1]
    _check("rope_interleaved", dim)
    ops = Ops()
    cos, sin = _tables(ops, spread=True)
    for name in ("q", "k"):
        head = ops("transpose.int", name, dim0=1, dim1=2)
        _rotated(ops, head, cos, sin, _turn_pairs, dim, to=f"{name}_out")
    return ops.built(_inputs(shape, dtype, dim // 2), "q_out", "k_out")


def _partial(turn: Turn, name: str) -> Callable[[Shape, str], Built]:
    """Only the first half of each head is turned, the rest passes."""

    def build(shape: Shape, dtype: str) -> Built:
        dim = shape[-1]
        _check(name, dim, 2)
        rotary = dim // 2
        ops = Ops()
        cos, sin = _tables(ops, spread=turn is _turn_pairs)
        for value in ("q", "k"):
            head = ops("transpose.int", value, dim0=1, dim1=2)
            turned = ops("slice.Tensor", head, dim=3, start=0, end=rotary)
            passed = ops("slice.Tensor", head, dim=3, start=rotary, end=dim)
            turned = _rotated(ops, turned, cos, sin, turn, rotary)
            ops("cat.default", turned, passed, to=f"{value}_out", dim=-1)
        return ops.built(_inputs(shape, dtype, rotary // 2 if turn is _turn_pairs else rotary), "q_out", "k_out")

    return build


def _qk_norm_rope(shape: Shape, dtype: str) -> Built:
    """Qwen 3 and Gemma 3: each head of q and k is normalised, then turned."""
    dim = shape[-1]
    _check("qk_norm_rope", dim)
    ops = Ops()
    cos, sin = _tables(ops)
    for name in ("q", "k"):
        normal = rms_norm(ops, name, f"{name}_weight", dtype)
        head = ops("transpose.int", normal, dim0=1, dim1=2)
        _rotated(ops, head, cos, sin, _turn_halves, dim, to=f"{name}_out")
    weights = {f"{name}_weight": dense((dim,), dtype) for name in ("q", "k")}
    return ops.built({**_inputs(shape, dtype, dim), **weights}, "q_out", "k_out")


def rope_patterns() -> dict[str, Pattern]:
    """Rows of the pattern table."""
    return {
        "rope": Pattern(_rope, *_LAYOUT, "x cos + rotate(x) sin, pairs half a head apart"),
        "rope_interleaved": Pattern(_rope_interleaved, *_LAYOUT, "x cos + rotate(x) sin, neighbouring pairs"),
        "rope_partial": Pattern(
            _partial(_turn_halves, "rope_partial"), *_LAYOUT, "rope of the first half of each head"
        ),
        "rope_partial_interleaved": Pattern(
            _partial(_turn_pairs, "rope_partial_interleaved"), *_LAYOUT,
            "rope_interleaved of the first half of each head",
        ),
        "qk_norm_rope": Pattern(_qk_norm_rope, *_LAYOUT, "rope of the RMSNorm of each head of q and k"),
    }
