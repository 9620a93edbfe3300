"""A Triton program of a matmul of many rows: tile by tile, with both sides brought by the tensor memory accelerator.

What counts here are tensor cores that never wait, so each multiprocessor has one program that walks the tiles
(persistent), and blocks of both sides are copied to shared memory ahead of their use without any thread's work. That
asks for sides that lie in memory as the matmul reads them; the epilogue is free. Tiles that are near each other in time
share rows and columns, which the second-level cache then holds (grouped ordering).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fuseplan.kernels.gpu.launch import interpreter_is_on
from fuseplan.kernels.gpu.overlap import overlapped
from fuseplan.kernels.gpu.tile import HALVES, ceil_div, tile_of
from fuseplan.kernels.ir.backend import Config, Target
from fuseplan.kernels.ir.index import Coord, Size, as_size, evaluate, is_static
from fuseplan.kernels.ir.ir import ITEMSIZE, Buffer, Dot, Instr, KernelIR, Load, Product, RowValue, Segment
from fuseplan.kernels.ir.rewrite import ancestors
from fuseplan.kernels.triton.index import triton_size
from fuseplan.kernels.triton.segment import SegmentEmitter, _statements
from fuseplan.kernels.triton.values import tl_type

_INDENT = "    "
#: The accelerator copies from addresses that are multiples of this, with such strides, in bytes.
_ALIGNMENT = 16
#: Blocks of rows whose tiles come one after another.
_GROUP = 8
#: Rows of the left side up to which weights are what counts, and tiles are another body's.
FEW_ROWS = 128


@dataclass(frozen=True)
class Matrix:
    """Memory that a side reads as it lies, [rows, inner], inner elements side by side; all sizes in elements."""

    buffer: int
    offset: int
    rows: Size
    inner: int
    stride: int


def is_tiled(ir: KernelIR) -> bool:
    """Whether a kernel has a matmul of so many rows, or a dynamic number, that persistent programs walk its tiles."""
    rows = (segment.num_rows for segment in ir.segments if segment.products)
    return any(not is_static(one) or one > FEW_ROWS for one in rows)


def refuse(ir: KernelIR, target: Target) -> str | None:
    """Why no program can walk the tiles of ``ir``, of whose sizes rows alone may be dynamic; None where one can."""
    if not target.gpu.copies_tensors:
        return f"a matmul of more than {FEW_ROWS} rows, on a device without a tensor memory accelerator"
    if len(ir.segments) != 1:
        return f"a matmul of more than {FEW_ROWS} rows in a kernel of {len(ir.segments)} parts"
    (segment,) = ir.segments
    if not is_static(segment.cols, *(size for one in segment.products for size in (*one.right.rows, one.right.cols))):
        return "a matmul with dynamic sizes besides its rows"
    for one in segment.products:
        sides = [matrix_of(ir.buffers, *side) for side in _sides(one)]
        dtypes = {ir.buffers[side.buffer].dtype for side in sides if isinstance(side, Matrix)}
        reasons = [side for side in sides if isinstance(side, str)]
        if reasons or len(dtypes) > 1:
            return f"a matmul of more than {FEW_ROWS} rows, {reasons[0] if reasons else 'of two types'}"
    for instr in segment.body:
        if isinstance(instr, RowValue):
            return f"a matmul of more than {FEW_ROWS} rows, with a factor for each row of its left side"
        if isinstance(instr, Dot) and _first_row(segment, instr) is None:
            return f"a matmul of more than {FEW_ROWS} rows whose results are not read in the order of its weights"
    return None


def _sides(product: Product) -> tuple[tuple[Segment, int], tuple[Segment, int]]:
    return (product.left, product.left_value), (product.right, product.right_value)


def matrix_of(buffers: Sequence[Buffer], side: Segment, value: int) -> Matrix | str:
    """The memory that a side of a product reads, or why the side is not simply memory."""
    instr = side.body[value]
    if not isinstance(instr, Load) or instr.mask is not None or instr.gather is not None:
        return "one of whose sides is computed"
    dtype, index = buffers[instr.buffer].dtype, instr.index
    if dtype not in HALVES:
        return f"one of whose sides is {dtype}"
    if not all(isinstance(atom, Coord) for atom, _ in index.terms) or index.coefficient(side.col_axis) != 1:
        return "one of whose sides does not lie in rows"
    stride: Size = 0
    below: Size = 1
    for axis in reversed(range(len(side.rows))):
        if side.rows[axis] == 1:
            continue
        stride = index.coefficient(axis) if stride == 0 else stride
        if as_size(index.coefficient(axis) - stride * below) != 0:
            return "one of whose sides has rows at several distances"
        below = as_size(below * side.rows[axis])
    multiple = _ALIGNMENT // ITEMSIZE[dtype]
    if not is_static(stride, index.const, side.cols):
        return "one of whose sides has rows at dynamic distances"
    if stride == 0:
        return "one of whose sides has the same memory for all rows"
    if stride % multiple or index.const % multiple:
        return f"one of whose sides has rows that do not begin at multiples of {_ALIGNMENT} bytes"
    return Matrix(instr.buffer, index.const, below, side.cols, stride)


def _first_row(segment: Segment, dot: Dot) -> int | None:
    """The row of the weights that column 0 picks, where the columns pick one after another; else None."""
    column = ((Coord(segment.col_axis, segment.cols), 1),)
    return int(dot.index.const) if dot.index.terms == column and is_static(dot.index.const) else None


@dataclass(frozen=True)
class Block:
    """``rows`` rows of a matrix by a block of the inner dimension; ``first``: of the weights, the row of column 0."""

    matrix: Matrix
    rows: int
    first: int | None = None


def steps(buffers: Sequence[Buffer], segment: Segment, config: Config) -> tuple[tuple[Dot, Block, Block], ...]:
    """Each sum that is needed, and the blocks whose product a step adds to it; ValueError where a side is computed."""
    tile = tile_of(segment, config)
    live = ancestors(segment.body, (value for store in segment.stores for value in store.values))
    found = []
    for dot in dict.fromkeys(one for one in map(segment.body.__getitem__, live) if isinstance(one, Dot)):
        left, right = (matrix_of(buffers, *side) for side in _sides(segment.products[dot.product]))
        if isinstance(left, str) or isinstance(right, str):
            raise ValueError(f"a matmul {left if isinstance(left, str) else right}")
        found.append((dot, Block(left, tile.rows), Block(right, tile.cols, _first_row(segment, dot))))
    return tuple(found)


def rows_on_their_way(buffers: Sequence[Buffer], segment: Segment, config: Config) -> int:
    """Rows of all blocks that a step brings, each block once."""
    return sum(one.rows for one in {one for _, *sides in steps(buffers, segment, config) for one in sides})


def tiles(segment: Segment, config: Config) -> tuple[Size, int]:
    """Blocks of rows, and of columns."""
    tile = tile_of(segment, config)
    return ceil_div(segment.num_rows, tile.rows), -(-evaluate(segment.cols, {}) // tile.cols)


def persistent_programs(ir: KernelIR, config: Config, target: Target, sizes: Mapping[str, int]) -> int:
    """One for each multiprocessor, as long as there are tiles."""
    rows, cols = tiles(ir.bind(sizes).segments[0], config)
    return min(evaluate(rows, {}) * cols, target.cores)


class TileEmitter(SegmentEmitter):
    """Emits a segment whose tiles persistent programs walk; threads read sides in memory that is not ``aligned``."""

    def __init__(
        self, buffers: Sequence[Buffer], names: Sequence[str], segment: Segment, config: Config, aligned: bool
    ) -> None:
        super().__init__(buffers, names, segment, config)
        if not is_static(segment.num_rows) and int(config["block_rows"]) < FEW_ROWS:
            raise ValueError("a matmul with a dynamic number of rows, in blocks of few")
        self.block, self.aligned = int(config["block_inner"]), aligned
        self.steps = steps(buffers, segment, config)
        self.dots = [dot for dot, *_ in self.steps]
        self.blocks = list(dict.fromkeys(one for _, *sides in self.steps for one in sides))
        #: What descriptors are of: a matrix, and the rows of a block.
        self.described = list(dict.fromkeys((one.matrix, one.rows) for one in self.blocks))

    def lines(self) -> list[str]:
        sums_and_rest = [*(self._sums() if self.dots else []), *self.single_pass()]
        body = [*self.coordinates.definitions(), *sums_and_rest]
        walked = [*self._order(), *self._geometry("\n".join(body)), *body]
        rows, cols = tiles(self.segment, self.config)
        count = rows * cols if isinstance(rows, int) else f"{triton_size(rows)} * {cols}"
        head = f"for tile in tl.range(pid, {count}, tl.num_programs(0)):"
        lines = [head, *(f"{_INDENT}{line}".replace("\n", f"\n{_INDENT}") for line in walked)]
        if self.aligned:
            lines = [*self._descriptors(), *lines]
        first = "tl.make_tensor_descriptor(" if self.aligned else "tl.load("
        return overlapped(_statements(lines), self.config, first, "tl.store(")

    def _descriptors(self) -> list[str]:
        return [
            f"side{number} = tl.make_tensor_descriptor({self.names[one.buffer]} + {one.offset}, "
            f"[{triton_size(one.rows)}, {one.inner}], [{one.stride}, 1], [{rows}, {self.block}])"
            for number, (one, rows) in enumerate(self.described)
        ]

    def _order(self) -> list[str]:
        """Which tile comes when: all of a group's blocks of rows, then the next block of columns."""
        rows, cols = tiles(self.segment, self.config)
        return [
            f"first_block = tile // {_GROUP * cols} * {_GROUP}",
            f"members = tl.minimum({triton_size(rows)} - first_block, {_GROUP})",
            f"row_block = first_block + tile % {_GROUP * cols} % members",
            f"col_block = tile % {_GROUP * cols} // members",
        ]

    def _block_numbers(self) -> tuple[str, str]:
        return "row_block", "col_block"

    def _sums(self) -> list[str]:
        """The loop over the inner dimension."""
        name = {block: f"block{number}" for number, block in enumerate(self.blocks)}
        read = [f"{name[block]} = {self._read(block)}" for block in self.blocks]
        added = [
            f"dot{number} = tl.dot({self._taken(left, name[left])}, {self._taken(right, name[right])}.T, dot{number})"
            for number, (_, left, right) in enumerate(self.steps)
        ]
        inner, stages = max(block.matrix.inner for block in self.blocks), self.config["num_stages"]
        shape = f"({self.tile.rows}, {self.tile.cols})"
        return [
            *(f"dot{number} = tl.zeros({shape}, tl.float32)" for number in range(len(self.steps))),
            f"for start in tl.range(0, {inner}, {self.block}, num_stages={stages}):",
            *(_INDENT + line for line in (*read, *added)),
        ]

    def _read(self, block: Block) -> str:
        """A block, with zeros behind the last row and behind the end of the inner dimension."""
        matrix, rows = block.matrix, block.rows
        first = f"row_block * {rows}" if block.first is None else f"col_block * {rows}"
        first += f" + {block.first}" if block.first else ""
        if self.aligned:
            return f"side{self.described.index((matrix, rows))}.load([({first}).to(tl.int32), start])"
        row, col = f"({first} + tl.arange(0, {rows}))[:, None]", f"(start + tl.arange(0, {self.block}))[None, :]"
        pointer = f"{self.names[matrix.buffer]} + {matrix.offset} + {row} * {matrix.stride} + {col}"
        return f"tl.load({pointer}, mask=({row} < {triton_size(matrix.rows)}) & ({col} < {matrix.inner}), other=0.0)"

    def _taken(self, block: Block, name: str) -> str:
        # Triton's interpreter multiplies the bits of bfloat16 numbers.
        widens = interpreter_is_on() and self.buffers[block.matrix.buffer].dtype == "bfloat16"
        return f"{name}.to({tl_type('float32')})" if widens else name

    def _expression(self, instr: Instr) -> str:
        return f"dot{self.dots.index(instr)}" if isinstance(instr, Dot) else super()._expression(instr)
