"""Random small programs, written as Python text (``program_judging.py`` says whether a compiled one is right).

A program is grown statement by statement: one is kept when it runs on real tensors of two sets of sizes and what it
gives is finite. So its text needs no model of what PyTorch allows, and one text serves static and dynamic shapes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from program_rounding import overlaps

FLOATS = ("F32", "F32", "BF16", "F16", "F64")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "B": torch.bool,
}
_SIZES = (0, 1, 1, 2, 3, 3, 5, 5, 8, 16, 33, 64, 127)
#: Values are kept below this, so that half precision does not overflow.
_LARGEST = 1e3
_MOST_ELEMENTS = 60_000


class Argument(Protocol):
    """What makes an argument of a program for its sizes, from a seed."""

    def make(self, sizes: Mapping[str, int], seed: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Input:
    """An argument: its shape in the program's sizes, its dtype's name, and how it lies in memory."""

    shape: tuple[int | str, ...]
    dtype: str
    layout: str

    def make(self, sizes: Mapping[str, int], seed: int) -> torch.Tensor:
        """Numbers from the seed; the same ones whatever ran before."""
        shape = [sizes[size] if isinstance(size, str) else size for size in self.shape]
        generator = torch.Generator().manual_seed(seed)
        dtype = _DTYPES[self.dtype]
        if self.layout == "expanded":
            return self._plain([1, *shape[1:]], dtype, generator).expand(shape)
        if self.layout == "turned":
            return self._plain(shape[::-1], dtype, generator).permute(*reversed(range(len(shape))))
        if self.layout == "cut":
            return self._plain([*shape[:-1], shape[-1] + 3], dtype, generator)[..., 1 : 1 + shape[-1]]
        return self._plain(shape, dtype, generator)

    @staticmethod
    def _plain(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if not dtype.is_floating_point:
            return torch.randint(0 if dtype == torch.uint8 else -5, 9, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Step:
    """One statement. ``target`` is the value it makes, or writes to; ``rounds`` says whether its floats are rounded."""

    target: str
    text: str
    rounds: bool


@dataclass(frozen=True)
class Program:
    """A function of tensors. ``sizes`` are those of its two calls; the second differs only where shapes are dynamic.

    ``rounds_once`` says that a kernel of all its steps rounds to the results' dtypes alone, from float32 or wider.
    """

    seed: int
    inputs: tuple[Argument, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    sizes: tuple[Mapping[str, int], Mapping[str, int]]
    dynamic: bool
    numerics: str
    rounds_once: bool = False

    @property
    def source(self) -> str:
        """The function's text."""
        names = ", ".join(f"x{number}" for number in range(len(self.inputs)))
        lines = [f"def program({names}):", *(f"    {step.text}" for step in self.steps)]
        return "\n".join([*lines, f"    return ({', '.join(self.results)},)"]) + "\n"

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The program, compiled by Python alone."""
        space = namespace(None)
        exec(compile(self.source, f"<program {self.seed}>", "exec"), space)
        made: Callable[..., tuple[torch.Tensor, ...]] = space["program"]
        return made

    def arguments(self, call: int) -> list[torch.Tensor]:
        """Fresh arguments of the first or second call."""
        return [one.make(self.sizes[call], self.seed * 31 + number) for number, one in enumerate(self.inputs)]

    def described(self) -> str:
        """For people."""
        inputs = "\n".join(f"# x{number}: {one}" for number, one in enumerate(self.inputs))
        how = f"# sizes {dict(self.sizes[0])} then {dict(self.sizes[1])}, dynamic={self.dynamic}, {self.numerics}"
        return f"{how}\n{inputs}\n{self.source}"


def namespace(wide: torch.dtype | None) -> dict[str, Any]:
    dtypes = {name: wide if wide is not None and dtype.is_floating_point else dtype for name, dtype in _DTYPES.items()}
    return {"__name__": "programs", "torch": torch, "F": F, **dtypes}


# -- growing ----------------------------------------------------------------------------------------------

_UNARY = (
    "{v}.clamp(-4, 4).exp()", "{v}.tanh()", "{v}.sigmoid()", "F.gelu({v})", "F.gelu({v}, approximate='tanh')",
    "F.silu({v})", "({v}.abs() + 0.1).sqrt()", "({v}.abs() + 0.5).rsqrt()", "{v}.sin()", "{v}.cos()", "{v}.erf()",
    "({v}.abs() + 0.1).log()", "({v}.abs() + 0.5).reciprocal()", "{v}.square()", "{v} * {c}", "{v} + {c}", "{c} - {v}",
    "{v} / {c}", "{v}.clamp(-3, 3) ** 3", "{v} * {v}.shape[0]", "{v} / max({v}.shape[-1], 1) ** 0.5", "F.softplus({v})",
    "F.leaky_relu({v}, 0.1)", "{v}.clamp(-2, 2).exp2()", "F.elu({v})", "{v}.log1p() if False else {v} * 0.5",
)
_EXACT = (
    "-{v}", "{v}.abs()", "{v}.relu()", "{v}.clamp(-1, 2)", "{v}.clamp(min=0)", "{v}.floor()", "{v}.ceil()",
    "{v}.round()", "{v}.clone()", "torch.zeros_like({v})", "torch.ones_like({v})", "torch.full_like({v}, 2)",
)
_WHOLE = (
    "{v} + 3", "{v} * 2", "{v} & 3", "{v} | 1", "{v} ^ 5", "{v} >> 1", "{v} // 3", "{v} % 4", "-{v}", "{v}.abs()",
    "{v}.clamp(0, 3)", "{v} + {v}.shape[0]", "{v}.sum(-1)", "{v}.sum()", "{v}.amax(-1)", "{v}.cumsum(-1)", "{v} << 1",
)
_BINARY = (
    "{v} + {w}", "{v} - {w}", "{v} * {w}", "{v} / ({w}.abs() + 0.5)", "torch.add({v}, {w}, alpha=2)",
    "torch.lerp({v}, {w}, 0.5)", "{v}.addcmul({w}, {w})", "torch.atan2({v}, {w}.abs() + 0.5)",
)
_EXACT_BINARY = (
    "torch.maximum({v}, {w})", "torch.minimum({v}, {w})", "torch.where({b}, {v}, {w})", "{v}.masked_fill({b}, {c})",
    "torch.where({b}, {v}, 0.5)", "torch.where({b}, {v}, 2)",
)
_COMPARED = ("{v} < {w}", "{v} >= {w}", "{v} == {w}", "{v} != {w}", "{v} > 0", "{v} <= 0.5", "{v}.isnan()")
_LOGIC = ("{b} & {d}", "{b} | {d}", "{b} ^ {d}", "~{b}", "torch.logical_and({b}, {d})", "{b}.any(-1)", "{b}.all()")
_VIEWS = (
    "{v}.transpose(0, -1)", "{v}.t()", "{v}.unsqueeze({i})", "{v}.squeeze()", "{v}.squeeze({i})",
    "{v}.unsqueeze(0).expand(3, *{v}.shape)", "{v}[..., None].expand(*{v}.shape, 2)", "{v}[1:]", "{v}[:-1]",
    "{v}[..., ::2]", "{v}[..., 1:3]", "{v}[..., :{v}.shape[-1] // 2]", "{v}.select({i}, 0)", "{v}.select(-1, -1)",
    "{v}.chunk(2, -1)[{i}]", "{v}.chunk(3, 0)[0]", "{v}.flatten()", "{v}.flatten(0, 1)", "{v}.reshape(-1)",
    "{v}.reshape({v}.shape[0], -1)", "{v}.reshape(-1, {v}.shape[-1])", "{v}.permute(*reversed(range({v}.dim())))",
    "{v}.unbind(0)[0]", "{v}.narrow(-1, 0, 1)", "{v}.movedim(0, -1)", "{v}.view(-1)", "{v}.diagonal()", "{v}.mT",
    "{v}.unflatten(-1, (2, -1))", "{v}.split(2, -1)[0]", "{v}.expand_as({v})", "{v}.view_as({v})",
)
_JOINS = (
    "torch.cat([{v}, {w}], {i})", "torch.cat([{v}, {w}], -1)", "torch.stack([{v}, {w}], {i})",
    "torch.cat([{v}, {v}[..., :1]], -1)", "{v}.repeat_interleave(2, {i})", "{v}.repeat(2, 1)", "F.pad({v}, (1, 2))",
    "{v}.flip(-1)", "{v}.roll(1, -1)", "{v}.tril()", "{v}.triu(1)", "{v}.contiguous()",
    "torch.cat([-{v}[..., 1:], {v}[..., :1]], -1)",
)
_FOLDS = (
    "{v}.sum(-1)", "{v}.sum(-1, keepdim=True)", "{v}.mean(-1, keepdim=True)", "{v}.mean(-1)", "{v}.mean(0)",
    "{v}.sum()", "{v}.var(-1, correction=0)", "{v}.softmax(-1)", "{v}.log_softmax(-1)", "{v}.softmax(0)",
    "F.layer_norm({v}, {v}.shape[-1:])", "F.rms_norm({v}, {v}.shape[-1:], None, 1e-5)", "{v}.cumsum(-1)",
    "{v}.sum((0, 1))", "{v} * torch.rsqrt({v}.float().square().mean(-1, keepdim=True) + 1e-5)",
    "{v}.sum(-1, keepdim=True) + {v}", "{v}.norm(dim=-1)",
)
_EXACT_FOLDS = ("{v}.amax(-1)", "{v}.amin(-1, keepdim=True)", "{v}.amax(0)", "{v}.argmax(-1)", "{v}.max(-1)[0]")
_MATRIX = (
    "{v} @ {w}", "{v} @ {w}.transpose(-1, -2)", "F.linear({v}, {w})", "torch.einsum('...i,...i->...', {v}, {w})",
)
_MADE = (
    "torch.arange({v}.shape[-1])", "torch.arange({v}.shape[0], dtype=F32)", "torch.full(({v}.shape[-1],), 0.5)",
    "torch.zeros({v}.shape[0], 1)", "torch.arange({v}.shape[-1]) < {v}.shape[0]", "torch.arange(1, {v}.shape[-1] + 1)",
)
_LOOKED_UP = (
    "{v}.index_select(0, ({n}.reshape(-1) % {v}.shape[0]).long())", "{v}[({n} % {v}.shape[0]).long()]",
    "F.embedding({n} % {v}.shape[0], {v})", "{v}.gather(-1, ({n} % {v}.shape[-1]).long())",
)
_WRITES = (
    "{v}.add_({w})", "{v}.mul_(0.5)", "{v}.copy_({w})", "{v}[..., :2].copy_({w}[..., :2])", "{v}.zero_()",
    "{v}[0].fill_(1)", "{v}.relu_()", "{v}.clamp_(-1, 1)", "{v}.masked_fill_({b}, 2)", "{v}[..., 1:].add_(1)",
    "{v}.t().mul_({w})", "{v}.index_copy_(0, torch.arange(1), {w}[:1])", "{v}.sub_({w}.mean())", "{v}.tanh_()",
    "{v}.index_fill_(0, torch.arange(1), 3)", "{v}.select(-1, 0).copy_({w}.select(-1, 0))", "{v}.div_(2)",
)
#: Texts, whether they round, what their operands are, and how often they are taken.
_KINDS: tuple[tuple[Sequence[str], bool, str, int], ...] = (
    (_UNARY, True, "float", 5), (_EXACT, False, "number", 2), (_WHOLE, False, "whole", 2), (_BINARY, True, "float", 6),
    (_EXACT_BINARY, False, "float", 2), (_COMPARED, False, "exact", 2), (_LOGIC, False, "bool", 1),
    (_VIEWS, False, "any", 6), (_JOINS, False, "any", 3), (_FOLDS, True, "float", 3), (_EXACT_FOLDS, False, "exact", 1),
    (_MATRIX, True, "float", 1), (_MADE, False, "any", 1), (_LOOKED_UP, False, "any", 1), (_WRITES, True, "any", 2),
)


class _Grower:
    """A program under construction, with its values at both sets of sizes."""

    def __init__(self, rng: random.Random, inputs: Sequence[Input], sizes: Sequence[Mapping[str, int]]) -> None:
        self.rng = rng
        self.spaces = [
            namespace(None) | {f"x{number}": one.make(bound, number) for number, one in enumerate(inputs)}
            for bound in sizes
        ]
        self.names = [f"x{number}" for number in range(len(inputs))]
        self.steps: list[Step] = []
        #: Memory that holds rounded numbers: comparing them is no test.
        self.rounded: set[int] = set()

    def grow(self, wanted: int) -> None:
        for _ in range(12 * wanted):
            if len(self.steps) < wanted:
                self._try()

    def tensor(self, name: str, call: int = 0) -> torch.Tensor:
        held = self.spaces[call][name]
        assert isinstance(held, torch.Tensor)
        return held

    def is_exact(self, name: str) -> bool:
        return self.tensor(name).untyped_storage().data_ptr() not in self.rounded

    def _pick(self, wanted: Callable[[str], bool]) -> str:
        # What was made last is used most, so that chains grow long.
        found = [name for name in self.names if wanted(name)]
        return self.rng.choice(found[-3:] if self.rng.random() < 0.6 else found) if found else ""

    def _operand(self, kind: str) -> str:
        def fits(name: str) -> bool:
            dtype = self.tensor(name).dtype
            if kind == "float":
                return dtype.is_floating_point
            if kind == "whole":
                return not dtype.is_floating_point and dtype != torch.bool
            if kind == "bool":
                return dtype == torch.bool
            return kind == "any" or (dtype != torch.bool and (kind == "number" or self.is_exact(name)))

        return self._pick(fits)

    def _try(self) -> None:
        rng = self.rng
        texts, rounds, kind, _ = rng.choices(_KINDS, [weight for *_, weight in _KINDS])[0]
        template = rng.choice(texts)
        names = {"v": self._operand(kind), "w": self._operand(kind), "n": self._operand("whole")}
        names |= {"b": self._operand("bool"), "d": self._operand("bool")}
        if any(f"{{{slot}}}" in template and not name for slot, name in names.items()):
            return
        number = rng.choice(("0.5", "2", "3", "1.25", "7"))
        text = template.format(**names, c=number, i=rng.choice((0, 0, 1, -1)))
        if texts not in (_WRITES, _VIEWS, _MADE) and rng.random() < 0.12:
            text, rounds = f"({text}).to({rng.choice(FLOATS)})", True
        elif kind == "exact" and texts is _COMPARED and rng.random() < 0.3:
            text = f"({text}).to({rng.choice(('I32', 'F32', 'I8'))})"
        if texts is _MATRIX and self.tensor(names["v"]).dtype != self.tensor(names["w"]).dtype:
            return  # eager PyTorch refuses it only where there is something to multiply
        if texts is _MATRIX and any(self._makes_gigabytes(names["v"], names["w"], call) for call in (0, 1)):
            return
        if texts is _WRITES:
            self._write(Step(names["v"], text, rounds))
        else:
            self._make(Step(f"v{len(self.steps)}", f"v{len(self.steps)} = {text}", rounds), names)

    def _makes_gigabytes(self, one: str, other: str, call: int) -> bool:
        """Whether a product of two matrices might: no program has such a result, and making it may end the process."""
        first, second = self.tensor(one, call), self.tensor(other, call)
        width = max(1, first.shape[-1]) if first.dim() else 1
        return first.numel() // width * (second.numel() // width) > 1e8

    def _make(self, step: Step, names: Mapping[str, str]) -> None:
        read = [name for slot, name in names.items() if name and name in step.text]
        try:
            for space in self.spaces:
                exec(step.text, space)
        except Exception:
            self._forget(step.target)
            return
        made = self.spaces[0][step.target]
        if not self._is_fine(step.target):
            self._forget(step.target)
            return
        if made.is_floating_point() and (step.rounds or not all(map(self.is_exact, read))):
            self.rounded.add(made.untyped_storage().data_ptr())
        elif not made.is_floating_point() and not all(map(self.is_exact, read)):
            self._forget(step.target)  # a whole number made of rounded ones may be another one
            return
        self.steps.append(step)
        self.names.append(step.target)

    def _write(self, step: Step) -> None:
        """A write, on copies first: what it fails at, or spoils, is left alone."""
        copies = [_copied(space) for space in self.spaces]
        if overlaps(self.tensor(step.target)):
            return
        exact = self.is_exact(step.target)
        read = [name for name in self.names if name in step.text]
        try:
            for space in copies:
                exec(step.text, space)
        except Exception:
            return
        spaces, self.spaces = self.spaces, copies
        whole = not self.tensor(step.target).is_floating_point()
        shared = {name for name in self.names if shares(self.tensor(name), self.tensor(step.target))}
        rounded = {name for name in self.names if not _was_exact(spaces[0], self.rounded, name)}
        if (whole and rounded.intersection(read) - shared) or not all(map(self._is_fine, shared)):
            self.spaces = spaces
            return
        self.rounded = {self.tensor(name).untyped_storage().data_ptr() for name in rounded}
        if not whole or not exact:
            self.rounded.add(self.tensor(step.target).untyped_storage().data_ptr())
        self.steps.append(step)

    def _forget(self, name: str) -> None:
        for space in self.spaces:
            space.pop(name, None)

    def _is_fine(self, name: str) -> bool:
        held = [space.get(name) for space in self.spaces]
        if not all(isinstance(one, torch.Tensor) and one.numel() <= _MOST_ELEMENTS for one in held):
            return False
        one, other = held
        if one.dtype not in _DTYPES.values() or one.dim() != other.dim():
            return False
        return all(bool((tensor.double().abs() < _LARGEST).all()) for tensor in (one, other))


def _was_exact(space: Mapping[str, Any], rounded: set[int], name: str) -> bool:
    return space[name].untyped_storage().data_ptr() not in rounded


def shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def twin(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers in other memory and perhaps another dtype, laid out the same."""
    memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return memory.to(dtype, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _copied(space: Mapping[str, Any]) -> dict[str, Any]:
    """The same values in other memory; what shared memory still does."""
    memory: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        kept = memory.setdefault(storage._cdata, storage.clone())
        made = torch.empty(0, dtype=value.dtype)
        return made.set_(kept, value.storage_offset(), value.shape, value.stride())

    return {name: copy(value) for name, value in space.items()}


def make_program(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    dynamic = rng.random() < 0.4
    pool = [size for size in _SIZES if size > 1] if dynamic else list(_SIZES)
    if rng.random() < 0.6:
        pool = [size for size in pool if size > 2]
    bound = {name: rng.choice(pool) for name in "abc"}
    if rng.random() < 0.3:
        bound["b"] = bound["a"]
    second = {name: rng.choice(pool) for name in "abc"} if dynamic else bound
    inputs = []
    for _ in range(rng.randint(1, 4)):
        rank = rng.choice((1, 2, 2, 2, 3, 3, 4))
        shape = tuple(rng.choice(("a", "b", "c", "a", "b", 1, 2, 4)) for _ in range(rank))
        if sum(isinstance(size, str) for size in shape) > 2:
            shape = (2, *shape[1:])[-3:]
        dtype = rng.choice((*FLOATS, *FLOATS, "I64", "I32", "B", "I8", "U8", "I16"))
        inputs.append(Input(shape, dtype, rng.choice(("plain",) * 4 + ("turned", "cut", "expanded"))))
    if not any(one.dtype in FLOATS for one in inputs):
        inputs.append(Input(("a", "b"), "F32", "plain"))
    grower = _Grower(rng, inputs, (bound, second))
    grower.grow(rng.choice((2, 4, 6, 8, 12, 16)))
    made = grower.names[len(inputs) :] or ["x0 + 1"]
    results = dict.fromkeys([made[-1], *rng.sample(made, min(len(made), rng.randint(0, 3)))])
    numerics = rng.choice(("fp32", "eager"))
    return Program(seed, tuple(inputs), tuple(grower.steps), tuple(results), (bound, second), dynamic, numerics)
