"""Entry points of a generated kernel: how its segments become tasks, and what its outputs look like."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fuseplan.kernels.cpp.contraction import Contraction
from fuseplan.kernels.cpp.row_vectors import RowVectors, task_elements
from fuseplan.kernels.cpp.types import STORAGE_TYPE, cpp_size, indent
from fuseplan.kernels.ir.gathers import value_axes
from fuseplan.kernels.ir.ir import Buffer, KernelIR, Reduce, Segment
from fuseplan.kernels.ir.ops import REDUCTIONS
from fuseplan.kernels.ir.reduction_loops import lies_apart
from fuseplan.kernels.ir.rewrite import needed

#: Rows up to this many columns are never cut into column tiles: their trip count stays a constant.
UNTILED_COLS = 1024
#: The same where columns are strided: a narrow tile over several rows uses every cache line it fetches.
UNTILED_STRIDED_COLS = 32
#: Columns of a contraction's task: whole vectors, of sums that stay in a cache.
CONTRACTION_COLS = 32
#: Elements that one thread makes as fast as several are woken.
_SMALL_STAGE = 1 << 15


def is_tiled(segment: Segment) -> bool:
    """True when a (simplified) segment's columns are shared among tasks, too."""
    if isinstance(segment, RowVectors | Contraction):
        return True
    if segment.has_reduction() or (isinstance(segment.cols, int) and segment.cols <= UNTILED_STRIDED_COLS):
        return False
    return is_strided(segment) or not (isinstance(segment.cols, int) and segment.cols <= UNTILED_COLS)


def is_strided(segment: Segment) -> bool:
    """True when some access steps through memory from column to column (a transposed operand, a gather)."""
    if any(load.gather is not None and not segment.per_row[load.gather.value] for load in segment.loads):
        return True
    return lies_apart(segment, segment.col_axis) > 0


def symbol_lines(names: Mapping[str, str]) -> list[str]:
    """Declarations of the dynamic sizes."""
    return [f"const i64 {text} = sizes[{number}];" for number, text in enumerate(names.values())]


@dataclass(frozen=True)
class Checks(Segment):
    """A segment that makes the checks of another one, and stores nothing."""

    wanted: tuple[int, ...] = ()

    @property
    def checks(self) -> tuple[int, ...]:
        return self.wanted


def checks_alone(segment: Segment) -> Checks:
    """The checks of a segment, along no more axes than they depend on."""
    made, places = needed(segment.body, segment.checks)
    found = value_axes(segment)
    axes = frozenset[int]().union(*(found[value] for value in places))
    rows = tuple(extent if axis in axes else 1 for axis, extent in enumerate(segment.rows))
    along = segment.col_axis in axes or any(isinstance(instr, Reduce) for instr in made)
    return Checks(
        rows, segment.cols if along else 1, made, (), wanted=tuple(places[value] for value in segment.checks))


def outside_flag(buffers: Sequence[Buffer]) -> str:
    """Where a kernel says that a check fails: a number behind its buffers."""
    return f"(int*)buffers[{len(buffers)}]"


def entry_points(
    ir: KernelIR, simple: KernelIR, stages: Sequence[int], folds: Sequence[tuple[int, str]], names: Mapping[str, str]
) -> list[str]:
    """``elements``, what runs tasks of the segments of a simplified kernel (see ``cpp_loops.h``), ``fuseplan_launch``,
    and ``fuseplan_shapes``: sizes, then strides, of every output for given dynamic sizes.

    Segments that belong to no stage are checks. Each thread makes all of them first: they are few, and so no thread
    waits for another.
    """
    sizes = symbol_lines(names)
    elements, tasks, runs, checks = [], [], [], []
    for number, segment in enumerate(simple.segments):
        call, tiled = f"segment{number}(buffers, sizes, ", is_tiled(segment)
        rows = " * ".join(["(i64)1", *(cpp_size(extent, names) for extent in segment.rows)])
        cols = cpp_size(segment.cols, names)
        if number >= sum(stages):
            checks.append(f"{call}0, {rows}{f', 0, {cols}' if tiled else ''});")
            continue
        rows = f"({rows})"
        chunks = f"ceil_div({rows}, how->rows_per_task)"
        tiles = f"ceil_div({cols}, how->col_tile)" if tiled else "1"
        if isinstance(segment, Contraction):
            chunks, tiles = "1", str(contraction_tasks(segment))
        elements.append(f"{rows} * {cols} * {cpp_size(task_elements(segment), names)}")
        tasks.append(f"{chunks} * {tiles}")
        runs += (_run_contraction(call, rows, cols, tiles) if isinstance(segment, Contraction) else
                 _run_segment(call, tiled, rows, cols, chunks, tiles))
    checks += [f"if (*{outside_flag(ir.buffers)}) return;"] if checks else []
    parts, combined = _parts(simple.buffers, len(ir.buffers), folds)
    before_sums = any(isinstance(segment, Contraction) for segment in simple.segments)
    launch = [*sizes, *parts, "i64 begin = 0, end = 0;"]
    for stage, count in enumerate(stages):
        done = sum(stages[:stage])
        own = simple.segments[done : done + count]
        once = (stage > 0 and all(segment.cols == 1 for segment in own)) or (before_sums and _is_small(own))
        launch += [f"begin = end; end += {' + '.join(tasks[done : done + count])};",
                   f"{'FP_NAME' if once else 'run_tasks'}(buffers, sizes, how, begin, end);", *combined[stage]]
    shapes = (size for buffer in ir.outputs for size in (*buffer.shape, *buffer.strides))
    stores = [f"shapes[{number}] = {cpp_size(size, names)};" for number, size in enumerate(shapes)]
    return [
        "static i64 elements(const i64* sizes) {", *indent([*sizes, f"return {' + '.join(elements)};"]), "}",
        "static void FP_NAME(void* const* buffers, const i64* sizes, const Launch* how, i64 begin, i64 end) {",
        *indent([*sizes, *checks, *runs, "results_done();"]), "}",
        'extern "C" void fuseplan_launch(void* const* given, const i64* sizes, const Launch* how) {',
        *indent(launch), "}",
        'extern "C" void fuseplan_shapes(const i64* sizes, i64* shapes) {', *indent([*sizes, *stores]), "}",
    ]


