"""Editing a pre-dispatch trace: calls put in and taken out, with the fake values of what is left kept right."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

#: Calls in traces that touch no tensor.
_HARMLESS = (torch._C._set_grad_enabled,)


def value_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, None where it is something else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def static_sizes(node: Any) -> tuple[int, ...] | None:
    """The shape of a node's tensor, None where it has none or where a size is dynamic."""
    value = value_of(node)
    if value is None or not all(type(size) is int for size in value.shape):
        return None
    return tuple(value.shape)


def device_type(node: fx.Node) -> str:
    """Kind of device of a node's tensor, ``""`` where there is none."""
    value = value_of(node)
    return "" if value is None else value.device.type


def is_pure(target: Any) -> bool:
    """Whether a call writes to none of its operands and does nothing else: an ATen op, or a result of one."""
    if target is operator.getitem:
        return True
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable


def insert_call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """A call at the graph's insertion point, with its fake value."""
    made = graph.call_function(target, args, kwargs or {})
    evaluate_fake(made)
    return made


def evaluate_fake(node: fx.Node) -> None:
    """Work a node's fake value out from those of its operands."""
    def value(one: fx.Node) -> Any:
        return one.meta["val"]

    args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
    mode = torch._guards.detect_fake_mode((args, kwargs))
    assert mode is not None, f"{node} has no fake operand"
    with torch.no_grad(), mode:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def update_readers(changed: fx.Node) -> None:
    """Work out the fake values again of what reads a node whose strides may be others than before."""
    for node in list(changed.users):
        old = node.meta.get("val")
        if node.op != "call_function" or not isinstance(old, torch.Tensor) or not is_pure(node.target):
            continue
        evaluate_fake(node)
        if node.meta["val"].stride() != old.stride():
            update_readers(node)


def ancestors(node: fx.Node) -> list[fx.Node]:
    """A node and everything it is computed from, in the order of the graph."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting.extend(one.all_input_nodes)
    return [one for one in node.graph.nodes if one in seen]


def erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of the given nodes, listed in the order of the graph, that nothing reads any more."""
    for node in reversed(list(nodes)):
        if not node.users and node.op == "call_function" and is_pure(node.target):
            graph.erase_node(node)


def between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes after ``first`` and before ``last``."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def may_write(node: fx.Node, tensors: Iterable[fx.Node]) -> bool:
    """Whether a node may write to the memory of one of ``tensors``: an unknown call always may."""
    if node.op != "call_function" or is_pure(node.target) or node.target in _HARMLESS:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    kept = {_memory(one) for one in tensors}
    # Any operand of a call that writes counts: which of them it writes to is not worth telling apart.
    return bool(kept & {_memory(one) for one in node.all_input_nodes} - {None})


def _memory(node: fx.Node) -> int | None:
    value = value_of(node)
    return None if value is None else int(value.untyped_storage()._cdata)
