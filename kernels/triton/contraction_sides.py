"""The two sides of a matmul in a Triton program: functions of a row and a column that a loop calls block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.kernels.ir.index import FloorDiv, Index, axes_of, divides
from fuseplan.kernels.ir.ir import ITEMSIZE, Cast, Load, Product, Reduce, Segment, operands
from fuseplan.kernels.ir.reduction_loops import reduction_depths
from fuseplan.kernels.ir.rewrite import ancestors
from fuseplan.kernels.triton.index import Coordinates
from fuseplan.kernels.triton.segment import SegmentEmitter
from fuseplan.kernels.triton.values import index_extent, tl_type


@dataclass(frozen=True)
class Function:
    """A helper of the generated module; its parameters come before the kernel's own arguments."""

    name: str
    parameters: tuple[str, ...]
    lines: tuple[str, ...]


def run_of(index: Index, axis: int, most: int) -> int:
    """How many neighbours along an axis read one element: a power of two, where all blocks of so many do; 1 without."""
    dependent = [atom for atom, _ in index.terms if axis in axes_of(atom)]
    run = most
    for atom in dependent:
        if not isinstance(atom, FloorDiv) or atom.base.coefficient(axis) != 1 or len(atom.base.terms) > 1:
            return 1
        run = math.gcd(run, atom.divisor, atom.base.const)
    return run if dependent else 1


class Side(SegmentEmitter):
    """Emits values of one side of a product; ``row`` and ``col`` are parameters."""

    def __init__(self, outer: SegmentEmitter, side: Segment, rows: int, prefix: str) -> None:
        self.block = int(outer.config["block_inner"])
        config = {**outer.config, "block_rows": rows, "block_cols": self.block}
        super().__init__(outer.buffers, outer.names, side, config)
        self.outer, self.prefix, self.traps = outer, prefix, outer.traps
        self.masks_cols = divides(self.block, side.cols) is None

    def results(self, values: Sequence[int]) -> list[str]:
        """Their names; beyond the last column they are 0."""
        names = [self.tensor(value) for value in values]
        return [f"tl.where(in_cols, {name}, 0.0)" if self.masks_cols else name for name in names]

    def parameters(self) -> list[str]:
        return ["row", "col", *(["in_rows"] if self.masks_rows else []), *(["in_cols"] if self.masks_cols else [])]


class Left(Side):
    """The side of the activations; its folds are made in the loops of the products."""

    def __init__(self, outer: SegmentEmitter, left: Segment, number: int) -> None:
        super().__init__(outer, left, outer.tile.rows, f"l{number}")
        self.whole, self.number = left, number
        self.tile, self.flat, self.masks_rows = outer.tile, outer.flat, outer.masks_rows
        self.depths = reduction_depths(self.segment)

    def levels(self, wanted: Sequence[int]) -> list[list[int]]:
        """The folds behind some values, by how many folds each waits for."""
        folds = self.folds(wanted)
        depth = max((self.depths[value] for value in folds), default=0)
        return [[value for value in folds if self.depths[value] == level + 1] for level in range(depth)]

    def folds(self, values: Sequence[int]) -> list[int]:
        """The folds that some values are made of."""
        return [value for value in ancestors(self.segment.body, values) if isinstance(self.segment.body[value], Reduce)]

    def behind(self, values: Sequence[int]) -> list[int]:
        """Some values and what they are made of, up to folds."""
        body = self.segment.body
        return ancestors(body, values, lambda value: not isinstance(body[value], Reduce))

    def function(self, values: Sequence[int], name: str, functions: list[Function]) -> list[int]:
        """Add a function that computes values, and operands of folds, at some rows and columns: the folds it takes."""
        body = self.segment.body
        folds = [value for value in values if isinstance(body[value], Reduce)]
        plain = [value for value in values if value not in folds]
        roots = [*plain, *(self.reduction(value).arg for value in folds)]
        inside = self.behind(roots)
        given = [value for value in inside if isinstance(body[value], Reduce)]
        self.done, self.loaded = set(), set()
        lines = [f"{self.prefix}in_cols = in_cols"] if self.masks_cols else []
        lines += [*self.values(inside), *self.checks(inside)]
        results = [*self.results(plain), *(self.masked_operand(value) for value in folds)]
        lines = [*self.coordinates.definitions(), *lines, f"return {', '.join(results)}"]
        self.done, self.loaded = set(), set()
        parameters = (*self.parameters(), *(self.name(value) for value in given))
        functions.append(Function(name, parameters, tuple(lines)))
        return given


