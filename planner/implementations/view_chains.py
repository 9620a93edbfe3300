"""Chains of views as one call: where a result lies in the tensor that it views is worked out when a graph is compiled.

A view op costs the host one to two microseconds whatever it does, and a decoder layer has a dozen of them, in chains.
Each chain is run here once on the meta device, on a tensor laid out like its root. Where that layout is certain (graph
inputs, which Dynamo guards; results of fused kernels, which allocate as their IR says; matrix products), the chain
becomes one reinterpretation of the root's memory. What another library call returns may be laid out otherwise than its
fake tensor, and PyTorch 2.11 does not notice that a parameter's ``data`` was replaced: their views stay as they are.

So do results of the graph, and what is written to, with every view that they are taken from, so that version counters
and ``_base`` are as in eager; and views with a dynamic size.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import fx

from fuseplan.kernels.ir.dtypes import torch_dtype
from fuseplan.kernels.ir.ir import Buffer
from fuseplan.planner.capture.normalise import MODE_SWITCHES
from fuseplan.planner.implementations.direct_calls import Direct, FakeValues
from fuseplan.planner.implementations.first_call import GroupCall
from fuseplan.planner.ops.table import op_of
from fuseplan.planner.rewrites.trace_edit import is_pure, is_written, operands_where
from fuseplan.search.errors import OWN_FAULTS


def collapse_views(graph: fx.Graph, traced: fx.Graph, parameters: Collection[int] = ()) -> None:
    """Make chains of views single calls, share equal ones, and drop what nobody reads then.

    Nodes name the node of ``traced`` that they stand for (``meta["traced"]``), which has its fake value. ``parameters``
    are positions of graph inputs.
    """
    if any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in graph.nodes if is_op(node)):
        return  # a tensor's layout is changed under way
    movable = {node for at, node in enumerate(graph.find_nodes(op="placeholder")) if at in parameters}
    places = _Places(graph, FakeValues(traced), movable)
    kept = _exposed(graph)
    before = list(graph.nodes)
    made: dict[tuple[Any, ...], fx.Node] = {}
    for node in before:
        place = places.of.get(node)
        if not isinstance(place, _Place) or node is place.root or node in kept:
            continue
        better = _better(graph, node, place, places.of[place.root], made)
        # ATen lets some ops that write read a view of a tensor without elements, but not the tensor itself.
        writers = [user for user in node.users if is_op(user) and not is_pure(user.target)]
        if better is not None and not any(better in user.all_input_nodes for user in writers):
            node.replace_all_uses_with(better)
    needed = set(before) - places.views
    for node in reversed(graph.nodes):
        if node not in needed and not node.users:
            graph.erase_node(node)


# -- where a view lies ------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A tensor in the memory of another, its ``root``, which is laid out so in every call.

    ``lies`` stands for the tensor, in the storage of the meta tensor that stands for the root.
    """

    root: fx.Node
    lies: torch.Tensor


class _Places:
    """The places of all tensors of a graph with static sizes; several for a node with several results."""

    def __init__(self, graph: fx.Graph, values: FakeValues, movable: Collection[fx.Node]) -> None:
        self._values = values
        self._movable = movable
        self.of: dict[fx.Node, _Place | list[_Place | None] | None] = {}
        self.views: set[fx.Node] = set()  # nodes that compute nothing
        for node in graph.nodes:
            self.of[node] = self._find(node)

    def _find(self, node: fx.Node) -> _Place | list[_Place | None] | None:
        value = self._values[node]
        if node.op == "placeholder":
            return None if node in self._movable else _as_traced(node, value)
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            return self._item(node)
        if isinstance(node.target, GroupCall):
            buffers = node.target.buffers
            return _allocated(node, buffers[0]) if len(buffers) == 1 else None
        if not is_op(node):
            return None
        source = self.of.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if isinstance(source, _Place):
            if _returns_operand(node):
                return _Place(node, source.lies) if source.root is node.args[0] else None
            if _may_view(node) and (found := self._viewed(node, source)) is not None:
                return found
        is_product = op_of(str(node.target)).row_major and isinstance(value, torch.Tensor) and value.is_contiguous()
        return _as_traced(node, value) if is_product else None

    def _item(self, node: fx.Node) -> _Place | None:
        source, number = node.args
        if not isinstance(source, fx.Node) or not isinstance(number, int):
            return None
        if isinstance(source.target, GroupCall):
            return _allocated(node, source.target.buffers[number])
        places = self.of.get(source)
        if isinstance(places, list):
            if source in self.views:
                self.views.add(node)
            return places[number]
        return None

    def _viewed(self, node: fx.Node, source: _Place) -> _Place | list[_Place | None] | None:
        """The results of a view op; None where its result is not in its operand's memory, or may not be."""
        offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
        if node.target is torch.ops.aten.as_strided.default and offset is not None:
            return None  # where a graph input begins in its storage is not known
        if any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves((node.args[1:], dict(node.kwargs)))):
            return None
        assert isinstance(node.target, torch._ops.OpOverload)
        try:
            results = node.target(source.lies, *node.args[1:], **node.kwargs)
        except Exception as error:  # the op needs data, or another device
            OWN_FAULTS.tolerate(error)
            return None
        if not isinstance(results, list | tuple):
            return self._part(node, source, results)
        places = [self._part(node, source, one) for one in results]
        return places if any(places) else None

    def _part(self, node: fx.Node, source: _Place, lies: Any) -> _Place | None:
        if not _shares(lies, source.lies):
            return None
        self.views.add(node)
        return _Place(source.root, lies)


