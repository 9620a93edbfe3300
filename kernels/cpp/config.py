"""The configuration space of CPU kernels, and the choice made when nothing has been tuned."""

from __future__ import annotations

import math

from fuseplan.kernels.cpp.contraction import Contraction
from fuseplan.kernels.cpp.emitter import simplified_segments, transposed_loads
from fuseplan.kernels.cpp.entry import contraction_tasks, is_strided, is_tiled
from fuseplan.kernels.cpp.launch import RunSettings
from fuseplan.kernels.cpp.row_vectors import RowVectors, task_elements
from fuseplan.kernels.ir.backend import Config, Target, Tunable, checked
from fuseplan.kernels.ir.gathers import gathered_elements
from fuseplan.kernels.ir.index import is_static
from fuseplan.kernels.ir.ir import ITEMSIZE, Apply, KernelIR, Segment
from fuseplan.kernels.ir.ops import op_spec
from fuseplan.kernels.ir.reduction_loops import schedule

#: Work that pays for waking one more thread: bytes moved, or their equal in arithmetic.
BYTES_PER_THREAD = 192 * 1024
#: The same for dynamic sizes, in elements.
ELEMENTS_PER_THREAD = 32 * 1024
#: A task is at least this many bytes, so that handing it out costs nothing beside running it.
_TASK_BYTES = 16 * 1024
#: A call that works on fewer elements keeps the interpreter lock: releasing it costs more.
_GIL_ELEMENTS = 1 << 18
#: Staging pays while a row's buffer stays in the second-level cache.
_STAGE_BYTES = 512 * 1024
_TASKS_PER_THREAD = 4
_COL_TILES = (1024, 4096, 16384)
_STRIDED_COL_TILES = (32, 128)
#: Where vectors hold rows, of how many.
_ROW_TILES = (64, 256, 1024)
_ROWS_PER_TASK = (1, 4, 16)
_UNROLLS = (2, 4)
#: Streaming stores are worth a try once a call touches more than some last-level caches hold.
_STREAM_BYTES = 16 * 1024 * 1024
#: Bytes of traffic that take as long as one special-function application on one element.
_BYTES_PER_SFU = 8


#: Every parameter that some kernel has, and what it can be built and run with.
PARAMETERS = (
    Tunable("threads", tuple(range(1, 4097))),
    Tunable("rows_per_task", tuple(range(1, 65))),
    Tunable("col_tile", tuple(2**power for power in range(5, 15))),
    Tunable("unroll", (1, 2, 4)),
    Tunable("stage", (0, 1)),
    Tunable("stream", (0, 1)),
)


def config_space(ir: KernelIR, target: Target) -> tuple[Tunable, ...]:
    """The dimensions; one that cannot matter for ``ir`` has a single choice."""
    segments = simplified_segments(ir)
    many_rows = any(not isinstance(segment.num_rows, int) or segment.num_rows > 1 for segment in segments)
    size = ir_bytes(ir)
    small = size is not None and size < BYTES_PER_THREAD // 4
    default = default_settings(ir, target)
    threads = (1,) if small else tuple(sorted({*thread_choices(target.cores), int(default["threads"])}))
    if _contracts(segments):  # tasks are as large as they are
        return tuple(Tunable(name, threads if name == "threads" else (value,)) for name, value in default.items())
    return (
        Tunable("threads", threads),
        Tunable("rows_per_task", _ROWS_PER_TASK if many_rows else (1,)),
        Tunable("col_tile", tile_choices(segments)),
        Tunable("unroll", _UNROLLS),
        Tunable("stage", (0, 1) if any(map(_staged, segments)) else (0,)),
        Tunable("stream", (0, 1) if size is not None and size >= _STREAM_BYTES else (0,)),
    )


def _contracts(segments: tuple[Segment, ...]) -> bool:
    return any(isinstance(segment, Contraction) for segment in segments)


def tile_choices(segments: tuple[Segment, ...]) -> tuple[int, ...]:
    """Column tiles to choose from; one where no segment is tiled."""
    if any(isinstance(segment, RowVectors) for segment in segments):
        return _ROW_TILES
    tiled = [segment for segment in segments if is_tiled(segment)]
    if not tiled:
        return _COL_TILES[1:2]
    return _STRIDED_COL_TILES if any(map(is_strided, tiled)) else _COL_TILES


