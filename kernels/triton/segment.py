"""What one Triton program does: its tile of one segment, as statements.

With one row to a tile the code is one-dimensional and row coordinates are scalars; otherwise tensors are ``[rows, 1]``,
``[1, cols]`` or ``[rows, cols]``, and all turned where rows lie side by side in memory: neighbouring threads then are
neighbours there, whatever the compiler knows of the addresses. A row reduction either holds its row in registers (every
value is computed once) or walks it in blocks, one loop for each phase of the schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fuseplan.kernels.gpu.launch import interpreter_is_on
from fuseplan.kernels.gpu.overlap import overlapped
from fuseplan.kernels.gpu.tile import chunk_width, launches_of
from fuseplan.kernels.ir.backend import Config
from fuseplan.kernels.ir.index import Index, divides
from fuseplan.kernels.ir.ir import ITEMSIZE, Buffer, Gather, Load, Scan, Segment, Store
from fuseplan.kernels.ir.ops import REDUCTIONS, fold_identity, op_spec
from fuseplan.kernels.ir.reduction_loops import (
    Phase,
    centred_sums,
    folds_across,
    rescaled_sums,
    schedule,
    with_totals,
)
from fuseplan.kernels.triton.index import Coordinates, triton_size
from fuseplan.kernels.triton.split_sums import (
    Share,
    fold_places,
    folds_handed_over,
    inner_range,
    load_parts,
    parts_of,
    split_of_program,
    store_parts,
)
from fuseplan.kernels.triton.values import OUTSIDE, ValueEmitter, index_extent, literal, tl_type

_INDENT = "    "
#: How many times wider a loaded type is than a stored one where its lanes lie far apart.
_FAR_APART = 4


class SegmentEmitter(ValueEmitter):
    """Emits a segment for program number ``pid`` within it; beside tensor cores its checks trap, and do not assert."""

    def __init__(
        self, buffers: Sequence[Buffer], names: Sequence[str], segment: Segment, config: Config,
        share: Share | None = None,
    ) -> None:
        self.launches = launches_of(buffers, segment, config)
        super().__init__(buffers, with_totals(segment) if self.launches > 1 else segment, config)
        self.share = share or Share()
        self.turned = not self.flat and folds_across(segment)
        self.down, self.across = ("None, :", ":, None") if self.turned else (":, None", "None, :")
        self.names, self.traps = names, bool(segment.products)
        self.chunk = chunk_width(buffers, self.segment, config)
        self.rescaled = rescaled_sums(segment) if self.chunk else {}
        self.centred = centred_sums(self.segment) if self.tile.looped else {}
        #: Which loads of the current pass the cache is to keep, or to let go.
        self.policies: dict[Load, str] = {}
        self.masks_rows = not self.tile.flat and divides(self.tile.rows, segment.num_rows) is None
        self.coordinates = Coordinates(segment, self.tile.rows if self._loads_rows_once() else 1)

    def _loads_rows_once(self) -> bool:
        """Whether a row that a block shares is loaded alone: lanes of stores of wide types would lie far apart."""
        loads = self.segment.loads
        if self.masks_rows or self.segment.has_reduction() or any(one.mask is not None for one in loads):
            return False
        widest = max((ITEMSIZE[self.buffers[one.buffer].dtype] for one in loads), default=0)
        narrowest = min((ITEMSIZE[self.buffers[one.buffer].dtype] for one in self.segment.stores), default=8)
        return widest >= _FAR_APART * narrowest

    def lines(self) -> list[str]:
        """The statements; ``pid``, the buffers and the dynamic sizes are in scope."""
        return self._whole(self._looped() if self.tile.looped else self.single_pass())

    def launch_lines(self) -> list[list[str]]:
        """The statements of each launch of a segment that has several."""
        return [self._whole(body) for body in [self._launched(number) for number in range(self.launches)]]

    def _whole(self, body: Sequence[str]) -> list[str]:
        body = [*self.coordinates.definitions(), *body]
        lines = [*split_of_program(self.share), *self._geometry("\n".join(body)), *body]
        return overlapped(_statements(lines), self.config, "tl.load(", "tl.store(")

    # -- positions ----------------------------------------------------------------------------------------

    def _geometry(self, body: str) -> list[str]:
        """Definitions of ``row`` and ``col`` (and their bounds), where ``body`` uses them."""
        tile, lines, used = self.tile, [], set(re.findall(r"\w+", body))
        row_block, col_block = self._block_numbers()
        if used & {"row", "in_rows"}:
            rows = f"({row_block} * {tile.rows} + tl.arange(0, {tile.rows}))[{self.down}]"
            lines.append(f"row = {row_block.removeprefix('(').removesuffix(')') if self.flat else rows}")
        if "first_row" in used:
            lines.append(f"first_row = ({row_block} * {tile.rows} + tl.arange(0, 1))[:, None]")
        if "in_rows" in used:
            lines.append(f"in_rows = row < {triton_size(self.segment.num_rows)}")
        if not tile.looped and used & {"col", "in_cols"}:
            lines += self._columns(f"{col_block} * {tile.cols} + " if col_block else "")
        return lines

    def _block_numbers(self) -> tuple[str, str]:
        """The program's block along the rows, and along the columns ("" where there is one only)."""
        blocks = self.tile.col_blocks
        if isinstance(blocks, int) and blocks == 1:
            return "pid", ""
        if isinstance(self.segment.num_rows, int) and self.segment.num_rows == 1:
            return "0", "pid"
        return f"(pid // {triton_size(blocks)})", f"(pid % {triton_size(blocks)})"

    def _columns(self, start: str, width: int = 1) -> list[str]:
        """The tile's columns, in chunks of ``width`` where that is more than one."""
        arange = f"tl.arange(0, {self.tile.cols // width})"
        col = f"{start}{arange}" if self.flat else f"({start}{arange})[{self.across}]"
        if width > 1:
            col = f"{start}({arange} * {width})[:, None] + tl.arange(0, {width})[None, :]"
        bound = [f"in_cols = col < {triton_size(self.segment.cols)}"] if self.masks_cols else []
        return [f"col = {col}", *bound]

    def position(self, index: Index) -> str:
        return self.coordinates.text(index)

    # -- memory -------------------------------------------------------------------------------------------

    def _mask(self, on_rows: bool, on_cols: bool, *more: str) -> str:
        """The argument that says which lanes of this extent are real, and where ``more`` holds."""
        rows = ["in_rows"] if on_rows and self.masks_rows else []
        cols = ["in_cols"] if on_cols and self.masks_cols else []
        conditions = [*rows, *cols, *more]
        return f", mask={' & '.join(conditions)}" if conditions else ""

    def _pointer(
        self, buffer: int, index: Index, widen: tuple[bool, bool] = (False, False), gather: Gather | None = None
    ) -> str:
        """Address of ``index``, broadcast to rows / columns that the index itself does not mention."""
        terms = self.coordinates.terms(index)
        if gather is not None:
            terms.append(f"{self.tensor(gather.value)}.to(tl.int64) * {triton_size(gather.stride)}")
        on_rows, on_cols = index_extent(self.segment, index)
        if widen[0] and not on_rows:
            terms.append("row * 0")
        if widen[1] and not on_cols:
            terms.append("col * 0")
        return " + ".join([self.names[buffer], *terms])

    def load(self, instr: Load) -> str:
        on_rows, on_cols = index_extent(self.segment, instr.index)
        policy = f', eviction_policy="{self.policies[instr]}"' if instr in self.policies else ""
        if instr.mask is None:
            return f"tl.load({self._pointer(instr.buffer, instr.index)}{self._mask(on_rows, on_cols)}{policy})"
        widen = self.extent[instr.mask]
        mask = self._mask(on_rows or widen[0], on_cols or widen[1], self.operand(instr.mask))
        other = literal(instr.other, "float32" if instr.dtype.startswith("float") else "int32")
        pointer = self._pointer(instr.buffer, instr.index, widen, instr.gather)
        return f"tl.load({pointer}{mask}, other={other}{policy})"

    def store(self, store: Store, value: str) -> str:
        on_rows, on_cols = index_extent(self.segment, store.index)
        conditions = []
        if store.scatter is not None:
            on_rows = on_rows or self.extent[store.scatter.value][0]
            conditions = [] if store.scatter.check is None else [self.tensor(store.scatter.check)]
        pointer = self._pointer(store.buffer, store.index, gather=store.scatter)
        return f"tl.store({pointer}, {value}{self._mask(on_rows, on_cols, *conditions)})"

    def check(self, value: int) -> str:
        mask = self._mask(*self.extent[value])
        if self.traps and not interpreter_is_on():
            return f"_trap_unless({self.name(value)}{mask})"
        return f'tl.device_assert({self.name(value)}, "{OUTSIDE}"{mask})'

    # -- several passes -----------------------------------------------------------------------------------

    def _looped(self) -> list[str]:
        phases = schedule(self.segment, rescale=self.chunk > 0, centre=True)
        first, *others = (self._pass(phases, number) for number in range(len(phases)))
        rest = [*(line for lines in others for line in lines), *self.checks(self.segment.checks)]
        return [*first, *(rest if self.share.splits == 1 else self._handed_over(phases[0], rest))]

    def _pass(self, phases: Sequence[Phase], number: int) -> list[str]:
        phase = phases[number]
        self.policies = self._policies(phases, number)
        folds, row_folds = self.split_reductions(phase)
        width = self.chunk if any(value in self.rescaled for value in folds) else 1
        lines = [*self.values(phase.rows), *self.stores(phase.row_stores)]
        lines += [self.accumulator(value, self.tile.cols // width) for value in folds]
        centred = [value for value in folds if value in self.centred]
        lines += [self.accumulator(value, self.tile.cols, name) for value in centred for name in ("first", "apart")]
        lines += [self._carried(value) for value in phase.elements if isinstance(self.segment.body[value], Scan)]
        if folds or phase.stores:
            lines += self._loop(phase, folds, width)
        lines += self._seen() if centred else []
        for value in folds:
            lines += self._off_centre(value) if value in self.centred else []
            lines += self.fold(value, self._folded(value))
        return [*lines, *(self.fold_per_row(value) for value in row_folds)]

    def _handed_over(self, phase: Phase, rest: Sequence[str]) -> list[str]:
        """Each program stores what it folded of its columns; the last one of a tile folds that, and does ``rest``."""
        folds = self.split_reductions(phase)[0]
        types = {self.name(value): self.fold_type(value) for value in folds}
        return folds_handed_over(self.share, types, self._handed_lanes(), [*self._parts_folded(folds), *rest])

    def _handed_lanes(self) -> tuple[int, str, str]:
        """The tile's rows, and how they and the programs that share them lie in a tensor."""
        return (1, "", "") if self.flat else (self.tile.rows, f"[{self.down}]", f"[{self.across}]")

    def _launched(self, number: int) -> list[str]:
        """A pass, after the folds of those before; all but the last hand theirs over."""
        phases = schedule(self.segment, rescale=self.chunk > 0, centre=True)
        folds = {value: self.fold_type(value) for phase in phases for value in self.split_reductions(phase)[0]}
        names = {self.name(value): dtype for value, dtype in folds.items()}
        places, each = fold_places(names, self._handed_lanes())
        self.done.clear()
        self.loaded.clear()
        lines = parts_of(self.share, self._handed_lanes(), each) if number else []
        for phase in phases[:number]:
            lines += self.values(phase.rows)
            handed, once = self.split_reductions(phase)
            lines += [load_parts(self.name(value), places[self.name(value)]) for value in handed]
            lines += [*self._parts_folded(handed), *(self.fold_per_row(value) for value in once)]
        lines += self._pass(phases, number)
        if number == len(phases) - 1:
            return [*lines, *self.checks(self.segment.checks)]
        own = map(self.name, self.split_reductions(phases[number])[0])
        return [*lines, *store_parts(self.share, {name: places[name] for name in own}, each)]

    def _parts_folded(self, folds: Sequence[int]) -> list[str]:
        """Fold what all programs of a tile have handed over; a scan takes its own parts of that."""
        folded = self._parts_seen() if any(value in self.centred for value in folds) else []
        for value in folds:
            text = f"all_{self.name(value)}"
            if value in self.centred:
                total = self.name(self.centred[value])
                folded.append(f"all_off = all_{total} / tl.maximum(all_seen, 1.0) - {total} / {self.segment.cols}")
                text += " + all_seen * all_off * all_off"
            elif (top := self.rescaled.get(value)) is not None:
                text += f" * {_exponential(f'all_{self.name(top)} - base{top}')}"
            folded += [] if value in self.totals else self.fold(value, text)
            if value in self.rescaled.values():
                folded.append(f"base{value} = {_finite(self.name(value))}")
        return folded

    def _policies(self, phases: Sequence[Phase], number: int) -> dict[Load, str]:
        """What is read again by the next pass is to stay in the cache until then, and to make room afterwards."""
        found: dict[Load, str] = {}
        for value in phases[number].elements:
            instr = self.segment.body[value]
            if not isinstance(instr, Load) or index_extent(self.segment, instr.index) != (True, True):
                continue
            if any(value in later.elements for later in phases[number + 1 :]):
                found[instr] = "evict_last"
            elif any(value in earlier.elements for earlier in phases[:number]):
                found[instr] = "evict_first"
        return found

    def _carried(self, value: int) -> str:
        """What a scan carries from block to block, before the first one: a number for each row."""
        dtype, instr = self.fold_type(value), self.segment.body[value]
        identity = literal(fold_identity(self.reduction(value).kind, dtype), dtype)
        if isinstance(instr, Scan) and instr.total is not None:
            before = f"tl.where({self._lanes(self.share.splits)} < split, all_{self.name(instr.total)}, {identity})"
            return f"acc{self.prefix}{value} = {self.folded(value, before)}"
        shape = () if self.flat else self.shape(value, 1)
        return f"acc{self.prefix}{value} = tl.full({shape}, {identity}, {tl_type(dtype)})"

    def scanned(self, value: int, instr: Scan) -> list[str]:
        if not self.tile.looped:
            return super().scanned(value, instr)
        name, total, spec = self.name(value), f"acc{self.prefix}{value}", REDUCTIONS[instr.kind]
        operand, axis = self.masked_operand(value), 0 if self.flat or self.turned else 1
        return [
            f"{name} = tl.broadcast_to({operand}, {self.shape(value, self.tile.cols)})",
            f"after{self.prefix}{value} = {self.folded(value, name)}",
            f"{name} = {spec.triton_combine.format(total, f'{spec.triton_scan}({name}, {axis})')}",
            f"{total} = {spec.triton_combine.format(total, f'after{self.prefix}{value}')}",
        ]

    def _loop(self, phase: Phase, folds: Sequence[int], width: int) -> list[str]:
        self.done.difference_update(phase.elements)
        self.loaded.difference_update(phase.elements)
        body = [*self._columns("start + ", width), *self.values(phase.elements)]
        if width > 1:
            body += self._rescaling(folds)
        else:
            body += [self.combined(value, self.masked_operand(value)) for value in folds if value not in self.centred]
            body += self._centring([value for value in folds if value in self.centred])
        body += [*self.stores(phase.stores), *self.checks(phase.elements)]
        bounds = f"{', '.join(self._range())}, {self.tile.cols}"
        head = f"for start in tl.range({bounds}, num_stages={self.config.get('num_stages', 1)}):"
        return [head, *(_INDENT + line for line in body)]

    def _range(self) -> tuple[str, str]:
        """Where the columns of this program begin and end."""
        cols = self.segment.cols
        if self.share.splits == 1 or not isinstance(cols, int):
            return "0", triton_size(cols)
        first, end = inner_range(self.share, cols, self.tile.cols).split(", ", 1)
        return first, end

    # -- sums of squares around a mean --------------------------------------------------------------------

    def _centring(self, folds: Sequence[int]) -> list[str]:
        """Take columns into each lane's sums of how far they are from its first one, and of the squares of that."""
        lines = [f"is_first = start == {self._range()[0]}"] if folds else []
        for value in folds:
            element = self.operand(self.reduction(self.centred[value]).arg)
            off, real = f"{element} - first{value}", " & in_cols" if self.masks_cols else ""
            lines += [
                f"first{value} = tl.where(is_first{real}, {element}, first{value})",
                f"off = tl.where(in_cols, {off}, 0.0)" if real else f"off = {off}",
                f"apart{value} += off",
                f"acc{value} += off * off",
            ]
        return lines

    def _seen(self) -> list[str]:
        """How many columns each lane has seen, and all lanes."""
        (first, end), block = self._range(), self.tile.cols
        columns = end if self.share.splits == 1 else f"tl.maximum({end} - {_bracketed(first)}, 0)"
        seen = f"(columns - {self._lanes(block)} + {block - 1}) // {block}"
        return [f"columns = {columns}", f"seen = ({seen}).to(tl.float32)"]

    def _parts_seen(self) -> list[str]:
        """How many columns each program of the tile has seen."""
        cols, block, splits = self.segment.cols, self.tile.cols, self.share.splits
        assert isinstance(cols, int)
        each = -(-cols // (block * splits)) * block
        seen = f"tl.minimum(tl.maximum({cols} - {self._lanes(splits)} * {each}, 0), {each})"
        return [f"all_seen = ({seen}).to(tl.float32)"]

    def _lanes(self, count: int) -> str:
        """Numbers from 0, where a tile's columns lie in a tensor."""
        return f"tl.arange(0, {count})" + ("" if self.flat else f"[{self.across}]")

    def _off_centre(self, value: int) -> list[str]:
        """How far the mean of each lane is from that of all columns."""
        mean = f"{self.name(self.centred[value])} / tl.maximum(columns, 1)"
        return [f"off{value} = first{value} - {mean} + apart{value} / tl.maximum(seen, 1.0)"]

    # -- sums that follow a maximum -----------------------------------------------------------------------

    def _rescaling(self, folds: Sequence[int]) -> list[str]:
        """Take chunks into maxima and the sums below them; one of nothing but -inf adds exp(-inf - 0), not NaN."""
        fold_max, fold_sum = REDUCTIONS["max"].triton_reduce, REDUCTIONS["sum"].triton_reduce
        larger = REDUCTIONS["max"].triton_combine
        lines: list[str] = []
        for top in [value for value in folds if value not in self.rescaled]:
            lines += [
                f"n{top} = {self.masked_operand(top)}",
                f"top{top} = {larger.format(f'acc{top}', f'{fold_max}(n{top}, 1)')}",
                f"base{top} = {_finite(f'top{top}')}",
            ]
            for total in [value for value in folds if self.rescaled.get(value) == top]:
                kept = f"acc{total} * {_exponential(f'acc{top} - base{top}')}"
                lines.append(f"acc{total} = {kept} + {fold_sum}({_exponential(f'n{top} - base{top}[:, None]')}, 1)")
            lines.append(f"acc{top} = top{top}")
        return lines

    def _folded(self, value: int) -> str:
        """What the lanes of an accumulator are folded to: ``v<top>`` exists by the time its sum does."""
        top = self.rescaled.get(value)
        if value in self.centred:
            return f"acc{value} - apart{value} * apart{value} / tl.maximum(seen, 1.0) + seen * off{value} * off{value}"
        if top is None:
            return f"acc{value}"
        # Columns of one program may all be -inf, and those of a row not.
        base = self.name(top) if self.launches == 1 else _finite(self.name(top))
        return f"acc{value} * {_exponential(f'acc{top} - {base}')}"


def _bracketed(text: str) -> str:
    return f"({text})" if " " in text else text


def _finite(text: str) -> str:
    """A largest number, or 0 of nothing but -inf."""
    return f"tl.where({text} == float('-inf'), 0.0, {text})"


def _exponential(text: str) -> str:
    return op_spec("exp").triton.format(text)


def _statements(lines: Iterable[str]) -> list[str]:
    """Lines joined to top-level statements: what is indented belongs to the line above."""
    found: list[str] = []
    for line in lines:
        if line.startswith(_INDENT):
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return found
