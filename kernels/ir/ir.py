"""KernelIR: one fused kernel, as data.

A kernel is a list of segments, each an iteration space ``rows x cols`` with a straight-line SSA body. A value is
computed per element or, where it depends on no column, per row. Several segments in one kernel are horizontal fusion:
they share the launch (and may share buffers), not the loop.

Every load and store names a buffer and an :class:`~fuseplan.kernels.ir.index.Index`, the element offset from the
tensor's data pointer as a function of the coordinates ``0 .. len(rows)`` (the last one is the column).

Values are held in registers as ``float32`` (``float64`` where an operand is), ``int64``, ``int32`` or ``bool``; loads
widen and stores round.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from fuseplan.kernels.ir.index import Index, Size, evaluate, evaluate_all, product, symbols_of

#: Storage types a kernel can load and store, and their sizes in bytes.
ITEMSIZE: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "float8_e4m3fn": 1,
}
#: Storage types that carry meaning by their few bits: a value of one is always held as exactly what it can store.
NARROW = frozenset({"float8_e4m3fn", "int8", "uint8", "int16"})
#: Storage types to which every conversion (``Round``, a store) saturates, NaN excepted, and their largest numbers.
LARGEST: Mapping[str, float] = {"float8_e4m3fn": 448.0}
#: Register types.
RegisterType: TypeAlias = Literal["float64", "float32", "int64", "int32", "bool"]


def register_type(dtype: str) -> RegisterType:
    """The register type that holds a loaded value of storage type ``dtype``."""
    if dtype in ("float64", "float32", "int64", "int32", "bool"):
        return dtype  # type: ignore[return-value]
    return "float32" if "float" in dtype else "int32"


@dataclass(frozen=True)
class Buffer:
    """A tensor argument; ``shape`` and ``strides`` are in elements.

    An output may lie ``over`` an input, given by its position (a cache that is written into): the kernel changes the
    elements that it stores, and loads nothing of that input.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    is_output: bool = False
    over: int | None = None

    @property
    def numel(self) -> Size:
        return product(self.shape)

    def distinct_bytes(self) -> int:
        """Bytes of distinct elements of a static buffer: a broadcast (stride 0) dimension is counted once."""
        dims = zip(self.shape, self.strides, strict=True)
        return ITEMSIZE[self.dtype] * math.prod(evaluate(extent, {}) for extent, stride in dims if stride != 0)


@dataclass(frozen=True)
class Gather:
    """The part of an address that is data: ``value`` (an int64 value id) times ``stride``, for ``extent`` such rows.

    Where several coordinates are data, ``value`` is their distance from the first element, and ``extent`` is the least
    of their sizes. ``check`` (a bool value id) is true where there is such an element, and where a mask of the kernel's
    own excuses the lookup; else the call fails, as ATen's op does. None: the element is known to be there.
    """

    value: int
    stride: Size
    extent: Size
    check: int | None = None

    @property
    def values(self) -> tuple[int, ...]:
        return (self.value,) if self.check is None else (self.value, self.check)

    def renamed(self, change: Callable[[int], int]) -> Gather:
        return replace(self, value=change(self.value), check=None if self.check is None else change(self.check))


@dataclass(frozen=True)
class Load:
    """``buffers[buffer][index]``; where ``mask`` (a bool value id) is false, nothing is read and ``other`` stands.

    With ``gather`` the element lies ``gather.value * gather.stride`` further. Its mask is never None: it is true only
    where ``0 <= value < extent``, so that data cannot lead a kernel out of its buffer before the call fails.
    """

    dtype: RegisterType
    buffer: int
    index: Index
    mask: int | None = None
    other: float = 0.0
    gather: Gather | None = None


@dataclass(frozen=True)
class Const:
    dtype: RegisterType
    value: float | int | bool


@dataclass(frozen=True)
class Iota:
    """The integer value of an index expression (``arange``, a position in a mask, a ``cat`` selector)."""

    dtype: RegisterType
    index: Index


@dataclass(frozen=True)
class Apply:
    """A pointwise op of the op table (:mod:`fuseplan.kernels.ir.ops`). Operands have been cast by the lowering."""

    dtype: RegisterType
    op: str
    args: tuple[int, ...]


@dataclass(frozen=True)
class Cast:
    """Convert to another register type (float to int truncates toward zero, as in C and ATen)."""

    dtype: RegisterType
    arg: int


@dataclass(frozen=True)
class Round:
    """Keep only what storage type ``to`` can hold of a value, staying in its register type; stores do so by themselves.

    Floats round to nearest even (float8_e4m3fn saturates at its largest number and keeps NaN), integers wrap around.
    """

    dtype: RegisterType
    arg: int
    to: str


