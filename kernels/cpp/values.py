"""C++ expressions for the values of a segment: once per row (scalars), and per column (vectors of lanes).

Row-level value ``v`` is the scalar ``r<v>``, element-level value ``v`` the vector ``e<v>``. A row-level value used
among vectors is broadcast once per row into ``s<v>_<kind>``. In a column loop ``j`` is the first lane's column and
``m`` says how many lanes count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fuseplan.kernels.cpp.types import (
    COMPARISONS,
    SCALAR_TYPE,
    STORAGE_TYPE,
    VECTOR_TYPE,
    carried_type,
    constant_text,
    cpp_size,
)
from fuseplan.kernels.ir.index import Coord, FloorDiv, Index, Size, axes_of
from fuseplan.kernels.ir.ir import (
    Apply,
    Buffer,
    Cast,
    Const,
    Gather,
    Iota,
    Load,
    Reduce,
    Round,
    Scan,
    Segment,
    Store,
    register_type,
)
from fuseplan.kernels.ir.ops import REDUCTIONS, fold_identity, op_spec

#: Largest integer exponent of a power that is written as products.
_MOST_PRODUCTS = 64
_ROOTS = {0.5: "fp_root", -0.5: "1.0f / fp_root"}
_LOGIC = frozenset({"logical_and", "logical_or", "logical_not"})


@dataclass(eq=False)
class ValueWriter(ABC):
    """Writes the values of one segment; its subclasses write the loops around them.

    ``kinds`` are the register types of the values, ``names`` the spelling of symbols, ``checks`` those to be written.
    """

    buffers: Sequence[Buffer]
    segment: Segment
    kinds: Sequence[str]
    names: Mapping[str, str]
    checks: Sequence[int]
    unroll: int
    stage: bool

    def __post_init__(self) -> None:
        self.per_row = self.segment.per_row
        #: Lines that stand in the current scope already.
        self.declared: set[str] = set()
        #: Broadcasts used since the last :meth:`splats`, name to declaration.
        self._splats: dict[str, str] = {}
        #: Loads that are read in transposed blocks.
        self.blocks: tuple[int, ...] = ()

    @abstractmethod
    def arrays(self) -> list[str]:
        """Declarations of the arrays in which values wait for a later loop."""

    @abstractmethod
    def row(self) -> list[str]:
        """The statements for one row."""

    def size(self, size: Size) -> str:
        return cpp_size(size, self.names)

    def storage(self, buffer: int) -> str:
        const = "" if self.buffers[buffer].is_output else "const "
        return const + STORAGE_TYPE[self.buffers[buffer].dtype]

    def fresh(self, lines: Iterable[str]) -> list[str]:
        """The lines that the current scope has not yet."""
        found = [line for line in lines if line not in self.declared]
        self.declared.update(found)
        return found

    def checked(self, values: Collection[int]) -> list[str]:
        """The checks among some values, each where it is first computed."""
        found = [value for value in self.checks if value in values]
        self.checks = [value for value in self.checks if value not in found]
        return [
            f"if ({f'!r{value}' if self.per_row[value] else f'any(present(m, ~e{value}))'}) *outside = 1;"
            for value in found if not isinstance(self.segment.body[value], Const)
        ]

    def declaration(self, value: int) -> str:
        """``const float r3 = ...;`` or ``const vf e3 = ...;``"""
        if self.per_row[value]:
            return f"const {SCALAR_TYPE[self.kinds[value]]} r{value} = {self._row_expression(value)};"
        return f"const {VECTOR_TYPE[self.kinds[value]]} e{value} = {self._element_expression(value)};"

    def _row_expression(self, value: int) -> str:
        instr = self.segment.body[value]
        kind = self.kinds[value]
        if isinstance(instr, Const):
            return constant_text(kind, instr.value)
        if isinstance(instr, Iota):
            return f"({SCALAR_TYPE[kind]})({self.index(instr.index)})"
        if isinstance(instr, Load):
            loaded = f"get(b{instr.buffer} + ({self.index(instr.index)}){self._row_gather(instr.gather)})"
            return loaded if instr.mask is None else f"r{instr.mask} ? {loaded} : {constant_text(kind, instr.other)}"
        if isinstance(instr, Cast):
            return f"{f'r{instr.arg} != 0' if kind == 'bool' else f'({SCALAR_TYPE[kind]})r{instr.arg}'}"
        if isinstance(instr, Round):
            return f"{_ROUNDS[instr.to]}(r{instr.arg})"
        assert isinstance(instr, Apply)
        operands = [f"r{arg}" for arg in instr.args]
        kinds = [self.kinds[arg] for arg in instr.args]
        if instr.op not in _LOGIC and "bool" in kinds and instr.op != "where":
            operands = [f"(int){text}" for text in operands]
        return _spell(instr.op, operands)

    def index(self, index: Index, column: str = "(j + i)") -> str:
        """An element offset, ``i64``; row coordinates are ``c<axis>``."""
        return index.render(lambda axis: column if axis == self.segment.col_axis else f"c{axis}", self.size)

    def _first(self, index: Index) -> str:
        """The offset in column 0 of an index that is affine in the column."""
        column = self.segment.col_axis
        rest = [term for term in index.terms if getattr(term[0], "axis", None) != column]
        return self.index(Index.build(index.const, rest))

    # -- columns --------------------------------------------------------------------------------------------

    def operand(self, value: int, kind: str | None = None) -> str:
        """A value among vectors of ``kind`` (its own by default)."""
        kind = kind or self.kinds[value]
        if not self.per_row[value]:
            return f"e{value}"
        name = f"s{value}_{kind}"
        clamped = (self.kinds[value], kind) == ("int64", "int32")
        text = _splat(kind, f"clamp_int(r{value})" if clamped else f"r{value}")
        self._splats[name] = f"const {VECTOR_TYPE[kind]} {name} = {text};"
        return name

    def splats(self) -> list[str]:
        """Declarations of the broadcasts used since the last call that the current scope has not yet."""
        declarations = self.fresh(self._splats.values())
        self._splats.clear()
        return declarations

    def _element_expression(self, value: int) -> str:
        instr = self.segment.body[value]
        kind = self.kinds[value]
        if isinstance(instr, Iota):
            return self._positions(instr.index, kind)
        if isinstance(instr, Load):
            return self._load(value, instr, kind)
        if isinstance(instr, Cast):
            return conversion(self.kinds[instr.arg], kind, self.operand(instr.arg))
        if isinstance(instr, Round):
            return f"{_ROUNDS[instr.to]}({self.operand(instr.arg)})"
        if isinstance(instr, Scan):
            return self.scanned(value, carried_type(kind, instr))
        assert isinstance(instr, Apply)
        return self._apply(instr, kind)

    def _positions(self, index: Index, kind: str) -> str:
        integer = kind if kind.startswith("int") else ("int64" if kind == "float64" else "int32")
        vector = VECTOR_TYPE[integer]
        if index.is_affine_in(self.segment.col_axis):
            step = index.coefficient(self.segment.col_axis)
            text = f"iota<{vector}>({self._first(index)} + j * {self.size(step)}, {self.size(step)})"
        else:
            text = f"positions<{vector}>([&](int i) {{ return {self.index(index)}; }})"
        return conversion(integer, kind, text)

    def _apply(self, instr: Apply, kind: str) -> str:
        if instr.op == "where":
            condition, a, b = instr.args
            return f"fp_where({self.operand(condition)}, {self.operand(a, kind)}, {self.operand(b, kind)})"
        if instr.op in _LOGIC:
            return _spell(instr.op, [self.operand(arg, "bool") for arg in instr.args])
        common = next(self.kinds[arg] for arg in instr.args if not self.per_row[arg])
        if instr.op == "pow" and common == "float32" and (power := self._known_power(instr)):
            return f"{power}({self.operand(instr.args[0])})"
        if common == "bool":
            # A mask is 0 or -1 in its lanes: arithmetic and order need 0 or 1.
            result = _spell(instr.op, [f"({self.operand(arg)} & 1)" for arg in instr.args])
            return f"({result} != 0)" if kind == "bool" and instr.op not in COMPARISONS else result
        result = _spell(instr.op, [self.operand(arg, common) for arg in instr.args])
        return f"fp_mask({result})" if instr.op in COMPARISONS else result

    def _known_power(self, power: Apply) -> str:
        """The function that is a power with a constant exponent; "" where there is none."""
        exponent = self.segment.body[power.args[1]]
        if not isinstance(exponent, Const):
            return ""
        whole = exponent.value and abs(exponent.value) <= _MOST_PRODUCTS and not exponent.value % 1
        return f"fp_power<{int(exponent.value)}>" if whole else _ROOTS.get(exponent.value, "")

    # -- folds ----------------------------------------------------------------------------------------------

    def reduction(self, value: int) -> Reduce | Scan:
        instr = self.segment.body[value]
        assert isinstance(instr, Reduce | Scan)
        return instr

    def scans(self, values: Iterable[int]) -> dict[int, str]:
        """The scans among some values, with the register type of what each carries."""
        found = {value: self.segment.body[value] for value in values}
        return {value: carried_type(self.kinds[value], one) for value, one in found.items() if isinstance(one, Scan)}

    def scanned(self, value: int, kind: str) -> str:
        """A scan's vector of columns; what it carries, in registers of ``kind``, is ``carried<v>``."""
        own, combine = self.kinds[value], f"[](auto x, auto y) {{ return {self.combined(value, 'x', 'y')}; }}"
        operand = self.operand(self.reduction(value).arg, own)
        function = REDUCTIONS[self.reduction(value).kind].cpp_scan
        return f"{function}({operand}, carried{value}, {self.identity(value, kind)}, {combine})"

    def identity(self, value: int, kind: str) -> str:
        """What a fold in registers of ``kind`` begins with."""
        reduce = self.reduction(value)
        return constant_text(kind, fold_identity(reduce.kind, "bool" if reduce.dtype == "bool" else kind))

    def combined(self, value: int, a: str, b: str) -> str:
        return REDUCTIONS[self.reduction(value).kind].cpp_combine.format(a, b)

    # -- memory ---------------------------------------------------------------------------------------------

    def pointer(self, name: str, access: Load | Store, address: str | None = None) -> list[str]:
        """Declaration of the address of column 0 of an index affine in the column; none for the others."""
        if not access.index.is_affine_in(self.segment.col_axis) or self._gathers_columns(_picked(access)):
            return []
        return [f"{self.storage(access.buffer)}* {name} = {address or self.row_address(access)};"]

    def row_address(self, access: Load | Store) -> str:
        """Address of the element in column 0."""
        return f"b{access.buffer} + ({self._first(access.index)}){self._row_gather(_picked(access))}"

    def where_stored(self, store: Store) -> str:
        """The condition in front of a store that data gives the address of."""
        return "" if store.scatter is None or store.scatter.check is None else f"if (r{store.scatter.check}) "

    def _gathers_columns(self, gather: Gather | None) -> bool:
        return gather is not None and not self.per_row[gather.value]

    def _row_gather(self, gather: Gather | None) -> str:
        """The summand of an address that a row-level value gives."""
        return "" if gather is None else f" + r{gather.value} * (i64){self.size(gather.stride)}"

    def address(self, name: str, access: Load | Store) -> tuple[str, str | None]:
        """``(pointer, offsets)``: consecutive columns when ``offsets`` is None, else a function of the lane."""
        index, gather = access.index, _picked(access)
        if gather is not None and self._gathers_columns(gather):
            picked = f"e{gather.value}[i] * (i64){self.size(gather.stride)}"
            return f"b{access.buffer}", f"[&](int i) -> i64 {{ return {self.index(index)} + {picked}; }}"
        if not index.is_affine_in(self.segment.col_axis):
            pointer = f"b{access.buffer}{self._row_gather(gather)}"
            if side_by_side(index, self.segment):
                return f"{pointer} + ({self.index(index, 'j')})", None
            return pointer, f"[&](int i) -> i64 {{ return {self.index(index)}; }}"
        step = index.coefficient(self.segment.col_axis)
        if isinstance(step, int) and step == 1:
            return f"{name} + j", None
        return name, f"[&](int i) -> i64 {{ return (j + i) * {self.size(step)}; }}"

    def _load(self, value: int, instr: Load, kind: str) -> str:
        if value in self.blocks:
            return f"load(p{value} + j, m)"
        if instr.gather is None and instr.mask is None and shared_by_lanes(instr.index, self.segment):
            loaded = f"get(b{instr.buffer} + ({self.index(instr.index, 'j')}))"
            return _splat(kind, loaded)
        pointer, offsets = self.address(f"p{value}", instr)
        plain = f"load({pointer}, m)" if offsets is None else f"gather({pointer}, {offsets}, m)"
        if offsets is not None and _walks_back(instr, self.segment):
            plain = f"load_back({pointer} - j, m)"
        if instr.mask is None:
            return plain
        other = _splat(kind, constant_text(kind, instr.other))
        if self.per_row[instr.mask]:
            return f"r{instr.mask} ? {plain} : {other}"
        if offsets is None:
            return f"load_masked({pointer}, e{instr.mask}, {other}, m)"
        return f"gather_masked({pointer}, {offsets}, e{instr.mask}, {other}, m)"

    def store(self, number: int) -> str:
        """Write the value of a store for every column."""
        store = self.segment.stores[number]
        value, storage_kind = self.operand(store.value), register_type(self.buffers[store.buffer].dtype)
        if (self.kinds[store.value], storage_kind) != ("int32", "int64"):
            value = conversion(self.kinds[store.value], storage_kind, value)
        pointer, offsets = self.address(f"q{number}", store)
        call = f"store({pointer}, {value}, m);" if offsets is None else f"scatter({pointer}, {offsets}, {value}, m);"
        return f"{self.where_stored(store)}{call}"


