"""Hand-built kernels for the emitters' tests: the shapes of body that a planner produces, and their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from well_formed import validate

from fuseplan.kernels.ir.index import Index, Size, evaluate, flatten, product, row_major_strides, symbol
from fuseplan.kernels.ir.ir import (
    Apply,
    Buffer,
    Cast,
    Const,
    Gather,
    Instr,
    Iota,
    KernelIR,
    Load,
    Reduce,
    Round,
    Scan,
    Segment,
    Store,
    register_type,
)
from fuseplan.kernels.ir.ops import float32_bits, op_spec, torch_dtype


class Body:
    """Builds one segment; values are ids, coordinates are in ``self.at`` (the last one is the column)."""

    def __init__(self, buffers: Sequence[Buffer], rows: Sequence[Size], cols: Size) -> None:
        self.buffers = list(buffers)
        self.rows, self.cols = tuple(rows), cols
        self.at = [Index.coord(axis, extent) for axis, extent in enumerate((*rows, cols))]
        self.instrs: list[Instr] = []
        self.stores: list[Store] = []

    def _add(self, instr: Instr) -> int:
        self.instrs.append(instr)
        return len(self.instrs) - 1

    def load(self, name: str, coords: Sequence[Index], mask: int | None = None, other: float = 0.0) -> int:
        number = self._number(name)
        buffer = self.buffers[number]
        index = flatten(coords, buffer.strides)
        return self._add(Load(register_type(buffer.dtype), number, index, mask, other))

    def gather(
        self, name: str, coords: Sequence[Index], at: int, dim: int, other: float, where: int | None = None
    ) -> int:
        """The element whose coordinate along ``dim`` is the value ``at``; ``other`` where that is not looked up."""
        number = self._number(name)
        buffer = self.buffers[number]
        inside = check = self.inside(at, buffer.shape[dim])
        if where is not None:
            check = self("logical_or", self("logical_not", where), inside)
            inside = self("logical_and", where, inside)
        gather = Gather(at, buffer.strides[dim], buffer.shape[dim], check)
        index = flatten(coords, buffer.strides)
        return self._add(Load(register_type(buffer.dtype), number, index, inside, other, gather))

    def inside(self, at: int, extent: Size) -> int:
        return self("logical_and", self("ge", at, self.const(0, "int64")), self("lt", at, self.iota(Index(extent))))

    def const(self, value: float | int | bool, dtype: str = "float32") -> int:
        return self._add(Const(dtype, value))  # type: ignore[arg-type]

    def iota(self, index: Index, dtype: str = "int64") -> int:
        return self._add(Iota(dtype, index))  # type: ignore[arg-type]

    def __call__(self, op: str, *args: int) -> int:
        result = op_spec(op).result
        return self._add(Apply(self.instrs[args[-1]].dtype if result == "same" else result, op, args))

    def cast(self, arg: int, dtype: str) -> int:
        return self._add(Cast(dtype, arg))  # type: ignore[arg-type]

    def round(self, arg: int, to: str) -> int:
        return self._add(Round(self.instrs[arg].dtype, arg, to))

    def reduce(self, kind: str, arg: int) -> int:
        return self._add(Reduce(self.instrs[arg].dtype, kind, arg))

    def scan(self, kind: str, arg: int) -> int:
        return self._add(Scan(self.instrs[arg].dtype, kind, arg))

    def store(self, name: str, coords: Sequence[Index], value: int) -> None:
        number = self._number(name)
        self.stores.append(Store(number, flatten(coords, self.buffers[number].strides), value))

    def scatter(self, name: str, coords: Sequence[Index], at: int, dim: int, value: int) -> None:
        """A store at the coordinate ``at`` along ``dim``, a value; none where there is no such coordinate."""
        self.store(name, coords, value)
        buffer = self.buffers[self.stores[-1].buffer]
        place = Gather(at, buffer.strides[dim], buffer.shape[dim], self.inside(at, buffer.shape[dim]))
        self.stores[-1] = replace(self.stores[-1], scatter=place)

    def segment(self) -> Segment:
        return Segment(self.rows, self.cols, tuple(self.instrs), tuple(self.stores))

    def _number(self, name: str) -> int:
        return next(number for number, buffer in enumerate(self.buffers) if buffer.name == name)


#: Inputs that say where a kernel looks up or writes.
INDICES = ("ids", "at")
#: A number outside every table.
FAR = 2**40


@dataclass(frozen=True)
class Sample:
    """A kernel and a way to make its inputs. ``scale`` stretches float inputs; ``overrides`` replaces some."""

    name: str
    ir: KernelIR
    symbols: dict[str, int] = field(default_factory=dict)
    scale: float = 1.0
    overrides: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    #: How much larger the numbers that say where to look up are than the positions.
    shift: int = 0

    def inputs(self, seed: int = 0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        bound = self.ir.bind(self.symbols)
        made = []
        for buffer in bound.inputs:
            tensor = _random(buffer, generator, self.scale)
            made.append(self.overrides(buffer.name, tensor) if self.overrides else tensor)
        return made

    def outside(self, place: int, number: int) -> list[torch.Tensor]:
        """The inputs with another ``number`` among those that say where to look up or write."""
        made = self.inputs()
        self.indices(made).view(-1)[place] = number
        return made

    @property
    def places(self) -> list[int]:
        """The first, one, and the last of the numbers that are not excused."""
        read = (self.indices(self.inputs()).view(-1) != FAR).nonzero().view(-1).tolist()
        return [read[0], read[len(read) // 2], read[-1]]

    def indices(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The input that says where to look up or write."""
        (found,) = (tensor for buffer, tensor in zip(self.ir.inputs, inputs, strict=True) if buffer.name in INDICES)
        return found

    @property
    def extent(self) -> int:
        """The least number that is too large."""
        (extent,) = {gather.extent for segment in self.ir.segments for gather in segment.gathers()}
        assert isinstance(extent, int)
        return extent + self.shift

    def outputs(self) -> list[torch.Tensor]:
        """Preallocated outputs, poisoned: an element the kernel forgets shows up. What lies over an input is a copy."""
        bound = self.ir.bind(self.symbols)
        made = []
        for buffer in bound.outputs:
            if buffer.over is not None:
                made.append(self.inputs()[buffer.over].clone())
                continue
            dtype = torch_dtype(buffer.dtype)
            tensor = torch.empty_strided(buffer.shape, buffer.strides, dtype=dtype)
            made.append(tensor.fill_(math.nan if dtype.is_floating_point else dtype == torch.bool or 113))
        return made


