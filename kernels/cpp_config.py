"""The configuration space of CPU kernels, and the choice made when nothing has been tuned.

``unroll`` and ``stage`` change the binary; ``threads``, ``rows_per_task`` and ``col_tile`` are arguments of a call.
"""

from __future__ import annotations

import math

from fuseplan.kernels.backend import Config, Target, Tunable
from fuseplan.kernels.cpp_emitter import is_tiled, simplified_segments
from fuseplan.kernels.cpp_launch import RunSettings
from fuseplan.kernels.index import is_static, product
from fuseplan.kernels.ir import ITEMSIZE, Apply, KernelIR, Segment
from fuseplan.kernels.ops import op_spec
from fuseplan.kernels.schedule import schedule

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
_COL_TILES = (1024, 4096, 16384)
_ROWS_PER_TASK = (1, 4, 16)
_UNROLLS = (1, 2, 4)
_DEFAULT_UNROLL = 2
#: Bytes of traffic that take as long as one special-function application on one element.
_BYTES_PER_SFU = 8


def config_space(ir: KernelIR, target: Target) -> tuple[Tunable, ...]:
    """The dimensions; one that cannot matter for ``ir`` has a single choice."""
    segments = simplified_segments(ir)
    reduced = any(segment.has_reduction() for segment in segments)
    many_rows = any(not isinstance(segment.num_rows, int) or segment.num_rows > 1 for segment in segments)
    small = ir_bytes(ir) is not None and (ir_bytes(ir) or 0) < BYTES_PER_THREAD // 4
    return (
        Tunable("threads", (1,) if small else thread_choices(target.cores)),
        Tunable("rows_per_task", _ROWS_PER_TASK if many_rows else (1,)),
        Tunable("col_tile", _COL_TILES if any(map(is_tiled, segments)) else (_COL_TILES[1],)),
        Tunable("unroll", _UNROLLS),
        Tunable("stage", (0, 1) if reduced and can_stage(segments) else (0,)),
    )


def thread_choices(cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all cores."""
    powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    return (*powers, max(cores, 1))


def can_stage(segments: tuple[Segment, ...]) -> bool:
    """True when some segment evaluates a value twice that a staging buffer could hold."""
    return any(phase.stages for segment in segments for phase in schedule(segment, stage=True))


def refuse_config(ir: KernelIR, config: Config, target: Target) -> str | None:
    """Why a configuration cannot pay off, or None."""
    threads = int(config["threads"])
    if threads > max(target.cores, 1):
        return f"{threads} threads on {target.cores} cores"
    segments = simplified_segments(ir)
    if not all(is_static(*segment.rows, segment.cols) for segment in segments):
        return None
    tasks = sum(_tasks(segment, config) for segment in segments)
    if threads > 1 and tasks < threads:
        return "fewer tasks than threads"
    if int(config["rows_per_task"]) > max([1, *(segment.num_rows for segment in segments)]):
        return "more rows per task than rows"
    smaller = [tile for tile in _COL_TILES if tile < int(config["col_tile"])]
    if smaller and all(segment.cols <= smaller[-1] for segment in segments if is_tiled(segment)) and any(
        map(is_tiled, segments)
    ):
        return "a column tile wider than the row"
    if int(config["stage"]) and stage_bytes(segments) > _STAGE_BYTES:
        return f"staging needs {stage_bytes(segments)} bytes a thread"
    return None


def _tasks(segment: Segment, config: Config) -> int:
    chunks = math.ceil(segment.num_rows / int(config["rows_per_task"]))
    return int(chunks * (math.ceil(segment.cols / int(config["col_tile"])) if is_tiled(segment) else 1))


def stage_bytes(segments: tuple[Segment, ...]) -> int:
    """Staging space of one thread (static columns)."""
    return max(
        int(segment.cols) * sum(
            ITEMSIZE[segment.body[value].dtype] for phase in schedule(segment, stage=True) for value in phase.stages
        )
        for segment in segments
    )


def ir_bytes(ir: KernelIR) -> int | None:
    """Distinct bytes a call touches, plus its special functions in bytes of traffic; None for dynamic sizes."""
    if ir.symbols:
        return None
    traffic = sum(buffer.distinct_bytes() for buffer in ir.buffers)
    functions = sum(
        segment.num_rows * segment.cols * _BYTES_PER_SFU
        for segment in ir.segments
        for instr, row_level in zip(segment.body, segment.per_row(), strict=True)
        if isinstance(instr, Apply) and not row_level and op_spec(instr.op).unit == "sfu"
    )
    return int(traffic + functions)


def default_settings(ir: KernelIR, target: Target) -> Config:
    """A good configuration by arithmetic alone."""
    segments = simplified_segments(ir)
    size = ir_bytes(ir)
    threads = max(target.cores, 1) if size is None else max(1, min(target.cores, size // BYTES_PER_THREAD))
    rows = _rows_per_task(segments, threads)
    stage = can_stage(segments) and (not _static_cols(segments) or stage_bytes(segments) <= _STAGE_BYTES)
    config: dict[str, int | str] = {
        "threads": threads, "rows_per_task": rows, "col_tile": _COL_TILES[1], "unroll": _DEFAULT_UNROLL,
        "stage": int(stage),
    }
    if refuse_config(ir, config, target) is not None:
        config |= {"rows_per_task": 1, "col_tile": _COL_TILES[0]}
    return config if refuse_config(ir, config, target) is None else {**config, "threads": 1, "stage": 0}


def _static_cols(segments: tuple[Segment, ...]) -> bool:
    return is_static(*(segment.cols for segment in segments))


def _rows_per_task(segments: tuple[Segment, ...], threads: int) -> int:
    """The largest choice that leaves every thread some tasks, as long as tasks are small."""
    if not all(is_static(*segment.rows, segment.cols) for segment in segments):
        return _ROWS_PER_TASK[0]
    rows = product(segment.num_rows for segment in segments[:1])
    widest = max([1, *(segment.cols for segment in segments)])
    fitting = [
        choice for choice in _ROWS_PER_TASK
        if choice == 1 or (choice * widest * 4 <= _TASK_BYTES and rows >= 4 * threads * choice)
    ]
    return fitting[-1]


def run_settings(ir: KernelIR, config: Config, target: Target) -> RunSettings:
    """The part of a configuration that is passed at run time."""
    segments = simplified_segments(ir)
    static = not ir.symbols
    elements = sum(segment.num_rows * segment.cols for segment in segments) if static else _GIL_ELEMENTS
    return RunSettings(
        threads=min(int(config["threads"]), max(target.cores, 1)),
        grain=0 if static else ELEMENTS_PER_THREAD,
        rows_per_task=int(config["rows_per_task"]),
        col_tile=int(config["col_tile"]),
        release_gil=bool(elements >= _GIL_ELEMENTS),
    )
