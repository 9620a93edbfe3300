"""The loops of a segment whose vectors hold rows: over blocks of what is folded, vectors, and the numbers of a block.

Numbers of rows that more than one loop needs (folds, what is computed from them) wait in an array: ``t<v>``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fuseplan.kernels.cpp.row_vectors import RowVectors
from fuseplan.kernels.cpp.types import SCALAR_TYPE, STORAGE_TYPE, VECTOR_TYPE, constant_text, cpp_size, indent
from fuseplan.kernels.cpp.values import Values, conversion
from fuseplan.kernels.ir.index import Size
from fuseplan.kernels.ir.ir import Buffer, Const, Load, Reduce, Store, operands, register_type
from fuseplan.kernels.ir.ops import REDUCTIONS, fold_identity
from fuseplan.kernels.ir.reduction_loops import Phase, schedule

#: Rows that are worked on together: their numbers stay in the first-level cache.
_MOST_ROWS, _LEAST_ROWS = 1024, 64
#: Elements that stay in the second-level cache until the next pass over them.
_CACHED_ELEMENTS = 1 << 16
#: Numbers that a register takes in before it is added to what is in memory, for each of ``unroll``.
_BLOCK = 4


class RowVectorsWriter:
    """Writes the statements for one row of a :class:`RowVectors`, which has the columns ``[low, high)``."""

    def __init__(self, buffers: Sequence[Buffer], values: Values, unroll: int, checks: Sequence[int]) -> None:
        assert isinstance(values.segment, RowVectors)
        self.buffers, self.values, self.segment, self.kinds = buffers, values, values.segment, values.kinds
        self.block, self.checks = _BLOCK * unroll, set(checks)
        self.phases = schedule(self.segment.whole)
        #: Pass or beginning of a pass that computes each value of a row.
        self.places = {value: number for number, phase in enumerate(self.phases) for value in phase.rows}
        self.folds = {value: number for number, phase in enumerate(self.phases) for value in phase.reductions}
        self.kept = self._kept()
        self._declared: set[str] = set()

    def _kept(self) -> dict[int, str]:
        """The values that wait in an array, with the register type of its elements."""
        found = {value: self._fold_type(value) for value in self.folds}
        for number, phase in enumerate(self.phases):
            for user in (*phase.rows, *phase.elements):
                found |= self._needed(number, operands(self.segment.body[user]), user in phase.elements)
            stored = [value for store in phase.stores for value in self.segment.stores[store].values]
            folded = [operands(self.segment.body[value])[0] for value in phase.reductions]
            found |= self._needed(number, (*stored, *folded), True)
            rows = [value for store in phase.row_stores for value in self.segment.stores[store].values]
            found |= self._needed(number, rows, False)
        return found

    def _needed(self, number: int, values: Iterable[int], in_loop: bool) -> dict[int, str]:
        """Those that an earlier loop computes."""
        rows = [one for one in values if one in self.places and not self.values.per_row[one]]
        return {one: self.kinds[one] for one in rows if in_loop or self.places[one] < number}

    def _size(self, size: Size) -> str:
        return cpp_size(size, self.values.names)

    def arrays(self) -> list[str]:
        """Declarations of the arrays, each with room for a vector more: the last one has a place of its own."""
        return [f"alignas(64) {_element(kind)} t{value}[{self._rows_at_once()} + L];"
                for value, kind in self.kept.items()]

    def _rows_at_once(self) -> int:
        folded = self.segment.folded
        if len(self.phases) == 1 or all(not phase.reductions and not phase.stores for phase in self.phases[1:]):
            return _MOST_ROWS
        fitting = _CACHED_ELEMENTS // max(1, folded) if isinstance(folded, int) else _LEAST_ROWS
        return max(_LEAST_ROWS, min(_MOST_ROWS, fitting // _LEAST_ROWS * _LEAST_ROWS))

    def lines(self) -> list[str]:
        """The statements."""
        size = self._rows_at_once()
        body = [f"const i64 last = least(high, first + {size});"]
        for number, phase in enumerate(self.phases):
            body += self._phase(number, phase)
        return [f"for (i64 first = low; first < high; first += {size}) {{", *indent(body), "}"]

    def _phase(self, number: int, phase: Phase) -> list[str]:
        shared = [value for value in phase.rows if self.values.per_row[value]]
        lines = self._computed(shared)
        self._declared = set()
        begin = self._computed([value for value in phase.rows if value not in shared])
        begin += [f"write({_place(value)}, e{value});" for value in phase.rows if value in self.kept]
        begin += [line for store in phase.row_stores for line in self._store(store)]
        for value in phase.reductions:
            kind = VECTOR_TYPE[self._fold_type(value)]
            begin.append(f"write({_place(value)}, splat<{kind}>({self._identity(value)}));")
        if begin:
            lines += [f"auto rows{number} = {_LAMBDA}(auto m, i64 j) {_INLINE} {{", *indent(begin), "};"]
            lines += _vectors(lambda mode, at: f"rows{number}({mode}, {at});")
        self._declared = set()
        loop = self._pass(phase)
        return [*lines, *self._loop(number, phase, loop)] if loop else lines

    def _pass(self, phase: Phase) -> list[str]:
        """What one vector of one number of the fold does; ``a<v>`` are the folds."""
        if not phase.reductions and not phase.stores and not self.checks.intersection(phase.elements):
            return []
        lines = self._computed(phase.elements)
        for value in phase.reductions:
            operand = operands(self.segment.body[value])[0]
            lines += self._read([operand])
            kind = self._fold_type(value)
            item = self.values.operand(operand, kind)
            if not self.values.per_row[operand]:
                item = conversion(self.kinds[operand], kind, item)
            lines += [*self._splats(), f"a{value} = {self._combine(value, f'a{value}', item)};"]
        return [*lines, *(line for store in phase.stores for line in self._store(store))]

    def _loop(self, number: int, phase: Phase, body: Sequence[str]) -> list[str]:
        """The loops around a pass: folds stay in registers while a block is folded."""
        axis, folds = self.segment.col_axis + 1, phase.reductions
        types = [VECTOR_TYPE[self._fold_type(value)] for value in folds]
        parameters = "".join(f", {kind}& a{value}" for kind, value in zip(types, folds, strict=True))
        lines = [f"auto pass{number} = {_LAMBDA}(auto m, i64 j, i64 c{axis}{parameters}) {_INLINE} {{",
                 *indent(body), "};"]
        held = "".join(f", a{value}" for value in folds)
        block = [f"{kind} a{value} = splat<{kind}>({self._identity(value)});"
                 for kind, value in zip(types, folds, strict=True)]
        block += [f"for (i64 c{axis} = begin{axis}; c{axis} < end{axis}; ++c{axis}) pass{number}(m, j, c{axis}{held});"]
        for kind, value in zip(types, folds, strict=True):
            total = self._combine(value, f"read<{kind}>({_place(value)})", f"a{value}")
            block.append(f"write({_place(value)}, {total});")
        size = self._size(self.segment.folded)
        inner = [f"const i64 end{axis} = least({size}, begin{axis} + {self.block});",
                 f"auto block{number} = {_LAMBDA}(auto m, i64 j) {_INLINE} {{", *indent(block), "};",
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
                lines += self._pointer(f"p{value}", instr)
            declared = self.values.declaration(value)
            lines += [*self._splats(), declared]
            if value in self.checks and not isinstance(instr, Const):
                self.checks.discard(value)
                lines.append(f"if (!r{value}) *outside = 1;" if self.values.per_row[value]
                             else f"if (any(present(m, ~e{value}))) *outside = 1;")
            self._declared.add(f"e{value}")
        return lines

    def _read(self, values: Iterable[int]) -> list[str]:
        """Declarations of those that wait in an array."""
        lines = []
        for value in values:
            if value in self.kept and f"e{value}" not in self._declared:
                self._declared.add(f"e{value}")
                held = f"read<{VECTOR_TYPE[self.kept[value]]}>({_place(value)})"
                found = conversion(self.kept[value], self.kinds[value], held)
                lines.append(f"const {VECTOR_TYPE[self.kinds[value]]} e{value} = {found};")
        return lines

    def _splats(self) -> list[str]:
        fresh = [one for one in self.values.take_splats() if one not in self._declared]
        self._declared.update(fresh)
        return fresh

    def _pointer(self, name: str, access: Load | Store) -> list[str]:
        const = "" if self.buffers[access.buffer].is_output else "const "
        line = self.values.pointer(name, access, const + STORAGE_TYPE[self.buffers[access.buffer].dtype])
        return [line] if line else []

    def _store(self, number: int) -> list[str]:
        store = self.segment.stores[number]
        lines = [*self._read(store.values), *self._pointer(f"q{number}", store)]
        text = self.values.store(number, store, register_type(self.buffers[store.buffer].dtype))
        return [*lines, *self._splats(), text]

    # -- folds --------------------------------------------------------------------------------------------

    def _fold_type(self, value: int) -> str:
        """Register type in which a reduction is folded."""
        return "int32" if self.kinds[value] == "bool" else self.kinds[value]

    def _identity(self, value: int) -> str:
        return constant_text(self._fold_type(value), fold_identity(self._kind(value), self.kinds[value]))

    def _kind(self, value: int) -> str:
        instr = self.segment.body[value]
        assert isinstance(instr, Reduce)
        return instr.kind

    def _combine(self, value: int, a: str, b: str) -> str:
        return REDUCTIONS[self._kind(value)].cpp_combine.format(a, b)


_LAMBDA, _INLINE = "[&]", "__attribute__((always_inline))"


def _place(value: int) -> str:
    """Where a vector of a value waits."""
    return f"t{value} + (slot(m, j) - first)"


def _element(kind: str) -> str:
    return "int" if kind == "bool" else SCALAR_TYPE[kind]


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
