"""What in-place ops demand: which ops keep their order, which must stay, and which are as good as ops like others.

``y.relu_()`` on an intermediate that is read nowhere else can be fused as ``relu(y)``. The trace keeps the call, which
writes over its operand where it stays unfused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import fx

from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.rewrites.trace_edit import fake_result, value_of
from fuseplan.search.errors import OWN_FAULTS

#: The random number generator, as a storage that every random op writes.
GENERATOR = frozenset({-1})


class Access(NamedTuple):
    """The storages that an op reads or writes (a pure view reads none), and those that it writes; views share one."""

    touched: frozenset[int]
    written: frozenset[int]


def order_edges(ops: Sequence[OpNode], accesses: Mapping[str, Access]) -> list[tuple[str, str]]:
    """Pairs ``(before, after)`` of op names that must keep their order: one writes to a storage that the other touches.
    """
    mutable = {storage for op in ops for storage in accesses[op.name].written}
    last_write: dict[int, str] = {}
    reads: dict[int, list[str]] = {}
    edges: list[tuple[str, str]] = []
    for op in ops:
        touched, written = accesses[op.name]
        for storage in sorted((touched | written) & mutable):
            earlier = [last_write[storage]] if storage in last_write else []
            if storage in written:
                earlier += reads.pop(storage, ())
                last_write[storage] = op.name
            else:
                reads.setdefault(storage, []).append(op.name)
            edges.extend((before, op.name) for before in earlier)
    return list(dict.fromkeys(edges))


def live(ops: Sequence[OpNode], accesses: Mapping[str, Access], outputs: Iterable[str]) -> list[OpNode]:
    """The ops that an output or an effect needs, in order."""
    needed = set(outputs)
    kept: list[OpNode] = []
    for op in reversed(ops):
        if accesses[op.name].written or not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    return kept[::-1]


@cache
def functional_twin(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The op that computes the same and writes to nothing: ``aten.add.Tensor`` of ``aten.add_.Tensor``.

    It has the same arguments, perhaps by another overload: ``pow.Tensor_Scalar`` of ``pow_.Scalar``.
    """
    namespace, _, name = target._schema.name.partition("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    overloads = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    alike = [one for one in overloads if not one._schema.is_mutable and _arguments(one) == _arguments(target)]
    return next((one for one in alike if one._overloadname == target._overloadname), next(iter(alike), None))


def _arguments(target: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in target._schema.arguments]


def is_laid_out_alike(node: fx.Node, twin: torch._ops.OpOverload) -> bool:
    """Whether ``twin`` would give the very tensor that the in-place call ``node`` leaves, in as much memory."""
    old = value_of(node)
    try:
        new = fake_result(twin, node.args, node.kwargs, {})
    except Exception as error:  # an op may refuse operands for any reason: the call stays as it is
        OWN_FAULTS.tolerate(error)
        return False
    if old is None or not isinstance(new, torch.Tensor):
        return False
    if (old.shape, old.dtype, old.stride(), old.device) != (new.shape, new.dtype, new.stride(), new.device):
        return False
    # Sizes of memory may be symbols, and are compared as they are written, which adds no guard to the trace.
    return str(old.untyped_storage().nbytes()) == str(new.untyped_storage().nbytes())


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
