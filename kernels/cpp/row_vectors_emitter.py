"""The loops of a segment whose vectors hold rows: over blocks of what is folded, vectors, and the numbers of a block.

Numbers of rows that more than one loop needs (folds, what is computed from them) wait in an array: ``t<v>``. So does
what a scan carries from block to block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fuseplan.kernels.cpp.row_vectors import RowVectors
from fuseplan.kernels.cpp.types import ELEMENT_TYPE, VECTOR_TYPE, indent
from fuseplan.kernels.cpp.values import ValueWriter, conversion
from fuseplan.kernels.ir.ir import Load, operands
from fuseplan.kernels.ir.reduction_loops import Phase, schedule

#: Rows that are worked on together: their numbers stay in the first-level cache.
_MOST_ROWS, _LEAST_ROWS = 1024, 64
#: Elements that stay in the second-level cache until the next pass over them.
_CACHED_ELEMENTS = 1 << 16
#: Numbers that a register takes in before it is added to what is in memory, for each of ``unroll``.
_BLOCK = 4
_INLINE = "__attribute__((always_inline))"


class RowVectorsWriter(ValueWriter):
    """Writes the loops of a :class:`RowVectors` segment, of whose rows each has the columns ``[low, high)``."""

    segment: RowVectors

    def __post_init__(self) -> None:
        super().__post_init__()
        self.block = _BLOCK * self.unroll
        self.phases = schedule(self.segment.whole)
        #: Pass or beginning of a pass that computes each value of a row.
        self.places = {value: number for number, phase in enumerate(self.phases) for value in phase.rows}
        self.kept = self._kept()
        self.carried = self.scans(value for phase in self.phases for value in phase.elements)

    def _kept(self) -> dict[int, str]:
        """The values that wait in an array, with the register type of its elements."""
        found = {value: self._fold_type(value) for phase in self.phases for value in phase.reductions}
        for number, phase in enumerate(self.phases):
            for user in (*phase.rows, *phase.elements):
                found |= self._needed(number, operands(self.segment.body[user]), user in phase.elements)
            stored = [value for store in phase.stores for value in self.segment.stores[store].values]
            folded = [self.reduction(value).arg for value in phase.reductions]
            found |= self._needed(number, (*stored, *folded), True)
            rows = [value for store in phase.row_stores for value in self.segment.stores[store].values]
            found |= self._needed(number, rows, False)
        return found

    def _needed(self, number: int, values: Iterable[int], in_loop: bool) -> dict[int, str]:
        """Those that an earlier loop computes."""
        rows = [one for one in values if one in self.places and not self.per_row[one]]
        return {one: self.kinds[one] for one in rows if in_loop or self.places[one] < number}

    def arrays(self) -> list[str]:
        # Each has room for a vector more: the last one has a place of its own.
        return [f"alignas(64) {ELEMENT_TYPE[kind]} t{value}[{self._rows_at_once()} + L];"
                for value, kind in {**self.kept, **self.carried}.items()]

    def _rows_at_once(self) -> int:
        folded = self.segment.folded
        if len(self.phases) == 1 or all(not phase.reductions and not phase.stores for phase in self.phases[1:]):
            return _MOST_ROWS
        fitting = _CACHED_ELEMENTS // max(1, folded) if isinstance(folded, int) else _LEAST_ROWS
        return max(_LEAST_ROWS, min(_MOST_ROWS, fitting // _LEAST_ROWS * _LEAST_ROWS))

    def row(self) -> list[str]:
        size = self._rows_at_once()
        body = [f"const i64 last = least(high, first + {size});"]
        for number, phase in enumerate(self.phases):
            body += self._phase(number, phase)
        return [f"for (i64 first = low; first < high; first += {size}) {{", *indent(body), "}"]

    def _phase(self, number: int, phase: Phase) -> list[str]:
        shared = [value for value in phase.rows if self.per_row[value]]
        lines = self._computed(shared)
        self.declared = set()
        begin = self._computed([value for value in phase.rows if value not in shared])
        begin += [f"write({_place(value)}, e{value});" for value in phase.rows if value in self.kept]
        begin += [line for store in phase.row_stores for line in self._store(store)]
        for value, kind in self._folds(phase).items():
            begin.append(f"write({_place(value)}, splat<{VECTOR_TYPE[kind]}>({self.identity(value, kind)}));")
        if begin:
            lines += [f"auto rows{number} = [&](auto m, i64 j) {_INLINE} {{", *indent(begin), "};"]
            lines += _vectors(lambda mode, at: f"rows{number}({mode}, {at});")
        self.declared = set()
        loop = self._pass(phase)
        return [*lines, *self._loop(number, phase, loop)] if loop else lines

    def _pass(self, phase: Phase) -> list[str]:
        """What one vector of one number of the fold does; ``a<v>`` are the folds."""
        if not phase.reductions and not phase.stores and not set(self.checks) & {*phase.elements}:
            return []
        lines = self._computed(phase.elements)
        for value in phase.reductions:
            operand = self.reduction(value).arg
            lines += self._read([operand])
            kind = self._fold_type(value)
            item = self.operand(operand, kind)
            if not self.per_row[operand]:
                item = conversion(self.kinds[operand], kind, item)
            lines += [*self.splats(), f"a{value} = {self.combined(value, f'a{value}', item)};"]
        return [*lines, *(line for store in phase.stores for line in self._store(store))]

    def _loop(self, number: int, phase: Phase, body: Sequence[str]) -> list[str]:
        """The loops around a pass: folds stay in registers while a block is folded."""
        axis, folds = self.segment.col_axis + 1, self._folds(phase)
        types = [VECTOR_TYPE[kind] for kind in folds.values()]
        first = [f"read<{kind}>({_place(value)})" if value in self.carried
                 else f"splat<{kind}>({self.identity(value, folds[value])})"
                 for kind, value in zip(types, folds, strict=True)]
        parameters = "".join(f", {kind}& a{value}" for kind, value in zip(types, folds, strict=True))
        lines = [f"auto pass{number} = [&](auto m, i64 j, i64 c{axis}{parameters}) {_INLINE} {{",
                 *indent(body), "};"]
        held = "".join(f", a{value}" for value in folds)
        block = [f"{kind} a{value} = {text};" for kind, value, text in zip(types, folds, first, strict=True)]
        block += [f"for (i64 c{axis} = begin{axis}; c{axis} < end{axis}; ++c{axis}) pass{number}(m, j, c{axis}{held});"]
        for kind, value in zip(types, folds, strict=True):
            total = f"a{value}"
            if value not in self.carried:
                total = self.combined(value, f"read<{kind}>({_place(value)})", total)
            block.append(f"write({_place(value)}, {total});")
        size = self.size(self.segment.folded)
        inner = [f"const i64 end{axis} = least({size}, begin{axis} + {self.block});",
                 f"auto block{number} = [&](auto m, i64 j) {_INLINE} {{", *indent(block), "};",
                 *_vectors(lambda mode, at: f"block{number}({mode}, {at});")]
        return [*lines, f"for (i64 begin{axis} = 0; begin{axis} < {size}; begin{axis} += {self.block}) {{",
                *indent(inner), "}"]

    # -- values -------------------------------------------------------------------------------------------

    def _computed(self, values: Sequence[int]) -> list[str]:
        """Declarations of values, after those of what they need."""
        lines: list[str] = []
        for value in values:
            instr = self.segment.body[value]
            lines += self._read(operands(instr))
            if isinstance(instr, Load):
                lines += self.pointer(f"p{value}", instr)
            declared = self.declaration(value)
            lines += [*self.splats(), declared, *self.checked([value])]
            self.declared.add(f"e{value}")
        return lines

    def _read(self, values: Iterable[int]) -> list[str]:
        """Declarations of those that wait in an array."""
        lines = []
        for value in values:
            if value in self.kept and f"e{value}" not in self.declared:
                self.declared.add(f"e{value}")
                held = f"read<{VECTOR_TYPE[self.kept[value]]}>({_place(value)})"
                found = conversion(self.kept[value], self.kinds[value], held)
                lines.append(f"const {VECTOR_TYPE[self.kinds[value]]} e{value} = {found};")
        return lines

    def _store(self, number: int) -> list[str]:
        store = self.segment.stores[number]
        lines, text = [*self._read(store.values), *self.pointer(f"q{number}", store)], self.store(number)
        return [*lines, *self.splats(), text]

    def _folds(self, phase: Phase) -> dict[int, str]:
        """What a pass goes on with from number to number, folds and scans, and in which register type."""
        return {**{value: self._fold_type(value) for value in phase.reductions}, **self.scans(phase.elements)}

    def scanned(self, value: int, kind: str) -> str:
        operand, own = self.reduction(value).arg, self.kinds[value]
        item = conversion(own, kind, self.operand(operand, own))
        return conversion(kind, own, f"(a{value} = {self.combined(value, f'a{value}', item)})")

    def _fold_type(self, value: int) -> str:
        """Register type in which a reduction is folded."""
        return "int32" if self.kinds[value] == "bool" else self.kinds[value]


def _place(value: int) -> str:
    """Where a vector of a value waits."""
    return f"t{value} + (slot(m, j) - first)"


def _vectors(call: Callable[[str, str], str]) -> list[str]:
    """A loop over the vectors of rows ``[first, last)``."""
    return [
        "{",
        "  i64 j = first;",
        f"  for (; j + L <= last; j += L) {call('Full{}', 'j')}",
        "  if (j < last) {",
        f"    if (last - first >= L) {call('Last{(int)(j - (last - L))}', 'last - L')}",
        f"    else {call('Part{(int)(last - j)}', 'j')}",
        "  }",
        "}",
    ]
