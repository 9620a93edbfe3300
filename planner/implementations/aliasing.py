"""What the schemas of ATen ops say about memory: operands that a result may lie in, and those that are written to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from fuseplan.planner.capture.normalise import MODE_SWITCHES
from fuseplan.planner.implementations.direct_calls import GroupCall, is_written
from fuseplan.planner.lowering.views import VIEW_MAPS

#: Of the ops that run as several others, those that return new memory all the same.
_MAKES_NEW = frozenset({
    "aten.linear.default", "aten.matmul.default", "aten.scaled_dot_product_attention.default",
})


def is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def _schema(node: fx.Node) -> torch._C.FunctionSchema:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema


def may_view(node: fx.Node) -> bool:
    """Whether the results may lie in the first operand, and nothing is written."""
    schema = _schema(node)
    if schema.is_mutable or len(schema.returns) != 1:
        return False
    return schema.returns[0].alias_info is not None or str(node.target) in VIEW_MAPS


def returns_operand(node: fx.Node) -> bool:
    """Whether the op writes to its first operand and returns that."""
    schema = _schema(node)
    if len(schema.returns) != 1 or schema.returns[0].alias_info is None or not schema.arguments:
        return False
    first = schema.arguments[0].alias_info
    return first is not None and first.is_write and first.before_set == schema.returns[0].alias_info.before_set


def exposed(graph: fx.Graph) -> set[fx.Node]:
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
        yield from _operands(user, is_written)
    elif user.target is not operator.getitem and user.target not in MODE_SWITCHES:
        yield from user.all_input_nodes


def _aliased(node: fx.Node) -> Iterator[fx.Node]:
    """Operands whose memory may be a result's."""
    if isinstance(node.target, GroupCall):
        yield from _overwritten(node)
    elif not is_op(node):
        yield from node.all_input_nodes
    elif any(one.alias_info is not None for one in _schema(node).returns):
        yield from _operands(node, lambda argument: argument.alias_info is not None)
    elif str(node.target) in VIEW_MAPS or (str(node.target) not in _MAKES_NEW and _is_composite(node.target)):
        yield from node.all_input_nodes


def _overwritten(call: fx.Node) -> Iterator[fx.Node]:
    """Arguments that a group's call writes to, and returns."""
    assert isinstance(call.target, GroupCall)
    written = (call.args[one.over] for one in call.target.buffers if one.over is not None)
    yield from (argument for argument in written if isinstance(argument, fx.Node))


def _operands(node: fx.Node, wanted: Callable[[Any], bool]) -> Iterator[fx.Node]:
    for number, argument in enumerate(_schema(node).arguments):
        if wanted(argument):
            given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, fx.Node))


def _is_composite(target: Any) -> bool:
    """Whether an op runs as others, which may return an operand though its schema promises a new tensor (dropout)."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"))
