"""Configurations of a Triton kernel: the choices, which of them arithmetic rules out, and the default."""

from __future__ import annotations

from fuseplan.kernels.gpu.overlap import OVERLAP, OVERLAP_CHOICES, default_overlap, overlap_tunables, pointless_overlap
from fuseplan.kernels.gpu.tile import Tile, chunk_width, live_words, next_power_of_2, programs, splits_of, tile_of
from fuseplan.kernels.ir.backend import Config, Target, Tunable
from fuseplan.kernels.ir.index import Size, is_static
from fuseplan.kernels.ir.ir import ITEMSIZE, KernelIR, Load, Scan, Segment
from fuseplan.kernels.ir.ops import REDUCTIONS
from fuseplan.kernels.ir.reduction_loops import (
    folds_across,
    folds_in_parts,
    reduction_depths,
    scans_in_parts,
    schedule,
    sweeps,
)

#: Rows wider than this are walked in blocks by default; configs may hold up to the second number in registers.
DEFAULT_PERSISTENT_COLS = 16384
MAX_PERSISTENT_COLS = 32768
#: The same of tiles that are scanned, whose numbers threads hold twice; and how many numbers a block of others has.
_PERSISTENT_SCAN, _SCANNED_BLOCK = 4096, 2048
#: Rows across memory of which a program scans more columns at once, with more threads.
_FEW_SCANNED = 2
#: Registers a kernel spends on addresses, masks and the like, whatever its tile.
_BASE_REGISTERS = 24
#: A count of programs that is as good as the fewest, and columns as good as covered exactly.
_NEARLY = 1.25
#: Elements of a default pointwise tile at most, and the bytes that each moves; where it moves fewer, tiles are larger.
_POINTWISE_TILE, _FULL_BYTES = 1024, 4
#: Columns of such a larger tile: four elements for each of 128 threads.
_NARROW_COLS = 512
#: The default block and warps of a looped reduction that rescales sums.
_RESCALING: Config = {"block_rows": 1, "block_cols": 8192, "num_warps": 32}
#: Bytes that a GPU fetches from memory at once, and that it reads fully used from its cache.
_SECTOR_BYTES, _LINE_BYTES = 32, 128
#: Elements of a default tile that folds across memory: held in registers, and of a block that is one of many.
_HELD_TILE, _LOOPED_TILE = 8192, 4096
#: What a thread loads of a tile that it holds, and its registers, at most by default.
_HELD_BYTES, _HELD_REGISTERS = 256, 160
#: Multiprocessors where no device is named: those of an H200.
_TYPICAL_CORES = 132
#: Programs that share the columns of a tile: at most, and blocks that each folds at least; and how many there are for
#: each multiprocessor, of one row and across memory.
MOST_SPLITS, _SPLIT_BLOCKS = 512, 4
_SPLITS_EACH, _SPLITS_ACROSS = 2, 4
#: Scans are shared, in several launches, where a tile has so many numbers, and there are this many multiprocessors for
#: each; and the numbers that a program takes at least, and the columns across memory.
_SHARED_SCAN, _CORES_EACH, _SCANNED_SPLIT, _SCANNED_COLS = 16384, 4, 1024, 64
#: What a dynamic size counts as where a choice needs a number.
_TYPICAL_SIZE = 4096


#: Every parameter that some kernel has, and what it can be built with.
PARAMETERS = (
    Tunable(OVERLAP, ("none", *OVERLAP_CHOICES)),
    Tunable("block_rows", (1, 2, 4, 8, 16, 32, 64, 128)),
    Tunable("block_cols", tuple(2**power for power in range(MAX_PERSISTENT_COLS.bit_length()))),
    Tunable("block_inner", tuple(2**power for power in range(4, 15))),
    Tunable("num_warps", (1, 2, 4, 8, 16, 32)),
    Tunable("loads", ("early", "late")),
    Tunable("num_stages", (1, 2, 3, 4, 5)),
    Tunable("splits", tuple(2**power for power in range(MOST_SPLITS.bit_length()))),
)


