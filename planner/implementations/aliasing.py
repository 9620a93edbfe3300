"""What the schemas of ATen ops say about memory: operands that a result may lie in, and those that are written to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import fx

from fuseplan.kernels.ir.ir import Buffer
from fuseplan.planner.capture.normalise import MODE_SWITCHES
from fuseplan.planner.lowering.views import VIEW_MAPS

#: By target of a fused call, the outputs that it returns.
Allocated: TypeAlias = Mapping[Any, Sequence[Buffer]]

#: Of the ops that run as several others, those that return new memory all the same.
_MAKES_NEW = frozenset({
    "aten.linear.default", "aten.matmul.default", "aten.scaled_dot_product_attention.default",
})


def is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def _schema(node: fx.Node) -> torch._C.FunctionSchema:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema


def is_written(argument: torch._C.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def may_view(node: fx.Node) -> bool:
    """Whether the results may lie in the first operand, and nothing is written."""
    schema = _schema(node)
    return (
        not schema.is_mutable
        and len(schema.returns) == 1
        and (schema.returns[0].alias_info is not None or str(node.target) in VIEW_MAPS)
    )


def returns_operand(node: fx.Node) -> bool:
    """Whether the op writes to its first operand and returns that."""
    schema = _schema(node)
    if len(schema.returns) != 1 or schema.returns[0].alias_info is None or not schema.arguments:
        return False
    first = schema.arguments[0].alias_info
    return first is not None and first.is_write and first.before_set == schema.returns[0].alias_info.before_set


# -- over a graph -----------------------------------------------------------------------------------------


def exposed(graph: fx.Graph, calls: Allocated) -> set[fx.Node]:
    """Nodes whose result is returned or written to, and all that they may be views of."""
    pending = [node for user in graph.nodes for node in _exposed_by(user, calls)]
    kept: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in kept:
            kept.add(node)
            pending.extend(_aliased(node, calls))
    return kept


def _exposed_by(user: fx.Node, calls: Allocated) -> Iterator[fx.Node]:
    """Operands that a node hands out, or writes to, or may write to."""
    if user.op == "call_function":
        if user.target in calls:
            yield from _overwritten(user, calls)
            return
        if user.target is operator.getitem or user.target in MODE_SWITCHES:
            return
        if is_op(user):
            yield from _operands(user, is_written)
            return
    yield from user.all_input_nodes


def _overwritten(call: fx.Node, calls: Allocated) -> Iterator[fx.Node]:
    """Arguments that a fused call writes to, and returns."""
    for buffer in calls[call.target]:
        if buffer.over is not None and isinstance(argument := call.args[buffer.over], fx.Node):
            yield argument


def _aliased(node: fx.Node, calls: Allocated) -> Iterator[fx.Node]:
    """Operands whose memory may be a result's."""
    if node.op != "call_function":
        return
    if node.target in calls:
        yield from _overwritten(node, calls)
    elif not is_op(node):
        yield from node.all_input_nodes
    elif any(one.alias_info is not None for one in _schema(node).returns):
        yield from _operands(node, lambda argument: argument.alias_info is not None)
    elif str(node.target) in VIEW_MAPS or (str(node.target) not in _MAKES_NEW and _is_composite(node.target)):
        yield from node.all_input_nodes


def _operands(node: fx.Node, wanted: Callable[[Any], bool]) -> Iterator[fx.Node]:
    for number, argument in enumerate(_schema(node).arguments):
        if wanted(argument):
            given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, fx.Node))


def _is_composite(target: Any) -> bool:
    """Whether an op runs as others, which may return an operand though its schema promises a new tensor (dropout)."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"))
