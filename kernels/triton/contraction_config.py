"""Configurations of Triton kernels with matmuls: the choices, which of them arithmetic rules out, and the default.

One row is a matter of bytes on their way: each thread loads its share of whole rows of weights. More rows are tiles of
tensor cores, with blocks of the inner dimension in shared memory ahead of their use. So is one row where neighbours
among the weights belong to different columns (``x @ w``): of whole rows of weights, each number would lie in a line of
its own. Many rows (:mod:`~fuseplan.kernels.triton.tiles`) are a matter of tiles as large as the registers.
"""

from __future__ import annotations

from collections.abc import Mapping

from fuseplan.kernels.gpu.overlap import default_overlap, overlap_tunables
from fuseplan.kernels.gpu.tile import next_power_of_2, programs
from fuseplan.kernels.ir.backend import Config, Target, Tunable
from fuseplan.kernels.ir.contraction import stored_bytes
from fuseplan.kernels.ir.gathers import may_fail
from fuseplan.kernels.ir.index import Coord, Index, Mod, evaluate, product
from fuseplan.kernels.ir.ir import Dot, KernelIR, Reduce, Segment
from fuseplan.kernels.triton import tiles
from fuseplan.kernels.triton.split_sums import unsplittable

#: Registers for addresses, masks and the like, whatever the tile.
_BASE_REGISTERS = 32
#: Elements of weights that a thread has on their way at least, and at most.
_LEAST_EACH, _MOST_EACH = 8, 128
#: Rows of weights that a warp multiplies at least, and at most; more from so many rows of the left side on.
_LEAST_ROWS, _MOST_ROWS, _WHOLE_ROWS = 8, 32, 64
#: Where programs share a tile: how many for each multiprocessor at most, the blocks of the inner dimension for each at
#: least, and how many of these are on their way, there and from ``_WHOLE_ROWS`` rows on.
_MOST_PROGRAMS, _LEAST_BLOCKS, _STAGES = 2, 4, 4
#: Bytes of memory that come together.
_LINE_BYTES = 32
#: Rows of a block of the left side at most.
_MOST_BLOCK_ROWS = 128
#: Of many rows: sums that a thread holds, fewest and most, and elements of the inner dimension in a block.
_TILE_SUMS, _TILE_INNER = (64, 128), 64
#: Shared memory that the compiler takes for itself.
_COMPILERS_BYTES = 3 * 2**10


def contracts(ir: KernelIR) -> bool:
    """Whether a kernel has a matmul in it."""
    return any(segment.products for segment in ir.segments)


def tunables(ir: KernelIR, target: Target) -> tuple[Tunable, ...]:
    """``block_rows``, ``block_cols`` (of the epilogue), ``block_inner``, ``num_warps`` and ``num_stages``; for 2 to 128
    rows ``splits``, the programs that share the inner dimension of a tile. ``overlap``, where the device has it, comes
    first and has one choice: the others gain nothing where most of a kernel's time goes into weights.
    """
    rows, inner = _rows(ir), next_power_of_2(_inner(ir))
    found: dict[str, tuple[int, ...]]
    if tiles.is_tiled(ir):
        found = {
            "block_rows": (_MOST_BLOCK_ROWS,), "block_cols": (64, 128, 256), "block_inner": (_TILE_INNER,),
            "num_warps": (4, 8), "num_stages": (_STAGES,),
        }
    elif rows == 1 and not _lie_across(ir):
        found = {
            "block_rows": (1,), "block_cols": (1, 2, 4, 8),
            "block_inner": tuple(size for size in (1024, 2048, 4096) if size <= inner) or (inner,),
            "num_warps": (2, 4, 8), "num_stages": (1,),
        }
    else:
        many = rows >= _WHOLE_ROWS
        found = {
            # Weights are read once for each block of rows; more than twice loses to the tiles of libraries.
            "block_rows": tuple(
                size for size in (16, 32, 64, 128) if (size < 2 * rows or size == 16) and 2 * size >= rows),
            "block_cols": (16, 32, 64, 128),
            "block_inner": tuple(
                size for size in ((64, 128) if many else (128, 256)) if size <= inner) or (max(inner, 16),),
            "num_warps": (2, 4, 8), "num_stages": (_STAGES,) if many else (3, 4, 5), "splits": (1, 2, 4),
        }
    overlap = (Tunable(one.name, one.choices[:1]) for one in overlap_tunables(target))
    return (*overlap, *(Tunable(*one) for one in found.items()))


