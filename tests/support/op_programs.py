"""A small program for each op that has a recipe and each dtype: the op, and another one that a kernel can join to it.

What follows the op is exact, so that a kernel of both rounds once: its results are judged by that one rounding
(``Program.rounds_once``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from graphs import Builder
from op_samples import BAGS, SAMPLES, X
from programs import Program, Step, twin

from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.capture.arguments import respell
from fuseplan.planner.graph.execute import bind_call
from fuseplan.planner.ops.op import DTYPES
from fuseplan.planner.ops.table import OPS, why_opaque

#: Of ops that write, or have several results.
_STATEMENTS: Mapping[str, tuple[str, ...]] = {
    "aten.copy_.default": ("v0 = x0 + x0", "x1.copy_(v0)"),
    "aten.index_copy_.default": ("v0 = x0 + x0", "x1.index_copy_(0, x2, v0)"),
    "aten.max.dim": ("v0 = x0.max(-1)[0]", "v1 = x0.max(-1)[1] + 1"),
    "aten.cummax.default": ("v0 = x0.cummax(-1)[0]", "v1 = x0.cummax(-1)[1] + 1"),
    "aten.cummin.default": ("v0 = x0.cummin(-1)[0]", "v1 = x0.cummin(-1)[1] + 1"),
    "aten.min.dim": ("v0 = x0.min(-1)[0]", "v1 = x0.min(-1)[1] + 1"),
}
_OPERANDS = (X, X.flip(0), torch.tensor([2, 0, 1]))


@dataclass(frozen=True)
class Given:
    """An argument with numbers of its own."""

    tensor: torch.Tensor

    def make(self, _sizes: Mapping[str, int], _seed: int) -> torch.Tensor:
        """The numbers in fresh memory, laid out the same."""
        return twin(self.tensor, self.tensor.dtype)


@dataclass(frozen=True)
class OpCase:
    """An op and the dtype of its numbers, with a program of both; ``refusal`` says why no kernel can have the op."""

    op: str
    dtype: str
    program: Program
    refusal: str | None = None


def op_cases(words: str = "") -> Iterator[OpCase]:
    """Every sample in its own dtype, and one of each op in each other dtype that eager takes.

    Of ops whose name has one of the ``words``, joined by commas; they are numbered from 0.
    """
    number = 0
    fusible = [name for name, op in OPS.items() if op.is_fusible and name not in BAGS]
    for op in (name for name in fusible if any(word in name for word in words.split(","))):
        own = [one for one in SAMPLES if one[0] == op] or [(op, _OPERANDS[: 3 if "index" in op else 2], {})]
        cases = [case for _, operands, attrs in own if (case := _case(op, operands, attrs))]
        for dtype in map(torch_dtype, DTYPES):
            others = (_case(op, _cast(operands, dtype), attrs) for _, operands, attrs in own)
            there = {case.dtype for case in cases if not case.refusal}
            made = [case for case in others if case and case.dtype not in there]
            cases += [case for case in made if not case.refusal][:1] or made[:1]
        for case in cases:
            yield replace(case, program=replace(case.program, seed=number, numerics=("fp32", "eager")[number % 2]))
            number += 1


def _dtype(tensors: Sequence[torch.Tensor]) -> str:
    """What a case is listed under: the dtype of its first number, or that of a mask where there is none."""
    names = [str(one.dtype).removeprefix("torch.") for one in tensors]
    return next((name for name in names if name != "bool"), "bool")


def _cast(operands: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Operands in another dtype: the floats where there are any (other operands are positions or masks), else all."""
    floats = any(one.is_floating_point() for one in operands)

    def cast(one: torch.Tensor) -> torch.Tensor:
        if floats and not one.is_floating_point():
            return one
        if dtype == torch.bool:
            return one.float() > 0
        if not dtype.is_floating_point and one.is_floating_point():
            one = (one.float().nan_to_num(0.0, 9.0, -9.0) * 3).round().clamp(0 if dtype == torch.uint8 else -99, 99)
        return twin(one, dtype)

    return tuple(map(cast, operands))


def _case(op: str, operands: Sequence[torch.Tensor], attrs: Mapping[str, Any]) -> OpCase | None:
    """None where eager refuses the op, or the meta device, on which graphs are traced."""
    try:
        case = _made(op, operands, attrs)
        case.program.function()(*case.program.arguments(0))
        if operands and "device" not in attrs:
            case.program.function()(*(one.to("meta") for one in case.program.arguments(0)))
    except (RuntimeError, IndexError, ValueError):
        return None
    return case


def _made(op: str, operands: Sequence[torch.Tensor], attrs: Mapping[str, Any]) -> OpCase:
    builder = Builder(**{f"x{place}": one for place, one in enumerate(operands)})
    if op in _STATEMENTS:
        refusal = None
        if op.endswith(".dim"):  # of a value and its position
            values = builder.many(op, "x0", outputs=2, dim=-1)
            refusal = why_opaque(builder.nodes[0], builder.graph(*values).specs)
        return OpCase(op, _dtype(operands), _program(operands, _STATEMENTS[op]), refusal)
    value = builder(op, *builder.inputs, **attrs)
    made, node, specs = builder.tensors[value], builder.nodes[0], builder.graph(value).specs
    args, kwargs = bind_call(node, list(map(_Word, builder.inputs)), "cpu")
    words = [*map(repr, args), *(f"{name}={given!r}" for name, given in kwargs.items())]
    call = f"v0 = torch.ops.{op}({', '.join(words)})".replace("device(type", "torch.device(type")
    if operands:
        then = "v1 = " + _joined(made.dtype)
    else:  # a kernel is made for what reads something
        operands, then = [torch.randint(-9, 9, made.shape).to(made.dtype)], "v1 = v0 * x0"
    source = specs[node.inputs[0]] if node.inputs else None
    spelled = respell(op, node.inputs, node.attrs, source, specs[value], moves=False)[0]
    refusal = why_opaque(node, specs)
    if spelled != op or op == "aten.dropout.default":
        refusal = f"it is {spelled if spelled != op else 'its operand'} when it is planned"
    return OpCase(op, _dtype(operands), _program(operands, (call, then)), refusal)


class _Word(str):
    """A name that shows itself without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _joined(dtype: torch.dtype) -> str:
    """An op on ``v0`` that rounds nothing."""
    if dtype == torch.bool:
        return "~v0"
    if dtype == torch.float8_e4m3fn:
        return "v0.float()"
    return "v0 * 2" if dtype.is_floating_point else "v0 + 1"


def _program(operands: Sequence[torch.Tensor], texts: Sequence[str]) -> Program:
    """It returns the values that no later statement reads."""
    steps = [Step(text.partition(" = ")[0] if " = " in text else "x1", text, True) for text in texts]
    unread = [one.target for at, one in enumerate(steps) if not any(one.target in text for text in texts[at + 1 :])]
    given = tuple(map(Given, operands))
    return Program(0, given, tuple(steps), tuple(unread), ({}, {}), False, "fp32", rounds_once=True)
