"""Running dataflow ops eagerly, one ATen call each: the unfused oracle, and the fallback of every fused group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree

# Ops that graphs may hold, which register themselves:
import fuseplan.planner.graph.decode_attention
import fuseplan.planner.graph.merged_linear  # noqa: F401
from fuseplan.planner.errors import ShapeError, UnknownOpError
from fuseplan.planner.graph.dataflow import OpNode, Ref

#: Schema arguments whose values are attributes of ``torch``, spelled as strings in ``OpNode.attrs``.
_TORCH_ARGUMENTS = ("dtype", "out_dtype", "layout", "memory_format")


def resolve_op(name: str) -> torch._ops.OpOverload:
    """The overload a name such as ``"aten.add.Tensor"`` stands for; UnknownOpError, with near names, where none is."""
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), packet_name, None) if packet_name else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        names, prefix = torch._C._dispatch_get_all_op_names(), f"{namespace}::{packet_name[:2]}"
        raise UnknownOpError(name, [known.replace("::", ".") for known in names if known.startswith(prefix)])
    found = getattr(packet, overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload):
        raise UnknownOpError(name, [f"{namespace}.{packet_name}.{known}" for known in packet.overloads()])
    return found


def bind_call(
    node: OpNode, values: Sequence[Any], device: torch.device | str | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the ATen call ``node`` stands for, ``values`` being its inputs (or proxies).

    ``device`` is given to ops that create a tensor from nothing (``arange``) unless an attribute says it. ShapeError
    where an argument without a default is missing, or operands are left over.
    """
    referenced = {leaf.position for leaf in pytree.tree_leaves(list(node.attrs.values())) if isinstance(leaf, Ref)}
    remaining = iter([value for position, value in enumerate(values) if position not in referenced])
    parameters = parameters_of(node.op)
    makes_tensor = not any(parameter.is_tensor for parameter in parameters)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name in node.attrs:
            value = _argument_value(parameter.name, node.attrs[parameter.name], values)
        elif parameter.is_variadic:
            value = list(remaining)
        elif parameter.is_tensor:
            value = next(remaining, None)
            if value is None and parameter.required:
                raise ShapeError(f"op {node.op} ({node.name}) lacks its operand {parameter.name!r}; add it to inputs")
        elif parameter.name == "device" and device is not None and makes_tensor:
            value = torch.device(device)
        elif parameter.required:
            raise ShapeError(f"op {node.op} ({node.name}) lacks its argument {parameter.name!r}; add it to attrs")
        elif parameter.kwarg_only:
            continue
        else:
            value = parameter.default
        if parameter.kwarg_only:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    if next(remaining, None) is not None:
        raise ShapeError(f"op {node.op} ({node.name}) has {len(values)} operands, more than its schema takes")
    return args, kwargs


@dataclass(frozen=True)
class Parameter:
    """One argument of an ATen schema."""

    name: str
    #: It takes a tensor, an optional one or a list of them.
    is_tensor: bool
    #: It is a plain list after which no tensor comes, so that it takes the remaining operands.
    is_variadic: bool
    is_written: bool
    kwarg_only: bool
    required: bool
    default: Any


@cache
def parameters_of(op: str) -> tuple[Parameter, ...]:
    """The schema of an op as plain records, in order."""
    arguments = resolve_op(op)._schema.arguments
    last_tensor = max((n for n, argument in enumerate(arguments) if "Tensor" in str(argument.type)), default=-1)
    return tuple(
        Parameter(
            name=argument.name,
            is_tensor="Tensor" in str(argument.type),
            is_variadic=number == last_tensor and str(argument.type) == "List[Tensor]",
            is_written=argument.alias_info is not None and argument.alias_info.is_write,
            kwarg_only=argument.kwarg_only,
            required=not argument.has_default_value(),
            default=argument.default_value,
        )
        for number, argument in enumerate(arguments)
    )


def _argument_value(name: str, value: Any, values: Sequence[Any]) -> Any:
    """What ATen takes for an attribute: names become torch objects, ``Ref`` the operand."""
    if isinstance(value, Ref):
        return values[value.position]
    if isinstance(value, tuple | list):
        return [_argument_value(name, item, values) for item in value]
    if isinstance(value, str) and name in _TORCH_ARGUMENTS:
        return getattr(torch, value)
    return torch.device(value) if isinstance(value, str) and name == "device" else value


def run_node(
    node: OpNode, inputs: Sequence[torch.Tensor], device: torch.device | str | None = None
) -> list[torch.Tensor]:
    """Execute one op eagerly: one tensor per ``node.outputs``; on ``device`` where it has no operands."""
    if device is None and inputs:
        device = inputs[0].device
    args, kwargs = bind_call(node, inputs, device)
    result = resolve_op(node.op)(*args, **kwargs)
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