@dataclass(frozen=True)
class Reduce:
    """Fold ``arg`` over the columns of a row with ``kind`` (a key of ``REDUCTIONS``); the result is per row."""

    dtype: RegisterType
    kind: str
    arg: int


@dataclass(frozen=True)
class Scan:
    """Fold ``arg`` over the columns of a row up to and with each one, with ``kind`` (a key of ``REDUCTIONS``)."""

    dtype: RegisterType
    kind: str
    arg: int
    #: The same fold of all columns, where programs share a row: each takes from it what comes before its own columns.
    total: int | None = None


@dataclass(frozen=True)
class Dot:
    """The sum of product number ``product`` for the row at hand of its left side and row ``index`` of its right."""

    dtype: RegisterType
    product: int
    index: Index


@dataclass(frozen=True)
class RowValue:
    """Value ``value`` of the left side of product number ``product``: one number per row."""

    dtype: RegisterType
    product: int
    value: int


Instr: TypeAlias = Load | Const | Iota | Apply | Cast | Round | Reduce | Scan | Dot | RowValue
#: Instructions that have an index.
_INDEXED = (Load, Iota, Dot)


def operands(instr: Instr) -> tuple[int, ...]:
    """Value ids an instruction reads."""
    if isinstance(instr, Apply):
        return instr.args
    if isinstance(instr, Cast | Round | Reduce | Scan):
        total = instr.total if isinstance(instr, Scan) else None
        return (instr.arg,) if total is None else (instr.arg, total)
    if isinstance(instr, Load) and instr.mask is not None:
        return (instr.mask, *(instr.gather.values if instr.gather is not None else ()))
    return ()


def renamed(instr: Instr, change: Callable[[int], int]) -> Instr:
    """The same with each of its :func:`operands` renamed."""
    if isinstance(instr, Apply):
        return replace(instr, args=tuple(map(change, instr.args)))
    if isinstance(instr, Scan) and instr.total is not None:
        return replace(instr, arg=change(instr.arg), total=change(instr.total))
    if isinstance(instr, Cast | Round | Reduce | Scan):
        return replace(instr, arg=change(instr.arg))
    if isinstance(instr, Load) and instr.mask is not None:
        return replace(instr, mask=change(instr.mask), gather=instr.gather and instr.gather.renamed(change))
    return instr


@dataclass(frozen=True)
class Store:
    """``buffers[buffer][index] = value``, rounded to the buffer's type. Per row when neither mentions the column.

    With ``scatter`` the element lies ``scatter.value * scatter.stride`` further, and is stored only where its check
    holds. Both values are one per row.
    """

    buffer: int
    index: Index
    value: int
    scatter: Gather | None = None

    @property
    def values(self) -> tuple[int, ...]:
        """Value ids that the store reads."""
        return (self.value, *(self.scatter.values if self.scatter is not None else ()))

    def with_values(self, change: Callable[[int], int]) -> Store:
        """The same with each of its :attr:`values` renamed."""
        return replace(self, value=change(self.value), scatter=self.scatter and self.scatter.renamed(change))


@dataclass(frozen=True)
class Product:
    """A matmul: sums over an inner dimension of the left side's value times the right side's.

    Both sides are bodies without stores whose columns are the inner dimension. Rows of the left side are those of the
    segment; rows of the right side are what a :class:`Dot` picks from. ``dtype`` is the storage type that the graph
    gives both: a kernel may round the two values to it before it multiplies them, or keep more.
    """

    left: Segment
    left_value: int
    right: Segment
    right_value: int
    dtype: str