def thread_choices(cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all cores."""
    powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    return (*powers, max(cores, 1))


def infeasible(ir: KernelIR, config: Config, target: Target) -> str | None:
    """Why a configuration cannot pay off, or None."""
    threads, rows, tile = (int(config[name]) for name in ("threads", "rows_per_task", "col_tile"))
    if threads > max(target.cores, 1):
        return f"{threads} threads on {target.cores} cores"
    segments = simplified_segments(ir)
    if not _is_static(segments):
        return None
    if threads > 1 and count_tasks(segments, rows, tile) < threads:
        return "fewer tasks than threads"
    if rows > max(1, *(int(segment.num_rows) for segment in segments), 1):
        return "more rows per task than rows"
    widest = max((int(segment.cols) for segment in segments if is_tiled(segment)), default=0)
    if any(tile > smaller >= widest > 0 for smaller in tile_choices(segments)):
        return "a column tile wider than the row"
    if int(config.get("stage", 0)) and stage_bytes(segments) > _STAGE_BYTES:
        return f"staging needs {stage_bytes(segments)} bytes a thread"
    return None


def count_tasks(segments: tuple[Segment, ...], rows_per_task: int, col_tile: int) -> int:
    """Tasks of a call with static sizes."""
    return sum(
        contraction_tasks(segment) if isinstance(segment, Contraction) else
        math.ceil(segment.num_rows / rows_per_task) * (math.ceil(segment.cols / col_tile) if is_tiled(segment) else 1)
        for segment in segments
    )


def _staged(segment: Segment) -> int:
    """Bytes, for each column, of values that a segment evaluates twice, and that a staging buffer could hold."""
    phases = () if isinstance(segment, RowVectors) else schedule(segment, stage=True)
    return sum(ITEMSIZE[segment.body[value].dtype] for phase in phases for value in phase.stages)


def stage_bytes(segments: tuple[Segment, ...]) -> int:
    """Staging space of one thread (static columns)."""
    return max(int(segment.cols) * _staged(segment) for segment in segments)


def ir_bytes(ir: KernelIR) -> int | None:
    """Distinct bytes a call touches, plus its special functions in bytes of traffic; None for dynamic sizes."""
    if ir.symbols:
        return None
    reached = {**gathered_elements(ir), **dict.fromkeys(ir.overwritten.values(), 0)}
    functions = 0
    for segment in ir.segments:
        elements = segment.num_rows * segment.cols
        for store in segment.stores:
            if ir.buffers[store.buffer].over is not None:
                reached[store.buffer] = reached.get(store.buffer, 0) + elements
        for instr, row_level in zip(segment.body, segment.per_row, strict=True):
            if isinstance(instr, Apply) and not row_level and op_spec(instr.op).unit == "sfu":
                functions += elements
    traffic = sum(
        reached[number] * ITEMSIZE[buffer.dtype] if number in reached else buffer.distinct_bytes()
        for number, buffer in enumerate(ir.buffers)
    )
    return int(traffic + functions * _BYTES_PER_SFU)


def default_settings(ir: KernelIR, target: Target) -> Config:
    """A good configuration by arithmetic alone: threads by bytes, then tasks that keep every thread busy."""
    segments = simplified_segments(ir)
    size = ir_bytes(ir)
    cores = max(target.cores, 1)
    threads = cores if size is None else max(1, min(cores, size // BYTES_PER_THREAD))
    rows, tile = _default_task(segments, threads)
    if _is_static(segments):
        threads = max(1, min(threads, count_tasks(segments, rows, tile)))
    small = not _is_static(segments) or stage_bytes(segments) <= _STAGE_BYTES
    stage = small and any(map(_staged, segments))
    # A reduction needs independent accumulators to hide the latency of an addition; a pointwise loop does not.
    unroll = 4 if any(segment.has_reduction() for segment in segments) else 2
    # What does not fit the last-level cache is gone before it is read again.
    stream = 0 < target.l2_bytes < (size or 0) and (size or 0) >= _STREAM_BYTES and not _contracts(segments)
    return {"threads": threads, "rows_per_task": rows, "col_tile": tile, "unroll": unroll, "stage": int(stage),
            "stream": int(stream)}


def _default_task(segments: tuple[Segment, ...], threads: int) -> tuple[int, int]:
    """Rows and columns of a task: the largest that are still small, and leave several tasks to each thread."""
    tiles = tile_choices(segments)
    strided = tiles == _STRIDED_COL_TILES
    if not _is_static(segments):
        return (_ROWS_PER_TASK[-1] if strided else _ROWS_PER_TASK[0], tiles[0])
    widest = max(int(segment.cols) for segment in segments)
    most_rows = max(int(segment.num_rows) for segment in segments)

    def busy(rows: int, tile: int) -> bool:
        return threads == 1 or count_tasks(segments, rows, tile) >= _TASKS_PER_THREAD * threads

    tile = tiles[0] if strided else max((one for one in tiles[:-1] if busy(1, one)), default=tiles[0])
    if any(map(transposed_loads, segments)) and busy(_ROWS_PER_TASK[-1], tiles[-1]):
        tile = tiles[-1]
    bytes_per_row = min(widest, tile) * 4 * max(int(task_elements(segment)) for segment in segments)
    fitting = [
        rows for rows in _ROWS_PER_TASK
        if rows <= most_rows and rows * bytes_per_row <= _TASK_BYTES and busy(rows, tile)
    ]
    return max(fitting, default=1), tile


def _is_static(segments: tuple[Segment, ...]) -> bool:
    return all(is_static(*segment.rows, segment.cols) for segment in segments)


def run_settings(ir: KernelIR, config: Config, target: Target) -> RunSettings:
    """The part of a configuration that is passed at run time; :class:`BuildError` where it holds what no kernel has."""
    config = checked(config, PARAMETERS)
    segments = simplified_segments(ir)
    static = not ir.symbols
    elements = sum(one.num_rows * one.cols * task_elements(one) for one in segments) if static else _GIL_ELEMENTS
    return RunSettings(
        threads=min(int(config["threads"]), max(target.cores, 1)),
        grain=0 if static else ELEMENTS_PER_THREAD,
        rows_per_task=int(config["rows_per_task"]),
        col_tile=int(config["col_tile"]),
        release_gil=bool(elements >= _GIL_ELEMENTS),
    )
