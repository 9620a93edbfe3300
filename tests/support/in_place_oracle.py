"""Which outputs may lie in which inputs, by brute force: every read of every element is followed to where it goes.

An output may lie in an input's memory exactly when the store of each element waits for every read of that element: each
read flows into the stored value. Nothing else orders two threads of a kernel, whatever its tiles are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, product

from index_oracle import value_of

from fuseplan.kernels.ir.index import evaluate_all
from fuseplan.kernels.ir.ir import Buffer, Iota, KernelIR, Load, Reduce, Segment, operands
from fuseplan.kernels.ir.reduction_loops import Phase, rescaled_sums, schedule

#: Numbers of reads; of a value, those that it was computed from.
Reads = frozenset[int]


class Trace:
    """What a static kernel reads and stores, element by element.

    Args:
        ir: The kernel.
        looped: Reductions walk their rows once for each phase.
        rescaled: Sums are folded in the phase of the maximum below them.
    """

    def __init__(self, ir: KernelIR, looped: bool, rescaled: bool = False) -> None:
        self.ir = ir
        self.reads: dict[tuple[int, int], set[int]] = {}
        self.stores: dict[tuple[int, int], list[Reads]] = {}
        self._numbers = count()
        for segment in ir.segments:
            phases = schedule(segment, rescale=rescaled)
            for row in product(*(range(extent) for extent in segment.rows)):
                self._row(segment, phases, row, looped and segment.has_reduction())

    def allows(self, target: int, source: int) -> bool:
        """Whether output buffer ``target`` may lie in the memory of input buffer ``source``."""
        ours, theirs = self.ir.buffers[target], self.ir.buffers[source]
        if (ours.dtype, ours.shape, ours.strides) != (theirs.dtype, theirs.shape, theirs.strides):
            return False
        stored = {at: values for (buffer, at), values in self.stores.items() if buffer == target}
        read = {at: numbers for (buffer, at), numbers in self.reads.items() if buffer == source}
        once = all(len(values) == 1 for values in stored.values())
        return once and all(read.get(at, set()) <= values[0] for at, values in stored.items())

    def _row(self, segment: Segment, phases: Sequence[Phase], row: tuple[int, ...], looped: bool) -> None:
        known: dict[int, list[Reads]] = {}
        for phase in phases:
            if looped:
                known = {value: reads for value, reads in known.items() if value not in phase.elements}
            for value in sorted((*phase.rows, *phase.elements)):
                if value not in known:
                    known[value] = [self._value(segment, value, (*row, at), known, at) for at in range(segment.cols)]
            for value in phase.reductions:
                instr = segment.body[value]
                assert isinstance(instr, Reduce)
                # A rescaled sum reads what its maximum does.
                operand = instr.arg if instr.arg in known else operands(segment.body[rescaled_sums(segment)[value]])[0]
                known[value] = [frozenset().union(*known[operand])] * segment.cols
            for number in (*phase.stores, *phase.row_stores):
                self._store(segment, number, row, known)

    def _value(
        self, segment: Segment, value: int, at: tuple[int, ...], known: Mapping[int, list[Reads]], column: int
    ) -> Reads:
        instr = segment.body[value]
        found = frozenset[int]().union(*(known[arg][column] for arg in operands(instr) if arg in known))
        if isinstance(instr, Load):
            number = next(self._numbers)
            buffer = self.ir.buffers[instr.buffer]
            where = range(_span(buffer)) if instr.gather is not None else (value_of(instr.index, at),)
            for element in where:
                self.reads.setdefault((instr.buffer, element), set()).add(number)
            return found | {number}
        assert isinstance(instr, Iota) or not isinstance(instr, Reduce)
        return found

    def _store(self, segment: Segment, number: int, row: tuple[int, ...], known: Mapping[int, list[Reads]]) -> None:
        store = segment.stores[number]
        columns = [0] if segment.store_per_row(store) else range(segment.cols)
        for column in columns:
            values = self.stores.setdefault((store.buffer, value_of(store.index, (*row, column))), [])
            values.append(known[store.value][column] if store.value in known else frozenset())


def _span(buffer: Buffer) -> int:
    """Elements from a static buffer's first to its last, those between its own included."""
    shape, strides = evaluate_all(buffer.shape, {}), evaluate_all(buffer.strides, {})
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
