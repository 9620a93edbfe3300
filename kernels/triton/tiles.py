"""A Triton program of a matmul of many rows: tile by tile, with both sides brought by the tensor memory accelerator.

What counts here are tensor cores that never wait, so each multiprocessor has one program that walks the tiles
(persistent), and blocks of both sides are copied to shared memory ahead of their use without any thread's work. That
asks for sides that lie in memory as the matmul reads them; the epilogue is free. Tiles that are near each other in time
share rows and columns, which the second-level cache then holds (grouped ordering).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.kernels.gpu.launch import interpreter_is_on
from fuseplan.kernels.gpu.overlap import can_overlap, overlapped
from fuseplan.kernels.gpu.tile import tile_of
from fuseplan.kernels.ir.backend import Config, Target
from fuseplan.kernels.ir.index import Coord, evaluate, is_static
from fuseplan.kernels.ir.ir import ITEMSIZE, Buffer, Dot, Instr, KernelIR, Load, Product, Segment, ancestors
from fuseplan.kernels.triton.segment import SegmentEmitter, _statements
from fuseplan.kernels.triton.values import tl_type

_INDENT = "    "
#: What tensor cores multiply as it lies in memory.
_HALVES = ("bfloat16", "float16")
#: The accelerator copies from addresses that are multiples of this, with such strides, in bytes.
_ALIGNMENT = 16
#: Blocks of rows whose tiles come one after another.
_GROUP = 8
#: Rows of the left side up to which weights are what counts, and tiles are another body's.
FEW_ROWS = 128


@dataclass(frozen=True)
class Matrix:
    """Memory that a side of a matmul reads as it lies, [rows, inner]: neighbours along the inner dimension.

    ``offset`` and ``stride`` are in elements.
    """

    buffer: int
    offset: int
    rows: int
    inner: int
    stride: int


def has_accelerator(target: Target) -> bool:
    """Whether the device has a tensor memory accelerator: from Hopper on, as is programmatic dependent launch."""
    return can_overlap(target)


def is_tiled(ir: KernelIR) -> bool:
    """Whether a kernel has a matmul of so many rows that its tiles are walked by persistent programs."""
    return any(segment.products and evaluate(segment.num_rows, {}) > FEW_ROWS for segment in ir.segments)


def refuse(ir: KernelIR, target: Target) -> str | None:
    """Why no program can walk the tiles of ``ir``, whose sizes are static; None where one can."""
    if not has_accelerator(target):
        return f"a matmul of more than {FEW_ROWS} rows, on a device without a tensor memory accelerator"
    if len(ir.segments) != 1:
        return f"a matmul of more than {FEW_ROWS} rows in a kernel of {len(ir.segments)} parts"
    (segment,) = ir.segments
    for one in segment.products:
        for side, value in ((one.left, one.left_value), (one.right, one.right_value)):
            if isinstance(found := matrix_of(ir.buffers, side, value), str):
                return f"a matmul of more than {FEW_ROWS} rows, {found}"
    for instr in segment.body:
        if isinstance(instr, Dot) and _first_row(segment, instr) is None:
            return f"a matmul of more than {FEW_ROWS} rows whose results are not read in the order of its weights"
    return None


def matrix_of(buffers: Sequence[Buffer], side: Segment, value: int) -> Matrix | str:
    """The memory that is a side of a product, or why it is not memory as it lies."""
    instr = side.body[value]
    if not isinstance(instr, Load) or instr.mask is not None or instr.gather is not None:
        return "one of whose sides is computed"
    dtype, index = buffers[instr.buffer].dtype, instr.index
    if dtype not in _HALVES:
        return f"one of whose sides is {dtype}"
    if not all(isinstance(atom, Coord) for atom, _ in index.terms) or index.coefficient(side.col_axis) != 1:
        return "one of whose sides does not lie in rows"
    *rows, inner = side.extents()
    stride, below = 0, 1
    for axis in reversed(range(len(rows))):
        if rows[axis] == 1:
            continue
        stride = stride or int(index.coefficient(axis))
        if index.coefficient(axis) != stride * below:
            return "one of whose sides has rows at several distances"
        below *= rows[axis]
    multiple = _ALIGNMENT // ITEMSIZE[dtype]
    if not stride or stride % multiple or index.const % multiple:
        return f"one of whose sides has rows that do not begin at multiples of {_ALIGNMENT} bytes"
    return Matrix(instr.buffer, int(index.const), below, inner, stride)


def _first_row(segment: Segment, dot: Dot) -> int | None:
    """The row of the weights that column 0 picks, where the columns pick one after another; else None."""
    column = ((Coord(segment.col_axis, segment.cols), 1),)
    return int(dot.index.const) if dot.index.terms == column and is_static(dot.index.const) else None


def tiles(segment: Segment, config: Config) -> tuple[int, int]:
    """Blocks of rows, and of columns."""
    tile = tile_of(segment, config)
    rows, cols = evaluate(segment.num_rows, {}), evaluate(segment.cols, {})
    return -(-rows // tile.rows), -(-cols // tile.cols)


def persistent_programs(ir: KernelIR, config: Config, target: Target) -> int:
    """One for each multiprocessor, as long as there are tiles."""
    rows, cols = tiles(ir.segments[0], config)
    return min(rows * cols, target.cores)


class TileEmitter(SegmentEmitter):
    """Emits a segment with products whose tiles persistent programs walk.

    Threads read what the accelerator cannot: sides in memory that is not ``aligned``.
    """

    def __init__(
        self, buffers: Sequence[Buffer], names: Sequence[str], segment: Segment, config: Config, aligned: bool
    ) -> None:
        super().__init__(buffers, names, segment, config)
        self.block, self.aligned = int(config["block_inner"]), aligned
        live = ancestors(segment.body, (value for store in segment.stores for value in store.values))
        self.dots = list(dict.fromkeys(one for one in map(segment.body.__getitem__, live) if isinstance(one, Dot)))
        #: Each matrix once, with the rows of a block of it.
        self.matrices: dict[Matrix, int] = {}
        for dot in self.dots:
            product = segment.products[dot.product]
            self.matrices.setdefault(self._matrix(product.left, product.left_value), self.tile.rows)
            self.matrices.setdefault(self._matrix(product.right, product.right_value), self.tile.cols)

    def lines(self) -> list[str]:
        body = [line for dot in self.dots[:1] for line in self._sums()] + self.single_pass()
        body = [*self.coordinates.definitions(), *body]
        walked = [*self._order(), *self._geometry("\n".join(body)), *body]
        rows, cols = tiles(self.segment, self.config)
        head = f"for tile in tl.range(pid, {rows * cols}, tl.num_programs(0)):"
        lines = [head, *(f"{_INDENT}{line}".replace("\n", f"\n{_INDENT}") for line in walked)]
        if self.aligned:
            lines = [*self._descriptors(), *lines]
        first = "tl.make_tensor_descriptor(" if self.aligned else "tl.load("
        return overlapped(_statements(lines), self.config, first, "tl.store(")

    def _matrix(self, side: Segment, value: int) -> Matrix:
        found = matrix_of(self.buffers, side, value)
        if isinstance(found, str):
            raise ValueError(f"a matmul {found}")
        return found

    def _descriptors(self) -> list[str]:
        return [
            f"side{number} = tl.make_tensor_descriptor({self.names[one.buffer]} + {one.offset}, "
            f"[{one.rows}, {one.inner}], [{one.stride}, 1], [{rows}, {self.block}])"
            for number, (one, rows) in enumerate(self.matrices.items())
        ]

    def _order(self) -> list[str]:
        """Which tile comes when: all of a group's blocks of rows, then the next block of columns."""
        rows, cols = tiles(self.segment, self.config)
        return [
            f"first_block = tile // {_GROUP * cols} * {_GROUP}",
            f"members = tl.minimum({rows} - first_block, {_GROUP})",
            f"row_block = first_block + tile % {_GROUP * cols} % members",
            f"col_block = tile % {_GROUP * cols} // members",
        ]

    def _block_numbers(self) -> tuple[str, str]:
        return "row_block", "col_block"

    def _sums(self) -> list[str]:
        """The loop over the inner dimension."""
        number = {matrix: at for at, matrix in enumerate(self.matrices)}
        loads, lines = dict[tuple[int, str], str](), []
        for at, dot in enumerate(self.dots):
            product = self.segment.products[dot.product]
            left = number[self._matrix(product.left, product.left_value)]
            right = number[self._matrix(product.right, product.right_value)]
            first = _first_row(self.segment, dot)
            rows = f"row_block * {self.tile.rows}"
            picked = f"col_block * {self.tile.cols}" + (f" + {first}" if first else "")
            one, other = (
                self._taken(loads.setdefault(key, f"block{len(loads)}"), product)
                for key in ((left, rows), (right, picked))
            )
            lines.append(f"dot{at} = tl.dot({one}, {other}.T, dot{at})")
        read = (f"{name} = {self._read(side, row)}" for (side, row), name in loads.items())
        inner, stages = max(matrix.inner for matrix in self.matrices), self.config["num_stages"]
        return [
            *(f"dot{at} = tl.zeros(({self.tile.rows}, {self.tile.cols}), tl.float32)" for at in range(len(self.dots))),
            f"for start in tl.range(0, {inner}, {self.block}, num_stages={stages}):",
            *(_INDENT + line for line in (*read, *lines)),
        ]

    def _read(self, side: int, first: str) -> str:
        """A block of a side from a row on, with zeros behind the end of its rows and of the inner dimension."""
        if self.aligned:
            return f"side{side}.load([({first}).to(tl.int32), start])"
        matrix, rows = list(self.matrices.items())[side]
        row, col = f"({first} + tl.arange(0, {rows}))[:, None]", f"(start + tl.arange(0, {self.block}))[None, :]"
        pointer = f"{self.names[matrix.buffer]} + {matrix.offset} + {row} * {matrix.stride} + {col}"
        return f"tl.load({pointer}, mask=({row} < {matrix.rows}) & ({col} < {matrix.inner}), other=0.0)"

    def _taken(self, name: str, product: Product) -> str:
        # Triton's interpreter multiplies the bits of bfloat16 numbers.
        return f"{name}.to({tl_type('float32')})" if interpreter_is_on() and product.dtype == "bfloat16" else name

    def _expression(self, instr: Instr) -> str:
        return f"dot{self.dots.index(instr)}" if isinstance(instr, Dot) else super()._expression(instr)