def _static(size: Size) -> int:
    return size if isinstance(size, int) else _TYPICAL_SIZE


def tunables(ir: KernelIR, target: Target) -> tuple[Tunable, ...]:
    """``block_rows``, ``block_cols``, ``num_warps``; for reductions also ``loads``; for looped ones ``num_stages``.

    On devices that can, ``overlap`` comes first. A reduction whose columns fit ``block_cols`` keeps its row in
    registers, else it is looped.
    """
    widest = max((next_power_of_2(_static(segment.cols)) for segment in ir.segments), default=1)
    rows = max((next_power_of_2(_static(segment.num_rows)) for segment in ir.segments), default=1)
    reduces = any(segment.has_reduction() for segment in ir.segments)
    narrower, most = ((1024, 2048, 4096, 8192), MAX_PERSISTENT_COLS) if reduces else (
        (64, 128, 256, 512, 1024, 2048, 4096), 8192)
    if any(map(folds_across, ir.segments)):
        narrower = (32, 64, 128, 256, 512, *narrower)
    cols = [*(c for c in narrower if c < widest), *([widest] if widest <= most else [])]
    found = [
        *overlap_tunables(target),
        Tunable("block_rows", tuple(r for r in (1, 2, 4, 8, 16, 32, 64, 128) if r <= rows)),
        Tunable("block_cols", tuple(cols or [widest])),
        Tunable("num_warps", (1, 2, 4, 8, 16, 32) if reduces else (1, 2, 4, 8)),
    ]
    if any(_late_loads(segment) for segment in ir.segments):
        found.append(Tunable("loads", ("early", "late")))
    if any(not is_static(s.cols) or min(cols) < s.cols for s in ir.segments if s.has_reduction()):
        found.append(Tunable("num_stages", (1, 2, 3)))
    splits = max(default_splits(ir, segment, target.cores) for segment in ir.segments)
    if splits > 1:
        found.append(Tunable("splits", tuple(2**power for power in range(min(2 * splits, MOST_SPLITS).bit_length()))))
    return tuple(found)