def infeasible(ir: KernelIR, config: Config, target: Target) -> str | None:
    """Why ``config`` is not worth compiling, or None."""
    if tiles.is_tiled(ir):
        return _infeasible_tiles(ir, config, target)
    rows, cols, inner = (int(config[name]) for name in ("block_rows", "block_cols", "block_inner"))
    warps = int(config["num_warps"])
    threads, limit = target.gpu.warp * warps, target.gpu.most_registers(warps) - _BASE_REGISTERS
    for segment in (one for one in ir.segments if one.products):
        sums = _sums(segment)
        if rows == 1:
            each = cols * inner / threads
            if not _LEAST_EACH <= each <= _MOST_EACH:
                return f"{each:g} elements of a block of weights for each thread"
            # Weights as they are stored, activations, and sums where there are several blocks.
            stored = each * _weight_bytes(ir, segment) / 4
            words = sums * stored + inner / threads + (0 if inner >= _inner(ir) else sums * each)
            if words > limit:
                return f"{sums} sums of {each:g} elements a thread do not fit its registers"
            continue
        if sums * rows * cols / threads > limit:
            return f"{sums} sums of {rows}x{cols} do not fit the registers of {threads} threads"
        each = sums * cols / warps
        if not _LEAST_ROWS <= each <= _MOST_ROWS * (1 + (_rows(ir) >= _WHOLE_ROWS)):
            return f"{each:g} rows of weights for each warp"
    if (held := _held_bytes(ir, config)) > target.gpu.shared_bytes - _COMPILERS_BYTES:
        return f"{held:.0f} bytes of blocks on their way do not fit shared memory"
    count, splits = programs(ir, config, {}), int(config.get("splits", 1))
    if count < target.cores // 2:
        return f"{count} programs leave most of {target.cores} multiprocessors idle"
    return _pointless_splits(ir, config, count, target) if splits > 1 else None


def _infeasible_tiles(ir: KernelIR, config: Config, target: Target) -> str | None:
    rows, cols = int(config["block_rows"]), int(config["block_cols"])
    threads = target.gpu.warp * int(config["num_warps"])
    (segment,) = ir.segments
    each, (fewest, most) = _sums(segment) * rows * cols / threads, _TILE_SUMS
    if not fewest <= each <= most:
        return f"{each:g} sums for each thread"
    brought = tiles.rows_on_their_way(ir.buffers, segment, config)
    held = int(config["num_stages"]) * int(config["block_inner"]) * brought * 2
    if held > target.gpu.shared_bytes - _COMPILERS_BYTES:
        return f"{held} bytes of blocks on their way do not fit shared memory"
    if cols > next_power_of_2(evaluate(segment.cols, {})):
        return f"{cols} columns are more than there are"
    row_blocks, col_blocks = tiles.tiles(segment, config)
    if isinstance(row_blocks, int) and row_blocks * col_blocks < target.cores // 2:
        return f"{row_blocks * col_blocks} tiles leave most of {target.cores} multiprocessors idle"
    return None


def _pointless_splits(ir: KernelIR, config: Config, count: int, target: Target) -> str | None:
    splits, inner = int(config["splits"]), int(config["block_inner"])
    for segment in ir.segments:
        if segment.products and (reason := unsplittable(segment)) is not None:
            return reason
    if int(config["num_stages"]) != _STAGES:
        return f"with splits {_STAGES} blocks are on their way"
    if count // splits >= target.cores or count > _MOST_PROGRAMS * target.cores:
        return f"{count // splits} tiles need no {splits} programs each"
    if _inner(ir) < _LEAST_BLOCKS * splits * inner:
        return f"{splits} splits of {_inner(ir)} have too few blocks of {inner}"
    return None


def default_config(ir: KernelIR, target: Target) -> Config:
    """A configuration that is good without tuning."""
    if tiles.is_tiled(ir):
        return _default_tiles(ir, target)
    anchored = [segment for segment in ir.segments if segment.products]
    rows, sums = _rows(ir), max(map(_sums, anchored))
    each = max(_weight_bytes(ir, segment) for segment in anchored)
    wide = rows >= _WHOLE_ROWS or each > 2.5
    # The narrower weights are, the more of them make the same bytes on their way.
    several = min(8, next_power_of_2(round(2 / each)))
    if rows == 1 and not _lie_across(ir):
        wished = {"block_rows": 1, "block_cols": several, "block_inner": 2048, "num_warps": 4, "num_stages": 1}
    else:
        wished = {
            "block_rows": min(64, max(16, next_power_of_2(rows))), "block_cols": 32 if sums == 2 else 16,
            "block_inner": 128 if wide else 256, "num_warps": 2, "num_stages": 4, "splits": 1,
        }
    choices = {one.name: one.choices for one in tunables(ir, target)}
    chosen = {name: value if value in choices[name] else choices[name][-1] for name, value in wished.items()}
    default = _fitting({**default_overlap(target), **chosen}, ir, choices, target)
    if _lie_across(ir):
        return _across(ir, default, target)
    return _all_rows(ir, default, sums, target) if rows >= _WHOLE_ROWS else default


def _held_bytes(ir: KernelIR, config: Config) -> float:
    """Shared memory of the blocks on their way, of several rows: weights, and 2 bytes a number of the left side."""
    rows, cols = int(config["block_rows"]), int(config["block_cols"])
    each = (_sums(one) * cols * _weight_bytes(ir, one) + rows * 2 for one in ir.segments if one.products)
    return 0 if rows == 1 else int(config["num_stages"]) * int(config["block_inner"]) * max(each)


