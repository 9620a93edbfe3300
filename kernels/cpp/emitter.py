"""KernelIR -> C++: one function per segment, loops over rows and vectors of columns, written for one binary.

What does not change the binary (threads, rows per task, column tile) is an argument: ``Launch`` in ``cpp_loops.h``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fuseplan.kernels.cpp.contraction import Contraction, Sum, parts_of, refusal
from fuseplan.kernels.cpp.contraction_emitter import sums_made
from fuseplan.kernels.cpp.entry import checks_alone, entry_points, is_tiled, outside_flag, symbol_lines
from fuseplan.kernels.cpp.ranges import in_ranges, in_runs
from fuseplan.kernels.cpp.row_vectors import RowVectors, as_row_vectors
from fuseplan.kernels.cpp.row_vectors_emitter import RowVectorsWriter
from fuseplan.kernels.cpp.types import ELEMENT_TYPE, SCALAR_TYPE, STORAGE_TYPE, VECTOR_TYPE, assign_registers, indent
from fuseplan.kernels.cpp.values import ValueWriter, conversion
from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.ir.coalesce import coalesce, split_columns
from fuseplan.kernels.ir.gathers import may_fail
from fuseplan.kernels.ir.ir import ITEMSIZE, KernelIR, Load, Segment, Store, register_type
from fuseplan.kernels.ir.kernel_name import kernel_name
from fuseplan.kernels.ir.reduction_loops import Phase, schedule

#: A staging row up to this size lives on the stack.
_STACK_BYTES = 64 * 1024
#: Lanes of the widest vectors (512 bits of float32).
_MOST_LANES = 16
#: An operand whose rows, and not columns, lie side by side is read in blocks that are transposed in registers: the
#: columns of a tile, for as many rows as share lines of memory. Columns of a block, and how many more its rows have
#: room for: the last vector of a row may begin before the block.
_COLS, _ROOM = 128, 16
_LINE_BYTES = 64


def emit_cpp(ir: KernelIR, unroll: int = 2, stage: bool = False, stream: bool = False) -> str:
    """Source text of a kernel; BuildError where a dynamic size has no C++ spelling.

    ``unroll``: vectors per turn of a column loop, and accumulators per reduction; ``stage``: keep what several passes
    over a row need in a buffer; ``stream``: write results past the caches.
    """
    names = {name: f"n{number}" for number, name in enumerate(ir.symbols)}
    tasks, stages, folds = simplified(ir)
    # What somebody else sees is written only after all checks; what a call makes is dropped where one fails.
    whole = (one.whole if isinstance(one, RowVectors) else one for one in tasks.segments)
    before = tuple(dict.fromkeys(map(checks_alone, whole))) if _checks_first(ir) else ()
    simple = KernelIR(tasks.buffers, (*tasks.segments, *(one for one in before if one.checks)))
    weights = [one.weights for segment in simple.segments for one in _sums(segment)]
    kinds, widest = assign_registers(KernelIR(simple.buffers, (*simple.segments, *weights)))
    if weights and widest > 4:
        raise BuildError("cpp: a matmul beside numbers of 64 bits")
    floats = {buffer.dtype for buffer in ir.outputs if "float" in buffer.dtype}
    rough = bool(floats) and floats <= {"bfloat16", "float16"}
    macros = {"FP_WIDEST": widest, "FP_STREAM": int(stream), "FP_ROUGH": int(rough), "FP_NAME": kernel_name(ir)}
    lines = [*(f"#define {name} {value}" for name, value in macros.items()), prelude()]
    lines += [_header("cpp_contraction.h")] if weights else []
    of_weights = iter(kinds[len(simple.segments) :])
    for number, segment in enumerate(simple.segments):
        checks = () if before and number < len(tasks.segments) else segment.checks
        writer = RowVectorsWriter if isinstance(segment, RowVectors) else _ColumnsWriter
        own = [next(of_weights) for _ in _sums(segment)]
        first = sums_made(simple.buffers, segment, own, names) if isinstance(segment, Contraction) else []
        lines += _function(number, writer(simple.buffers, segment, kinds[number], names, checks, unroll, stage), first)
    return "\n".join([*lines, *entry_points(ir, simple, stages, folds, names)]) + "\n"


def _sums(segment: Segment) -> tuple[Sum, ...]:
    return segment.sums if isinstance(segment, Contraction) else ()


def _checks_first(ir: KernelIR) -> bool:
    return bool(ir.overwritten) and may_fail(ir)


class Simplified(NamedTuple):
    """A kernel as it is emitted.

    Attributes:
        tasks: The kernel with its segments cut; behind its own buffers it has one for the parts of each long fold.
        stages: How many of its segments each stage runs; a stage begins when the one before it has ended.
        folds: For each buffer of parts, the stage that fills it, and the kind of fold that combines the parts.
            The parts of contractions, which come first, need none.
    """

    tasks: KernelIR
    stages: tuple[int, ...]
    folds: tuple[tuple[int, str], ...]


@lru_cache(maxsize=64)
def simplified(ir: KernelIR) -> Simplified:
    """Cut where masks change, with as few axes as possible, and with the columns of long folds shared among tasks."""
    buffers, folds, stages = [*ir.buffers], list[tuple[int, str]](), defaultdict[int, list[Segment]](list)
    contracted = [segment for segment in ir.segments if segment.products]
    if contracted and refusal(ir) is None:
        made = parts_of(contracted, len(buffers))
        buffers += made.buffers
        folds += [(0, "sum") for _ in made.buffers]
        stages[0], stages[1] = [*made.before], [*made.contractions]
    rest_of = [segment for segment in ir.segments if not segment.products]
    merged = (coalesce(piece, within_divisions=True) for segment in rest_of for piece in split_columns(segment))
    for piece in (piece for segment in merged for piece in split_columns(segment)):
        rest, stage = coalesce(piece, within_divisions=True), 0
        while not _checks_first(ir) and (shared := in_ranges(rest, len(buffers))):
            stages[stage] += shared.segments
            folds += [(stage, kind) for kind in shared.kinds]
            buffers += shared.parts
            rest, stage = shared.rest, stage + 1
        stages[stage].append(as_row_vectors(in_runs(rest)))
    ordered = [stages[stage] for stage in range(len(stages))]
    segments = tuple(segment for stage in ordered for segment in stage)
    return Simplified(KernelIR(tuple(buffers), segments), tuple(map(len, ordered)), tuple(folds))


def simplified_segments(ir: KernelIR) -> tuple[Segment, ...]:
    """The segments that tasks share."""
    return simplified(ir).tasks.segments


@lru_cache(maxsize=1)
def prelude() -> str:
    """The C++ text in front of every kernel."""
    return "".join(map(_header, ("cpp_prelude.h", "cpp_maths.h", "cpp_loops.h")))


@lru_cache(maxsize=4)
def _header(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


def _function(number: int, writer: ValueWriter, before: Sequence[str]) -> list[str]:
    """The function of one segment: rows ``[begin, end)``, columns ``[low, high)``; it begins with lines ``before``."""
    segment = writer.segment
    tiled = ", i64 low, i64 high" if is_tiled(segment) else ""
    head = f"static void segment{number}(void* const* buffers, const i64* sizes, i64 begin, i64 end{tiled}) {{"
    lines = symbol_lines(writer.names)
    read = {buffer for one in _sums(segment) for buffer in (one.left, *(load.buffer for load in one.weights.loads))}
    for used in sorted(read.union(access.buffer for access in segment.accesses)):
        lines.append(f"{writer.storage(used)}* __restrict__ b{used} = ({writer.storage(used)}*)buffers[{used}];")
    if writer.checks:
        lines.append(f"int* const outside = {outside_flag(writer.buffers)};")
    if not tiled:
        lines.append(f"const i64 low = 0, high = {writer.size(segment.cols)};")
    first, following = _rows(writer)
    rows = indent([*writer.row(), *following])
    loop = in_blocks(writer, first, rows) if writer.blocks else [
        *first, "for (i64 row = begin; row < end; ++row) {", *rows, "}"]
    return [head, *indent([*lines, *before, *writer.arrays(), *loop]), "}"]


def _rows(writer: ValueWriter) -> tuple[list[str], list[str]]:
    """The coordinates of the first row, and the step to the next one."""
    axes = [(axis, writer.size(extent)) for axis, extent in enumerate(writer.segment.rows) if extent != 1]
    if not axes:
        return [], []
    (outer, _), *inner = axes
    first = ["i64 rest = begin;"]
    first += [f"i64 c{axis} = rest % {extent}; rest /= {extent};" for axis, extent in reversed(inner)]
    step = [f"++c{outer};"]
    for axis, extent in inner:
        step = [f"if (++c{axis} == {extent}) {{", f"  c{axis} = 0;", *indent(step), "}"]
    return [*first, f"i64 c{outer} = rest;"], step


class _ColumnsWriter(ValueWriter):
    """Writes loops over vectors of columns, one for each phase of a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.segment.cols, int):  # no more accumulators than the row has vectors
            self.unroll = max(1, min(self.unroll, self.segment.cols // _MOST_LANES))
        self.phases = schedule(self.segment, self.stage)
        self.blocks = transposed_loads(self.segment)

    def row(self) -> list[str]:
        return [line for position, phase in enumerate(self.phases) for line in self._phase(position, phase)]

    def arrays(self) -> list[str]:
        lines = []
        count = "(high - low + L - 1) / L * L"
        for value in (value for phase in self.phases for value in phase.stages):
            kind, cols = self.kinds[value], self.segment.cols
            scalar = ELEMENT_TYPE[kind]
            if isinstance(cols, int) and cols * ITEMSIZE[kind] <= _STACK_BYTES:
                lines.append(f"alignas(64) {scalar} t{value}[({max(cols, 1)} + L - 1) / L * L];")
            else:
                lines += [f"Scratch<{scalar}> scratch{value}({count});", f"{scalar}* t{value} = scratch{value}.data;"]
        return lines

    # -- passes over the columns ----------------------------------------------------------------------------

    def _phase(self, position: int, phase: Phase) -> list[str]:
        lines = [*map(self.declaration, phase.rows), *self.checked(phase.rows)]
        for number in phase.row_stores:
            store = self.segment.stores[number]
            scalar = SCALAR_TYPE[register_type(self.buffers[store.buffer].dtype)]
            lines.append(f"{self.where_stored(store)}put({self.row_address(store)}, ({scalar})r{store.value});")
        looped = [value for value in phase.reductions if not self.per_row[self.reduction(value).arg]]
        lines += [self._constant_reduction(value) for value in phase.reductions if value not in looped]
        if not looped and not phase.stores and not set(self.checks) & {*phase.elements}:
            return lines
        body = self._body(phase, looped)
        lines += [*self.splats(), *self.fresh(self._pointers(phase))]
        for value in looped:
            kind = self._accumulator_kind(value)
            vector, identity = VECTOR_TYPE[kind], self.identity(value, kind)
            lines += [f"{vector} a{value}_{lane} = splat<{vector}>({identity});" for lane in range(self.unroll)]
        for value, kind in self.scans(phase.elements).items():
            lines.append(f"{SCALAR_TYPE[kind]} carried{value} = {self.identity(value, kind)};")
        return [*lines, *self._loop(f"pass{position}", looped, body), *map(self._fold, looped)]

    def _constant_reduction(self, value: int) -> str:
        """A row-level value folds to itself, or under a sum to itself times the number of columns."""
        instr, scalar = self.reduction(value), SCALAR_TYPE[self.kinds[value]]
        cols = self.size(self.segment.cols)
        whole = f"({scalar})r{instr.arg}" + (f" * ({scalar})({cols})" if instr.kind == "sum" else "")
        return f"const {scalar} r{value} = ({cols}) ? {whole} : {self.identity(value, self.kinds[value])};"

    def _accumulator_kind(self, value: int) -> str:
        """Register type of a reduction's lanes: the result's, unless the operand is a narrowed integer or a mask."""
        operand = self.kinds[self.reduction(value).arg]
        natural = self.segment.body[value].dtype
        if operand == "bool":
            return "int32"
        return operand if natural == "int64" else natural

    def _fold(self, value: int) -> str:
        total = f"a{value}_0"
        for lane in range(1, self.unroll):
            total = self.combined(value, total, f"a{value}_{lane}")
        function = f"[](auto x, auto y) {{ return {self.combined(value, 'x', 'y')}; }}"
        target = SCALAR_TYPE[self.kinds[value]]
        return f"const {target} r{value} = ({target})fold({total}, {function});"

    def _pointers(self, phase: Phase) -> list[str]:
        values = [(f"p{value}", self.segment.body[value]) for value in phase.elements]
        accesses = [*values, *((f"q{number}", self.segment.stores[number]) for number in phase.stores)]
        blocks = {f"p{value}": block_pointer(value) for value in self.blocks}
        return [line for name, one in accesses if isinstance(one, Load | Store)
                for line in self.pointer(name, one, blocks.get(name))]

    def _body(self, phase: Phase, looped: Sequence[int]) -> list[str]:
        lines = []
        for value in phase.reads:
            vector = VECTOR_TYPE[self.kinds[value]]
            lines.append(f"const {vector} e{value} = read<{vector}>(t{value} + slot(m, j));")
        for value in phase.elements:
            lines.append(self.declaration(value))
            if value in phase.stages:
                lines.append(f"write(t{value} + slot(m, j), e{value});")
        lines += self.checked(phase.elements)
        for value in looped:
            kind, operand = self._accumulator_kind(value), self.reduction(value).arg
            item = conversion(self.kinds[operand], kind, f"e{operand}")
            lines.append(f"a{value} = keep(m, {self.combined(value, f'a{value}', item)}, a{value});")
        return [*lines, *map(self.store, phase.stores)]

    def _loop(self, name: str, looped: Sequence[int], body: Sequence[str]) -> list[str]:
        """The loop over whole vectors, ``unroll`` at a time, then the end of the row."""
        parameters = "".join(f", {VECTOR_TYPE[self._accumulator_kind(value)]}& a{value}" for value in looped)

        def call(mode: str, column: str, lane: int) -> str:
            return f"{name}({mode}, {column}{''.join(f', a{value}_{lane}' for value in looped)});"

        unrolled = " ".join(call("Full{}", f"j + {lane} * L", lane) for lane in range(self.unroll))
        lines = [f"auto {name} = [&](auto m, i64 j{parameters}) __attribute__((always_inline)) {{", *indent(body), "};"]
        lines += ["{", "  i64 j = low;"]
        lines.append(f"  for (; j + {self.unroll} * L <= high; j += {self.unroll} * L) {{ {unrolled} }}")
        if self.unroll > 1:
            lines.append(f"  for (; j + L <= high; j += L) {call('Full{}', 'j', 0)}")
        last, part = call("Last{(int)(j - (high - L))}", "high - L", 0), call("Part{(int)(high - j)}", "j", 0)
        # A scan goes on from the vector before, and cannot begin earlier.
        ends = [part] if self.segment.has_scan() else [f"if (high >= L) {last}", f"else {part}"]
        return [*lines, "  if (j < high) {", *indent(indent(ends)), "  }", "}"]


def transposed_loads(segment: Segment) -> tuple[int, ...]:
    """The values of a segment without folds that are loaded so."""
    inner = _inner_axis(segment)
    if segment.has_reduction() or inner is None:
        return ()
    return tuple(
        value for value, instr in enumerate(segment.body)
        if isinstance(instr, Load) and instr.gather is None and instr.mask is None
        and instr.index.is_affine_in(segment.col_axis) and instr.index.is_affine_in(inner)
        and instr.index.coefficient(inner) == 1 and instr.index.coefficient(segment.col_axis) not in (0, 1, -1))


def _inner_axis(segment: Segment) -> int | None:
    """The row axis that changes from row to row."""
    return next((axis for axis in reversed(range(segment.col_axis)) if segment.rows[axis] != 1), None)


def block_pointer(value: int) -> str:
    """Address of column 0 of a row of a block."""
    return f"x{value} + (row - top) * {_COLS + _ROOM} - from"


def in_blocks(writer: ValueWriter, first: list[str], rows: list[str]) -> list[str]:
    """The loops over blocks: ``first`` are the coordinates of the first row, ``rows`` the statements of a row."""
    inner, column, size = _inner_axis(writer.segment), writer.segment.col_axis, writer.size
    assert inner is not None
    arrays, fills = [], []
    loads = {value: instr for value in writer.blocks if isinstance(instr := writer.segment.body[value], Load)}
    height = _LINE_BYTES // min(ITEMSIZE[writer.buffers[load.buffer].dtype] for load in loads.values())
    for value, load in loads.items():
        kind = STORAGE_TYPE[writer.buffers[load.buffer].dtype]
        arrays.append(f"alignas(64) {kind} x{value}[{height * (_COLS + _ROOM)}];")
        place = f"b{load.buffer} + ({load.index.render(lambda a: 'from' if a == column else f'c{a}', size)})"
        fills.append(f"transpose<{_COLS + _ROOM}>({place}, {size(load.index.coefficient(column))}, bottom - top, "
                     f"high - from, x{value});")
    extent = size(writer.segment.rows[inner])
    return [
        *arrays,
        "const i64 stop = high;",
        f"for (i64 left = low; left < stop; left += {_COLS}) {{",
        f"  const i64 low = left, high = least(stop, left + {_COLS}), from = high >= L ? least(low, high - L) : low;",
        "  i64 top = begin, bottom = begin;",
        *indent([*first, "for (i64 row = begin; row < end; ++row) {", "  if (row == bottom) {",
                 f"    top = row, bottom = row + least({height}, least(end - row, {extent} - c{inner}));",
                 *indent(indent(fills)), "  }", *rows, "}"]),
        "}",
    ]
