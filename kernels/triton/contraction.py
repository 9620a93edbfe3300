"""A Triton program of a segment with matmuls: sums over the inner dimension in a loop, then the epilogue on its tile.

Each side of a product is a function of its positions, so the epilogue, the weights and the activations each have a
``row`` and a ``col`` of their own. With one row, sums are lanes of products that are folded once at the end: what
counts then is how many bytes are on their way. With more rows tensor cores multiply, weights on the wide side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.kernels.gpu.launch import interpreter_is_on
from fuseplan.kernels.gpu.overlap import overlapped
from fuseplan.kernels.ir.backend import Config
from fuseplan.kernels.ir.index import Index, divides
from fuseplan.kernels.ir.ir import Buffer, Dot, Instr, Load, Product, Reduce, RowValue, Segment, ancestors
from fuseplan.kernels.ir.ops import REDUCTIONS
from fuseplan.kernels.ir.schedule import reduction_depths
from fuseplan.kernels.triton.index import triton_size
from fuseplan.kernels.triton.segment import SegmentEmitter, _statements
from fuseplan.kernels.triton.split_sums import Share, handed_over, inner_range, numbers_each, split_of_program
from fuseplan.kernels.triton.values import fold_identity, index_extent, literal, tl_type

_INDENT = "    "
#: What tensor cores multiply; anything else is multiplied as float32.
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Function:
    """A helper of the generated module; its parameters come before the kernel's own arguments."""

    name: str
    parameters: tuple[str, ...]
    lines: tuple[str, ...]


