"""Chains of views as one call: where each view begins in its root, and its strides, are known when a graph is compiled.

A view costs the host one to five microseconds; a transformer layer has a dozen, in chains. Each whose root certainly
has its fake tensor's strides reinterprets the root's memory, as in TorchInductor's code. Certain are graph inputs,
whose strides Dynamo guards, and results of fused kernels and matrix products. Not certain are a library's other
results, and parameters: PyTorch 2.11 does not notice that their ``data`` was replaced.

Views of dynamic sizes stay, and of what the graph returns or writes to (eager mode's version counters and ``_base``).
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.implementations.direct_calls import Direct, FakeValues
from fuseplan.planner.implementations.first_call import FirstCall, GroupCall
from fuseplan.planner.ops.table import op_of
from fuseplan.planner.rewrites.trace_edit import is_static, written_operands
from fuseplan.planner.runtime.buffer_donation import HARMLESS, Memory

#: ``(tensor, shape, strides, offset from the tensor's own)``; None where this PyTorch has no such function.
_FUNCTION = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_reinterpret_tensor", None)
_REINTERPRET = None if _FUNCTION is None else Direct(_FUNCTION, "reinterpret")


def shorten_views(graph: fx.Graph, traced: Traced, memory: Memory, unguarded: Collection[int]) -> None:
    """Make each chain of views one call, share equal ones, and drop what nobody reads then.

    ``graph`` is :func:`~fuseplan.planner.runtime.placement.fused_graph` of ``traced``. Strides of graph inputs at
    ``unguarded`` positions may change from call to call.
    """
    source = traced.module.graph
    if _REINTERPRET is None or any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in source.nodes):
        return  # a tensor's sizes are changed under way
    values = FakeValues(source)
    exposed = {one for node in graph.nodes for read in _exposed_by(node) for one in memory.storages[read]}
    unknown = {node for at, node in enumerate(graph.find_nodes(op="placeholder")) if at in unguarded}
    #: What each view is a view of; a certain tensor is its own root. The storage's number does not tell: an op that
    #: writes is fused as one that makes new memory, though its fake tensor is in that of its operand.
    roots: dict[fx.Node, fx.Node] = {}
    #: What each result is like, by eager mode's own view functions: fake tensors have other strides where a size is 1,
    #: and which strides a computed result gets follows from those.
    like: dict[fx.Node, Any] = {}
    made: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        storage = memory.storages[node]
        if len(storage) != 1 or not exposed.isdisjoint(storage):
            continue
        if node.op == "placeholder" or node in memory.new:
            value = values[node]
            if node not in unknown and _is_plain(value) and _is_certain(node, value, traced):
                roots[node] = node
                like[node] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            continue
        operand = node.args[0] if node.args else None
        root = roots.get(operand) if isinstance(operand, fx.Node) else None
        is_view = isinstance(values[node], torch.Tensor | list | tuple)  # not a number that is read from its memory
        if root is None or memory.storages[root] != storage or not is_view:
            continue
        roots[node] = root
        value, whole = _result_like(node, like), like[root]
        if not _is_plain(value) or value.dtype != whole.dtype:
            continue
        place = tuple(value.shape), value.stride(), int(value.storage_offset())
        made.setdefault((root, tuple(whole.shape), whole.stride(), 0), root)
        if (root, *place) not in made:
            with graph.inserting_before(node):
                made[root, *place] = graph.call_function(_REINTERPRET, (root, *place))
            made[root, *place].meta = dict(node.meta)
        view = made[root, *place]
        roots[view], like[view] = root, value
        node.replace_all_uses_with(view)
    for node in reversed(graph.nodes):
        if not node.users and roots.get(node, node) is not node:
            graph.erase_node(node)


def _result_like(node: fx.Node, like: dict[fx.Node, Any]) -> Any:
    """The result of a view's call on the meta device, kept in ``like``; None where an operand's is not known."""
    if callable(node.target) and "device" not in node.kwargs and all(one in like for one in node.all_input_nodes):
        like[node] = node.target(*fx.map_arg(node.args, like.__getitem__), **fx.map_arg(node.kwargs, like.__getitem__))
    return like.get(node)


def _is_plain(value: Any) -> bool:
    """Whether a fake value is a tensor whose elements are numbers as they are in memory, with static sizes."""
    return (
        isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized
        and not value.dtype.is_complex and not value.is_neg()
        and is_static(value) and isinstance(value.storage_offset(), int)
    )


def _is_certain(node: fx.Node, value: torch.Tensor, traced: Traced) -> bool:
    """Whether a node's result has the strides of its fake value."""
    if node.op == "placeholder":
        return True
    call, number = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
    if not isinstance(call, fx.Node) or not isinstance(call.target, GroupCall):
        return op_of(str(node.target)).row_major and value.is_contiguous()
    if not isinstance(call.target, FirstCall) or call.target.ir is None:  # a library's call
        ops = [op_of(traced.graph.op(name).op) for name in call.target.ops]
        return all(op.row_major for op in ops) and value.is_contiguous()
    return isinstance(number, int) and tuple(call.target.buffers[number].strides) == value.stride()


def _exposed_by(node: fx.Node) -> list[fx.Node]:
    """What a node returns, or writes to, or may write to; and what ``as_strided`` reads, whose offset is absolute."""
    if isinstance(node.target, GroupCall):
        return [one for one in (node.args[buffer.over] for buffer in node.target.buffers if buffer.over is not None)
                if isinstance(one, fx.Node)]
    if node.target is torch.ops.aten.as_strided.default:  # no guard checks at which offset an input begins
        return node.all_input_nodes
    if isinstance(node.target, torch._ops.OpOverload):
        return written_operands(node)
    return [] if node.op in ("placeholder", "get_attr") or node.target in HARMLESS else node.all_input_nodes
