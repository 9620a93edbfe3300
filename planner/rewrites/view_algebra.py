"""Which element of a tensor each element of another one is, through ops that only move elements: views and copies.

Each dimension of the result walks through the tensor by digits. A transposed, split or repeated dimension is another
list of digits, whichever op made it: every view op is run on a tensor without memory that is laid out row by row, and
its strides there say which digits each new dimension has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import fx

from fuseplan.planner.rewrites.trace_edit import arguments_of, is_pure, static_sizes, value_of
from fuseplan.search.errors import OWN_FAULTS

_aten = torch.ops.aten
#: ``(size, stride)``: it counts to the size, in steps of so many elements of the source; a stride of zero repeats them.
Digit: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class ElementMap:
    """The digits of each dimension, the fastest last. Steps are in elements of the source, counted row by row."""

    dims: tuple[tuple[Digit, ...], ...]

    @staticmethod
    def of(shape: Sequence[int]) -> ElementMap:
        """A tensor of a shape as itself."""
        return ElementMap(tuple(((size, math.prod(shape[dim + 1 :])),) for dim, size in enumerate(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(size for size, _ in dim) for dim in self.dims)

    def plain(self) -> ElementMap:
        """The same map in its one spelling: no digits of size one, and no two that are one."""
        return ElementMap(tuple(map(_joined, self.dims)))

    def through(self, node: fx.Node) -> ElementMap | None:
        """The map of a call that moves elements of what this one describes; None where it may do something else."""
        if node.op != "call_function" or not is_pure(node.target) or _other_operands(node):
            return None
        if node.target is _aten.clone.default:  # the same elements at the same places of a new tensor
            return self
        if node.target is _aten.repeat_interleave.self_int:
            return self._repeated(node)
        return self._viewed(node)

    def _repeated(self, node: fx.Node) -> ElementMap | None:
        call = arguments_of(node)
        times, dim = call["repeats"], call["dim"]
        if not isinstance(times, int) or not isinstance(dim, int):
            return None
        dims = list(self.dims)
        dims[dim] = (*dims[dim], (times, 0))
        return ElementMap(tuple(dims))

    def _viewed(self, node: fx.Node) -> ElementMap | None:
        source = value_of(node.args[0])
        if source is None or node.target is _aten.as_strided.default:  # which counts in memory, not in elements
            return None
        # A trace is made in a fake mode, which would take these for fakes, too.
        with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
            rows = torch.empty(self.shape, dtype=source.dtype, device="meta")
            try:
                found = node.target(rows, *node.args[1:], **node.kwargs)  # type: ignore[operator]
            except Exception as error:  # an op may refuse operands for any reason
                OWN_FAULTS.tolerate(error)
                return None
        if not isinstance(found, torch.Tensor) or found.untyped_storage()._cdata != rows.untyped_storage()._cdata:
            return None
        if found.dtype != rows.dtype or found.storage_offset() or found.is_neg() or found.is_conj():
            return None
        digits = [digit for dim in self.dims for digit in dim]
        dims = [walked(digits, size, stride) for size, stride in zip(found.shape, found.stride(), strict=True)]
        return ElementMap(tuple(dim for dim in dims if dim is not None)) if None not in dims else None


def walked(digits: Sequence[Digit], size: int, stride: int) -> tuple[Digit, ...] | None:
    """The digits of ``size`` places in steps of ``stride``, counted through ``digits``; None where they have none."""
    if stride == 0:
        return ((size, 0),)
    found: list[Digit] = []
    for extent, step in reversed(digits):
        if size == 1:
            break
        if (size - 1) * stride < extent:  # all of them are within this digit
            found.append((size, step * stride))
            size = 1
        elif stride >= extent:
            if stride % extent:
                return None
            stride //= extent
        else:
            if extent % stride or size % (extent // stride):
                return None
            found.append((extent // stride, step * stride))
            size //= extent // stride
            stride = 1
    return tuple(reversed(found)) if size == 1 else None


def moved_from(node: fx.Node, starts: Callable[[fx.Node], bool]) -> list[fx.Node] | None:
    """The calls by which a tensor becomes ``node``, from one that ``starts`` on; None where there is no such call.

    Each takes what the one before it gives as its first operand.
    """
    path = [node]
    while not starts(path[-1]):
        source = path[-1].args[0] if path[-1].op == "call_function" and path[-1].args else None
        if not isinstance(source, fx.Node) or static_sizes(source) is None:
            return None
        path.append(source)
    return path[::-1]


def _other_operands(node: fx.Node) -> bool:
    """Whether a call reads anything but its first operand."""
    return node.all_input_nodes != [node.args[0]] if node.args else True


def _joined(dim: Sequence[Digit]) -> tuple[Digit, ...]:
    found: list[Digit] = []
    for size, stride in dim:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return tuple(found)
