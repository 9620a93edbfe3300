"""Triton configurations that a search tries beside the default: good ones that no single step from it reaches."""

from __future__ import annotations

from fuseplan.kernels.gpu.overlap import OVERLAP, has_waves
from fuseplan.kernels.gpu.tile import Tile, access_width, chunk_width, programs, tile_of
from fuseplan.kernels.ir.backend import Config, Target
from fuseplan.kernels.ir.ir import KernelIR, Segment
from fuseplan.kernels.ir.reduction_loops import sweeps
from fuseplan.kernels.triton.config import default_config, infeasible

#: Columns from which a row is worth walking in halves, and rows for each multiprocessor.
_WIDE, _MANY_ROWS = 2048, 8
#: Halves of so few columns are worth walking two rows at a time, up to so many rows for each multiprocessor.
_SHORT, _FEW_ROWS = 1024, 32
#: More sweeps over a row than these take too long from any cache.
_MAX_PASSES = 3


def suggestions(ir: KernelIR, target: Target) -> tuple[Config, ...]:
    """What no single step from the default reaches, the most promising first: see the kinds below."""
    if ir.symbols:
        return ()
    config = default_config(ir, target)
    reduces = any(segment.has_reduction() for segment in ir.segments)
    if reduces:
        found = (*_looped_suggestion(ir, config, target), *_fitting_suggestion(ir, config, target))
    elif target.gpu.overlaps and target.in_graph:
        found = (*_late_suggestions(ir, config, target), *_warp_suggestion(ir, config, target))
    else:
        return ()
    feasible = tuple(one for one in found if infeasible(ir, one, target) is None)
    return feasible if reduces else feasible[:1]


def _late_suggestions(ir: KernelIR, config: Config, target: Target) -> tuple[Config, ...]:
    """Larger tiles that let the next kernel start late: a gain in pointwise kernels of many waves, where neither is."""
    if not has_waves(config, programs(ir, config, {}), target):
        return ()
    return tuple({**config, name: 2 * int(config[name]), OVERLAP: "late"} for name in ("block_cols", "block_rows"))


def _warp_suggestion(ir: KernelIR, config: Config, target: Target) -> tuple[Config, ...]:
    """One warp a program, as many fewer rows, and the next kernel starts at once: for short kernels whose rows share an
    operand that fills all threads of a block. It goes through shared memory, with barriers that one warp does without.
    """
    warps, rows = int(config["num_warps"]), int(config["block_rows"])
    if warps == 1 or rows < warps:
        return ()
    if not any(_shares_a_row(segment, tile_of(segment, config), target.gpu.warp * warps) for segment in ir.segments):
        return ()
    return ({**config, "block_rows": rows // warps, "num_warps": 1, OVERLAP: "early"},)


def _shares_a_row(segment: Segment, tile: Tile, threads: int) -> bool:
    """Whether neighbouring rows of a block use one operand of at least as many elements as there are threads."""
    axes = (one.index.axes() for one in segment.loads if one.gather is None)
    shared = (segment.col_axis in own and segment.col_axis - 1 not in own for own in axes)
    return tile.rows > 1 and tile.cols >= threads and any(shared)


def _looped_suggestion(ir: KernelIR, config: Config, target: Target) -> tuple[Config, ...]:
    """Half a wide row at a time, where there are many: later passes find it in the cache, and twice the programs fit a
    multiprocessor. Quantised rows are left out: they would compute much a second time.
    """
    tiles = [tile_of(segment, config) for segment in ir.segments]
    cols, most = max(tile.cols for tile in tiles), max(segment.num_rows for segment in ir.segments)
    if cols < _WIDE or any(tile.looped for tile in tiles) or most <= _MANY_ROWS * target.cores:
        return ()
    rows = 2 if cols // 2 <= _SHORT and most <= _FEW_ROWS * target.cores else 1
    halves: Config = {**config, "block_rows": rows, "block_cols": cols // 2, "num_warps": min(16, cols // 512)}
    return (halves,) if max(_passes(ir, segment, halves) for segment in ir.segments) <= _MAX_PASSES else ()


def _passes(ir: KernelIR, segment: Segment, config: Config) -> int:
    """How often a program reads its rows."""
    if not tile_of(segment, config).looped:
        return 1
    rescale = chunk_width(ir.buffers, segment, config) > 0
    return sweeps(segment, rescale, centre=True)


def _fitting_suggestion(ir: KernelIR, config: Config, target: Target) -> tuple[Config, ...]:
    """Warps whose accesses of 16 bytes end where a row does: the compiler then drops what pads it to a power of two."""
    held = [s for s in ir.segments if s.has_reduction() and not tile_of(s, config).looped]
    padded = {s.cols for s in held if tile_of(s, config).cols != s.cols}
    if len(padded) != 1:
        return ()
    warps, cols = int(config["num_warps"]), padded.pop()
    vector = min(access_width(ir.buffers, segment) for segment in held)
    fitting = [w for w in (warps, warps // 2, warps // 4) if w > 0 and cols % (target.gpu.warp * w * vector) == 0]
    if not fitting or fitting[0] == warps:
        return ()
    late = {"loads": "late"} if "loads" in config else {}  # which leaves the registers for it
    return ({**config, "num_warps": fitting[0], **late},)
