"""One spelling per meaning: synonymous ATen calls become one op with explicit sizes.

``x.float()``, ``x.to("cuda", torch.float32)`` and ``x.type_as(y)`` are the same op, and ``view(-1, 64)`` is
``view(8, 64)``; keys of tuned records must not depend on which one a model's author wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuseplan.kernels.ir.index import as_size, is_static
from fuseplan.planner.graph.dataflow import TensorSpec


@dataclass(frozen=True)
class Call:
    """An ATen call under normalisation.

    ``inputs`` name the tensor operands; ``attrs`` are all other arguments by schema name. ``source`` is the spec of the
    first operand (None for an op without any), ``result`` that of the first result; ``moves`` says that they are on
    different devices.
    """

    op: str
    inputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    source: TensorSpec | None
    result: TensorSpec
    moves: bool


_CASTS = frozenset({
    "aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten.to.other", "aten.type_as.default",
    "aten._to_copy.default",
})
_VIEWS = frozenset({"aten.view.default", "aten.view_as.default"})
_RESHAPES = frozenset({
    "aten.reshape.default", "aten.reshape_as.default", "aten._unsafe_view.default", "aten.flatten.using_ints",
    "aten.unflatten.int",
})
_EXPANDS = frozenset(("aten.expand.default", "aten.expand_as.default"))


def respell(call: Call) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """``(op, inputs, attrs)`` in the one spelling the planner uses."""
    first = call.inputs[:1]
    if call.op in _CASTS and not call.moves:
        return _respell_cast(call)
    if call.op in _VIEWS:
        return "aten.view.default", first, {"size": call.result.shape}
    if call.op in _RESHAPES:
        return "aten.reshape.default", first, {"shape": call.result.shape}
    if call.op in _EXPANDS:
        return "aten.expand.default", first, {"size": call.result.shape, "implicit": False}
    if call.op == "aten.lift_fresh_copy.default":
        return "aten.clone.default", first, {}
    if call.op == "aten.slice.Tensor":
        return call.op, call.inputs, _explicit_slice(call)
    return call.op, call.inputs, dict(call.attrs)


def _respell_cast(call: Call) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    kept = {key: value for key, value in call.attrs.items() if key == "memory_format"}
    assert call.source is not None
    if call.source.dtype == call.result.dtype:
        return "aten.clone.default", call.inputs[:1], kept
    return "aten.to.dtype", call.inputs[:1], {"dtype": call.result.dtype, **kept}


def _explicit_slice(call: Call) -> dict[str, Any]:
    """Start and end as positions inside the dimension, where they are known."""
    assert call.source is not None
    rank = len(call.source.shape)
    dim, step, start = call.attrs["dim"] % rank, call.attrs["step"], call.attrs["start"] or 0
    extent, length = call.source.shape[dim], call.result.shape[dim]
    attrs = dict(call.attrs)
    if not is_static(start):
        return attrs
    if start < 0:
        start = extent + start
    if is_static(start, extent):
        start = min(max(start, 0), extent)
    end = as_size(start + length) if step == 1 else call.attrs["end"]
    if step != 1 and is_static(extent, end):
        end = min(end + extent if end < 0 else end, extent)
    return {**attrs, "dim": dim, "start": as_size(start), "end": end}
