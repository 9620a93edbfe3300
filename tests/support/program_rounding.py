"""Statements of eager code in float64, with what eager rounds in them, op by op.

A statement may pass through several dtypes: ``(x.half() + 1).to(F64)`` is only as exact as float16. So the ops that it
calls are watched as eager runs them, for the dtypes that their results are held in. In float64 each of these results is
then moved by a rounding of its dtype. What comes of that is what rounding alone explains. Equal numbers are rounded
equally, as they are in the dtype: their errors add up. On the way to a sum they are not always: partial sums differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: Ops that only choose or move numbers: they round where they change the dtype.
_EXACT = frozenset({
    "_unsafe_view", "abs", "amax", "amin", "arange", "cat", "ceil", "clamp", "clamp_", "clamp_min", "clone",
    "constant_pad_nd", "copy_", "embedding", "fill_", "flip", "floor", "full", "full_like", "gather", "index",
    "index_copy_", "index_fill_", "index_select", "masked_fill", "masked_fill_", "max", "maximum", "minimum", "neg",
    "ones_like", "relu", "relu_", "repeat", "roll", "round", "stack", "tril", "triu", "where", "zero_", "zeros",
    "zeros_like",
})
#: Ops that round on the way to their results, where terms may cancel: as if each operand were off by a rounding.
_ROUND_WITHIN = frozenset({
    "_fused_rms_norm", "_log_softmax", "_softmax", "addcmul", "addmm", "avg_pool2d", "bmm", "convolution", "cumsum",
    "dot", "gelu", "lerp", "linalg_vector_norm", "mean", "mm", "mv", "native_batch_norm", "native_group_norm",
    "native_layer_norm", "sum", "upsample_bilinear2d", "var",
})
#: Ops that round to the nearest number. Others are functions, which may be off by some units of float32 or wider.
_NEAREST = frozenset({"add", "add_", "addcmul", "div", "mul", "mul_", "reciprocal", "rsub", "sqrt", "sub"})
_FUNCTION_UNITS = 4.0
#: Half precision is summed in float32; only the sum is rounded to it.
_WITHIN = torch.finfo(torch.float32).eps
#: Partial sums are larger than what is summed. Of other types eager's error, which shows, allows as much.
_FLOAT64, _PARTIAL_SUMS = torch.finfo(torch.float64).eps, 4.0
_CAST = "_to_copy"


@dataclass(frozen=True)
class Rounding:
    """What one op rounds in eager, relative to the numbers: its ``results``, and its ``operands`` on the way there."""

    op: str
    results: float
    operands: float = 0.0

    def within(self) -> Rounding:
        """The same in a kernel that keeps float32 or wider."""
        return Rounding(self.op, min(self.results, _FUNCTION_UNITS * _WITHIN), self.operands)


class Watch(TorchDispatchMode):
    """Collects the roundings of what runs under it. A cast counts with the op before it; one before all has no op."""

    def __init__(self) -> None:
        super().__init__()
        self.roundings: list[Rounding] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = max(map(_eps, _floats((args, kwargs))), default=0.0)
        made = func(*args, **(kwargs or {}))
        results = _results(func, made)
        if results:
            op, unit = _name(func), _eps(results[0])
            narrowed = unit if unit > given else 0.0
            if op == _CAST:
                last = self.roundings.pop() if self.roundings else Rounding("", 0.0)
                self.roundings.append(Rounding(last.op, max(last.results, narrowed), last.operands))
            elif op in _EXACT:
                self.roundings.append(Rounding(op, narrowed))
            else:
                inner = min(unit, _WITHIN)
                within = inner if unit > _FLOAT64 else _PARTIAL_SUMS * inner
                result = unit if op in _NEAREST else max(unit, _FUNCTION_UNITS * inner)
                self.roundings.append(Rounding(op, result, within if op in _ROUND_WITHIN else 0.0))
        return made


class Wide(TorchDispatchMode):
    """Runs the same in float64, casts to narrower floats included.

    Args:
        roundings: Of the same statement in eager.
        generator: Moves each number by a part of its rounding, up or down; None for exact results.
    """

    def __init__(self, roundings: Sequence[Rounding], generator: torch.Generator | None) -> None:
        super().__init__()
        self._ops = [one for one in roundings if one.op]
        self._first = max((one.results for one in roundings if not one.op), default=0.0)
        self._worst = Rounding("", *(
            max((getattr(one, which) for one in roundings), default=0.0) for which in ("results", "operands")
        ))
        self._generator = generator
        self._apart = generator is not None and bool(torch.randint(2, (), generator=generator))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if isinstance(given.get("dtype"), torch.dtype) and given["dtype"].is_floating_point:
            given["dtype"] = torch.float64
        if self._generator is None or _name(func) == _CAST:
            return func(*args, **given)
        rounding = self._foreseen(_name(func))
        if rounding.operands:
            args = pytree.tree_map_only(
                torch.Tensor, lambda one: self._moved(one, rounding.operands, self._apart), args)
        made = func(*args, **given)
        results = _results(func, made)
        if results:
            self._ops, self._first = self._ops[1:], 0.0
        for one in results:
            if rounding.results and not overlaps(one):
                one.copy_(self._moved(one, rounding.results))
        if rounding.operands and (inner := _cancelled(_name(func), args[0], made)) is not None:
            results[0].add_(self._moved(inner, rounding.operands, apart=True) - inner)
        return made

    def settled(self, made: torch.Tensor) -> torch.Tensor:
        """The statement's result, moved by the rounding of a cast that no op came after."""
        return self._moved(made, self._first) if self._generator is not None and self._first else made

    def _foreseen(self, op: str) -> Rounding:
        """What eager rounds in the op that is next; the worst of the statement where eager takes another way."""
        found = self._ops[0] if self._ops else self._worst
        if found.op != op:
            return Rounding(op, self._worst.results, self._worst.operands if op in _ROUND_WITHIN else 0.0)
        return Rounding(op, found.results, max(found.operands, self._first))

    def _moved(self, tensor: torch.Tensor, unit: float, apart: bool = False) -> torch.Tensor:
        """Each number moved by a part of its rounding; with ``apart`` equal ones, too, differ."""
        if not tensor.is_floating_point():
            return tensor
        if apart:
            by = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
            return tensor * (1 + unit / 2 * by)
        # Half a unit at most, up or down, by a number made of the value's bits and this op's own.
        own = int(torch.randint(2**62, (), generator=self._generator)) | 1
        bits = tensor.double().view(torch.int64) * own
        bits = (bits ^ (bits >> 29)) * -0x61C8864680B583EB
        return tensor * (1 + unit / 2 * ((bits >> 11).double() / 2.0**52))


def _cancelled(op: str, x: torch.Tensor, made: Any) -> torch.Tensor | None:
    """What an op takes away from about as much: a rounding of that moves the result. None for other ops."""
    if op == "gelu":  # x / 2 * (1 + erf(...))
        return x.abs()
    if op == "_log_softmax":  # x - max - log(sum)
        return x.abs() + 1
    return x.abs() * made[2] if op == "native_layer_norm" else None  # (x - mean) / deviation


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _results(func: Any, made: Any) -> list[torch.Tensor]:
    """The floats that an op made or wrote; none where it only views its operand."""
    views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    return [] if views else _floats(made)


def _floats(tree: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, torch.Tensor) and one.is_floating_point()]


def _eps(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.partition("::")[2]
