"""The sums of a contraction in C++: what a row of weights is, as a function that the loops of the header call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuseplan.kernels.cpp.contraction import Contraction, Sum
from fuseplan.kernels.cpp.types import indent
from fuseplan.kernels.cpp.values import ValueWriter
from fuseplan.kernels.ir.ir import ITEMSIZE, Buffer, Load

_INLINE = "__attribute__((always_inline))"
#: Vectors of a turn of the loop (``STEP`` of the header).
_STEP = 4


def sums_made(
    buffers: Sequence[Buffer], segment: Contraction, kinds: Sequence[Sequence[str]], names: Mapping[str, str]
) -> list[str]:
    """Statements that make the sums of columns ``[low, high)``; ``kinds`` are those of the weights of each sum."""
    lines = []
    for number, (one, own) in enumerate(zip(segment.sums, kinds, strict=True)):
        weights = _WeightsWriter(buffers, one.weights, own, names, (), 1, False)
        lines += weights.function(f"weights{number}", one)
        picked = weights.picked(one, segment)
        shape = f"{segment.num_rows}, {len(one.values)}, {one.weights.cols}"
        given = f"b{one.left}, b{one.total}, {segment.cols}"
        lines.append(f"sums<{shape}>(weights{number}, {picked}, {given}, low, high);")
    return lines


class _WeightsWriter(ValueWriter):
    """Writes the right side of a product, whose row is ``c0``."""

    def arrays(self) -> list[str]:
        return []

    def row(self) -> list[str]:
        return []

    def picked(self, one: Sum, segment: Contraction) -> str:
        """The row of the weights for a column."""
        row = one.index.render(lambda axis: "col" if axis == segment.col_axis else f"c{axis}", self.size)
        return f"[&](i64 col) {_INLINE} {{ return (i64)({row}); }}"

    def function(self, name: str, one: Sum) -> list[str]:
        body, side = self.segment.body, self.segment
        rows = [self.declaration(value) for value in range(len(body)) if self.per_row[value]]
        elements = [value for value in range(len(body)) if not self.per_row[value]]
        numbers = [self.declaration(value) for value in elements]
        made = ", ".join(f"keep(m, {self.operand(value, 'float32')}, vf{{}})" for value in one.values)
        loads = {value: instr for value in elements if isinstance(instr := body[value], Load)}
        pointers = [line for value, instr in loads.items() for line in self.pointer(f"p{value}", instr)]
        fetched = []
        for value, instr in loads.items():
            size = ITEMSIZE[self.buffers[instr.buffer].dtype]
            if instr.index.is_affine_in(side.col_axis) and instr.index.coefficient(side.col_axis) == 1:
                ahead = f"__builtin_prefetch(p{value} + k + at + rows * {self.size(instr.index.coefficient(0))}, 0, 2)"
                fetched.append(f"for (int at = 0; at < {_STEP} * L; at += {64 // size}) {ahead};")
        return [
            f"auto {name} = [&](i64 c0) {_INLINE} {{",
            *indent([*rows, *pointers, *self.splats(), "return WeightRow("]),
            f"    [=](auto m, i64 j) {_INLINE} {{",
            *(f"      {line}" for line in (*numbers, f"return Numbers<{len(one.values)}>{{{{{made}}}}};")),
            "    },",
            f"    [=](i64 k, i64 rows) {_INLINE} {{",
            *(f"      {line}" for line in fetched),
            "    });",
            "};",
        ]
