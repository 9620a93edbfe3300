"""In-place ops whose operand nobody needs any more, told apart from those that somebody sees.

``y.relu_()`` on an intermediate that is read nowhere else means what ``relu(y)`` means: as that it can be fused. The
trace keeps the call as it is, so that an op that stays unfused goes on writing over its operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import fx

from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.rewrites.trace_edit import fake_result, value_of


@cache
def functional_twin(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The op that computes the same and writes to nothing: ``aten.add.Tensor`` of ``aten.add_.Tensor``."""
    namespace, _, name = target._schema.name.partition("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    twin = getattr(packet, target._overloadname, None)
    return twin if isinstance(twin, torch._ops.OpOverload) and not twin._schema.is_mutable else None


def is_read_later(written: Iterable[fx.Node], by: fx.Node, known: Mapping[fx.Node, object]) -> bool:
    """Whether one of the nodes that stand for an operand is used after the op ``by`` writes to it.

    ``known`` holds every node before ``by`` in the trace.
    """
    return any(user is not by and user not in known for node in written for user in node.users)


def is_laid_out_alike(node: fx.Node, twin: torch._ops.OpOverload) -> bool:
    """Whether ``twin`` would give the very tensor that the in-place call ``node`` leaves: shape, dtype and strides."""
    old = value_of(node)
    try:
        new = fake_result(twin, node.args, node.kwargs, {})
    except Exception:  # an op may refuse operands for any reason: the call stays as it is
        return False
    if old is None or not isinstance(new, torch.Tensor):
        return False
    return (old.shape, old.dtype, old.stride(), old.device) == (new.shape, new.dtype, new.stride(), new.device)


def unordered_readers(readers: Iterable[OpNode], op: OpNode, ops: Iterable[OpNode]) -> list[str]:
    """Names of those ``readers`` of an operand that no data flow puts before ``op``, which writes to it."""
    producers = {value: one for one in ops for value in one.outputs}
    before: set[str] = set()
    pending = list(op.inputs)
    while pending:
        producer = producers.get(pending.pop())
        if producer is not None and producer.name not in before:
            before.add(producer.name)
            pending.extend(producer.inputs)
    return [reader.name for reader in readers if reader.name not in before]
