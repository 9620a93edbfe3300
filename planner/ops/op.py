"""A row of the table of ops, and what the recipes of several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal, TypeAlias

import sympy

from fuseplan.kernels.ir.index import Size, product
from fuseplan.kernels.ir.ir import RegisterType, register_type
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.ops.builder import BodyBuilder, Value
from fuseplan.planner.ops.positions import Position, Specs, reshape_position

Build: TypeAlias = Callable[[BodyBuilder, OpNode, Position], Value]
#: The reason when an op cannot be lowered as it is (an unsupported attribute), else None.
Refuse: TypeAlias = Callable[[OpNode, Specs], str | None]
#: From the position of a row, and one in it, to that of the element in the operand.
Walk: TypeAlias = Callable[[Position], Position]
#: ``map(node, output value, position, specs)``: the position in the node's first operand.
ViewMap: TypeAlias = Callable[[OpNode, str, Position, Specs], Position]

Family: TypeAlias = Literal[
    "view", "pointwise", "activation", "conversion", "rearrangement", "lookup", "write", "reduction", "scan",
    "normalisation", "matmul", "product", "convolution", "attention", "order", "scatter", "composed", "check", "state",
    "other",
]

FLOATS = ("float64", "float32", "bfloat16", "float16")
HALVES = frozenset({"bfloat16", "float16"})
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
#: What an operand or a result may be.
DTYPES = (*FLOATS, "float8_e4m3fn", *INTEGERS, "bool")


@dataclass(frozen=True)
class Op:
    """What the planner knows of an op by its name: how a kernel computes it, where one can, and what else it is."""

    #: ``"matmul"``: one product of two operands, to which a row may be added; ``"product"``: another matrix product.
    #: ``"order"``: it puts elements in order. ``"write"``: it writes to elements of operand 0. ``"scatter"``: it gives
    #: operand 0 with other elements where operand 1 says along a dimension. ``"composed"``: a trace has it as the ops
    #: that PyTorch computes it by. ``"check"``: it only checks something at run time. ``"state"``: it changes the state
    #: of autograd, and no number.
    family: Family = "other"
    #: Emits the value at a position of the op's (first) result. None: no kernel computes the op.
    build: Build | None = None
    #: The same for each further result.
    others: tuple[Build, ...] = ()
    refuse: Refuse | None = None
    #: The dimensions of operand 0 that the op folds (none where it writes a short fold out), or the one that it scans;
    #: None for pointwise ops.
    reduced_dim: Callable[[OpNode, Specs], tuple[int, ...]] | None = None
    #: ``row_shape`` where it is not that the folded dimensions are one (the groups of a group_norm).
    rows: Callable[[OpNode, Specs], tuple[Size, ...]] | None = None
    #: In which order it walks the elements of a row, where that is not always the operand's own, row-major.
    walk: Callable[[OpNode, Specs], Walk | None] | None = None
    #: For an op that writes to operand 0, the dimension along which operand 1 says where to; None where all of the
    #: operand is written. ``build`` then emits what is written, at a position of that.
    writes: Callable[[OpNode, Specs], int | None] | None = None
    #: Its results are views of operand 0, which ``may_copy`` where strides cannot express the result.
    view: ViewMap | None = None
    may_copy: bool = False
    #: The op as which a call of it is planned; "" for itself.
    spelled: str = ""
    #: The elements of its result are elements of its operands, except for a sign or a number that is given.
    rearranges: bool = False
    #: 1: it adds its two operands; -1: it takes one from the other.
    adds: int = 0
    #: A scalar constant of its says how it is computed: a power may be a product, a root, or a call of a library.
    by_constant: bool = False
    #: Position of the argument that says which rows along the first dimension of the first one it gives.
    rows_by: int | None = None
    #: TorchInductor's code of it takes negative positions from the end, where eager mode fails.
    wraps: bool = False
    #: It gives its operand back outside of training.
    drops: bool = False
    #: Its result lies in memory as its operand does, if that is dense.
    like: bool = False
    #: It gives what it reads, in memory of its own if that lies otherwise.
    copies: bool = False
    #: It gives a larger picture.
    grows: bool = False
    #: Its result is always new memory, and certainly row-major. (Schemas do not say so: ``dropout``'s promises a new
    #: tensor, and gives its operand back in inference.)
    new_memory: bool = False
    row_major: bool = False
    #: Of a matrix product, the operands that are multiplied.
    factors: tuple[int, int] | None = None
    #: Of attention, how many pairs of a query and a key it multiplies, and which share of keys and values it reads, as
    #: a fraction.
    pairs: Callable[[OpNode, Specs], float] | None = None
    share: Callable[[OpNode, Specs], tuple[int, int]] | None = None
    #: How many kernels ATen launches for it on a GPU.
    launches: int = 1
    #: What ATen's own CUDA kernel of it is like; "" for one that treats each element by itself.
    effort: Literal["", "function", "fold", "position", "whole row", "scan", "gather", "scatter"] = ""
    #: How many times longer than a kernel of ours ATen's takes on a CPU, where nothing was measured: the least of
    #: results/amd-epyc-family-25-model-17/single-ops.md, by the op's operands and attributes where these decide it.
    slow_on_cpu: float | Callable[[OpNode, Specs], float] = 1.0

    @property
    def is_anchor(self) -> bool:
        """Whether libraries run it, some of them in other ways; of a convolution its sizes decide (:func:`kind_of`)."""
        return self.family in ("matmul", "product", "convolution", "attention", "order")

    @property
    def is_contraction(self) -> bool:
        """Whether a kernel can be built around it."""
        return self.factors is not None and self.build is not None

    @property
    def is_fusible(self) -> bool:
        """Whether any kernel can hold it: a matmul only one that is built around it."""
        return self.build is not None and not self.is_contraction

    def cpu_factor(self, node: OpNode, specs: Specs) -> float:
        """``slow_on_cpu`` of a call."""
        return self.slow_on_cpu(node, specs) if callable(self.slow_on_cpu) else self.slow_on_cpu

    def reduced_size(self, node: OpNode, specs: Specs) -> Size | None:
        """Number of elements folded into each result; None when the op folds no row here."""
        if self.reduced_dim is None or not self.reduced_dim(node, specs):
            return None
        return self.row_shape(node, specs)[-1]

    def row_shape(self, node: OpNode, specs: Specs) -> tuple[Size, ...]:
        """Operand 0's shape as the op walks it: what counts its rows, then the number of elements of a row."""
        if self.rows is not None:
            return self.rows(node, specs)
        shape, dims = specs[node.inputs[0]].shape, self.folded_dims(node, specs)
        kept = (size for dim, size in enumerate(shape) if dim not in dims)
        return (*kept, product(shape[dim] for dim in dims))

    def folded_dims(self, node: OpNode, specs: Specs) -> tuple[int, ...]:
        """The dimensions of operand 0 that the op folds, in order."""
        assert self.reduced_dim is not None
        return tuple(sorted(self.reduced_dim(node, specs)))

    def folds_several(self, node: OpNode, specs: Specs) -> bool:
        """Whether the rows that it folds are not just one dimension of operand 0."""
        return self.rows is not None or len(self.folded_dims(node, specs)) > 1

    def walk_of(self, node: OpNode, specs: Specs) -> Walk | None:
        """How the op goes through operand 0; None where a row's elements follow one another as they do there."""
        if self.walk is not None:
            return self.walk(node, specs)
        shape, dims = specs[node.inputs[0]].shape, self.folded_dims(node, specs)
        kept = [dim for dim in range(len(shape)) if dim not in dims]
        if not dims or dims[0] == len(kept):
            return None
        folded = tuple(shape[dim] for dim in dims)

        def walk(position: Position) -> Position:
            column = reshape_position(position[-1:], (product(folded),), folded)
            coordinates = dict(zip((*kept, *dims), (*position[:-1], *column), strict=True))
            return tuple(coordinates[dim] for dim in range(len(shape)))

        return walk


