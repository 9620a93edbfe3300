"""Several linear ops that read one value as one op, ``fuseplan::merged_linear``: registered with PyTorch when imported.

It is one matrix product where the weights follow one another in memory, and several where they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

import torch

_LIBRARY = torch.library.Library("fuseplan", "DEF")
_LIBRARY.define("merged_linear(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor")

_linear = torch.nn.functional.linear
_as_strided = torch.as_strided
_address = torch.Tensor.data_ptr


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors that follow one another in memory as one along the first dimension, a view; None where they do not."""
    first = tensors[0]
    address = first.data_ptr()
    for one in tensors:
        alike = one.dtype == first.dtype and one.device == first.device and one.shape[1:] == first.shape[1:]
        if not alike or not one.is_contiguous() or one.data_ptr() != address:
            return None
        address += one.numel() * one.element_size()
    # Two allocations may touch by chance.
    storage = first.untyped_storage()
    if address > storage.data_ptr() + storage.nbytes():
        return None
    shape = (sum(one.shape[0] for one in tensors), *first.shape[1:])
    return first.as_strided(shape, (prod(shape[1:]), *first.stride()[1:]))


def side_by_side(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors in one new piece of memory, in which they follow one another along the first dimension."""
    whole = torch.cat([one.detach() for one in tensors])
    return list(whole.split([one.shape[0] for one in tensors]))


def linear_apart(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """A matrix product for each weight (x: ``[..., K]``, weights: ``[N_i, K]``), side by side: ``[..., sum(N_i)]``."""
    result = _empty_result(x, weights)
    rows = x.reshape(-1, x.shape[-1])
    parts = result.view(-1, result.shape[-1]).split([one.shape[0] for one in weights], 1)
    for number, (weight, part) in enumerate(zip(weights, parts, strict=True)):
        if biases:
            torch.addmm(biases[number], rows, weight.t(), out=part)
        else:
            torch.mm(rows, weight.t(), out=part)
    return result


#: ``move(weights, biases)``: tries to let them lie side by side, and says whether they do.
Move: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], bool]
#: Shape and strides of weights as one, and those of biases.
_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
#: Sets of weights that one place in a program remembers: more layers than this rarely share their code.
_MOST_KNOWN = 1024


class MergedLinear:
    """``merged_linear`` without PyTorch's dispatcher, for one place in a program.

    Layers that share a compiled graph have their own weights: how a set lies is remembered by its addresses. ``move``
    is asked once for weights that do not lie side by side.
    """

    def __init__(self, move: Move | None = None) -> None:
        self._move = move
        # None for weights that are several.
        self._known: dict[tuple[int, ...], _Layout | None] = {}

    def __call__(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """As the op: see :func:`linear_apart` for shapes."""
        addresses = _addresses(weights, biases)
        layout = self._known[addresses] if addresses in self._known else self._look(weights, biases)
        if layout is None:
            return linear_apart(x, weights, biases)
        try:
            weight = _as_strided(weights[0], layout[0], layout[1])
            bias = _as_strided(biases[0], layout[2], layout[3]) if biases else None
        except RuntimeError:  # other memory at the same addresses, in several pieces
            self._known[addresses] = None
            return linear_apart(x, weights, biases)
        return _linear(x, weight, bias)

    def _look(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> _Layout | None:
        layout = _layout(weights, biases)
        if layout is None and self._move is not None and self._move(weights, biases):
            layout = _layout(weights, biases)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[_addresses(weights, biases)] = layout
        return layout


def _addresses(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple([_address(one) for one in (*weights, *biases)] if biases else [_address(one) for one in weights])


def _layout(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> _Layout | None:
    weight, bias = as_one(weights), as_one(biases) if biases else None
    if weight is None or (biases and bias is None):
        return None
    return tuple(weight.shape), weight.stride(), (weight.shape[0],), (1,)


def _empty_result(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sum(one.shape[0] for one in weights)))


_LIBRARY.impl("merged_linear", lambda *operands: MergedLinear()(*operands), "CompositeExplicitAutograd")
torch.library.register_fake(
    "fuseplan::merged_linear", lambda x, weights, biases: _empty_result(x, weights), lib=_LIBRARY
)

#: The op: ``MERGED(x, weights, biases)``.
MERGED: torch._ops.OpOverload = torch.ops.fuseplan.merged_linear.default