def _fitting(
    config: dict[str, int | str], ir: KernelIR, choices: Mapping[str, tuple[int | str, ...]], target: Target
) -> dict[str, int | str]:
    """A config with smaller blocks, then fewer of them, where shared memory is too small for its own."""
    for name in ("block_inner", "num_stages"):
        for choice in reversed(choices[name]):
            if _held_bytes(ir, config) > target.gpu.shared_bytes - _COMPILERS_BYTES:
                config = {**config, name: min(choice, config[name], key=int)}
    return config


def _default_tiles(ir: KernelIR, target: Target) -> Config:
    """The largest tiles that leave few multiprocessors idle; where none does, those of the fewest sums a thread."""
    fixed = {"block_rows": _MOST_BLOCK_ROWS, "block_inner": _TILE_INNER, "num_stages": _STAGES}
    found = [
        {**default_overlap(target), **fixed, "block_cols": cols, "num_warps": warps}
        for cols in (256, 128, 64) for warps in (8, 4)
    ]
    smallest = {**found[-1], "num_warps": 8}
    return next((one for one in found if _infeasible_tiles(ir, one, target) is None), smallest)


def _all_rows(ir: KernelIR, default: Config, sums: int, target: Target) -> Config:
    """The default for many rows: all of them in a block, and as many programs for each tile as there is work for."""
    rows = min(_MOST_BLOCK_ROWS, next_power_of_2(_rows(ir)))
    cols, warps = (64, 4) if sums > 1 else (128, 8)
    # As much of the inner dimension as there are columns, or all of it.
    inner = min(cols, int(next(one for one in tunables(ir, target) if one.name == "block_inner").choices[-1]))
    shape = {"block_rows": rows, "block_cols": cols, "block_inner": inner, "num_warps": warps}
    found = ({**default, **shape, "splits": splits} for splits in (4, 2, 1))
    return next((one for one in found if infeasible(ir, one, target) is None), default)


def _across(ir: KernelIR, default: Config, target: Target) -> Config:
    """The default for weights that lie across: each tile takes whole lines, and programs share the inner dimension."""
    each = max(_weight_bytes(ir, segment) for segment in ir.segments if segment.products)
    cols = max(int(default["block_cols"]), min(64, next_power_of_2(round(_LINE_BYTES / each))))
    wider = {**default, "block_cols": cols, "num_warps": max(int(default["num_warps"]), cols // 16)}
    found = ({**wider, "splits": splits} for splits in (4, 2, 1))
    return next((one for one in found if infeasible(ir, one, target) is None), default)


def likeness(ir: KernelIR) -> tuple[tuple[object, ...], ...]:
    """Of each matmul: rows of tiles of its left side, rows of weights, the inner dimension, bytes of a weight and how
    many instructions make one, what it is multiplied in, matmuls in one tile, and folds of the left side's rows.
    Epilogues take little time beside the weights; the order is any.
    """
    rows = 1 if _rows(ir) == 1 else max(16, next_power_of_2(_rows(ir)))
    return tuple(sorted(
        (
            rows, evaluate(segment.cols, {}) * _sums(segment) // len(segment.products), evaluate(one.left.cols, {}),
            _weight_bytes(ir, segment), len(one.right.body), one.dtype, len(segment.products),
            sum(isinstance(instr, Reduce) for instr in one.left.body),
        )
        for segment in ir.segments for one in segment.products
    ))


def refuse(ir: KernelIR, target: Target) -> str | None:
    """Why no kernel is built around the matmuls of ``ir``, None where one can be."""
    if may_fail(ir) and not target.gpu.takes_ptx:
        return f"an index outside its table stops a matmul by PTX, which {target.arch} has not"
    if tiles.is_tiled(ir):
        return tiles.refuse(ir, target)
    return f"a matmul with dynamic sizes ({', '.join(ir.symbols)})" if ir.symbols else None


def _rows(ir: KernelIR) -> int:
    return max(evaluate(product(segment.rows), {}) for segment in ir.segments if segment.products)


def _sums(segment: Segment) -> int:
    return len({instr for instr in segment.body if isinstance(instr, Dot)})


def _inner(ir: KernelIR) -> int:
    return max(evaluate(one.left.cols, {}) for segment in ir.segments for one in segment.products)


def _lie_across(ir: KernelIR) -> bool:
    """Whether neighbours among the weights in memory are of different columns of the result, in every matmul."""
    sides = [one.right for segment in ir.segments for one in segment.products]
    loads = [one.index for side in sides for one in side.loads if one.index.axes() == {0, 1}]
    return bool(loads) and all(_slope(index, 0) < _slope(index, 1) for index in loads)


def _slope(index: Index, axis: int) -> float:
    """Elements between neighbours along an axis, on average."""
    parts = ((atom, coefficient) for atom, coefficient in index.terms if not isinstance(atom, Mod))
    return float(sum(
        coefficient * ((atom.axis == axis) if isinstance(atom, Coord) else atom.base.coefficient(axis) / atom.divisor)
        for atom, coefficient in parts
    ))


def _weight_bytes(ir: KernelIR, segment: Segment) -> float:
    """Bytes of a weight in memory, with its share of scales and the like."""
    return max((stored_bytes(ir, one.right) for one in segment.products), default=2.0)