Rows: TypeAlias = dict[str, Op]


def rows(family: Family, names: str, build: Build | None = None, **also: Any) -> Rows:
    """The same row for several ops, such as ``"add.Tensor exp conv2d.*"``; ``also`` are further fields of :class:`Op`.

    A bare name is the default overload, ``name.*`` all overloads that have no row of their own.
    """
    op = Op(family, build, **also)
    full = (name if "." in name else f"{name}.default" for name in names.split())
    return {name if name.startswith("fuseplan.") else f"aten.{name}": op for name in full}


def result_type(p: BodyBuilder, node: OpNode) -> RegisterType:
    """Register type of the op's result."""
    return register_type(p.specs[node.outputs[0]].dtype)


def is_float(value: Any) -> bool:
    """True for an attribute that is a float, or stands for one that changes between calls."""
    return isinstance(value, float) or (isinstance(value, sympy.Expr) and not value.is_integer)


def argument(p: BodyBuilder, node: OpNode, name: str, number: int, position: Position, dtype: RegisterType) -> Value:
    """Operand ``number``, or the scalar attribute ``name`` where a number stands in its place."""
    return p.const(node.attrs[name], dtype) if name in node.attrs else p.operand(node, number, position, dtype)


def of_one(compute: Callable[[Value], Value]) -> Build:
    """A recipe of one operand, in the type of the result."""
    return lambda p, node, position: compute(p.operand(node, 0, position, result_type(p, node)))


def of_operands(
    compute: Callable[..., Value], names: Sequence[str],
    meet: Callable[[BodyBuilder, OpNode], RegisterType] = result_type,
) -> Build:
    """A recipe of operands by their names in the schema, any of which may be a number, in the type where they ``meet``.

    ``compute`` takes builder, node and the values; a ``condition`` is one of booleans.
    """

    def build(p: BodyBuilder, node: OpNode, position: Position) -> Value:
        dtype, numbers = meet(p, node), count()
        values = [p.const(node.attrs[name], dtype) if name in node.attrs
                  else p.operand(node, next(numbers), position, "bool" if name == "condition" else dtype)
                  for name in names]
        return compute(p, node, *values)

    return build


of_two = partial(of_operands, names=("self", "other"))


def float_result(node: OpNode, specs: Specs) -> str | None:
    """Refuses integer results."""
    return None if specs[node.outputs[0]].dtype in FLOATS else "integer result"


def no_booleans(node: OpNode, specs: Specs) -> str | None:
    """Refuses booleans among the operands: ATen raises for most of these ops, differences too."""
    return "of booleans" if any(specs[value].dtype == "bool" for value in node.inputs) else None
