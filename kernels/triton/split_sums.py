"""Tiles whose inner dimension several programs share: who sums what, and what the last of them adds up.

Each program stores its sums; the last one to arrive at a tile adds them in the order of the splits, whoever that is, so
the same call gives the same bits (split-K with a workspace).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fuseplan.kernels.gpu.tile import segment_programs, splits_of, tile_of
from fuseplan.kernels.ir.backend import Config
from fuseplan.kernels.ir.ir import Dot, KernelIR, Reduce, Segment
from fuseplan.kernels.ir.reduction_loops import reduction_depths

#: Arguments of a kernel with splits, behind its buffers.
PARTIALS, COUNTERS = "partials", "counters"
_INDENT = "    "


@dataclass(frozen=True)
class Share:
    """The tiles of one segment: ``splits`` programs each, the number of its first tile and of its first partial sum."""

    splits: int = 1
    first_tile: int = 0
    first_number: int = 0


def shares(ir: KernelIR, config: Config) -> tuple[list[Share], int, int]:
    """For each segment its share of a kernel's tiles; the partial sums and the tiles of all."""
    found, numbers, tiles = [], 0, 0
    for segment in ir.segments:
        splits = splits_of(segment, config)
        found.append(Share(splits, tiles, numbers))
        if segment.products:
            programs = segment_programs(segment, config, {})
            numbers += programs * numbers_each(segment, config)
            tiles += programs // splits
    return found, numbers, tiles


def scratch(ir: KernelIR, config: Config) -> tuple[int, int]:
    """Numbers and counters that a kernel needs; (0, 0) without splits."""
    return shares(ir, config)[1:] if any(splits_of(segment, config) > 1 for segment in ir.segments) else (0, 0)


def numbers_each(segment: Segment, config: Config) -> int:
    """Float32 numbers that a program hands over at most: its sums, and folds of its rows."""
    tile, lefts = tile_of(segment, config), {one.left for one in segment.products}
    folds = sum(isinstance(instr, Reduce) for left in lefts for instr in left.body)
    return tile.rows * (len({instr for instr in segment.body if isinstance(instr, Dot)}) * tile.cols + folds)


def unsplittable(segment: Segment) -> str | None:
    """Why the sums of a segment cannot be made in parts, or None."""
    for one in segment.products:
        depths = reduction_depths(one.left)
        folds = [instr for instr in one.left.body if isinstance(instr, Reduce)]
        if depths[one.left_value] or max(depths, default=0) > 1:
            return "its sums wait for folds of their rows"
        if any(fold.kind != "sum" or fold.dtype != "float32" for fold in folds):
            return "its rows are folded to other than sums"
    if any(isinstance(instr, Dot) and instr.dtype == "float64" for instr in segment.body):
        return "its sums are in float64"
    return None


def inner_range(share: Share, inner: int, block: int) -> str:
    """Where a program's loop over the inner dimension begins and ends."""
    if share.splits == 1:
        return f"0, {inner}"
    each = -(-inner // (block * share.splits)) * block
    end = f"split * {each} + {each}"
    return f"split * {each}, {end if each * share.splits == inner else f'tl.minimum({end}, {inner})'}"


def split_of_program(share: Share) -> list[str]:
    """Statements that take the program's number apart."""
    return [f"split = pid % {share.splits}", f"pid = pid // {share.splits}"] if share.splits > 1 else []


def handed_over(
    share: Share, sums: Sequence[str], folds: Sequence[str], tile: tuple[int, int], each: int, rest: Sequence[str]
) -> list[str]:
    """Store ``sums`` [rows, cols] and ``folds`` [rows, 1]; a tile's last program adds them up, and does ``rest``."""
    if share.splits == 1:
        return list(rest)
    named = list(_places(sums, folds, tile))
    first = f"{share.first_number} + ((pid * {share.splits} + {{}}) * {each})"
    lines = [f"own = {PARTIALS} + {first.format('split')}"]
    lines += [f"tl.store(own + {place}, {name})" for name, place, _ in named]
    lines += [
        "tl.debug_barrier()",
        f"arrived = tl.atomic_add({COUNTERS} + {share.first_tile} + pid, 1, sem=\"acq_rel\")",
        f"if arrived == {share.splits - 1}:",
    ]
    last = [f"tl.store({COUNTERS} + {share.first_tile} + pid, 0)"]
    last += [f"{name} = tl.zeros({shape}, tl.float32)" for name, _, shape in named]
    last += [f"for other in tl.static_range({share.splits}):", f"{_INDENT}part = {PARTIALS} + {first.format('other')}"]
    last += [f'{_INDENT}{name} += tl.load(part + {place}, cache_modifier=".cg")' for name, place, _ in named]
    return [*lines, *(_INDENT + line for line in (*last, *rest))]


def _places(sums: Sequence[str], folds: Sequence[str], tile: tuple[int, int]) -> Iterator[tuple[str, str, str]]:
    """Names with where they lie among a program's numbers, and their shapes."""
    rows, cols = tile
    for number, name in enumerate(sums):
        at = f"tl.arange(0, {rows})[:, None] * {cols} + tl.arange(0, {cols})[None, :]"
        yield name, f"{number * rows * cols} + {at}", f"({rows}, {cols})"
    for number, name in enumerate(folds):
        yield name, f"{(len(sums) * cols + number) * rows} + tl.arange(0, {rows})[:, None]", f"({rows}, 1)"
