"""A Triton program of a segment with matmuls: sums over the inner dimension in a loop, then the epilogue on its tile.

Each side of a product is a function of its positions, so the epilogue, the weights and the activations each have a
``row`` and a ``col`` of their own. With one row, sums are lanes of products that are folded once at the end: what
counts then is how many bytes are on their way. With more rows, or blocks of more, tensor cores multiply, weights on the
wide side.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.kernels.gpu.launch import interpreter_is_on
from fuseplan.kernels.gpu.overlap import overlapped
from fuseplan.kernels.gpu.tile import HALVES, TENSOR_CORE_ROWS
from fuseplan.kernels.ir.backend import Config
from fuseplan.kernels.ir.index import Index
from fuseplan.kernels.ir.ir import Buffer, Dot, Instr, Product, RowValue, Segment
from fuseplan.kernels.ir.rewrite import ancestors
from fuseplan.kernels.triton.contraction_sides import Function, Left, Right
from fuseplan.kernels.triton.index import triton_size
from fuseplan.kernels.triton.segment import SegmentEmitter, _statements
from fuseplan.kernels.triton.split_sums import Share, handed_over, inner_range, numbers_each, split_of_program
from fuseplan.kernels.triton.values import tl_type

_INDENT = "    "


class ContractionEmitter(SegmentEmitter):
    """Emits a segment with products; :attr:`functions` are what its statements call.

    ``arguments`` are the kernel's own, which the functions are given too; ``name`` tells those of segments apart;
    ``share`` says how many programs a tile has.
    """

    def __init__(
        self, buffers: Sequence[Buffer], names: Sequence[str], segment: Segment, config: Config, arguments: str,
        name: str = "", share: Share | None = None,
    ) -> None:
        super().__init__(buffers, names, segment, config, share)
        self.flat = self.tile.flat and config["block_rows"] == 1
        self.traps = not self.flat
        #: Rows that tensor cores multiply; a row alone is all of them.
        self.lanes = max(self.tile.rows, TENSOR_CORE_ROWS)
        self.arguments, self.suffix = arguments, name
        self.block = int(config["block_inner"])
        self.functions: list[Function] = []
        live = ancestors(segment.body, (value for store in segment.stores for value in store.values))
        body = [segment.body[value] for value in live]
        self.dots = list(dict.fromkeys(one for one in body if isinstance(one, Dot)))
        self.row_values = list(dict.fromkeys(one for one in body if isinstance(one, RowValue)))
        used = {one.product for one in self.dots} | {one.product for one in self.row_values}
        lefts = dict.fromkeys(segment.products[number].left for number in sorted(used))
        self.lefts = [Left(self, left, number) for number, left in enumerate(lefts)]

    def lines(self) -> list[str]:
        picked = [f"n{number} = {self._picked(dot.index)}" for number, dot in enumerate(self.dots)]
        loops = [line for left in self.lefts for line in self._summed(left)]
        behind = [(left, left.behind(self._own(left))) for left in self.lefts]
        per_row = [line for left, values in behind for line in left.values(values)]
        checks = [line for left, values in behind for line in left.checks(values)]
        rest = [*per_row, *self.single_pass(), *checks]
        sums = [f"dot{number}" for number in range(len(self.dots))]
        folds = [left.name(value) for left in self.lefts for value in left.folds(self._own(left))]
        tile, each = (self.tile.rows, self.tile.cols), numbers_each(self.segment, self.config)
        body = [*picked, *loops, *handed_over(self.share, sums, folds, tile, each, rest)]
        body = [*self.coordinates.definitions(), *body]
        lines = _statements([*split_of_program(self.share), *self._geometry("\n".join(body)), *body])
        # Memory is first accessed by the functions of a product's sides.
        return overlapped(lines, self.config, f"read{self.suffix}_", "tl.store(")

    def _expression(self, instr: Instr) -> str:
        if isinstance(instr, Dot):
            return f"dot{self.dots.index(instr)}"
        if isinstance(instr, RowValue):
            return self._left_of(instr.product).name(instr.value)
        return super()._expression(instr)

    def product(self, dot: Dot) -> Product:
        return self.segment.products[dot.product]

    def _left_of(self, product: int) -> Left:
        return next(one for one in self.lefts if one.whole == self.segment.products[product].left)

    # -- the loops over the inner dimension ---------------------------------------------------------------

    def _summed(self, left: Left) -> list[str]:
        """All sums of the products that share a left side, and its numbers for each row."""
        dots = [number for number, dot in enumerate(self.dots) if self.product(dot).left == left.whole]
        wanted = list(dict.fromkeys(self.product(self.dots[number]).left_value for number in dots))
        levels = left.levels([*wanted, *self._own(left)])
        if max((left.depths[value] for value in wanted), default=0) >= len(levels):
            levels.append([])  # the sums wait for all folds: none shares their loop
        lines: list[str] = []
        for level, folds in enumerate(levels):
            last = level == len(levels) - 1
            lines += self._sums(left, folds, dots if last else [], wanted if last else [], level)
        return lines

    def _own(self, left: Left) -> list[int]:
        """Numbers for each row of a left side that the epilogue reads."""
        return [one.value for one in self.row_values if self._left_of(one.product) is left]

    def _sums(
        self, left: Left, folds: Sequence[int], dots: Sequence[int], wanted: Sequence[int], level: int
    ) -> list[str]:
        """A loop over the inner dimension, with the folds and sums that it makes; none where one block is all of it."""
        name = f"read{self.suffix}_left{left.number}_{level}"
        taken = left.function([*wanted, *folds], name, self.functions)
        results = [*(f"a{value}" for value in wanted), *(f"f{value}" for value in folds)]
        masks = ", in_rows" if self.masks_rows else ""
        positions = "row, k[None, :]" if not self.flat else "row, k"
        edge = (", in_k" if self.flat else ", in_k[None, :]") if left.masks_cols else ""
        given = "".join(f", {left.name(value)}" for value in taken)
        # Weights come from afar: they are asked for first.
        at_once = left.segment.cols <= self.block and self.share.splits == 1
        body = [f"w{number} = {self._weights(number, left, '0' if at_once else 'start')}" for number in dots]
        body.append(f"{', '.join(results)} = {name}({positions}{masks}{edge}{given}, {self.arguments})")
        if left.masks_cols:
            body.insert(0, f"in_k = k < {triton_size(left.segment.cols)}")
        if at_once:
            body += [f"acc{left.prefix}{value} = f{value}" for value in folds]
            body += [f"sum{number} = {self._multiplied(number)}" for number in dots]
            lines = [f"k = tl.arange(0, {self.block})", *body]
        else:
            body += [left.combined(value, f"f{value}") for value in folds]
            body += [self._step(number) for number in dots]
            stages, inner = int(self.config.get("num_stages", 1)), left.segment.cols
            assert isinstance(inner, int)
            walked = inner_range(self.share, inner, self.block)
            lines = [
                *(left.accumulator(value, self.block) for value in folds), *(self._zeros(number) for number in dots),
                f"for start in tl.range({walked}, {self.block}, num_stages={stages}):",
                *(_INDENT + line for line in [f"k = start + tl.arange(0, {self.block})", *body]),
            ]
        for value in folds:
            lines += left.fold(value, f"acc{left.prefix}{value}")
        return [*lines, *(self._total(number) for number in dots)]

    def _picked(self, index: Index) -> str:
        """Rows of the weights, one for each column of the tile."""
        same = "" if self.segment.col_axis in index.axes() else " + col * 0"
        return self.position(index) + same

    def _zeros(self, number: int) -> str:
        cols = self.tile.cols
        shape = (cols, self.block) if self.flat else (cols, self.lanes)
        dtype = "float64" if self.dots[number].dtype == "float64" else "float32"
        return f"sum{number} = tl.zeros({shape}, {tl_type(dtype)})"

    def _weights(self, number: int, left: Left, first: str) -> str:
        """A block of the weights of a sum, from column ``first`` on."""
        product = self.product(self.dots[number])
        name = f"read{self.suffix}_right{self.segment.products.index(product)}"
        column = Index.coord(self.segment.col_axis, self.segment.cols)
        in_order = all(one.index == column for one in self.dots if self.product(one) == product)
        Right(self, product, in_order).function(name, product, self._dot_type(product), self.functions)
        masks = (", in_cols[:, None]" if self.flat else ", tl.trans(in_cols)") if self.masks_cols else ""
        edge = ", in_k[None, :]" if left.masks_cols else ""
        block = self._block_numbers()[1]
        first_row = f"{block} * {self.tile.cols}" if block else "0"
        rows = f"n{number}[:, None]" if self.flat else f"tl.trans(n{number})"
        return f"{name}({rows}, k[None, :]{masks}{edge}, {first_row}, {first}, {self.arguments})"

    def _step(self, number: int) -> str:
        """Take one block of the inner dimension into a sum."""
        if self.flat:
            return f"sum{number} += {self._multiplied(number)}"
        return f"sum{number} = {self._multiplied(number, f', sum{number}')}"

    def _multiplied(self, number: int, total: str = "") -> str:
        """The product of two blocks, added to a total by tensor cores."""
        product = self.product(self.dots[number])
        activations = f"a{product.left_value}"
        if self.flat:
            return f"w{number} * {activations}[None, :]"
        dtype, left = self._dot_type(product), self._left_of(self.dots[number].product)
        if self.tile.rows < self.lanes or not left.extent[product.left_value][0]:
            activations = f"tl.broadcast_to({activations}, ({self.lanes}, {self.block}))"
        given = f"w{number}.to({tl_type(dtype)}), tl.trans({activations}).to({tl_type(dtype)})"
        precision = ', input_precision="ieee"' if dtype == "float32" else ""
        return f"tl.dot({given}{total}{precision})"

    def _dot_type(self, product: Product) -> str:
        """The type in which tensor cores multiply: that of the operands, where it has half the bits."""
        dtype = product.dtype if product.dtype in HALVES else "float32"
        # Triton's interpreter multiplies the bits of bfloat16 numbers.
        return "float32" if dtype == "bfloat16" and interpreter_is_on() else dtype

    def _total(self, number: int) -> str:
        if self.flat:
            return f"dot{number} = tl.sum(sum{number}, 1)"
        rows = f"tl.max(sum{number}, 1, keep_dims=True)" if self.tile.rows < self.lanes else f"sum{number}"
        return f"dot{number} = tl.trans({rows})"
