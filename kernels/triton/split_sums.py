"""Tiles whose inner dimension, or whose columns, several programs share: who sums what, and what the last one adds up.

Each program stores its sums, or what it folded; the last one to arrive at a tile takes them together in the order of
the splits, whoever that is, so the same call gives the same bits (split-K with a workspace).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fuseplan.kernels.gpu.tile import segment_programs, splits_of, tile_of
from fuseplan.kernels.ir.backend import Config
from fuseplan.kernels.ir.ir import ITEMSIZE, Dot, KernelIR, Reduce, Scan, Segment
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
        if splits > 1 or segment.products:
            programs = segment_programs(segment, config, {})
            numbers += programs * numbers_each(segment, config)
            tiles += programs // splits
    return found, numbers, tiles


def scratch(ir: KernelIR, config: Config) -> tuple[int, int]:
    """Numbers and counters that a kernel needs; (0, 0) without splits."""
    return shares(ir, config)[1:] if any(splits_of(segment, config) > 1 for segment in ir.segments) else (0, 0)


def numbers_each(segment: Segment, config: Config) -> int:
    """Words of 32 bits that a program hands over at most, an even number: its sums, and folds of its rows."""
    tile, bodies = tile_of(segment, config), {segment, *(one.left for one in segment.products)}
    folds = sum(words(instr.dtype) for one in bodies for instr in one.body if isinstance(instr, Reduce | Scan))
    return _even(tile.rows * (len({instr for instr in segment.body if isinstance(instr, Dot)}) * tile.cols + folds))


def words(dtype: str) -> int:
    """Words of 32 bits in which a fold of this register type is handed over."""
    return 2 if ITEMSIZE[dtype] == 8 else 1


def _even(count: int) -> int:
    return count + count % 2


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
    last = [f"{name} = tl.zeros({shape}, tl.float32)" for name, _, shape in named]
    last += [f"for other in tl.static_range({share.splits}):", f"{_INDENT}part = {_numbers(share, 'other', each)}"]
    last += [f'{_INDENT}{name} += tl.load(part + {place}, cache_modifier=".cg")' for name, place, _ in named]
    return _last_goes_on(share, {name: f"{{}} + {place}" for name, place, _ in named}, each, [*last, *rest])


def folds_handed_over(
    share: Share, folds: Mapping[str, str], lanes: tuple[int, str, str], rest: Sequence[str]
) -> list[str]:
    """Store ``folds`` of a tile's rows; its last program does ``rest``, where ``all_<name>`` has what all have stored.

    ``folds``: names with their register types. ``lanes``: the tile's rows, how they and the splits lie in a tensor.
    """
    places, each = fold_places(folds, lanes)
    last = [*parts_of(share, lanes, each), *(load_parts(name, place) for name, place in places.items())]
    return _last_goes_on(share, places, each, [*last, *rest])


def fold_places(folds: Mapping[str, str], lanes: tuple[int, str, str]) -> tuple[dict[str, str], int]:
    """Where each fold of a tile's rows lies from the address ``{}`` of a program's first number; and its numbers."""
    rows, down, _ = lanes
    at, begin = f"tl.arange(0, {rows}){down}" if down else "0", 0
    places: dict[str, str] = {}
    for name in sorted(folds, key=lambda name: -words(folds[name])):  # those of 64 bits lie at even words
        typed = "" if folds[name] == "float32" else f".to(tl.pointer_type(tl.{folds[name]}))"
        places[name] = f"({{}} + {begin}){typed} + {at}"
        begin += rows * words(folds[name])
    return places, _even(begin)


def parts_of(share: Share, lanes: tuple[int, str, str], each: int) -> list[str]:
    """``parts = ...``: the addresses of what all programs of a tile hand over."""
    return [f"parts = {_numbers(share, f'tl.arange(0, {share.splits}){lanes[2]}', each)}"]


def load_parts(name: str, place: str) -> str:
    """``all_<name> = ...``: what all programs of a tile have handed over of a fold."""
    return f'all_{name} = tl.load({place.format("parts")}, cache_modifier=".cg")'


def store_parts(share: Share, places: Mapping[str, str], each: int) -> list[str]:
    """Hand over what is named: store it at its place from the first number of this split."""
    return [f"own = {_numbers(share, 'split', each)}",
            *(f"tl.store({place.format('own')}, {name})" for name, place in places.items())]


def _numbers(share: Share, split: str, each: int) -> str:
    """Address of the first number of a split of this tile, each of which has ``each`` numbers."""
    return f"{PARTIALS} + {share.first_number} + ((pid * {share.splits} + {split}) * {each})"


def _last_goes_on(share: Share, places: Mapping[str, str], each: int, rest: Sequence[str]) -> list[str]:
    """Store what is named at its place from the first number of this split; a tile's last program does ``rest``."""
    counter = f"{COUNTERS} + {share.first_tile} + pid"
    return [
        *store_parts(share, places, each),
        "tl.debug_barrier()",
        f'arrived = tl.atomic_add({counter}, 1, sem="acq_rel")',
        f"if arrived == {share.splits - 1}:",
        *(_INDENT + line for line in (f"tl.store({counter}, 0)", *rest)),
    ]


def _places(sums: Sequence[str], folds: Sequence[str], tile: tuple[int, int]) -> Iterator[tuple[str, str, str]]:
    """Names with where they lie among a program's numbers, and their shapes."""
    rows, cols = tile
    for number, name in enumerate(sums):
        at = f"tl.arange(0, {rows})[:, None] * {cols} + tl.arange(0, {cols})[None, :]"
        yield name, f"{number * rows * cols} + {at}", f"({rows}, {cols})"
    for number, name in enumerate(folds):
        yield name, f"{(len(sums) * cols + number) * rows} + tl.arange(0, {rows})[:, None]", f"({rows}, 1)"
