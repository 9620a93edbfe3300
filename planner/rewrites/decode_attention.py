"""Attention of one query position over a cache as one op, which a kernel of ours computes where the cache lies.

A model in plain PyTorch gathers the pages of each sequence by its block table (``key_pages[block_table]``) for
attention. The op reads the pages themselves (:mod:`~fuseplan.planner.graph.decode_attention`).

PyTorch's attention has no cap (Gemma 2), so models write ``softmax(cap * tanh(q @ k.T * scale / cap) + mask) @ v``:
small kernels, and copies of shared keys and values. Such a chain becomes the op, too. One without a cap stays: for a
row of minus infinity it gives NaN, PyTorch's attention zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fuseplan.costmodel.devices import for_gpu
from fuseplan.planner.graph.decode_attention import DECODE_ATTENTION
from fuseplan.planner.rewrites import trace_edit as edit
from fuseplan.planner.rewrites.attention_backends import fits_scores
from fuseplan.planner.rewrites.attention_call import ATTENTION
from fuseplan.planner.rewrites.grouped_queries import shared_heads
from fuseplan.planner.rewrites.paged_cache import GatheredPages, gathered_pages, has_same_table, in_order, viewed

_aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Decode:
    """``softmax(cap * tanh(scale * query @ key.T / cap) + mask) @ value``, or the same without a cap.

    Attributes:
        nodes: The calls that compute it, the last one last.
        key_reader: The call that reads the key; the last one reads the value.
        numbers: ``scale`` and ``cap``, where they are given.
        is_shared: Whether groups of query heads may read one head of keys and values.
    """

    nodes: Sequence[fx.Node]
    query: Any
    key: Any
    key_reader: fx.Node
    value: Any
    mask: Any
    numbers: Mapping[str, float]
    is_shared: bool = False

    @property
    def is_capped(self) -> bool:
        return "cap" in self.numbers


@dataclass(frozen=True)
class _Cache:
    """The memory of keys or values: ``[batch, heads, length, width]``, or pages.

    Attributes:
        held: The node of the cache.
        read: Nodes that read it for attention: the copy, and its other arguments. Nothing may write to these, or to
            the cache, after the copy.
    """

    held: fx.Node
    heads: int
    read: tuple[fx.Node, ...]
    pages: GatheredPages | None = None


def rewrite_decoding(module: fx.GraphModule, wanted: bool | None = None) -> tuple[int, int]:
    """Make attention of one query position one op, where it reads pages by a copy, or is a chain that caps scores.

    The trace has fake values; ``wanted`` is None where a device has a kernel for it. How many there were of both.
    """
    paged, capped = (
        sum(
            _replace(decode) for node in list(module.graph.find_nodes(op="call_function", target=target))
            if (wanted or (wanted is None and for_gpu(edit.trace_device(node)))) and (decode := find(node)) is not None
        ) for target, find in ((ATTENTION, _called), (_aten.matmul.default, _chain))
    )
    return paged, capped


def _called(node: fx.Node) -> _Decode | None:
    """What a call of PyTorch's attention computes."""
    call = edit.arguments_of(node)
    scale = call["scale"]
    is_positive = scale is None or (isinstance(scale, int | float) and 0 < scale < math.inf)
    if call["dropout_p"] != 0.0 or call["is_causal"] or not is_positive:
        return None
    numbers = {} if scale is None else {"scale": scale}
    query, key, value, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    return _Decode([node], query, key, node, value, mask, numbers, bool(call["enable_gqa"]))


def _chain(last: fx.Node) -> _Decode | None:
    """The chain that ends in a matmul, if nothing else reads what it computes on the way."""
    nodes = [last]

    def step(*targets: Any) -> fx.Node | None:
        """The call that the node before reads first, if it is one of some ops and nothing else reads it."""
        source = nodes[-1].args[0]
        if not isinstance(source, fx.Node) or source.target not in targets or list(source.users) != [nodes[-1]]:
            return None
        nodes.append(source)
        return source

    while (moved := step(_aten.dropout.default, _aten.to.dtype)) is not None:
        if moved.target is _aten.dropout.default and moved.args[1] != 0.0 and moved.args[2]:
            return None
    softmax = step(_aten.softmax.int)
    if softmax is None or softmax.args[1] not in (-1, 3) or not _is_rounded_once(nodes):
        return None
    added = step(_aten.add.Tensor)
    mask = None if added is None else added.args[1]
    if added is not None and (added.kwargs.get("alpha", 1) != 1 or not isinstance(mask, fx.Node)):
        return None
    cap, tanh = _factor(step(_aten.mul.Tensor)), step(_aten.tanh.default)
    factor = _factor(step(_aten.div.Tensor, _aten.mul.Tensor))
    if cap is None or tanh is None or factor is None or not math.isclose(cap * factor, 1.0, rel_tol=1e-6):
        return None
    scaled, first = step(_aten.mul.Tensor, _aten.div.Tensor), step(_aten.matmul.default)
    scale = 1.0 if scaled is None else _factor(scaled)
    if first is None or scale is None:
        return None
    query, across = first.args[:2]
    if not isinstance(across, fx.Node) or across.target is not _aten.transpose.int:
        return None
    key, *dims = across.args
    if {dim % 4 for dim in dims} != {2, 3}:  # type: ignore[operator]
        return None
    return _Decode(nodes[::-1], query, key, across, last.args[1], mask, {"scale": scale, "cap": cap})