class ContractionEmitter(SegmentEmitter):
    """Emits a segment with products; :attr:`functions` are what its statements call.

    ``arguments`` are the kernel's own, which the functions are given too; ``name`` tells those of segments apart;
    ``share`` says how many programs a tile has.
    """

    def __init__(
        self, buffers: Sequence[Buffer], names: Sequence[str], segment: Segment, config: Config, arguments: str,
        name: str = "", share: Share | None = None,
    ) -> None:
        super().__init__(buffers, names, segment, config)
        self.arguments, self.suffix, self.share = arguments, name, share or Share()
        self.block = int(config["block_inner"])
        self.functions: list[Function] = []
        live = ancestors(segment.body, (value for store in segment.stores for value in store.values))
        body = [segment.body[value] for value in live]
        self.dots = list(dict.fromkeys(one for one in body if isinstance(one, Dot)))
        self.row_values = list(dict.fromkeys(one for one in body if isinstance(one, RowValue)))
        used = {one.product for one in self.dots} | {one.product for one in self.row_values}
        lefts = dict.fromkeys(segment.products[number].left for number in sorted(used))
        self.lefts = [_Left(self, left, number) for number, left in enumerate(lefts)]

    def lines(self) -> list[str]:
        picked = [f"n{number} = {self._picked(dot.index)}" for number, dot in enumerate(self.dots)]
        loops = [line for left in self.lefts for line in self._summed(left)]
        per_row = [line for left in self.lefts for line in left.values(left.behind(self._own(left)))]
        rest = [*per_row, *self.single_pass()]
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

    def _left_of(self, product: int) -> _Left:
        return next(one for one in self.lefts if one.whole == self.segment.products[product].left)

    # -- the loops over the inner dimension ---------------------------------------------------------------

    def _summed(self, left: _Left) -> list[str]:
        """All sums of the products that share a left side, and its numbers for each row."""
        dots = [number for number, dot in enumerate(self.dots) if self.product(dot).left == left.whole]
        wanted = list(dict.fromkeys(self.product(self.dots[number]).left_value for number in dots))
        lines: list[str] = []
        levels = left.levels([*wanted, *self._own(left)])
        late = max((left.depths[value] for value in wanted), default=0)
        for level, folds in enumerate(levels):
            # The last fold shares the loop of the sums where these do not wait for it.
            sums = dots if level == len(levels) - 1 and late <= level else []
            lines += self._sums(left, folds, sums, wanted if sums else [], level)
        if not levels or late > len(levels) - 1:
            lines += self._sums(left, [], dots, wanted, len(levels))
        return lines

    def _own(self, left: _Left) -> list[int]:
        """Numbers for each row of a left side that the epilogue reads."""
        return [one.value for one in self.row_values if self._left_of(one.product) is left]

    def _sums(
        self, left: _Left, folds: Sequence[int], dots: Sequence[int], wanted: Sequence[int], level: int
    ) -> list[str]:
        """A loop over the inner dimension, with the folds and sums that it makes; none where one block is all of it."""
        call = left.function([*wanted, *folds], f"read{self.suffix}_left{left.number}_{level}", self.functions)
        results = [*(f"a{value}" for value in wanted), *(f"f{value}" for value in folds)]
        masks = ", in_rows" if self.masks_rows else ""
        positions = "row, k[None, :]" if not self.flat else "row, k"
        edge = (", in_k" if self.flat else ", in_k[None, :]") if left.masks_cols else ""
        given = "".join(f", {left.name(value)}" for value in call.folded)
        # Weights come from afar: they are asked for first.
        body = [f"w{number} = {self._weights(number, left)}" for number in dots]
        body.append(f"{', '.join(results)} = {call.name}({positions}{masks}{edge}{given}, {self.arguments})")
        if left.masks_cols:
            body.insert(0, f"in_k = k < {triton_size(left.segment.cols)}")
        if left.in_one_block:
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
                *(left.accumulator(value) for value in folds), *(self._zeros(number) for number in dots),
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
        shape = (cols, self.block) if self.flat else (cols, self.tile.rows)
        return f"sum{number} = tl.zeros({shape}, {tl_type(self._held(number))})"

    def _held(self, number: int) -> str:
        return "float64" if self.dots[number].dtype == "float64" else "float32"

    def _weights(self, number: int, left: _Left) -> str:
        """A block of the weights of a sum."""
        product = self.product(self.dots[number])
        name = f"read{self.suffix}_right{self.segment.products.index(product)}"
        _Right(self, product).function(name, product, self.functions)
        masks = (", in_cols[:, None]" if self.flat else ", tl.trans(in_cols)") if self.masks_cols else ""
        edge = ", in_k[None, :]" if left.masks_cols else ""
        return f"{name}({self._weight_rows(number)}, k[None, :]{masks}{edge}, {self.arguments})"

    def _weight_rows(self, number: int) -> str:
        return f"n{number}[:, None]" if self.flat else f"tl.trans(n{number})"

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
        dtype = self._dot_type(product)
        given = f"w{number}.to({tl_type(dtype)}), tl.trans({activations}).to({tl_type(dtype)})"
        precision = ', input_precision="ieee"' if dtype == "float32" else ""
        return f"tl.dot({given}{total}{precision})"

    def _dot_type(self, product: Product) -> str:
        """The type in which tensor cores multiply: that of the weights, where it has half the bits."""
        stored = {self.buffers[one.buffer].dtype for one in product.right.loads}
        dtype = next(iter(stored)) if len(stored) == 1 and stored <= set(_HALVES) else "float32"
        # Triton's interpreter multiplies the bits of bfloat16 numbers.
        return "float32" if dtype == "bfloat16" and interpreter_is_on() else dtype

    def _total(self, number: int) -> str:
        folded = f"tl.sum(sum{number}, 1)" if self.flat else f"tl.trans(sum{number})"
        return f"dot{number} = {folded}"


@dataclass(frozen=True)
class _Call:
    name: str
    #: Folds of the side that the function is given.
    folded: tuple[int, ...]


class _Side(SegmentEmitter):
    """Emits values of one side of a product; ``row`` and ``col`` are parameters."""

    def __init__(self, outer: ContractionEmitter, side: Segment, rows: int, prefix: str) -> None:
        config = {**outer.config, "block_rows": rows, "block_cols": outer.block}
        super().__init__(outer.buffers, outer.names, side, config)
        self.outer, self.prefix = outer, prefix
        self.masks_cols = divides(outer.block, side.cols) is None
        #: One block holds the inner dimension.
        self.in_one_block = isinstance(side.cols, int) and side.cols <= outer.block and outer.share.splits == 1

    def results(self, values: Sequence[int]) -> list[str]:
        """Their names; beyond the last column they are 0."""
        names = [self.tensor(value) for value in values]
        return [f"tl.where(in_cols, {name}, 0.0)" if self.masks_cols else name for name in names]

    def parameters(self) -> list[str]:
        return ["row", "col", *(["in_rows"] if self.masks_rows else []), *(["in_cols"] if self.masks_cols else [])]


