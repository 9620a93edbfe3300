"""What a graph does with its arguments when it is replayed as a CUDA graph, and why it cannot be replayed at all.

A CUDA graph repeats kernel launches with the addresses they were recorded with. So an argument is either *kept* (read
and written where it lies: parameters, buffers, whatever the graph writes) or *copied* into memory of the recording, and
anything the host computes from data, or on the CPU, would be frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fuseplan.planner.rewrites.trace_edit import fake_tensors


@dataclass(frozen=True)
class Roles:
    """Positions of a graph's arguments by role; an unused argument has none.

    Attributes:
        kept: Tensors used where they lie.
        copied: Tensors whose values are copied in before each replay.
        sizes: Numbers: dynamic sizes and other scalars.
        shaped: Tensors with a dynamic size.
        held: Tensors that the module itself holds; used where they lie.
    """

    kept: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    shaped: tuple[int, ...] = ()
    held: tuple[torch.Tensor, ...] = ()


def argument_roles(module: fx.GraphModule, stationary: Collection[int]) -> Roles:
    """The roles of a traced module's arguments.

    The module is pre-dispatch ATen, with fake values in ``meta["val"]``. Tensors at ``stationary`` positions are kept:
    those that stay where they are, and those that the graph writes.
    """
    kept, copied, sizes, shaped = [], [], [], []
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
        fake = node.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            sizes.append(position)
            continue
        if any(not isinstance(extent, int) for extent in (*fake.shape, *fake.stride())):
            shaped.append(position)
        if position in stationary:
            kept.append(position)
        elif node.users:
            copied.append(position)
    attributes = (attrgetter(str(node.target))(module) for node in module.graph.find_nodes(op="get_attr"))
    held = tuple(attribute for attribute in attributes if isinstance(attribute, torch.Tensor))
    return Roles(tuple(kept), tuple(copied), tuple(sizes), tuple(shaped), held)


def why_unrecordable(module: fx.GraphModule, device_type: str = "cuda") -> str | None:
    """Why a traced module cannot be replayed as it was recorded, None when nothing speaks against it."""
    for node in module.graph.nodes:
        reason = None
        if node.op == "placeholder" and node.users:
            if any(fake.device.type != device_type for fake in fake_tensors(node)):
                reason = f"argument {node.name} is on the CPU: its value would be frozen"
        elif node.op == "call_function":
            reason = _unrepeatable(node) or _on_host(node, device_type)
        elif node.op == "output" and any(fake.device.type != device_type for fake in _operands(node)):
            reason = "it returns a tensor that is not on the GPU"
        if reason is not None:
            return reason
    return None


def _unrepeatable(node: fx.Node) -> str | None:
    """Why the host needs to see data to run this op."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"{node.target.name()} may branch on data"
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if torch.Tag.data_dependent_output in node.target.tags or free_unbacked_symbols(node.meta.get("val")):
        return f"{node.target} hands data to the host"
    return None


def _on_host(node: fx.Node, device_type: str) -> str | None:
    """Why an op that computes on the CPU gives something else in a replay."""
    results = fake_tensors(node)
    if not isinstance(node.target, torch._ops.OpOverload) or all(one.device.type == device_type for one in results):
        return None
    if any(one.device.type == device_type for one in _operands(node)):
        return f"{node.target} copies to the CPU"
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return f"{node.target} draws random numbers on the CPU"
    if node.target._schema.is_mutable:
        return f"{node.target} writes to a CPU tensor"
    return None


def _operands(node: fx.Node) -> Sequence[torch.Tensor]:
    return [fake for operand in node.all_input_nodes for fake in fake_tensors(operand)]
