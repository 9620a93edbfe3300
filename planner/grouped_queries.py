"""Grouped-query attention of one token without a copy of keys and values for every query head.

Models whose query heads share keys and values either repeat those for attention, or ask for ``enable_gqa``, of which
few kernels make use. With a single query position the query heads of a group are as good as positions of one head:
``[batch, kv * group, 1, width]`` becomes ``[batch, kv, group, width]``, and attention reads the cache as it is. The
same numbers are computed for every head; only the order in which a kernel adds them up may be another.

Measured on two CPU cores (bfloat16, 32 query and 8 key-value heads of width 64, 8 sequences, a cache of 1024): 26.7 ms
with the copies, 11.3 ms for attention alone on what was copied before, 1.0 ms so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
_MERGES = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
#: Kinds of device on which folding has been measured to pay.
MEASURED = frozenset({"cpu"})


@dataclass(frozen=True)
class _Shared:
    """A key or value that groups of query heads share.

    Attributes:
        base: It, before it is repeated: ``[batch, kv, length, width]``.
        copied: The node that copies it: from there to attention its memory must not change. None where nothing does.
    """

    base: fx.Node
    copied: fx.Node | None


def fold_grouped_queries(module: fx.GraphModule, wanted: bool | None = None) -> int:
    """Rewrite attention of one token over shared keys and values in a pre-dispatch trace; how many there were.

    Args:
        module: The trace; every node carries its fake value in ``meta["val"]``.
        wanted: Whether to; None on the kinds of device where it was measured to pay.
    """
    found = 0
    for node in module.graph.find_nodes(op="call_function", target=_ATTENTION):
        if wanted or (wanted is None and _device(node) in MEASURED):
            found += _fold(module.graph, node)
    if found:
        module.graph.lint()
        module.recompile()
    return found


def _device(node: fx.Node) -> str:
    value = node.meta.get("val")
    return value.device.type if isinstance(value, torch.Tensor) else ""


def _fold(graph: fx.Graph, node: fx.Node) -> bool:
    call = dict(zip(_PARAMETERS, node.args, strict=False)) | dict(node.kwargs)
    query, mask = call["query"], call.get("attn_mask")
    sizes = _sizes(query)
    if sizes is None or len(sizes) != 4 or sizes[2] != 1:
        return False
    if call.get("dropout_p", 0.0) != 0.0 or call.get("is_causal", False) or not _is_same_for_all_heads(mask):
        return False
    key, value = (_shared(call[name], bool(call.get("enable_gqa", False))) for name in ("key", "value"))
    if key is None or value is None:
        return False
    batch, heads, _, width = sizes
    key_sizes, value_sizes = _sizes(key.base), _sizes(value.base)
    if key_sizes is None or value_sizes is None or key_sizes[:2] != value_sizes[:2] or key_sizes[0] != batch:
        return False
    kv_heads = key_sizes[1]
    if heads == kv_heads or heads % kv_heads or _written_between((key, value), node):
        return False
    # One node may be both.
    repeated = [one for one in dict.fromkeys((call["key"], call["value"])) if isinstance(one, fx.Node)]
    with graph.inserting_before(node):
        folded = _call(graph, _aten.reshape.default, (query, [batch, kv_heads, heads // kv_heads, width]))
        scale = {"scale": call["scale"]} if call.get("scale") is not None else {}
        together = _call(graph, _ATTENTION, (folded, key.base, value.base, mask), scale)
        apart = _call(graph, _aten.reshape.default, (together, list(node.meta["val"].shape)))
    node.replace_all_uses_with(apart)
    graph.erase_node(node)
    for user in list(apart.users):
        if user.target is _aten.reshape.default:  # of a reshape: one does
            user.replace_input_with(apart, together)
    _update(together)
    for one in (*repeated, apart):
        _erase_unused(graph, one)
    return True


def _sizes(node: Any) -> tuple[int, ...] | None:
    """The static shape of a node's tensor, None where there is none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not all(type(size) is int for size in value.shape):
        return None
    return tuple(value.shape)


def _is_same_for_all_heads(mask: Any) -> bool:
    """Whether a mask ``[batch, heads, positions, length]`` (or fewer dimensions) has one row for all of a sequence."""
    if mask is None:
        return True
    sizes = _sizes(mask)
    return sizes is not None and 2 <= len(sizes) <= 4 and all(size == 1 for size in sizes[-3:-1])


def _shared(node: Any, grouped: bool) -> _Shared | None:
    """What a key or value is a repetition of: ``repeat_interleave`` over heads, or a new dimension that is expanded
    and merged; with ``grouped`` the node itself."""
    sizes = _sizes(node)
    if sizes is None or len(sizes) != 4:
        return None
    if grouped:
        return _Shared(node, None)
    if node.target is _aten.repeat_interleave.self_int:
        call = dict(zip(("self", "repeats", "dim"), node.args, strict=False)) | dict(node.kwargs)
        times, short = call["repeats"], _sizes(call["self"])
        if call.get("dim") in (1, -3) and short and sizes == (short[0], short[1] * times, *short[2:]):
            return _Shared(call["self"], node)
        return None
    merge = node
    if merge.target not in _MERGES or not isinstance(merge.args[0], fx.Node):
        return None
    expand = merge.args[0]
    wide = _sizes(expand)
    if expand.target is not _aten.expand.default or wide is None or len(wide) != 5:
        return None
    insert = expand.args[0]
    if not isinstance(insert, fx.Node) or insert.target is not _aten.unsqueeze.default:
        return None
    base = insert.args[0]
    batch, heads, times, length, width = wide
    if not isinstance(base, fx.Node) or _sizes(base) != (batch, heads, length, width):
        return None
    if _sizes(insert) != (batch, heads, 1, length, width) or sizes != (batch, heads * times, length, width):
        return None
    return _Shared(base, merge)


def _written_between(read: Sequence[_Shared], node: fx.Node) -> bool:
    """Whether something may write to memory after a key or value was copied, and before attention."""
    for one in read:
        between = one.copied or node
        while between is not node:
            if between.op == "call_function" and not _is_pure(between.target):
                return True
            between = between.next
    return False


def _is_pure(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    made = graph.call_function(target, args, kwargs or {})
    _evaluate(made)
    return made


def _evaluate(node: fx.Node) -> None:
    """Work a node's fake value out from those of its operands."""
    def value(one: fx.Node) -> Any:
        return one.meta["val"]

    args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
    mode = torch._guards.detect_fake_mode((args, kwargs))
    assert mode is not None, f"{node} has no fake operand"
    with torch.no_grad(), mode:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a chain of calls that nothing reads any more, from its end."""
    while not node.users and node.op == "call_function" and _is_pure(node.target):
        before = node.args[0]
        graph.erase_node(node)
        if not isinstance(before, fx.Node):
            return
        node = before


def _update(changed: fx.Node) -> None:
    """Work out the fake values again of what reads a node whose strides may be others than before."""
    for node in list(changed.users):
        old = node.meta.get("val")
        if node.op != "call_function" or not isinstance(old, torch.Tensor) or not _is_pure(node.target):
            continue
        _evaluate(node)
        if node.meta["val"].stride() != old.stride():
            _update(node)