class _Left(_Side):
    """The side of the activations; its folds are made in the loops of the products."""

    def __init__(self, outer: ContractionEmitter, left: Segment, number: int) -> None:
        super().__init__(outer, left, outer.tile.rows, f"l{number}")
        self.whole, self.number = left, number
        self.tile, self.flat, self.masks_rows = outer.tile, outer.tile.flat, outer.masks_rows
        self.depths = reduction_depths(self.segment)

    def levels(self, wanted: Sequence[int]) -> list[list[int]]:
        """The folds behind some values, by how many folds each waits for."""
        behind = ancestors(self.segment.body, wanted)
        folds = [value for value in behind if isinstance(self.segment.body[value], Reduce)]
        depth = max((self.depths[value] for value in folds), default=0)
        return [[value for value in folds if self.depths[value] == level + 1] for level in range(depth)]

    def folds(self, values: Sequence[int]) -> list[int]:
        """The folds that some values are made of."""
        return [value for value in ancestors(self.segment.body, values) if isinstance(self.segment.body[value], Reduce)]

    def behind(self, values: Sequence[int]) -> list[int]:
        """Some values and what they are made of, up to folds."""
        body = self.segment.body
        return ancestors(body, values, lambda value: not isinstance(body[value], Reduce))

    def function(self, values: Sequence[int], name: str, functions: list[Function]) -> _Call:
        """A function that computes values, and operands of folds, at some rows and columns."""
        body = self.segment.body
        folds = [value for value in values if isinstance(body[value], Reduce)]
        plain = [value for value in values if value not in folds]
        roots = [*plain, *(self.reduction(value).arg for value in folds)]
        inside = self.behind(roots)
        given = tuple(value for value in inside if isinstance(body[value], Reduce))
        self.done, self.loaded = set(), set()
        lines = [f"{self.prefix}in_cols = in_cols"] if self.masks_cols else []
        lines += self.values(inside)
        results = [*self.results(plain), *(self.masked_operand(value) for value in folds)]
        lines = [*self.coordinates.definitions(), *lines, f"return {', '.join(results)}"]
        self.done, self.loaded = set(), set()
        parameters = (*self.parameters(), *(self.name(value) for value in given))
        functions.append(Function(name, parameters, tuple(lines)))
        return _Call(name, given)

    def accumulator(self, value: int) -> str:
        dtype = self.fold_type(value)
        identity = literal(fold_identity(self.reduction(value).kind, dtype), dtype)
        shape = (self.outer.block,) if self.flat else (self.tile.rows, self.outer.block)
        return f"acc{self.prefix}{value} = tl.full({shape}, {identity}, {tl_type(dtype)})"

    def combined(self, value: int, operand: str) -> str:
        total = f"acc{self.prefix}{value}"
        return f"{total} = {REDUCTIONS[self.reduction(value).kind].triton_combine.format(total, operand)}"


class _Right(_Side):
    """The side of the weights, whose rows are those that the epilogue's columns pick."""

    def __init__(self, outer: ContractionEmitter, product: Product) -> None:
        super().__init__(outer, product.right, outer.tile.cols, "r")
        self.flat, self.masks_rows = False, outer.masks_cols
        # Weights are read once.
        self.policies = {
            one: "evict_first" for one in product.right.loads
            if isinstance(one, Load) and index_extent(product.right, one.index) == (True, True)
        }

    def function(self, name: str, product: Product, functions: list[Function]) -> str:
        if name not in (one.name for one in functions):
            value, instr = product.right_value, self.segment.body[product.right_value]
            if isinstance(instr, Load) and not self.outer.flat:  # tensor cores take it as it is stored
                inside, text = [self.early_load(value, instr)], self._raw(value, instr)
            else:
                inside, text = self.values(ancestors(self.segment.body, [value])), self.tensor(value)
            result = f"tl.where(in_cols, {text}, 0.0)" if self.masks_cols else text
            lines = (*self.coordinates.definitions(), *inside, f"return {result}")
            functions.append(Function(name, tuple(self.parameters()), lines))
        return name
