"""What in-place ops demand: which ops may not be reordered, and which must stay although nobody reads their result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fuseplan.planner.graph.dataflow import OpNode


@dataclass(frozen=True)
class Access:
    """The memory an op uses. Storages are numbers; a tensor and its views share one.

    Attributes:
        touched: Storages read or written. Empty for a pure view: it reads an address, not the data.
        written: Storages written.
        random: True when the op advances the random number generator, which is state like any other.
    """

    touched: frozenset[int]
    written: frozenset[int]
    random: bool = False

    @property
    def has_effect(self) -> bool:
        return bool(self.written) or self.random


#: The random number generator, as a storage that every random op writes.
_GENERATOR = -1


def order_edges(ops: Sequence[OpNode], accesses: Mapping[str, Access]) -> list[tuple[str, str]]:
    """Pairs ``(before, after)`` of op names that must keep their order.

    A write comes after every earlier read and write of its storage, and before every later one. Reads among
    themselves are free, and a storage that nobody writes orders nothing.
    """
    mutable = {storage for op in ops for storage in _written(accesses[op.name])}
    last_write: dict[int, str] = {}
    reads: dict[int, list[str]] = {}
    edges: list[tuple[str, str]] = []
    for op in ops:
        access = accesses[op.name]
        written = _written(access)
        for storage in sorted((access.touched | written) & mutable):
            earlier = [last_write[storage]] if storage in last_write else []
            if storage in written:
                edges.extend((before, op.name) for before in (*earlier, *reads.pop(storage, ())))
                last_write[storage] = op.name
            else:
                edges.extend((before, op.name) for before in earlier)
                reads.setdefault(storage, []).append(op.name)
    return list(dict.fromkeys(edges))


def _written(access: Access) -> frozenset[int]:
    return access.written | {_GENERATOR} if access.random else access.written


def live(ops: Sequence[OpNode], accesses: Mapping[str, Access], outputs: Iterable[str]) -> list[OpNode]:
    """The ops that an output or an effect needs, in order."""
    needed = set(outputs)
    kept: list[OpNode] = []
    for op in reversed(ops):
        if accesses[op.name].has_effect or not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    return kept[::-1]
