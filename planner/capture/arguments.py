"""The arguments of a traced ATen call, split as :class:`~fuseplan.planner.graph.dataflow.OpNode` wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from fuseplan.planner.capture.sizes import SizeNames
from fuseplan.planner.graph.dataflow import Ref
from fuseplan.planner.graph.execute import Parameter, parameters_of


@dataclass(frozen=True)
class TracedTensor:
    """A tensor of the trace: the name of its value, and the fake tensor that shows its layout and memory."""

    name: str
    fake: torch.Tensor


#: No address, and not the number that stands for the random number generator.
_FIRST_RENEWED = -2


@dataclass
class Storages:
    """Which traced tensors share memory at run time."""

    _merged: dict[int, int] = field(default_factory=dict)
    _renewals: int = 0

    def of(self, tensor: TracedTensor) -> int:
        """Identity of the memory: equal for a tensor, its views, and what an in-place op returns."""
        address = int(tensor.fake.untyped_storage()._cdata)
        return self._merged.get(address, address)

    def renew(self, tensor: TracedTensor) -> None:
        """Declare that from now on what the trace shows in the memory of ``tensor`` counts as another memory."""
        self._renewals += 1
        self._merged[int(tensor.fake.untyped_storage()._cdata)] = _FIRST_RENEWED - self._renewals

    def merge(self, tensor: TracedTensor, other: TracedTensor) -> None:
        """Declare that ``tensor`` is in the memory of ``other``, although the trace shows two storages."""
        self._merged[self.of(tensor)] = self.of(other)


@dataclass(frozen=True)
class Bound:
    """Arguments by role.

    ``operands`` are the tensors, in schema order, ``written`` those of them that the op writes to; ``attrs`` are all
    other arguments by schema name, as data.
    """

    operands: tuple[TracedTensor, ...]
    attrs: dict[str, Any]
    written: tuple[TracedTensor, ...]


#: In-place ops that change autograd state, never data.
_HARMLESS = frozenset(("aten.detach_.default", "aten.requires_grad_.default"))


def bind_arguments(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], names: SizeNames) -> Bound:
    """Bind by schema; defaults are filled in, and what only says where to allocate is left out.

    Tensors among the arguments are :class:`TracedTensor`.
    """
    operands: list[TracedTensor] = []
    attrs: dict[str, Any] = {}
    written: list[TracedTensor] = []
    parameters = parameters_of(op)
    given = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)} | dict(kwargs)
    for parameter in parameters:
        value = given.get(parameter.name, parameter.default)
        tensors = tensors_in(value)
        if parameter.is_written and op not in _HARMLESS:
            written.extend(tensors)
        if isinstance(value, TracedTensor):
            operands.append(value)
        elif parameter.is_variadic and tensors:
            operands.extend(tensors)
        elif tensors:
            attrs[parameter.name] = tuple(_place(item, operands, names) for item in value)
        elif not _is_default(parameter, value):
            attrs[parameter.name] = names.plain(value)
    return Bound(tuple(operands), attrs, tuple(written))


def tensors_in(value: Any) -> list[TracedTensor]:
    """The tensors in nested lists, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, TracedTensor)]


def _place(item: Any, operands: list[TracedTensor], names: SizeNames) -> Any:
    """A list element: a tensor becomes an operand and leaves a ``Ref`` to it."""
    if not isinstance(item, TracedTensor):
        return names.plain(item)
    operands.append(item)
    return Ref(len(operands) - 1)


def _is_default(parameter: Parameter, value: Any) -> bool:
    """True for arguments that say where or how to allocate, in the usual way: they carry no meaning."""
    if parameter.name in ("device", "pin_memory", "non_blocking"):
        return True
    if parameter.name == "layout":
        return value in (None, torch.strided)
    if parameter.name == "memory_format":
        # Schemas spell the default contiguous_format as the number 0.
        usual = torch.contiguous_format if parameter.default == 0 else torch.preserve_format
        return value in (None, usual, parameter.default)
    return parameter.name == "generator" and value is None