@dataclass(frozen=True)
class _Axis:
    """Rows or columns of a block of weights; ``ending`` makes a tensor of the block's rank of their positions."""

    name: str
    axis: int
    size: int
    block: int
    masked: bool
    ending: str


class Right(Side):
    """The side of the weights, whose rows the epilogue's columns pick: one after another if ``in_order``."""

    def __init__(self, outer: SegmentEmitter, product: Product, in_order: bool) -> None:
        super().__init__(outer, product.right, outer.tile.cols, "r")
        self.flat, self.masks_rows = False, outer.masks_cols
        # Weights are read once.
        self.policies = {
            one: "evict_first" for one in product.right.loads
            if isinstance(one, Load) and index_extent(product.right, one.index) == (True, True)
        }
        self.in_order = in_order
        self.axes = (
            _Axis("row", 0, self.segment.rows[0], outer.tile.cols, self.masks_rows, "[:, None]"),
            _Axis("col", 1, self.segment.cols, self.block, self.masks_cols, "[None, :]"),
        )
        #: Definitions of the positions at which loads are made that neighbours share.
        self.shared: dict[str, str] = {}

    def parameters(self) -> list[str]:
        return [*super().parameters(), "first_row", "first_col"]

    def load(self, instr: Load) -> str:
        """Neighbours that read one element load it once: a word of several numbers, the scale of a group of them."""
        rows, cols = (run_of(instr.index, one.axis, one.block) for one in self.axes)
        rows = rows if self.in_order else 1
        if instr.mask is not None or rows == cols == 1:
            return super().load(instr)
        index, names, conditions = instr.index, [], []
        for one, run in zip(self.axes, (rows, cols), strict=True):
            count = -(-one.size // run)
            names.append(one.name if run == 1 else f"{one.name}_{run}")
            if run > 1:
                at = f"first_{one.name} // {run} + tl.arange(0, {one.block // run})"
                self.shared[names[-1]] = f"({at}){one.ending}"
                index = index.substitute({one.axis: Index.coord(one.axis, count) * run})
            if one.masked and one.axis in instr.index.axes():
                conditions.append(f"({names[-1]} < {count})")
        coordinates = Coordinates(self.segment, row=names[0], col=names[1])
        pointer = " + ".join([self.names[instr.buffer], *coordinates.terms(index)])
        mask = f", mask={' & '.join(conditions)}" if conditions else ""
        policy = f', eviction_policy="{self.policies[instr]}"' if instr in self.policies else ""
        return f"_repeated(tl.load({pointer}{mask}{policy}), {rows}, {cols})"

    def function(self, name: str, product: Product, dtype: str, functions: list[Function]) -> None:
        """Add a function that reads weights, for tensor cores in the type in which they multiply."""
        if name not in (one.name for one in functions):
            body, value = self.segment.body, product.right_value
            text = self.tensor(value)
            stored = self._stored(value)
            if isinstance(load := body[stored], Load) and not self.outer.flat:
                inside = [*self.values(ancestors(body, operands(load))), self.early_load(stored, load)]
                # Nothing is lost between its type and that in which tensor cores take it.
                text = f"{self._raw(stored, load)}.to({tl_type(dtype)})"
            else:
                inside = self.values(ancestors(body, [value]))
            inside += self.checks(ancestors(body, [value]))
            result = f"tl.where(in_cols, {text}, 0.0)" if self.masks_cols else text
            shared = (f"{name} = {text}" for name, text in self.shared.items())
            lines = (*self.coordinates.definitions(), *shared, *inside, f"return {result}")
            functions.append(Function(name, tuple(self.parameters()), lines))

    def _stored(self, value: int) -> int:
        """What a value is widened from, where that is a byte in memory; else the value."""
        instr, body = self.segment.body[value], self.segment.body
        if isinstance(instr, Cast) and isinstance(load := body[instr.arg], Load):
            return instr.arg if ITEMSIZE[self.buffers[load.buffer].dtype] == 1 else value
        return value