def _random(buffer: Buffer, generator: torch.Generator, scale: float) -> torch.Tensor:
    dtype = torch_dtype(buffer.dtype)
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(buffer.shape, buffer.strides, strict=True))
    span = 0 if 0 in buffer.shape else evaluate(span, {})
    if dtype.is_floating_point:
        flat = (torch.randn(span, generator=generator, dtype=torch.float64) * scale).to(dtype)
    elif dtype == torch.bool:
        flat = torch.randint(0, 2, (span,), generator=generator).bool()
    else:
        low, high = (0, 100) if dtype == torch.uint8 else (-100, 100)
        flat = torch.randint(low, high, (span,), generator=generator).to(dtype)
    return flat.as_strided(buffer.shape, buffer.strides)


def contiguous(name: str, dtype: str, shape: Sequence[Size], is_output: bool = False) -> Buffer:
    return Buffer(name, dtype, tuple(shape), row_major_strides(shape), is_output)


def _kernel(buffers: Sequence[Buffer], *bodies: Body) -> KernelIR:
    ir = KernelIR(tuple(buffers), tuple(body.segment() for body in bodies))
    validate(ir)
    return ir


def rms_norm(rows: Size, cols: Size, dtype: str = "float32", symbols: dict[str, int] | None = None) -> Sample:
    """``y = x * rsqrt(mean(x^2) + eps) * w``."""
    buffers = [contiguous("x", dtype, (rows, cols)), contiguous("w", dtype, (cols,)),
               contiguous("y", dtype, (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    x = b.load("x", (r, c))
    b.store("y", (r, c), b("mul", b("mul", x, _inverse_rms(b, x)), b.load("w", (c,))))
    return Sample("rms_norm", _kernel(buffers, b), symbols or {})


def _inverse_rms(b: Body, x: int) -> int:
    dtype = b.instrs[x].dtype
    count = b.cast(b.iota(Index(b.cols)), dtype)
    mean = b("div", b.reduce("sum", b("mul", x, x)), count)
    return b("rsqrt", b("add", mean, b.const(1e-5, dtype)))


def add_rms_norm(rows: Size, cols: Size, dtype: str = "float32", eager: bool = False) -> Sample:
    """``h = x + r; y = rms_norm(h) * w``, both stored; ``eager`` rounds ``h`` and the normalised row like ATen."""
    buffers = [contiguous("x", dtype, (rows, cols)), contiguous("r", dtype, (rows, cols)),
               contiguous("w", dtype, (cols,)), contiguous("h", dtype, (rows, cols), True),
               contiguous("y", dtype, (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    h = b("add", b.load("x", (r, c)), b.load("r", (r, c)))
    if eager:
        h = b.round(h, dtype)
    normal = b("mul", h, _inverse_rms(b, h))
    if eager:
        normal = b.round(normal, dtype)
    b.store("h", (r, c), h)
    b.store("y", (r, c), b("mul", b.load("w", (c,)), normal))
    return Sample("add_rms_norm_eager" if eager else "add_rms_norm", _kernel(buffers, b))


def layer_norm(rows: Size, cols: Size, dtype: str = "float32", symbols: dict[str, int] | None = None) -> Sample:
    """Mean, then variance of the differences, then the affine result: two levels of reductions."""
    buffers = [contiguous("x", dtype, (rows, cols)), contiguous("w", dtype, (cols,)), contiguous("b", dtype, (cols,)),
               contiguous("y", dtype, (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    x = b.load("x", (r, c))
    register = b.instrs[x].dtype
    count = b.cast(b.iota(Index(cols)), register)
    difference = b("sub", x, b("div", b.reduce("sum", x), count))
    variance = b("div", b.reduce("sum", b("mul", difference, difference)), count)
    normal = b("mul", difference, b("rsqrt", b("add", variance, b.const(1e-5, register))))
    b.store("y", (r, c), b("add", b("mul", normal, b.load("w", (c,))), b.load("b", (c,))))
    return Sample("layer_norm", _kernel(buffers, b), symbols or {})


def softmax(rows: Size, cols: Size, dtype: str = "float32", causal: bool = False,
            symbols: dict[str, int] | None = None) -> Sample:
    """Maximum, sum of exponentials, quotient; ``causal`` hides columns beyond the row's number."""
    buffers = [contiguous("x", dtype, (rows, cols)), contiguous("y", dtype, (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    x = b.load("x", (r, c))
    register = b.instrs[x].dtype
    if causal:
        x = b("where", b("le", b.iota(c), b.iota(r)), x, b.const(-math.inf, register))
    exponential = b("exp", b("sub", x, b.reduce("max", x)))
    b.store("y", (r, c), b("div", exponential, b.reduce("sum", exponential)))
    return Sample("causal_softmax" if causal else "softmax", _kernel(buffers, b), symbols or {}, scale=3.0)


def running_share(rows: Size, cols: Size, dtype: str = "float32", symbols: dict[str, int] | None = None) -> Sample:
    """The share of columns up to each in the whole row, and the least that a running product of others has been."""
    buffers = [contiguous("x", dtype, (rows, cols)), contiguous("y", dtype, (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    x = b.load("x", (r, c))
    one = b.const(1.0, b.instrs[x].dtype)
    size = b("abs", x)
    share = b("div", b.scan("sum", size), b("add", b.reduce("sum", size), one))
    b.store("y", (r, c), b("add", share, b.reduce("min", b.scan("prod", b("sigmoid", x)))))
    return Sample("running_share", _kernel(buffers, b), symbols or {})


def lone_row(cols: int, dtype: str = "float32") -> Sample:
    """Softmax and least value of a vector: a segment without rows."""
    buffers = [contiguous("x", dtype, (cols,)), contiguous("y", dtype, (cols,), True)]
    b = Body(buffers, (), cols)
    (c,) = b.at
    x = b.load("x", (c,))
    exponential = b("exp", b("sub", x, b.reduce("max", x)))
    share = b("div", exponential, b.reduce("sum", exponential))
    b.store("y", (c,), b("add", share, b.reduce("min", x)))
    return Sample("lone_row", _kernel(buffers, b), scale=3.0)


def extreme_softmax(cols: int, dtype: str = "float32") -> Sample:
    """A softmax over rows with infinities and NaN at their ends and in between, and of nothing but -inf."""
    plain = softmax(8, cols, dtype)

    def extreme(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Rows: hidden start, hidden end, hidden all, +inf last, NaN first, huge, rising by steps, plain."""
        tensor[0, : cols // 2] = tensor[1, cols // 2 :] = tensor[2] = -math.inf
        tensor[3, -1], tensor[4, 0] = math.inf, math.nan
        tensor[5] = tensor[5].sign() * 3e38
        tensor[6] = torch.arange(cols, dtype=torch.float32) * 40
        return tensor

    return Sample("extreme_softmax", plain.ir, scale=3.0, overrides=extreme)


def swiglu(rows: Size, cols: Size, dtype: str = "float32", symbols: dict[str, int] | None = None) -> Sample:
    """``silu(g) * u`` where ``g`` and ``u`` are the halves of one row (a chunk: loads with a row stride of 2 cols)."""
    buffers = [contiguous("gu", dtype, (rows, 2 * cols)), contiguous("y", dtype, (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    g, u = b.load("gu", (r, c)), b.load("gu", (r, c + cols))
    b.store("y", (r, c), b("mul", b("mul", g, b("sigmoid", g)), u))
    return Sample("swiglu", _kernel(buffers, b), symbols or {}, scale=4.0)


def geglu(rows: Size, cols: Size, dtype: str = "float32", approximate: str = "tanh") -> Sample:
    """``gelu(g) * u``, by tanh or by erf."""
    buffers = [contiguous("g", dtype, (rows, cols)), contiguous("u", dtype, (rows, cols)),
               contiguous("y", dtype, (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    at = b.at
    g, u = b.load("g", at), b.load("u", at)
    register = b.instrs[g].dtype
    if approximate == "tanh":
        cube = b("mul", b("mul", g, g), g)
        inner = b("add", g, b("mul", b.const(0.044715, register), cube))
        bell = b("tanh", b("mul", b.const(math.sqrt(2 / math.pi), register), inner))
    else:
        bell = b("erf", b("mul", g, b.const(math.sqrt(0.5), register)))
    half = b("mul", b.const(0.5, register), g)
    gelu = b("mul", half, b("add", b.const(1.0, register), bell))
    b.store("y", at, b("mul", gelu, u))
    return Sample(f"geglu_{approximate}", _kernel(buffers, b), scale=3.0)


def rope(batch: Size, seq: Size, q_heads: int, k_heads: int, dim: int, dtype: str = "float32",
         symbols: dict[str, int] | None = None) -> Sample:
    """RoPE of q and k by halves: two segments; inputs are ``[B, H, S, D]`` views of ``[B, S, H * D]``."""
    def view(name: str, heads: int) -> Buffer:
        return Buffer(name, dtype, (batch, heads, seq, dim), (seq * heads * dim, dim, heads * dim, 1))

    buffers = [view("q", q_heads), view("k", k_heads), contiguous("cos", dtype, (batch, seq, dim)),
               contiguous("sin", dtype, (batch, seq, dim)), contiguous("oq", dtype, (batch, q_heads, seq, dim), True),
               contiguous("ok", dtype, (batch, k_heads, seq, dim), True)]
    bodies = []
    for source, out, heads in (("q", "oq", q_heads), ("k", "ok", k_heads)):
        b = Body(buffers, (batch, heads, seq), dim)
        i, h, s, c = b.at
        x = b.load(source, (i, h, s, c))
        low = b("lt", b.iota(c), b.const(dim // 2, "int64"))
        high = b("logical_not", low)
        left = b("neg", b.load(source, (i, h, s, c + dim // 2), mask=low))
        right = b.load(source, (i, h, s, c + -(dim // 2)), mask=high)
        rotated = b("where", low, left, right)
        turned = b("mul", rotated, b.load("sin", (i, s, c)))
        b.store(out, (i, h, s, c), b("add", b("mul", x, b.load("cos", (i, s, c))), turned))
        bodies.append(b)
    return Sample("rope", _kernel(buffers, *bodies), symbols or {})


def broadcast_add(rows: int, cols: int, dtype: str = "float32") -> Sample:
    """A stride-0 column operand, a row vector by stride-0 expansion, and a scalar."""
    buffers = [contiguous("x", dtype, (rows, cols)), Buffer("column", dtype, (rows, cols), (1, 0)),
               Buffer("row", dtype, (rows, cols), (0, 1)), contiguous("scalar", "float32", ()),
               contiguous("y", dtype, (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    at = b.at
    total = b("add", b("add", b.load("x", at), b.load("column", at)), b.load("row", at))
    b.store("y", at, b("add", total, b.cast(b.load("scalar", ()), b.instrs[total].dtype)))
    return Sample("broadcast_add", _kernel(buffers, b))


def transposed_copy(rows: int, cols: int, dtype: str = "float32") -> Sample:
    """A gather: the column is the strided dimension of the input, and the output is written transposed, too."""
    buffers = [Buffer("x", dtype, (rows, cols), (1, rows)), contiguous("y", dtype, (rows, cols), True),
               Buffer("z", dtype, (rows, cols), (1, rows), True)]
    b = Body(buffers, (rows,), cols)
    x = b.load("x", b.at)
    b.store("y", b.at, b("neg", x))
    b.store("z", b.at, x)
    return Sample("transposed_copy", _kernel(buffers, b))


def integer_maths(rows: int, cols: int) -> Sample:
    """int64, int32, uint8 and bool operands, floor division and remainder, comparisons, a bool output."""
    buffers = [contiguous("a", "int64", (rows, cols)), contiguous("b", "int32", (rows, cols)),
               contiguous("c", "uint8", (rows, cols)), contiguous("m", "bool", (rows, cols)),
               contiguous("quotient", "int64", (rows, cols), True), contiguous("rest", "int32", (rows, cols), True),
               contiguous("flag", "bool", (rows, cols), True), contiguous("byte", "int8", (rows, cols), True)]
    k = Body(buffers, (rows,), cols)
    at = k.at
    a, b, c, m = (k.load(name, at) for name in "abcm")
    k.store("quotient", at, k("add", k("int_floordiv", a, k.const(7, "int64")), k.iota(at[0] * 3 + at[1])))
    k.store("rest", at, k("int_remainder", k("mul", b, c), k.const(-5, "int32")))
    odd = k("eq", k("int_remainder", a, k.const(2, "int64")), k.const(1, "int64"))
    k.store("flag", at, k("logical_or", k("logical_and", odd, m), k("logical_not", k("ge", b, c))))
    k.store("byte", at, k("where", m, c, k("neg", k("maximum", b, k.const(-128 + 1, "int32")))))
    return Sample("integer_maths", _kernel(buffers, k))


def cast_chain(rows: int, cols: int) -> Sample:
    """bf16 in; rounded to fp16 and bf16 on the way; through int32, bool and float64; several types out."""
    buffers = [contiguous("x", "bfloat16", (rows, cols)), contiguous("half", "float16", (rows, cols), True),
               contiguous("whole", "int32", (rows, cols), True), contiguous("long", "int64", (rows, cols), True),
               contiguous("double", "float64", (rows, cols), True), contiguous("truth", "bool", (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    at = b.at
    x = b.load("x", at)
    third = b("mul", x, b.const(1 / 3))
    b.store("half", at, b.round(b.round(third, "float16"), "bfloat16"))
    whole = b.cast(b("mul", x, b.const(10.0)), "int32")
    b.store("whole", at, whole)
    b.store("long", at, b.cast(b.cast(whole, "bool"), "int64"))
    b.store("double", at, b("div", b.cast(third, "float64"), b.const(7.0, "float64")))
    b.store("truth", at, b.cast(b.cast(b.cast(x, "int32"), "float32"), "bool"))
    return Sample("cast_chain", _kernel(buffers, b), scale=3.0)


def pointwise_chain(rows: int, cols: int, dtype: str = "float32") -> Sample:
    """Every float op of one or two operands, in one long chain whose values stay in a tame range."""
    buffers = [contiguous("x", dtype, (rows, cols)), contiguous("y", dtype, (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    x = b.load("x", b.at)
    register = b.instrs[x].dtype
    one = b.const(1.0, register)
    value = b("add", b("sin", x), b("mul", b("cos", x), b.const(0.5, register)))
    value = b("exp", b("minimum", value, one))
    value = b("sqrt", b("add", b("log", b("add", value, one)), b("exp2", b("neg", value))))
    value = b("sub", b("floor", b("mul", x, b.const(3.0, register))), b("div", value, b("add", b("abs", x), one)))
    value = b("add", b("ceil", x), b("tanh", b("mul", value, b.const(0.1, register))))
    value = b("maximum", value, b("erf", b("reciprocal", b("add", b("mul", x, x), one))))
    value = b("pow", b("add", b("sigmoid", value), b("rsqrt", b("add", b("abs", value), one))), b.const(1.5, register))
    b.store("y", b.at, value)
    return Sample("pointwise_chain", _kernel(buffers, b))


def row_statistics(rows: Size, cols: Size, dtype: str = "float32", symbols: dict[str, int] | None = None) -> Sample:
    """Per-row stores only: sum, maximum, minimum, and the number of columns by summing a row-level 1."""
    buffers = [contiguous("x", dtype, (rows, cols)), contiguous("total", "float32", (rows,), True),
               contiguous("top", dtype, (rows, 1), True), contiguous("bottom", dtype, (rows,), True),
               contiguous("count", "int64", (rows,), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    x = b.load("x", (r, c))
    b.store("total", (r,), b.cast(b.reduce("sum", x), "float32"))
    b.store("top", (r, Index(0)), b.reduce("max", x))
    b.store("bottom", (r,), b.reduce("min", x))
    b.store("count", (r,), b.reduce("sum", b.const(1, "int64")))
    return Sample("row_statistics", _kernel(buffers, b), symbols or {})


def split_view(outer: int, inner: int, dtype: str = "float32") -> Sample:
    """A view that cuts across dimensions: floor divisions and remainders of row and column in the load index."""
    buffers = [contiguous("x", dtype, (inner, outer)), contiguous("y", dtype, (outer, inner), True)]
    b = Body(buffers, (outer,), inner)
    r, c = b.at
    position = r * inner + c
    b.store("y", (r, c), b.load("x", (position // outer, position % outer)))
    return Sample("split_view", _kernel(buffers, b))


def repeat_heads(batch: int, heads: int, groups: int, dim: int, dtype: str = "float32") -> Sample:
    """``repeat_kv``: the head of the source is a floor division of the head of the result."""
    buffers = [contiguous("x", dtype, (batch, heads, dim)), contiguous("y", dtype, (batch, heads * groups, dim), True)]
    b = Body(buffers, (batch, heads * groups), dim)
    i, h, c = b.at
    b.store("y", (i, h, c), b.load("x", (i, h // groups, c)))
    return Sample("repeat_heads", _kernel(buffers, b))


def cat_rows(left: int, right: int, cols: int, dtype: str = "float32") -> Sample:
    """``cat`` along the row dimension: a row-level mask guards an element-level load."""
    buffers = [contiguous("a", dtype, (left, cols)), contiguous("b", dtype, (right, cols)),
               contiguous("y", dtype, (left + right, cols), True)]
    k = Body(buffers, (left + right,), cols)
    r, c = k.at
    first = k("lt", k.iota(r), k.const(left, "int64"))
    a = k.load("a", (r, c), mask=first)
    b = k.load("b", (r + -left, c), mask=k("logical_not", first))
    k.store("y", (r, c), k("where", first, a, b))
    return Sample("cat_rows", _kernel(buffers, k))


def data_mask(rows: int, cols: int, dtype: str = "float32") -> Sample:
    """A load guarded by a mask that is data: masked elements read ``other``, a softmax consumes them."""
    buffers = [contiguous("m", "bool", (rows, cols)), contiguous("x", dtype, (rows, cols)),
               contiguous("y", dtype, (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    at = b.at
    x = b.load("x", at, mask=b.load("m", at), other=-2.5)
    top = b.reduce("max", x)
    total = b.reduce("sum", b("exp", b("sub", x, top)))
    b.store("y", at, b("div", b("exp", b("sub", x, top)), total))
    return Sample("data_mask", _kernel(buffers, b))


def position_mask(rows: int, cols: int) -> Sample:
    """A causal additive mask from position ids held in an int64 tensor."""
    buffers = [contiguous("position", "int64", (rows,)), contiguous("y", "float32", (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    visible = b("le", b.iota(c), b.load("position", (r,)))
    b.store("y", (r, c), b("where", visible, b.const(0.0), b.const(-math.inf)))
    return Sample("position_mask", _kernel(buffers, b))


def pair_mask(groups: int, rows: int, cols: int) -> Sample:
    """A boolean mask over pairs of int64 ids of one group: rows of a group share the ids of its columns."""
    buffers = [contiguous("q", "int64", (groups, rows)), contiguous("k", "int64", (groups, cols)),
               contiguous("y", "bool", (groups, rows, cols), True)]
    b = Body(buffers, (groups, rows), cols)
    g, r, c = b.at
    b.store("y", (g, r, c), b("le", b.load("k", (g, c)), b.load("q", (g, r))))
    return Sample("pair_mask", _kernel(buffers, b))


def quantised(rows: int, cols: int, dtype: str = "float32") -> Sample:
    """A row quantised to float8 and to int8 by its own largest magnitude, with both scales and what is left of it."""
    buffers = [contiguous("x", dtype, (rows, cols)), contiguous("y", "float8_e4m3fn", (rows, cols), True),
               contiguous("y_scale", "float32", (rows,), True), contiguous("z", "int8", (rows, cols), True),
               contiguous("z_scale", "float32", (rows,), True), contiguous("back", "float32", (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    x = b.load("x", (r, c))
    top = b.reduce("max", b("abs", x))
    y_scale, z_scale = (b("div", top, b.const(limit)) for limit in (448.0, 127.0))
    y = b("maximum", b("minimum", b("div", x, y_scale), b.const(448.0)), b.const(-448.0))
    z = b.cast(b("round", b("div", x, z_scale)), "int32")
    b.store("y", (r, c), y)
    b.store("y_scale", (r,), y_scale)
    b.store("z", (r, c), z)
    b.store("z_scale", (r,), z_scale)
    b.store("back", (r, c), b("mul", b.cast(b.round(z, "int8"), "float32"), z_scale))

    def in_steps_of_one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The largest magnitude is 127, so that the scale of int8 is one and ties are ties in every arithmetic."""
        tensor = (tensor * 30).clamp(-127, 127)
        tensor[:, 0] = 127.0
        return tensor

    return Sample("quantised", _kernel(buffers, b), overrides=in_steps_of_one)


#: Around the largest number of float8_e4m3fn and halfway to what would be the next; ties; around its smallest numbers.
FLOAT8_EDGES = (
    448.0, 447.0, 449.0, 463.9, 464.0, 464.1, 480.0, 512.0, 1e4, 3e38, math.inf, math.nan, 0.0, 240.0, 1.0625, 1.1875,
)
FLOAT8_TINY = (2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 2.0**-11, 0.9 * 2.0**-6, 1e-30)


def with_edges(tensor: torch.Tensor, edges: Sequence[float]) -> torch.Tensor:
    """``tensor`` with ``edges`` and their negatives in front."""
    numbers = torch.tensor([sign * edge for edge in edges for sign in (1.0, -1.0)]).to(tensor.dtype)
    tensor.view(-1)[: len(numbers)] = numbers
    return tensor


def clamped(rows: int, cols: int, dtype: str = "float32") -> Sample:
    """float8 of numbers clamped to its range (in either order), to less, and not at all; and as it is read back."""
    register = "float64" if dtype == "float64" else "float32"
    names = ("whole", "swapped", "less", "plain")
    buffers = [contiguous("x", dtype, (rows, cols)),
               *(contiguous(name, "float8_e4m3fn", (rows, cols), True) for name in names),
               *(contiguous(f"{name}_back", register, (rows, cols), True) for name in names)]
    b = Body(buffers, (rows,), cols)
    x = b.load("x", b.at)

    def limit(op: str, value: int, bound: float) -> int:
        return b(op, value, b.const(bound, register))

    numbers = (
        limit("minimum", limit("maximum", x, -448.0), 448.0), limit("maximum", limit("minimum", x, 500.0), -448.0),
        limit("minimum", limit("maximum", x, -240.0), 240.0), x,
    )
    for name, number in zip(names, numbers, strict=True):
        b.store(name, b.at, number)
        b.store(f"{name}_back", b.at, b.round(number, "float8_e4m3fn"))
    return Sample("clamped", _kernel(buffers, b), scale=30.0,
                  overrides=lambda _, tensor: with_edges(tensor, FLOAT8_EDGES))


def dequantised(rows: int, cols: int) -> Sample:
    """float8 and packed int4 back to floats: eight nibbles to an int32, taken apart by shifts and a mask."""
    buffers = [contiguous("x", "float8_e4m3fn", (rows, cols)), contiguous("packed", "int32", (rows, -(-cols // 8))),
               contiguous("y", "bfloat16", (rows, cols), True), contiguous("z", "float16", (rows, cols), True),
               contiguous("byte", "uint8", (rows, cols), True),
               contiguous("again", "float8_e4m3fn", (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    x = b.load("x", (r, c))
    word = b.load("packed", (r, c // 8))
    by = b.iota(c % 8 * 4, "int32")
    nibble = b("bit_and", b("shift_right", word, by), b.const(15, "int32"))
    signed = b("sub", b("bit_xor", nibble, b.const(8, "int32")), b.const(8, "int32"))
    b.store("y", (r, c), b("mul", x, b.const(3.0)))
    b.store("z", (r, c), b("mul", b.cast(b.round(signed, "int8"), "float32"), b.round(x, "float8_e4m3fn")))
    b.store("byte", (r, c), b.round(b("bit_or", b("shift_left", nibble, b.const(8, "int32")), signed), "uint8"))
    b.store("again", (r, c), x)
    return Sample("dequantised", _kernel(buffers, b))


def embedded(tokens: int, vocabulary: int, cols: int, dtype: str = "float32") -> Sample:
    """Rows of a table by int64 indices, and the RMSNorm of each row."""
    buffers = [contiguous("ids", "int64", (tokens,)), contiguous("table", dtype, (vocabulary, cols)),
               contiguous("h", dtype, (tokens, cols), True), contiguous("y", dtype, (tokens, cols), True)]
    b = Body(buffers, (tokens,), cols)
    r, c = b.at
    h = b.gather("table", (Index(0), c), b.load("ids", (r,)), 0, math.nan)
    b.store("h", (r, c), h)
    b.store("y", (r, c), b("mul", h, _inverse_rms(b, h)))

    def indices(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return (torch.arange(tokens) * 5 - 1) % vocabulary if name == "ids" else tensor

    return Sample("embedded", _kernel(buffers, b), overrides=indices)


def written(batch: Size, length: int, rows: int, cols: int, dtype: str = "float32",
            symbols: dict[str, int] | None = None) -> Sample:
    """The RMSNorm of rows goes where int64 positions say; the doubled rows are a result."""
    buffers = [contiguous("x", dtype, (batch, rows, cols)), contiguous("at", "int64", (rows,)),
               contiguous("cache", dtype, (batch, length, cols)),
               replace(contiguous("new", dtype, (batch, length, cols), True), over=2),
               contiguous("y", dtype, (batch, rows, cols), True)]
    b = Body(buffers, (batch, rows), cols)
    n, r, c = b.at
    x = b.load("x", (n, r, c))
    b.scatter("new", (n, Index(0), c), b.load("at", (r,)), 1, b("mul", x, _inverse_rms(b, x)))
    b.store("y", (n, r, c), b("add", x, x))

    def positions(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return (torch.arange(rows) - 1) % length if name == "at" else tensor

    return Sample("written", _kernel(buffers, b), symbols or {}, overrides=positions)


def picked(rows: int, cols: int, width: int, dtype: str = "float32", shift: int = 0) -> Sample:
    """``gather`` along the last dimension: an index for each element, then a sum over what was picked.

    Indices are numbers less a ``shift``: where there is no number, because a tile ends, there is no index either.
    """
    buffers = [contiguous("x", dtype, (rows, width)), contiguous("at", "int64", (rows, cols)),
               contiguous("y", dtype, (rows, cols), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    at = b.load("at", (r, c))
    x = b.gather("x", (r, Index(0)), b("sub", at, b.const(shift, "int64")) if shift else at, 1, 0.0)
    b.store("y", (r, c), b("div", x, b("add", b.reduce("sum", b("abs", x)), b.const(1.0, b.instrs[x].dtype))))
    return Sample("picked", _kernel(buffers, b),
                  overrides=lambda name, t: t.abs() % width + shift if name == "at" else t, shift=shift)


def repeated_lookup(tokens: int, vocabulary: int, cols: int, times: int, dtype: str = "float32") -> Sample:
    """Rows of a table by int64 indices, every element of them several times in a row: an address divides the column."""
    buffers = [contiguous("ids", "int64", (tokens,)), contiguous("table", dtype, (vocabulary, cols)),
               contiguous("y", dtype, (tokens, cols * times), True)]
    b = Body(buffers, (tokens,), cols * times)
    r, c = b.at
    b.store("y", (r, c), b.gather("table", (Index(0), c // times), b.load("ids", (r,)), 0, math.nan))

    def indices(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.arange(1, tokens + 1) * 3 % vocabulary if name == "ids" else tensor

    return Sample("repeated_lookup", _kernel(buffers, b), overrides=indices)


def one_of_two(rows: int, cols: int, dtype: str = "float32") -> Sample:
    """Rows of a table, then plain rows, one after the other: what is no row of the table there looks nothing up."""
    buffers = [contiguous("ids", "int64", (2 * rows,)), contiguous("table", dtype, (5, cols)),
               contiguous("x", dtype, (rows, cols)), contiguous("y", dtype, (2 * rows, cols), True)]
    b = Body(buffers, (2 * rows,), cols)
    r, c = b.at
    here = b("lt", b.iota(r), b.const(rows, "int64"))
    at = b.load("ids", (r,))
    looked_up = b.gather("table", (Index(0), c), at, 0, math.nan, here)
    plain = b.load("x", (r - rows, c), b("logical_not", here))
    b.store("y", (r, c), b("where", here, looked_up, plain))

    def indices(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(2 * rows) < rows, tensor.abs() % 5, FAR) if name == "ids" else tensor

    return Sample("one_of_two", _kernel(buffers, b), overrides=indices)


def lookups() -> list[Sample]:
    """Kernels that look up or write where numbers say."""
    n = symbol("n")
    return [
        written(2, 11, 4, 127), written(3, 5, 1, 64, "bfloat16"), written(n, 9, 4, 33, "float32", {"n": 3}),
        embedded(5, 11, 127), embedded(1, 3, 64, "bfloat16"), embedded(3, 4, 1), picked(3, 8, 19),
        picked(2, 37, 5, "bfloat16"), picked(2, 127, 3, shift=1), picked(3, 1, 7, shift=2), picked(1, 3, 9, shift=1),
        repeated_lookup(5, 11, 19, 2), repeated_lookup(3, 4, 5, 3, "float16"), one_of_two(3, 37), one_of_two(1, 3),
    ]


def early_store(rows: int, cols: int, dtype: str = "float32") -> Sample:
    """A stored value that the reduction needs anyway, and one that it does not."""
    buffers = [contiguous("x", dtype, (rows, cols)), contiguous("double", dtype, (rows, cols), True),
               contiguous("wave", dtype, (rows, cols), True), contiguous("norm", "float32", (rows,), True)]
    b = Body(buffers, (rows,), cols)
    r, c = b.at
    x = b.load("x", (r, c))
    double = b("add", x, x)
    b.store("double", (r, c), double)
    b.store("wave", (r, c), b("cos", x))
    b.store("norm", (r,), b.cast(b("sqrt", b.reduce("sum", b("mul", double, double))), "float32"))
    return Sample("early_store", _kernel(buffers, b))


def scaled_by_number(rows: Size, cols: int, dtype: str, scale: float, sizes: dict[str, int]) -> Sample:
    """A float that changes between calls travels as bits: each row by itself, and its mean, times that number."""
    buffers = [
        contiguous("x", dtype, (rows, cols)), contiguous("y", dtype, (rows, cols), True),
        contiguous("mean", "float32", (rows,), True),
    ]
    b = Body(buffers, (rows,), cols)
    number = b("as_float", b.cast(b.iota(Index(symbol("scale"))), "int32"))
    x = b.load("x", b.at)
    b.store("y", b.at, b("mul", x, number))
    b.store("mean", b.at[:1], b("mul", b("mul", b.reduce("sum", x), b.const(1.0 / cols)), number))
    return Sample("scaled_by_number", _kernel(buffers, b), {**sizes, "scale": float32_bits(scale)})


def dynamic_samples() -> list[Sample]:
    """Kernels with symbolic sizes: rows alone, columns too, and a sequence length inside strides."""
    n, m = symbol("n"), symbol("m")
    return [
        rms_norm(n, 130, "bfloat16", {"n": 5}),
        layer_norm(n, m, "float32", {"n": 3, "m": 71}),
        softmax(n, m, "float32", True, {"n": 9, "m": 9}),
        softmax(n, m, "bfloat16", False, {"n": 2, "m": 5}),
        swiglu(n, 48, "float32", {"n": 7}),
        rope(2, n, 4, 2, 16, "bfloat16", {"n": 3}), written(n, 9, 4, 33, "float32", {"n": 3}),
        row_statistics(n, m, "float32", {"n": 4, "m": 33}),
        running_share(n, m, "float32", {"n": 3, "m": 130}), running_share(n, 127, "bfloat16", {"n": 2}),
        scaled_by_number(n, 37, "float32", -0.37, {"n": 5}), scaled_by_number(n, 64, "bfloat16", 1e-3, {"n": 3}),
    ]


def static_samples() -> list[Sample]:
    """One of each kind at odd sizes, fp32 and bf16, and some in fp16 and fp64."""
    samples = [
        rms_norm(3, 127), rms_norm(2, 64, "bfloat16"), rms_norm(1, 4097, "float16"), rms_norm(2, 33, "float64"),
        add_rms_norm(3, 129), add_rms_norm(5, 96, "bfloat16"), add_rms_norm(2, 40, "bfloat16", eager=True),
        layer_norm(4, 100), layer_norm(3, 257, "bfloat16"), layer_norm(2, 31, "float64"),
        softmax(3, 50), softmax(2, 1000, "bfloat16"), softmax(17, 17, causal=True), softmax(2, 7, "float64"),
        extreme_softmax(300), extreme_softmax(260, "bfloat16"), lone_row(127), lone_row(1000, "bfloat16"),
        swiglu(3, 127), swiglu(1, 256, "bfloat16"), swiglu(2, 65, "float16"),
        geglu(3, 50), geglu(2, 128, "bfloat16"), geglu(3, 50, approximate="erf"),
        geglu(2, 33, "float64", approximate="erf"), geglu(3, 70, "bfloat16", approximate="erf"),
        rope(2, 3, 4, 2, 64), rope(1, 1, 32, 8, 64, "bfloat16"), rope(1, 2, 2, 1, 6),
        broadcast_add(5, 33), broadcast_add(2, 64, "bfloat16"), transposed_copy(7, 37),
        transposed_copy(4, 20, "bfloat16"), integer_maths(3, 53), cast_chain(2, 75), pointwise_chain(3, 67),
        pointwise_chain(2, 19, "float64"), row_statistics(4, 33), row_statistics(3, 1, "bfloat16"),
        row_statistics(2, 40, "float64"), split_view(6, 10), repeat_heads(2, 2, 3, 24), cat_rows(2, 3, 37),
        data_mask(3, 45), position_mask(4, 29), pair_mask(3, 8, 37), pair_mask(2, 3, 64), early_store(3, 70),
        early_store(2, 48, "bfloat16"),
        *(one for one in lookups() if not one.symbols),
        quantised(3, 127), quantised(2, 64, "bfloat16"), dequantised(3, 72), dequantised(2, 37),
        clamped(3, 127), clamped(2, 64, "bfloat16"), clamped(2, 37, "float64"), running_share(3, 300),
        running_share(2, 33, "float64"),
    ]
    return [*samples, rms_norm(1, 1), softmax(5, 3), swiglu(0, 16), layer_norm(0, 9)]


def label(sample: Sample) -> str:
    """A test id: the name, the first buffer's type and shape."""
    first = sample.ir.bind(sample.symbols).buffers[0]
    dynamic = "-dynamic" if sample.symbols else ""
    return f"{sample.name}-{first.dtype}-{'x'.join(map(str, first.shape))}{dynamic}"


def total_elements(sample: Sample) -> int:
    return sum(evaluate(product((*s.rows, s.cols)), sample.symbols) for s in sample.ir.segments)
