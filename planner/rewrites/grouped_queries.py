"""Attention over keys and values that query heads share, without a copy for every query head.

* On GPUs ``enable_gqa`` reads shared keys and values as they are, where PyTorch has a fused back end that can.
* On CPUs, with one query position, the heads of a group become positions of one head: ``[batch, kv * group, 1, width]``
  is ``[batch, kv, group, width]``. Only the order in which numbers are added up may differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from fuseplan.costmodel.devices import KINDS, is_cpu, is_gpu
from fuseplan.kernels.ir.index import divides
from fuseplan.planner.rewrites import trace_edit as edit
from fuseplan.planner.rewrites.attention_call import (
    ATTENTION,
    change_call,
    chosen_backend,
    fake_arguments,
    masked_number,
)
from fuseplan.planner.rewrites.view_algebra import coordinates, origins

_aten = torch.ops.aten
#: Kinds of device on which query heads as positions have been measured to pay.
MEASURED = frozenset(filter(is_cpu, KINDS))


class SharedHeads(NamedTuple):
    """A key or value that groups of query heads share, ``[batch, kv, length, width]``, and what copies it for each."""

    base: fx.Node
    copied: fx.Node


def fold_grouped_queries(module: fx.GraphModule, wanted: bool | None = None) -> int:
    """Rewrite attention over shared keys and values in a trace with fake values; how many calls there were.

    ``wanted`` is None where it is done if measured to pay.
    """
    if wanted is False:
        return 0
    found = 0
    for node in list(module.graph.find_nodes(op="call_function", target=ATTENTION)):
        if is_gpu(edit.trace_device(node)) and _share(node):
            found += 1
        elif wanted or edit.trace_device(node) in MEASURED:
            found += _fold(node)
    return found


def _shared(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The key and value of a call that query heads share, if nothing writes to them between copies and the call."""
    call = edit.arguments_of(node)
    read = call["key"], call["value"]
    found = [SharedHeads(one, node) if call["enable_gqa"] else shared_heads(one) for one in read]
    if any(one is None or edit.is_written_between(one.copied, node, one) for one in found):
        return None
    key, value = (one.base for one in found if one is not None)
    sizes, others = edit.sizes_of(key), edit.sizes_of(value)
    is_alike = sizes is not None and others is not None and len(sizes) == len(others) == 4 and sizes[:2] == others[:2]
    return (key, value) if is_alike else None


def _share(node: fx.Node) -> bool:
    """Ask for ``enable_gqa`` instead of copies, where a fused back end then runs the plain op."""
    call = edit.arguments_of(node)
    found, query = _shared(node), edit.sizes_of(call["query"])
    if call["enable_gqa"] or found is None or query is None:
        return False
    # A query that is broadcast over the copies would not be over what they are of.
    if any(query[:-2] != sizes[:2] for sizes in map(edit.sizes_of, (call["key"], call["value"])) if sizes):
        return False
    shared = {"key": found[0], "value": found[1], "enable_gqa": True}
    after = fake_arguments(node, **shared)
    # Without one PyTorch would copy all the same, and compute attention op by op.
    if chosen_backend(after) == "math":
        return False
    mask = edit.value_of(call["attn_mask"])
    if mask is not None and mask.dtype == torch.bool and masked_number(after) != masked_number(fake_arguments(node)):
        return False
    if not change_call(node, **shared):
        return False
    edit.erase_unused(call["key"], call["value"])
    return True


def _fold(node: fx.Node) -> bool:
    """Make query heads of a group positions of one head."""
    graph, call = node.graph, edit.arguments_of(node)
    sizes, mask, shared = edit.sizes_of(call["query"]), call["attn_mask"], _shared(node)
    # A dynamic number of sequences can be left to a reshape to work out; nothing else.
    if sizes is None or len(sizes) != 4 or sizes[2] != 1 or not all(isinstance(size, int) for size in sizes[1:]):
        return False
    if shared is None or call["dropout_p"] != 0.0 or call["is_causal"]:
        return False
    rows = () if mask is None else edit.sizes_of(mask)
    if rows is None or (mask is not None and not 2 <= len(rows) <= 4) or any(size != 1 for size in rows[-3:-1]):
        return False  # heads have masks of their own
    sequences, kv_heads, _, width = edit.sizes_of(shared[1]) or (None,) * 4
    if sequences != sizes[0] or not isinstance(kv_heads, int) or not isinstance(width, int):
        return False
    heads = sizes[1]
    if heads == kv_heads or heads % kv_heads:
        return False
    batch = sizes[0] if isinstance(sizes[0], int) else -1
    result = [batch, *node.meta["val"].shape[1:]]
    with graph.inserting_before(node):
        positions = [batch, kv_heads, heads // kv_heads, sizes[3]]
        folded = edit.insert_call(graph, _aten.reshape.default, (call["query"], positions), replaces=[node])
        scale = {"scale": call["scale"]} if call["scale"] is not None else {}
        together = edit.insert_call(graph, ATTENTION, (folded, *shared, mask), scale, [node])
        apart = edit.insert_call(graph, _aten.reshape.default, (together, result), replaces=[node])
    if not edit.put_in_place(apart, node):
        edit.erase_unused(apart)
        return False
    for user in list(apart.users):
        if user.target is _aten.reshape.default and _is_merely_read(apart):  # of a reshape: one does
            edit.change_arguments(user, (together, *user.args[1:]), dict(user.kwargs))
    edit.erase_unused(call["key"], call["value"], apart)
    return True


def _is_merely_read(node: fx.Node) -> bool:
    """Whether nothing can tell if readers of a node see its memory or a copy of it."""
    if len(node.users) == 1:
        return True
    (output,) = node.graph.find_nodes(op="output")
    readers = [node, *node.users]
    return not edit.shares_memory(output, readers) and not edit.is_written_between(node, output, readers)


def shared_heads(node: Any) -> SharedHeads | None:
    """The tensor whose heads a key or value repeats, by whatever ops; None where it repeats none."""
    sizes = edit.sizes_of(node)
    if sizes is None or len(sizes) != 4:
        return None
    batch, head, *rest = coordinates(sizes)
    for base, position in origins(node):
        short = edit.sizes_of(base)
        if short is None or len(short) != 4 or (short[0], *short[2:]) != (sizes[0], *sizes[2:]):
            continue
        times = divides(short[1], sizes[1])
        if times not in (None, 1) and position == (batch, head // times, *rest):
            return SharedHeads(base, node)
    return None
