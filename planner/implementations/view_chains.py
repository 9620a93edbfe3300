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
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import fx

from fuseplan.kernels.ir.dtypes import torch_dtype
from fuseplan.kernels.ir.ir import Buffer
from fuseplan.planner.implementations.aliasing import exposed, is_op, may_view, returns_operand
from fuseplan.planner.implementations.direct_calls import Direct, FakeValues, GroupCall
from fuseplan.planner.rewrites.trace_edit import is_pure

#: Library calls whose result is certainly row-major.
_PRODUCTS = frozenset({
    "aten.linear.default", "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default",
    "fuseplan.merged_linear.default",
})


def collapse_views(graph: fx.Graph, traced: fx.Graph, parameters: Collection[int] = ()) -> None:
    """Make chains of views single calls, share equal ones, and drop what nobody reads then.

    Nodes name the node of ``traced`` that they stand for (``meta["traced"]``), which has its fake value. ``parameters``
    are positions of graph inputs.
    """
    if any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in graph.nodes if is_op(node)):
        return  # a tensor's layout is changed under way
    movable = {node for at, node in enumerate(graph.find_nodes(op="placeholder")) if at in parameters}
    places = _Places(graph, FakeValues(traced), movable)
    kept = exposed(graph)
    before = list(graph.nodes)
    made: dict[tuple[Any, ...], fx.Node] = {}
    for node in before:
        place = places.of.get(node)
        if not isinstance(place, _Place) or node is place.root or node in kept:
            continue
        better = _better(graph, node, place, places.of[place.root], made)
        if better is not None and not any(_writes_to(user, better) for user in node.users):
            node.replace_all_uses_with(better)
    needed = set(before) - places.views
    for node in reversed(graph.nodes):
        if node not in needed and not node.users:
            graph.erase_node(node)


def _writes_to(user: fx.Node, tensor: fx.Node) -> bool:
    """Whether an op may write to a tensor: ATen lets some read a view of it without elements, but not itself."""
    return is_op(user) and not is_pure(user.target) and tensor in user.all_input_nodes


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
            if returns_operand(node):
                return _Place(node, source.lies) if source.root is node.args[0] else None
            if may_view(node) and (found := self._viewed(node, source)) is not None:
                return found
        is_product = str(node.target) in _PRODUCTS and isinstance(value, torch.Tensor) and value.is_contiguous()
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
        if _is_absolute(node):
            return None  # where a graph input begins in its storage is not known
        if any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves((node.args[1:], dict(node.kwargs)))):
            return None
        assert isinstance(node.target, torch._ops.OpOverload)
        try:
            results = node.target(source.lies, *node.args[1:], **node.kwargs)
        except Exception:  # the op needs data, or another device
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
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return None
    return _Place(node, torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))


def _allocated(node: fx.Node, buffer: Buffer) -> _Place | None:
    shape, strides = ([size for size in sizes if isinstance(size, int)] for sizes in (buffer.shape, buffer.strides))
    if len(shape) + len(strides) < 2 * len(buffer.shape):
        return None
    return _Place(node, torch.empty_strided(shape, strides, dtype=torch_dtype(buffer.dtype), device="meta"))


def _is_absolute(node: fx.Node) -> bool:
    """Whether a view says where it lies in the storage, whatever its operand's offset."""
    return node.target is torch.ops.aten.as_strided.default and _given(node, 3, "storage_offset") is not None


def _given(node: fx.Node, number: int, name: str) -> Any:
    return node.args[number] if number < len(node.args) else node.kwargs.get(name)


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