def _is_rounded_once(nodes: list[fx.Node]) -> bool:
    """Whether weights are rounded to the type that they are multiplied in, and to no other, after the softmax."""
    last, *moved, softmax = nodes
    types = [one.dtype for node in (*moved, last) if (one := edit.value_of(node)) is not None]
    whole = edit.value_of(softmax)
    return whole is not None and set(types) <= {types[-1], whole.dtype} and whole.dtype in (torch.float32, types[-1])


def _factor(node: fx.Node | None) -> float | None:
    """The number that a product or quotient multiplies by; None where it is no positive number."""
    number = node.args[1] if node is not None and isinstance(node.args[0], fx.Node) else None
    if node is None or not isinstance(number, int | float) or isinstance(number, bool) or not 0 < number < math.inf:
        return None
    found = float(number) if node.target is _aten.mul.Tensor else 1.0 / number
    return found if 0 < found < math.inf else None


def _replace(decode: _Decode) -> bool:
    """Put one op in the place of the calls, if the program stays the same."""
    last, query, sizes = decode.nodes[-1], edit.static_sizes(decode.query), edit.static_sizes(decode.key)
    if query is None or sizes is None or len(query) != 4 or len(sizes) != 4 or query[2] != 1 or 0 in sizes:
        return False
    batch, heads, length, width = sizes
    if edit.static_sizes(decode.value) != sizes or (query[0], query[3]) != (batch, width):
        return False
    if query[1] != heads and (not decode.is_shared or query[1] % heads):
        return False
    operands = [edit.value_of(one) for one in (decode.query, decode.key, decode.value, last)]
    types, mask = {one.dtype for one in operands if one is not None}, edit.value_of(decode.mask)
    shape = edit.static_sizes(decode.mask)
    fits = decode.mask is None or (shape is not None and fits_scores(shape, (batch, query[1], 1, length)))
    if len(types) != 1 or not fits:
        return False
    if decode.is_capped and (types.isdisjoint(_FLOATS) or (mask is not None and not mask.is_floating_point())):
        return False
    key, value = _cache(decode.key, decode.key_reader), _cache(decode.value, last)
    if key is None or value is None or key.heads != value.heads or not _is_unchanged(decode, key, value):
        return False
    return _put(decode, key, value, (batch, length))


def _cache(node: fx.Node, reader: fx.Node) -> _Cache | None:
    """What a key or value that ``reader`` reads is a copy of."""
    if (pages := gathered_pages(node, reader)) is not None:
        return _Cache(pages.pages, pages.sizes[0], (*pages.path, pages.table), pages)
    held, copied = shared_heads(node) or (node, reader)
    sizes = edit.static_sizes(held)
    return None if sizes is None else _Cache(held, sizes[1], (copied,))


def _is_unchanged(decode: _Decode, key: _Cache, value: _Cache) -> bool:
    """Whether no op writes to an operand before the last call, and keys and values are pages of one table, or plain
    tensors of a capped chain: PyTorch's own attention reads plain ones.
    """
    if key.pages is not None and value.pages is not None:
        if not has_same_table(key.pages, value.pages):
            return False
    elif key.pages is not value.pages or not decode.is_capped:
        return False
    read = [(one.read, [one.held]) for one in (key, value)] + [(decode.nodes, [decode.query, decode.mask])]
    return not any(edit.is_written_between(calls[0], decode.nodes[-1], [*calls, *more]) for calls, more in read)


def _put(decode: _Decode, key: _Cache, value: _Cache, sizes: tuple[int, int]) -> bool:
    """Replace the call by one of :data:`DECODE_ATTENTION`; False where an operand cannot be had so."""
    last, numbers = decode.nodes[-1], dict[str, Any](decode.numbers)
    graph, unread, made = last.graph, last.all_input_nodes, None
    given: list[fx.Node | None] = [key.held, value.held]
    table = None
    with graph.inserting_before(last):
        if key.pages is not None and value.pages is not None:
            table = viewed(graph, key.pages.table, (sizes[0], sizes[1] // key.pages.sizes[1]))
            given = [in_order(graph, key.pages), in_order(graph, value.pages), table]
            numbers |= {} if key.pages.wraps else {"wraps": False}
        if None not in given:
            operands = decode.query, *given[:2], table, decode.mask
            made = edit.insert_call(graph, DECODE_ATTENTION, operands, numbers, decode.nodes)
    done = made is not None and edit.put_in_place(made, last)
    edit.erase_unused(*(unread if done else [one for one in (*given, made) if one is not None]))
    return done