def default_splits(ir: KernelIR, segment: Segment, cores: int = _TYPICAL_CORES, rows: int = 0) -> int:
    """Programs that share the columns of a tile: several for a long fold with fewer tiles than multiprocessors, or a
    long scan with far fewer, else 1.

    ``rows``: those of the tile; 0 for as many as the default tile has.
    """
    scans = scans_in_parts(segment)
    if not segment.loads or not (scans or folds_in_parts(segment)):  # what is handed over is made beside an input
        return 1
    across = folds_across(segment)
    rows, each = rows or (line_rows(ir, segment, cores) if across else 1), _SPLITS_ACROSS if across else _SPLITS_EACH
    tiles, blocks = -(-_static(segment.num_rows) // rows), _static(segment.cols) * rows // _LOOPED_TILE
    splits = min(each * cores // max(tiles, 1), blocks // _SPLIT_BLOCKS, MOST_SPLITS)
    if scans:
        numbers = _static(segment.cols) * rows
        worth = numbers >= _SHARED_SCAN and _CORES_EACH * tiles <= cores
        parts = min(numbers // _SCANNED_SPLIT, _static(segment.cols) // _SCANNED_COLS)
        most = min(_SPLITS_ACROSS * cores // max(tiles, 1), next_power_of_2(parts), MOST_SPLITS)
        splits = most if worth else 1
    return 1 << splits.bit_length() - 1 if splits > 1 else 1


def _late_loads(segment: Segment) -> bool:
    """True when some load is first needed after a reduction: it may be issued before or after."""
    phases, depths = schedule(segment), reduction_depths(segment)
    return any(
        isinstance(segment.body[value], Load) and depths[value] == 0 and value not in phases[0].elements
        for phase in phases[1:] for value in phase.elements
    )


def infeasible(ir: KernelIR, config: Config, target: Target) -> str | None:
    """Why ``config`` is not worth compiling, or None."""
    warps = int(config["num_warps"])
    threads, limit = target.gpu.warp * warps, target.gpu.most_registers(warps)
    if threads > target.gpu.most_threads:
        return f"{threads} threads, a program has {target.gpu.most_threads} at most"
    tiles = [tile_of(segment, config) for segment in ir.segments]
    for segment, tile in zip(ir.segments, tiles, strict=True):
        if (need := _registers(segment, tile, threads)) > limit:
            return f"about {need} registers a thread, the limit is {limit}"
        if not segment.has_reduction() and (per_thread := tile.elements / threads) > 64:
            return f"{per_thread:.0f} elements a thread in a pointwise tile"
    reason = _redundant(ir, config, tiles) or _starved(ir, config, tiles, target)
    if reason or ir.symbols:
        return reason
    return pointless_overlap(config, programs(ir, config, {}), max(tile.elements for tile in tiles), target)


def _registers(segment: Segment, tile: Tile, threads: int) -> int:
    """Registers of a thread: everything live is held at once, at least one element of each value."""
    return _BASE_REGISTERS + round(max(1.0, tile.elements / threads) * live_words(segment, in_place=True))


def _redundant(ir: KernelIR, config: Config, tiles: list[Tile]) -> str | None:
    """Configs that build the same kernel as another, or only waste lanes."""
    rows = int(config["block_rows"])
    if all(tile.rows < rows for tile in tiles):
        return f"block_rows={rows} is more than any segment has"
    if not any(tile.looped for tile in tiles) and int(config.get("num_stages", 1)) != 1:
        return "num_stages has no effect without a loop"
    splits = int(config.get("splits", 1))
    if splits > 1 and not any(splits <= next_power_of_2(-(-_static(segment.cols) // tile.cols))
                              and splits_of(segment, config) > 1
                              for tile, segment in zip(tiles, ir.segments, strict=True)):
        return f"no loop over columns has blocks for {splits} splits"
    folding = [tile for tile, segment in zip(tiles, ir.segments, strict=True) if segment.has_reduction()]
    if config.get("loads") == "late" and all(tile.looped for tile in folding):
        return "loads has no effect on a looped reduction"
    for tile, segment in zip(tiles, ir.segments, strict=True):
        if tile.looped and tile.rows > 4 and not folds_across(segment):
            return "a looped reduction over many rows at once"
        if not segment.has_reduction() and isinstance(segment.cols, int) and isinstance(tile.col_blocks, int):
            covered = tile.col_blocks * tile.cols
            if tile.cols > 64 and tile.col_blocks > 1 and covered > _NEARLY * segment.cols:
                return f"{covered - segment.cols} of {covered} columns would be idle lanes"
    return None


def _starved(ir: KernelIR, config: Config, tiles: list[Tile], target: Target) -> str | None:
    """Tiles too small for their threads, or so large that most multiprocessors idle."""
    threads = target.gpu.warp * int(config["num_warps"])
    largest = max(tile.elements for tile in tiles)
    if int(config["num_warps"]) > 1 and largest < 2 * threads:
        return f"{threads} threads for tiles of {largest} elements"
    if ir.symbols:
        return None
    count = programs(ir, config, {})
    if count < target.cores // 2 and largest > 4096 and max(tile.rows for tile in tiles) > 1:
        return f"{count} programs leave most of {target.cores} multiprocessors idle"
    if count > 64 * target.cores and largest <= 256:
        return f"{count} programs of only {largest} elements"
    return None


def default_config(ir: KernelIR, target: Target) -> Config:
    """A config that is good without tuning: 16-byte accesses, 8 to 32 elements a thread, no spills."""
    reduces = any(segment.has_reduction() for segment in ir.segments)
    chosen = _default_reduction(ir, target) if reduces else _default_pointwise(ir, target)
    return {**default_overlap(target), **chosen}


def _elements(segment: Segment) -> int:
    return _static(segment.num_rows) * _static(segment.cols)


def _default_pointwise(ir: KernelIR, target: Target) -> Config:
    total = sum(_elements(segment) for segment in ir.segments)
    # Enough programs to occupy every multiprocessor a few times over before tiles grow.
    most = _most_elements(ir, max(ir.segments, key=_elements))
    while most > 256 and total // most < 2 * target.cores:
        most //= 2
    while most > 128 and max(live_words(segment) for segment in ir.segments) * most > 16384:
        most //= 2
    rows, cols = _block_shape(ir, most, target)
    # Four warps, but no fewer than four elements a thread.
    warps = min(4, max(1, _largest_tile(ir, rows, cols) // (4 * target.gpu.warp)))
    return {"block_rows": rows, "block_cols": cols, "num_warps": warps}


def full_tile(ir: KernelIR, segment: Segment) -> tuple[int, int]:
    """Rows and columns of a default block of ``segment`` where there is enough work for every multiprocessor."""
    most = _POINTWISE_TILE if segment.has_reduction() else _most_elements(ir, segment)
    cols = _width(segment, most)
    return max(1, min(most // cols, _static(segment.num_rows))), cols


def _most_elements(ir: KernelIR, segment: Segment) -> int:
    """Elements of a pointwise tile at most, a power of two: more where each moves few bytes."""
    return _POINTWISE_TILE * _FULL_BYTES // min(next_power_of_2(_moved_bytes(ir, segment)), _FULL_BYTES)


def _moved_bytes(ir: KernelIR, segment: Segment) -> int:
    """Bytes that one element loads and stores for itself, at least 1: not what the rows above and below load too."""
    axes = {segment.col_axis, max(segment.col_axis - 1, 0)}
    # Which row is gathered depends on the row.
    touched = {(one.buffer, one.index) for one in segment.loads if one.gather is not None or axes <= one.index.axes()}
    touched |= {(store.buffer, store.index) for store in segment.stores if axes <= store.index.axes()}
    return max(1, sum(ITEMSIZE[ir.buffers[buffer].dtype] for buffer, _ in touched))


def _width(main: Segment, most: int) -> int:
    """Columns of a default tile of ``most`` elements: fewer, of several rows, where narrow elements make it larger."""
    if most > _POINTWISE_TILE:
        most = max(_NARROW_COLS, most // max(1, _static(main.num_rows)))  # a result may have no rows at all
    return min(most, next_power_of_2(_static(main.cols)))


def _largest_tile(ir: KernelIR, rows: int, cols: int) -> int:
    return max(tile_of(segment, {"block_rows": rows, "block_cols": cols}).elements for segment in ir.segments)


def _block_shape(ir: KernelIR, most: int, target: Target) -> tuple[int, int]:
    """Rows and columns of a block, of which each segment's tile has at most ``most`` elements: what suits the largest
    segment or, where that leaves tiny tiles to the others, the widest block that needs about as few programs as any.
    """
    main = max(ir.segments, key=_elements)
    choices = {tunable.name: tunable.choices for tunable in tunables(ir, target)}
    all_cols, typical = [int(choice) for choice in choices["block_cols"]], dict.fromkeys(ir.symbols, _TYPICAL_SIZE)

    def count(rows: int, cols: int) -> int:
        return programs(ir, {"block_rows": rows, "block_cols": cols}, typical)

    width = _width(main, most)
    cols = next((one for one in all_cols if one >= width), all_cols[-1])
    rows = min(max(most // width, 1), next_power_of_2(_static(main.num_rows)), 128)
    fewest = sum(-(-_elements(segment) // most) for segment in ir.segments)
    if _largest_tile(ir, rows, cols) <= most and count(rows, cols) <= _NEARLY * fewest:
        return rows, cols
    shapes = {
        (rows, cols): count(rows, cols) for rows in map(int, choices["block_rows"]) for cols in all_cols
        if _largest_tile(ir, rows, cols) <= most
    }
    enough = _NEARLY * min(shapes.values(), default=0)
    ranked = sorted((-cols, number, rows) for (rows, cols), number in shapes.items() if number <= enough)
    return (ranked[0][2], -ranked[0][0]) if ranked else (rows, cols)


def line_rows(ir: KernelIR, segment: Segment, cores: int = _TYPICAL_CORES) -> int:
    """Rows of a default block that folds across: of a line, or of a sector where there would be too few blocks, or even
    less where it scans.
    """
    narrowest = min((ITEMSIZE[ir.buffers[load.buffer].dtype] for load in segment.loads), default=4)
    rows, blocks = _LINE_BYTES // narrowest, cores - cores // 10 if _walks_twice(ir, segment) else 2 * cores
    while rows * narrowest > _SECTOR_BYTES and _static(segment.num_rows) // rows < blocks and (
            default_splits(ir, segment, cores, rows) == 1):
        rows //= 2
    # A program goes along its rows by itself: where there would be few, it had better leave part of a sector to others.
    while segment.has_scan() and rows > 1 and _static(segment.num_rows) // rows < cores - cores // 10 and (
            default_splits(ir, segment, cores, rows) == 1):
        rows //= 2
    return min(rows, next_power_of_2(_static(segment.num_rows)))


def _walks_twice(ir: KernelIR, segment: Segment) -> bool:
    """Whether what folds across is too long to be held, and read again after it has been folded: by one program on each
    multiprocessor, which keeps many loads in flight. More programs would push out each other's lines.
    """
    narrowest = min((ITEMSIZE[ir.buffers[load.buffer].dtype] for load in segment.loads), default=4)
    held = is_static(segment.cols) and _SECTOR_BYTES // narrowest * _static(segment.cols) <= _HELD_TILE
    return not held and not segment.has_scan() and sweeps(segment, centre=True) > 1


def _scans_wide(segment: Segment) -> bool:
    """Whether a scan takes many registers for each number: two for eight bytes, or those of a fold of many operations.
    """
    many = any(isinstance(one, Scan) and REDUCTIONS[one.kind].flops > 1 for one in segment.body)
    return many or (segment.has_scan() and max(ITEMSIZE[one.dtype] for one in segment.body) > 4)


def _reducing_config(ir: KernelIR, target: Target, block: tuple[int, int], warps: int, most: int) -> Config:
    """A block, with warps from ``warps`` up to ``most`` until registers hold it, its default splits, and the first of
    all other choices.
    """
    rows, cols = block
    words = max(live_words(segment) for segment in ir.segments)
    while warps < most and rows * cols // (target.gpu.warp * warps) * words > 128:
        warps *= 2
    choices = {tunable.name: tunable.choices for tunable in tunables(ir, target)}
    cols = next((int(choice) for choice in choices["block_cols"] if int(choice) >= cols), cols)
    chosen: dict[str, int | str] = {"block_rows": rows, "block_cols": cols, "num_warps": warps}
    chosen["splits"] = max(default_splits(ir, segment, target.cores) for segment in ir.segments)
    return {name: chosen.get(name, values[0]) for name, values in choices.items()}


def _shared_cols(ir: KernelIR, segment: Segment, target: Target) -> int:
    """Columns that a program has by default, up to a power of two: those of what programs share are a part."""
    return next_power_of_2(-(-_static(segment.cols) // default_splits(ir, segment, target.cores)))


def _default_across(ir: KernelIR, target: Target) -> Config:
    """Rows of whole lines, more where columns are few; as many columns as registers hold, or blocks of a few."""
    main = max((segment for segment in ir.segments if folds_across(segment)), key=_elements)
    rows, widest = line_rows(ir, main, target.cores), next_power_of_2(_static(main.cols))
    scans = main.has_scan()
    held = is_static(main.cols) and rows * widest <= (_PERSISTENT_SCAN if scans else _HELD_TILE)
    choices = {tunable.name: tunable.choices for tunable in tunables(ir, target)}
    while held and 2 * rows <= int(choices["block_rows"][-1]) and 2 * rows * widest <= _LOOPED_TILE and (
            _static(main.num_rows) // (2 * rows) >= 2 * target.cores):
        rows *= 2
    twice, most = _walks_twice(ir, main), 16
    # Twice the registers, and slower to scan; of one row or two, many threads scan a few elements each.
    wide = rows > _FEW_SCANNED and _scans_wide(main)
    block = _SCANNED_BLOCK if wide else _LOOPED_TILE * (2 if twice else 1)
    block = min(block, rows * _shared_cols(ir, main, target))
    wanted = widest if held else max(32, block // rows)
    cols = next((int(choice) for choice in choices["block_cols"] if int(choice) >= wanted), wanted)
    # What is held is folded by few warps, each with all its loads in flight: a fold is an exchange between them.
    each = 8 if twice else 16
    if scans:  # threads of few warps scan many elements each by themselves
        each = 8 if wide or rows <= _FEW_SCANNED else 32
    elif twice:
        most = target.gpu.most_threads // target.gpu.warp
    elif held:
        each = _HELD_BYTES // max((ITEMSIZE[ir.buffers[load.buffer].dtype] for load in main.loads), default=4)
    warps = max(1, min(most, rows * cols // (target.gpu.warp * each)))
    tile = Tile(rows, cols, False, 1)
    while held and warps < 16 and _registers(main, tile, target.gpu.warp * warps) > _HELD_REGISTERS:
        warps *= 2
    return _reducing_config(ir, target, (rows, cols), warps, warps if held else 16)


def _default_reduction(ir: KernelIR, target: Target) -> Config:
    reducing = [segment for segment in ir.segments if segment.has_reduction()]
    if all(map(folds_across, reducing)):
        return _default_across(ir, target)
    widest = max(next_power_of_2(_static(segment.cols)) for segment in reducing)
    scans = any(segment.has_scan() for segment in reducing)
    persistent = _PERSISTENT_SCAN if scans else DEFAULT_PERSISTENT_COLS
    looped = widest > persistent or not all(is_static(segment.cols) for segment in reducing)
    num_rows = max(_static(segment.num_rows) for segment in reducing)
    rescales = looped and any(chunk_width(ir.buffers, segment, _RESCALING) for segment in reducing)
    block = _SCANNED_BLOCK if scans else 4096 if num_rows > target.cores and not rescales else 8192
    if scans and any(default_splits(ir, segment, target.cores) > 1 for segment in reducing):
        block = min(_LOOPED_TILE, max(_shared_cols(ir, segment, target) for segment in reducing))
    cols = min(widest, block) if looped else widest
    choices = {tunable.name: tunable.choices for tunable in tunables(ir, target)}
    rows, most_rows = 1, int(choices["block_rows"][-1])
    while not looped and rows < most_rows and rows * cols < 1024 and num_rows // (2 * rows) >= 2 * target.cores:
        rows *= 2
    # Few warps, each with all its loads in flight, fold a row fastest. With a few rows for each multiprocessor, more
    # warps with less to do overlap better.
    few_rows_each = target.cores < num_rows <= 8 * target.cores
    per_thread = 8 if looped else 16 if few_rows_each else 32
    # A second pass finds its row in the cache only if few programs run at once: large ones, where a pass holds little.
    warp, most = target.gpu.warp, target.gpu.most_threads // target.gpu.warp
    warps = min(most if rescales else most // 2, max(1, rows * cols // (warp * per_thread)))
    # The first choice of what is left: all loads ahead of the first reduction, no pipelining.
    config = _reducing_config(ir, target, (rows, cols), warps, most)
    return {**config, "loads": "late"} if few_rows_each and not looped and "loads" in config else config