@dataclass(frozen=True)
class Segment:
    """One iteration space and its body. ``rows`` are parallel; ``cols`` is the innermost, reduced dimension.

    The body of a segment with ``products`` is their epilogue: it reads sums (:class:`Dot`), and numbers that their left
    sides have for each row (:class:`RowValue`).
    """

    rows: tuple[Size, ...]
    cols: Size
    body: tuple[Instr, ...]
    stores: tuple[Store, ...]
    products: tuple[Product, ...] = ()

    @property
    def col_axis(self) -> int:
        return len(self.rows)

    @property
    def num_rows(self) -> Size:
        return product(self.rows)

    def extents(self) -> tuple[int, ...]:
        """Rows of a static segment, then columns."""
        return evaluate_all((*self.rows, self.cols), {})

    @property
    def loads(self) -> tuple[Load, ...]:
        return tuple(instr for instr in self.body if isinstance(instr, Load))

    @property
    def accesses(self) -> tuple[Load | Store, ...]:
        return (*self.loads, *self.stores)

    def indices(self) -> Iterator[Index]:
        """Every index of its body and stores."""
        yield from (instr.index for instr in self.body if isinstance(instr, _INDEXED))
        yield from (store.index for store in self.stores)

    def with_indices(self, change: Callable[[Index], Index]) -> Segment:
        """The same with each of its :meth:`indices` changed."""
        body = [replace(one, index=change(one.index)) if isinstance(one, _INDEXED) else one for one in self.body]
        stores = (replace(store, index=change(store.index)) for store in self.stores)
        return replace(self, body=tuple(body), stores=tuple(stores))

    def has_reduction(self) -> bool:
        """Whether what it computes of a row is made of other columns too: one program then has all of them."""
        return any(isinstance(instr, Reduce | Scan) for instr in self.body)

    def has_scan(self) -> bool:
        """Whether numbers are carried from column to column."""
        return any(isinstance(instr, Scan) for instr in self.body)

    @cached_property
    def per_row(self) -> tuple[bool, ...]:
        """For each value: True when it is one number per row (depends on no column)."""
        result: list[bool] = []
        for instr in self.body:
            own = isinstance(instr, Scan) or (isinstance(instr, _INDEXED) and self.col_axis in instr.index.axes())
            folded = isinstance(instr, Reduce | RowValue)
            result.append(folded or (not own and all(result[arg] for arg in operands(instr))))
        return tuple(result)

    def store_per_row(self, store: Store) -> bool:
        return self.per_row[store.value] and self.col_axis not in store.index.axes()

    def gathers(self) -> Iterator[Gather]:
        """The addresses of its loads and stores that are data."""
        yield from filter(None, (load.gather for load in self.loads))
        yield from filter(None, (store.scatter for store in self.stores))

    @cached_property
    def checks(self) -> tuple[int, ...]:
        """Bool values that have to be true for every element, those of lookups included whose result nobody needs."""
        return tuple(dict.fromkeys(one.check for one in self.gathers() if one.check is not None))


@dataclass(frozen=True)
class KernelIR:
    """A fused kernel: ``kernel(*buffers, *symbols)``. Inputs come first in ``buffers``, then outputs."""

    buffers: tuple[Buffer, ...]
    segments: tuple[Segment, ...]

    def __hash__(self) -> int:
        """Without the bodies, which are long: buffers and sizes tell nearly all kernels apart."""
        return hash((self.buffers, tuple((one.rows, one.cols, len(one.body)) for one in self.segments)))

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        return tuple(buffer for buffer in self.buffers if not buffer.is_output)

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        return tuple(buffer for buffer in self.buffers if buffer.is_output)

    @property
    def bodies(self) -> tuple[Segment, ...]:
        """Its segments, and the sides of their products."""
        sides = (side for segment in self.segments for one in segment.products for side in (one.left, one.right))
        return (*self.segments, *sides)

    @property
    def overwritten(self) -> dict[int, int]:
        """For positions among the outputs, the position of the input that each lies over."""
        return {number: one.over for number, one in enumerate(self.outputs) if one.over is not None}

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Names of the dynamic sizes, sorted: the trailing integer arguments of the kernel."""
        sizes = [size for buffer in self.buffers for size in (*buffer.shape, *buffer.strides)]
        found: set[str] = set()
        for segment in self.bodies:
            sizes += [*segment.rows, segment.cols]
            sizes += [size for gather in segment.gathers() for size in (gather.stride, gather.extent)]
            found.update(*(index.symbols() for index in segment.indices()))
        return tuple(sorted(found | symbols_of(*sizes)))

    def bind(self, symbols: Mapping[str, int]) -> KernelIR:
        """The same kernel with every dynamic size replaced by a number."""
        if not symbols:
            return self
        buffers = tuple(replace(one, shape=evaluate_all(one.shape, symbols), strides=evaluate_all(one.strides, symbols))
                        for one in self.buffers)
        return KernelIR(buffers, tuple(_bind_segment(segment, symbols) for segment in self.segments))

    def fingerprint(self) -> str:
        """sha256 of the kernel's content (buffer names excluded): equal kernels share one compiled binary."""
        anonymous = KernelIR(tuple(replace(buffer, name="") for buffer in self.buffers), self.segments)
        return hashlib.sha256(repr(anonymous).encode()).hexdigest()


def _bind_segment(segment: Segment, symbols: Mapping[str, int]) -> Segment:
    def bound(one: Gather | None) -> Gather | None:
        return one and replace(one, stride=evaluate(one.stride, symbols), extent=evaluate(one.extent, symbols))

    indexed = segment.with_indices(lambda index: index.bind(symbols))
    body = tuple(replace(one, gather=bound(one.gather)) if isinstance(one, Load) else one for one in indexed.body)
    stores = tuple(replace(store, scatter=bound(store.scatter)) for store in indexed.stores)
    products = tuple(replace(one, left=_bind_segment(one.left, symbols), right=_bind_segment(one.right, symbols))
                     for one in segment.products)
    return Segment(evaluate_all(segment.rows, symbols), evaluate(segment.cols, symbols), body, stores, products)