def _as_traced(node: fx.Node, value: Any) -> _Place | None:
    """A tensor in memory of its own, laid out like its fake value."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        return None
    if value.dtype.is_complex or value.is_neg():
        return None
    return _root(node, value.shape, value.stride(), value.dtype)


def _allocated(node: fx.Node, buffer: Buffer) -> _Place | None:
    return _root(node, buffer.shape, buffer.strides, torch_dtype(buffer.dtype))


def _root(node: fx.Node, shape: Sequence[Any], strides: Sequence[Any], dtype: torch.dtype) -> _Place | None:
    if not all(isinstance(size, int) for size in (*shape, *strides)):
        return None
    return _Place(node, torch.empty_strided(shape, strides, dtype=dtype, device="meta"))


def _shares(one: Any, other: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a part of the memory of another, read as the same numbers."""
    return (
        isinstance(one, torch.Tensor)
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.dtype == other.dtype
        and not one.is_neg()
    )


# -- what replaces a chain --------------------------------------------------------------------------------

_private = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_reinterpret_tensor", None)
#: ``(tensor, shape, strides, offset from the tensor's own)``; without it ``as_strided``, whose offset is absolute.
_REINTERPRET = None if _private is None else Direct(_private, "reinterpret")
_AS_STRIDED = Direct(torch.as_strided, "as_strided")


def _better(
    graph: fx.Graph, node: fx.Node, place: _Place, whole: Any, made: dict[tuple[Any, ...], fx.Node]
) -> fx.Node | None:
    """A node that computes what ``node`` does, with less work; None to leave it. ``whole`` is the root's own place."""
    lies = place.lies
    shape, strides, offset = tuple(lies.shape), tuple(lies.stride()), int(lies.storage_offset())
    if (shape, strides, offset) == (whole.lies.shape, whole.lies.stride(), whole.lies.storage_offset()):
        return place.root
    key = place.root, shape, strides, offset
    if key not in made:
        call = _REINTERPRET or (None if offset else _AS_STRIDED)
        if call is None:
            return None
        args: tuple[Any, ...] = (place.root, shape, strides, *([offset] if offset else []))
        with graph.inserting_before(node):
            made[key] = graph.call_function(call, args)
        made[key].meta = dict(node.meta)
    return made[key]


# -- what schemas say about memory ------------------------------------------------------------------------


def is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def _schema(node: fx.Node) -> torch._C.FunctionSchema:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema


def _may_view(node: fx.Node) -> bool:
    """Whether the results may lie in the first operand, and nothing is written."""
    schema = _schema(node)
    if schema.is_mutable or len(schema.returns) != 1:
        return False
    return schema.returns[0].alias_info is not None or op_of(str(node.target)).view is not None


def _returns_operand(node: fx.Node) -> bool:
    """Whether the op writes to its first operand and returns that."""
    schema = _schema(node)
    if len(schema.returns) != 1 or schema.returns[0].alias_info is None or not schema.arguments:
        return False
    first = schema.arguments[0].alias_info
    return first is not None and first.is_write and first.before_set == schema.returns[0].alias_info.before_set


def _exposed(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose result is returned or written to, and all that they may be views of."""
    pending = [node for user in graph.nodes for node in _exposed_by(user)]
    kept: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in kept:
            kept.add(node)
            pending.extend(_aliased(node))
    return kept


def _exposed_by(user: fx.Node) -> Iterator[fx.Node]:
    """Operands that a node hands out, or writes to, or may write to."""
    if isinstance(user.target, GroupCall):
        yield from _overwritten(user)
    elif is_op(user):
        yield from operands_where(user, is_written)
    elif user.target is not operator.getitem and user.target not in MODE_SWITCHES:
        yield from user.all_input_nodes


def _aliased(node: fx.Node) -> Iterator[fx.Node]:
    """Operands whose memory may be a result's."""
    if isinstance(node.target, GroupCall):
        yield from _overwritten(node)
    elif not is_op(node):
        yield from node.all_input_nodes
    elif any(one.alias_info is not None for one in _schema(node).returns):
        yield from operands_where(node, lambda argument: argument.alias_info is not None)
    elif (op := op_of(str(node.target))).view is not None or (not op.new_memory and _is_composite(node.target)):
        yield from node.all_input_nodes


def _overwritten(call: fx.Node) -> Iterator[fx.Node]:
    """Arguments that a group's call writes to, and returns."""
    assert isinstance(call.target, GroupCall)
    written = (call.args[one.over] for one in call.target.buffers if one.over is not None)
    yield from (argument for argument in written if isinstance(argument, fx.Node))


def _is_composite(target: Any) -> bool:
    """Whether an op runs as others, which may return an operand though its schema promises a new tensor (dropout)."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"))
