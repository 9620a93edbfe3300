"""Tiles: which block of a segment one GPU program computes, and how many programs a kernel launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fuseplan.kernels.ir.backend import Config
from fuseplan.kernels.ir.index import Size, evaluate, is_static, product
from fuseplan.kernels.ir.ir import ITEMSIZE, Buffer, Const, Iota, KernelIR, Scan, Segment, operands
from fuseplan.kernels.ir.reduction_loops import (
    folds_in_parts,
    rescaled_sums,
    scans_in_parts,
    schedule,
    with_totals,
)

#: Threads of a warp, where how a kernel is written depends on it: of those that run today.
WARP = 32
#: The argument that numbers the launches of a kernel that has several, behind its dynamic sizes.
LAUNCH = "launch"
#: What a thread loads or stores at once.
_ACCESS_BYTES = 16
#: Largest number of elements in one Triton tensor.
MAX_TILE = 2**20
_INT32_MAX = 2**31 - 1
#: Fewest rows, columns or inner elements that tensor cores multiply.
TENSOR_CORE_ROWS = 16
#: What they multiply as it lies in memory; anything else is multiplied as float32.
HALVES = ("bfloat16", "float16")


def next_power_of_2(value: int) -> int:
    """Smallest power of two that is at least ``value`` (1 for 0)."""
    return 1 << max(value - 1, 0).bit_length()


@dataclass(frozen=True)
class Tile:
    """The block of a segment that one program computes, of ``rows`` x ``cols`` elements, powers of two."""

    rows: int
    cols: int
    #: The program walks its rows ``cols`` columns at a time (a reduction that is not held in registers).
    looped: bool
    #: Programs side by side along the columns (1 where rows are reduced).
    col_blocks: Size

    @property
    def flat(self) -> bool:
        """One-dimensional code with scalar row coordinates."""
        return self.rows == 1

    @property
    def elements(self) -> int:
        return self.rows * self.cols


def tile_of(segment: Segment, config: Config) -> Tile:
    """The tile of ``segment`` under ``config``: its block sizes, no larger than the segment needs."""
    rows, cols = int(config["block_rows"]), int(config["block_cols"])
    if is_static(segment.num_rows):
        rows = min(rows, next_power_of_2(segment.num_rows))
        if segment.products and rows > 1:
            rows = max(rows, TENSOR_CORE_ROWS)
    if is_static(segment.cols):
        cols = min(cols, next_power_of_2(segment.cols))
    if segment.has_reduction():
        return Tile(rows, cols, not is_static(segment.cols) or cols < segment.cols, 1)
    return Tile(rows, cols, False, ceil_div(segment.cols, cols))


def splits_of(segment: Segment, config: Config) -> int:
    """Programs that share what a tile sums or folds: the inner dimension, or the columns of a loop."""
    splits = int(config.get("splits", 1))
    if splits == 1 or segment.products or not tile_of(segment, config).looped:
        return splits if segment.products else 1
    return splits if folds_in_parts(segment) or scans_in_parts(segment) else 1


def launches_of(buffers: Sequence[Buffer], segment: Segment, config: Config) -> int:
    """Launches in which programs compute a segment: where they share what they scan, one for each pass along it."""
    if splits_of(segment, config) == 1 or not scans_in_parts(segment):
        return 1
    segment = with_totals(segment)
    return len(schedule(segment, rescale=chunk_width(buffers, segment, config) > 0, centre=True))


def launches(ir: KernelIR, config: Config) -> int:
    """Launches of a kernel."""
    return max(launches_of(ir.buffers, segment, config) for segment in ir.segments)


def as_launched(ir: KernelIR, config: Config) -> KernelIR:
    """The kernel with the folds that hand scans over from launch to launch."""
    segments = (with_totals(one) if launches_of(ir.buffers, one, config) > 1 else one for one in ir.segments)
    return KernelIR(ir.buffers, tuple(segments))


def chunk_width(buffers: Sequence[Buffer], segment: Segment, config: Config) -> int:
    """Neighbouring columns that each thread loads at once, to rescale its sum to a rising maximum once for all of them.

    0 in a tile of several rows or fewer than two columns a thread, or beside scans and reductions of the same pass.
    """
    tile = tile_of(segment, config)
    beside = rescaled_sums(segment) if tile.looped and tile.flat else {}
    if not beside:
        return 0
    chunked = {*beside, *beside.values()}
    for phase in schedule(segment, rescale=True):
        scans = any(isinstance(segment.body[value], Scan) for value in phase.elements)
        if not chunked.isdisjoint(phase.reductions) and (scans or not chunked.issuperset(phase.reductions)):
            return 0
    width = min(access_width(buffers, segment), tile.cols // (WARP * int(config["num_warps"])))
    return width if width > 1 else 0


def access_width(buffers: Sequence[Buffer], segment: Segment) -> int:
    """Elements of the widest loaded type that one access of a thread takes."""
    return _ACCESS_BYTES // max((ITEMSIZE[buffers[one.buffer].dtype] for one in segment.loads), default=4)


def ceil_div(size: Size, block: int) -> Size:
    """``ceil(size / block)``, as :class:`Blocks` for a dynamic size."""
    return -(-size // block) if isinstance(size, int) else Blocks(size, block)


@dataclass(frozen=True)
class Blocks:
    """``ceil(size / block)`` of a dynamic size."""

    size: Size
    block: int


def segment_programs(segment: Segment, config: Config, symbols: Mapping[str, int]) -> int:
    """Programs that compute ``segment``; 0 when it is empty."""
    tile = tile_of(segment, config)
    across = ceil_div(evaluate(segment.cols, symbols), tile.cols) if tile.col_blocks != 1 else 1
    return int(ceil_div(evaluate(segment.num_rows, symbols), tile.rows) * across) * splits_of(segment, config)


def programs(ir: KernelIR, config: Config, symbols: Mapping[str, int]) -> int:
    """Programs (CUDA blocks) of one launch."""
    return sum(segment_programs(segment, config, symbols) for segment in ir.segments)


def needs_int64(ir: KernelIR, symbols: Mapping[str, int] | None = None) -> bool:
    """Whether a position or an offset does not fit 32 bits; False for dynamic sizes until the launcher knows them."""
    if symbols is None and ir.symbols:
        return False
    values = symbols or {}
    for buffer in ir.buffers:
        span = 1 + sum(
            (evaluate(extent, values) - 1) * abs(evaluate(stride, values))
            for extent, stride in zip(buffer.shape, buffer.strides, strict=True)
        )
        if span > _INT32_MAX:
            return True
    # Lanes beyond the end may reach one tile further than the last element.
    return any(
        evaluate(product((*segment.rows, segment.cols)), values) > _INT32_MAX - MAX_TILE for segment in ir.segments
    )


def live_words(segment: Segment, in_place: bool = False) -> int:
    """Most 32-bit words of an element live at once; with ``in_place`` a result takes the registers of dead operands."""
    body = segment.body
    per_row = segment.per_row
    last_use = {store.value: len(body) for store in segment.stores}
    for value, instr in enumerate(body):
        for arg in operands(instr):
            last_use[arg] = max(last_use.get(arg, 0), value)

    def words(value: int) -> int:
        instr = body[value]
        if per_row[value] or isinstance(instr, Const | Iota):
            return 0
        return 2 if instr.dtype in ("float64", "int64") else 1

    changes = [0] * (len(body) + 2)
    for value, last in last_use.items():
        changes[value] += words(value)
        changes[max(value, last + 1 - in_place)] -= words(value)
    return max(accumulate(changes))