def _parts(
    buffers: Sequence[Buffer], given: int, folds: Sequence[tuple[int, str]]
) -> tuple[list[str], Mapping[int, list[str]]]:
    """The memory of parts, behind the buffers ``given`` and before the flag; and their folds, by stage."""
    memory, combined = [], defaultdict[int, list[str]](list)
    arguments = [f"given[{number}]" for number in range(given)]
    for number, (buffer, (stage, kind)) in enumerate(zip(buffers[given:], folds, strict=True)):
        ranges, rows = buffer.shape
        memory.append(f"Scratch<{STORAGE_TYPE[buffer.dtype]}> part{number}({ranges * rows});")
        arguments.append(f"part{number}.data")
        one, other = f"part{number}.data + row", f"part{number}.data + at * {rows} + row"
        total = REDUCTIONS[kind].cpp_combine.format(f"get({one})", f"get({other})")
        combined[stage] += [f"for (i64 at = 1; at < {ranges}; ++at)",
                            f"  for (i64 row = 0; row < {rows}; ++row) put({one}, {total});"]
    arguments.append(f"given[{given}]")
    return [*memory, f"void* const buffers[] = {{{', '.join(arguments)}}};"], combined


def _is_small(segments: Sequence[Segment]) -> bool:
    """Whether threads would wait longer for each other than one needs for some static segments without sums."""
    if any(isinstance(one, Contraction) for one in segments):
        return False
    return sum(int(one.num_rows * one.cols) for one in segments) <= _SMALL_STAGE


def contraction_tasks(segment: Contraction) -> int:
    """Tasks of a contraction. The last one also computes the columns that make no whole task: no vector spans two."""
    return max(1, int(segment.cols) // CONTRACTION_COLS)


def _run_contraction(call: str, rows: str, cols: str, count: str) -> list[str]:
    width = CONTRACTION_COLS
    return [
        "{",
        f"  const i64 count = {count}, last = least(end, count);",
        "  for (i64 task = begin > 0 ? begin : 0; task < last; ++task)",
        f"    {call}0, {rows}, task * {width}, task + 1 == count ? {cols} : (task + 1) * {width});",
        "  begin -= count; end -= count;",
        "}",
    ]


def _run_segment(call: str, tiled: bool, rows: str, cols: str, chunks: str, tiles: str) -> list[str]:
    """Run the part of tasks ``[begin, end)`` that belongs to a segment, then count the rest from its end."""
    if not tiled:
        return [
            "{",
            f"  const i64 count = {chunks}, first = begin > 0 ? begin : 0, last = least(end, count);",
            f"  if (first < last) {call}first * how->rows_per_task, least({rows}, last * how->rows_per_task));",
            "  begin -= count; end -= count;",
            "}",
        ]
    return [
        "{",
        f"  const i64 tiles = {tiles}, count = {chunks} * tiles, last = least(end, count);",
        "  for (i64 task = begin > 0 ? begin : 0; task < last; ++task) {",
        "    const i64 row = task / tiles * how->rows_per_task, col = task % tiles * how->col_tile;",
        f"    {call}row, least({rows}, row + how->rows_per_task), col, least({cols}, col + how->col_tile));",
        "  }",
        "  begin -= count; end -= count;",
        "}",
    ]
