"""Tensor subclasses as quantisation libraries write them, and feed-forward blocks of them beside their plain ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_aten = torch.ops.aten
_LIBRARY = torch.library.Library("fuseplan_quantised", "DEF")
_LIBRARY.define("widen(Tensor q, Tensor scale) -> Tensor")
_LIBRARY.impl("widen", lambda q, scale: q.to(scale.dtype) * scale, "CompositeImplicitAutograd")


class Int8Weight(Tensor):
    """Rows of int8, each with a scale; has its turn below autograd, where ``linear`` is a transpose and a product."""

    q: Tensor
    scale: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor, plus: float = 0.0) -> Any:
        made = Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype, device=q.device)  # type: ignore[attr-defined]
        made.q, made.scale, made.plus = q, scale, plus
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Any:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["q", "scale"], {"plus": self.plus}

    @classmethod
    def __tensor_unflatten__(cls, inside: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inside["q"], inside["scale"], **context)

    def wide(self) -> Tensor:
        found = self.q.to(self.scale.dtype) * self.scale
        return found + self.plus if self.plus else found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (_aten.detach.default, _aten.t.default):
            parts = (function(one) for one in (args[0].q, args[0].scale))
            return cls(*parts, args[0].plus)
        return function(*(one.wide() if isinstance(one, Int8Weight) else one for one in args), **(kwargs or {}))


class Int8Linear(Int8Weight):
    """Has its turn in Python already, and knows ``linear``; unpacks by an op of its library."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight, bias = args
            return F.linear(x, torch.ops.fuseplan_quantised.widen(weight.q, weight.scale), bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class Nibbles(Tensor):
    """Two numbers of four bits in a byte."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        rows, columns = held.shape
        made = Tensor._make_wrapper_subclass(cls, (rows, 2 * columns), dtype=torch.int8)  # type: ignore[attr-defined]
        made.held = held
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inside: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inside["held"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packed, *dtype = args
        if function is _aten.detach.default:
            return cls(function(packed.held))
        assert function in (_aten._to_copy.default, _aten.to.dtype), function
        return unpacked(packed.held).to(*dtype, **(kwargs or {}))


def unpacked(held: Tensor) -> Tensor:
    return torch.stack((held & 15, held >> 4), -1).flatten(-2).to(torch.int8) - 8


class Int4Weight(Int8Weight):
    """Holds a subclass, as quanto's does."""

    @classmethod
    def of(cls, weight: Tensor) -> Any:
        scale = weight.abs().amax(1, keepdim=True) / 7
        q = (weight / scale).round().to(torch.int32) + 8
        return cls(Nibbles((q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)), scale)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _aten.t.default:
            return args[0].wide().t()
        if function is _aten.detach.default:
            return cls(args[0].q.detach(), args[0].scale.detach())
        return super().__torch_dispatch__(function, types, args, kwargs)


class Block(nn.Module):
    """A norm, two layers and what is between; ``linear`` takes what a layer multiplies with."""

    def __init__(self, linear: Callable[..., Tensor], up: Any, down: Any) -> None:
        super().__init__()
        self.linear = linear
        self.norm, self.bias = nn.LayerNorm(24), nn.Parameter(torch.linspace(-1, 1, 40))
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.linear(self.norm(x), self.up, self.bias)) * 2
        return x + torch.tanh(self.linear(hidden, self.down, None))


def _by_parts(x: Tensor, parts: Any, bias: Tensor | None) -> Tensor:
    weight = parts[0].t().to(x.dtype) * parts[1].t()
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _by_nibbles(x: Tensor, parts: Any, bias: Tensor | None) -> Tensor:
    weight = (unpacked(parts[0]).to(x.dtype) * parts[1]).t()
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _by_linear(x: Tensor, parts: Any, bias: Tensor | None) -> Tensor:
    return F.linear(x, parts[0].to(x.dtype) * parts[1], bias)


#: What each class does in plain ops.
PLAIN: dict[type[Int8Weight], Callable[..., Tensor]] = {
    Int8Weight: _by_parts, Int8Linear: _by_linear, Int4Weight: _by_nibbles,
}


def parts_of(weight: Any) -> list[Tensor]:
    """The plain tensors inside."""
    return [weight.q.held if isinstance(weight.q, Nibbles) else weight.q, weight.scale]


def blocks(kind: type[Int8Weight]) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Two layers that share a weight: of subclasses, in plain ops on the tensors inside, and in float64 unpacked."""
    torch.manual_seed(0)
    down = kind.of(torch.randn(24, 40))
    ups = [kind.of(torch.randn(40, 24)) for _ in range(2)]
    plain, exact = PLAIN[kind], lambda x, weight, bias: F.linear(x, weight, None if bias is None else bias.double())

    def held(weight: Any) -> nn.ParameterList:
        return nn.ParameterList(nn.Parameter(one, requires_grad=False) for one in parts_of(weight))

    def wide(weight: Any) -> nn.Parameter:
        q, scale = parts_of(weight)
        return nn.Parameter((unpacked(q) if isinstance(weight.q, Nibbles) else q).double() * scale.double())

    shared, shared_parts = nn.Parameter(down, requires_grad=False), held(down)
    return (
        nn.Sequential(*(Block(F.linear, nn.Parameter(up, requires_grad=False), shared) for up in ups)).eval(),
        nn.Sequential(*(Block(plain, held(up), shared_parts) for up in ups)).eval(),
        nn.Sequential(*(Block(exact, wide(up), wide(down)) for up in ups)).double().eval(),
    )


def quantised() -> tuple[nn.Module, Tensor]:
    """For ``--module tensor_subclasses:quantised``."""
    return blocks(Int8Linear)[0], torch.randn(5, 24)


def in_plain_ops() -> tuple[nn.Module, Tensor]:
    return blocks(Int8Linear)[1], torch.randn(5, 24)