def _walks_back(load: Load, segment: Segment) -> bool:
    """Whether each column is right before the last one in memory."""
    affine = load.gather is None and load.index.is_affine_in(segment.col_axis)
    return affine and bool(load.index.coefficient(segment.col_axis) == -1)


def _picked(access: Load | Store) -> Gather | None:
    """The part of an address that is data."""
    return access.gather if isinstance(access, Load) else access.scatter


def _splat(kind: str, text: str) -> str:
    return f"splat_mask({text})" if kind == "bool" else f"splat<{VECTOR_TYPE[kind]}>({text})"


#: Columns in a vector, at most; a vector starts at a multiple of what it holds.
_LANES = 16


def shared_by_lanes(index: Index, segment: Segment) -> bool:
    """Whether all lanes of a vector read one element: the column counts by blocks of whole vectors only."""
    column = segment.col_axis
    if column not in index.axes() or not isinstance(segment.cols, int) or segment.cols % _LANES:
        return False
    dependent = [atom for atom, _ in index.terms if column in axes_of(atom)]
    return all(isinstance(atom, FloorDiv) and _in_blocks(atom, column) for atom in dependent)


def side_by_side(index: Index, segment: Segment) -> bool:
    """Whether the lanes of a vector read neighbouring elements."""
    column = segment.col_axis
    if index.is_affine_in(column):
        return bool(index.coefficient(column) == 1)
    if not isinstance(segment.cols, int) or segment.cols % _LANES:
        return False
    lanes = Index.coord(column, segment.cols // _LANES) * _LANES + Index.coord(column + 1, _LANES)
    split = index.substitute({column: lanes})
    return split.is_affine_in(column + 1) and bool(split.coefficient(column + 1) == 1)


def _in_blocks(atom: FloorDiv, column: int) -> bool:
    """Whether a quotient is the same for all columns of a vector."""
    numbers = [atom.divisor, atom.base.const]
    for term, coefficient in atom.base.terms:
        if not isinstance(term, Coord):
            return False
        if term.axis != column:
            numbers.append(coefficient)
        elif coefficient != 1:
            return False
    return all(isinstance(number, int) and number % _LANES == 0 for number in numbers)


def conversion(source: str, target: str, text: str) -> str:
    """A vector of ``source`` as a vector of ``target``."""
    if source == target:
        return text
    if target == "bool":
        return f"fp_mask({text} != 0)"
    number = f"({text} & 1)" if source == "bool" else text
    if source == "bool" and target == "int32":
        return number
    return f"convert<{VECTOR_TYPE[target]}>({number})"


def _spell(op: str, operands: Sequence[str]) -> str:
    return op_spec(op).cpp.format(*operands)


_ROUNDS = {
    "bfloat16": "round_bf16", "float16": "round_f16", "float8_e4m3fn": "round_f8", "int8": "round_i8",
    "uint8": "round_u8", "int16": "round_i16",
}
