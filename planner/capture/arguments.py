"""The arguments of a traced ATen call, split as :class:`~fuseplan.planner.graph.dataflow.OpNode` wants them.

Keys of tuned records must not depend on how a call was written: ``x.float()`` and ``x.type_as(y)`` get one spelling,
and ``view(-1, 64)`` is ``view(8, 64)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from fuseplan.kernels.ir.index import as_size, is_static
from fuseplan.planner.capture.sizes import SizeNames
from fuseplan.planner.graph.dataflow import Ref, TensorSpec
from fuseplan.planner.graph.execute import Parameter, parameters_of
from fuseplan.planner.ops.table import op_of
from fuseplan.planner.rewrites.trace_edit import storage_of


@dataclass(frozen=True)
class TracedTensor:
    """A tensor of the trace: the name of its value, and the fake tensor that shows its layout and memory."""

    name: str
    fake: torch.Tensor


@dataclass
class Storages:
    """Which traced tensors share memory at run time."""

    _merged: dict[int, int] = field(default_factory=dict)
    #: The last number given to memory that the trace does not show: no address, and not the random number generator.
    _renewed: int = -2

    def of(self, tensor: TracedTensor) -> int:
        """Identity of the memory: equal for a tensor, its views, and what an in-place op returns."""
        address = storage_of(tensor.fake)
        return self._merged.get(address, address)

    def renew(self, tensor: TracedTensor) -> None:
        """Declare that from now on what the trace shows in the memory of ``tensor`` counts as another memory."""
        self._renewed -= 1
        self._merged[storage_of(tensor.fake)] = self._renewed


@dataclass(frozen=True)
class Bound:
    """Arguments by role: tensors in schema order, all others by name as data, and the tensors that the op writes to."""

    operands: tuple[TracedTensor, ...]
    attrs: dict[str, Any]
    written: tuple[TracedTensor, ...]


def bind_arguments(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], names: SizeNames) -> Bound:
    """Bind :class:`TracedTensor` and others by schema: with defaults, without what only says where to allocate."""
    operands: list[TracedTensor] = []
    attrs: dict[str, Any] = {}
    written: list[TracedTensor] = []

    def placed(item: Any) -> Any:
        """A list element: a tensor becomes an operand and leaves a ``Ref`` to it."""
        if not isinstance(item, TracedTensor):
            return names.plain(item)
        operands.append(item)
        return Ref(len(operands) - 1)

    parameters = parameters_of(op)
    given = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)} | dict(kwargs)
    for parameter in parameters:
        value = given.get(parameter.name, parameter.default)
        tensors = tensors_in(value)
        if parameter.is_written and op_of(op).family != "state":
            written.extend(tensors)
        if isinstance(value, TracedTensor):
            operands.append(value)
        elif parameter.is_variadic and tensors:
            operands.extend(tensors)
        elif tensors:
            attrs[parameter.name] = tuple(map(placed, value))
        elif not _is_default(parameter, value):
            attrs[parameter.name] = names.plain(value)
    return Bound(tuple(operands), attrs, tuple(written))


def tensors_in(value: Any) -> list[TracedTensor]:
    """The tensors in nested lists, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, TracedTensor)]


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


def respell(
    op: str, inputs: tuple[str, ...], attrs: Mapping[str, Any], source: TensorSpec | None, result: TensorSpec,
    moves: bool,
) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """``(op, inputs, attrs)`` in the one spelling the planner uses.

    ``source`` is the spec of the first operand (None without any), ``result`` that of the first result; ``moves``: they
    are on different devices.
    """
    spelled = op_of(op).spelled
    if source is None and spelled and isinstance(number := attrs.get("self"), int | float):
        return "aten.full.default", (), {"size": result.shape, "fill_value": number, "dtype": result.dtype}
    if spelled == "to" and source is not None and not moves:
        kept = {key: value for key, value in attrs.items() if key == "memory_format"}
        if source.dtype == result.dtype:
            return "aten.clone.default", inputs[:1], kept
        return "aten.to.dtype", inputs[:1], {"dtype": result.dtype, **kept}
    shaped: dict[str, dict[str, Any]] = {
        "view": {"size": result.shape}, "reshape": {"shape": result.shape},
        "expand": {"size": result.shape, "implicit": False}, "clone": {},
    }
    if spelled in shaped:
        return f"aten.{spelled}.default", inputs[:1], shaped[spelled]
    if spelled == "slice" and source is not None:
        return op, inputs, _explicit_slice(attrs, source, result)
    return op, inputs, dict(attrs)


def _explicit_slice(attrs: Mapping[str, Any], source: TensorSpec, result: TensorSpec) -> dict[str, Any]:
    """Start and end as positions inside the dimension, where they are known."""
    dim, step, start = attrs["dim"] % len(source.shape), attrs["step"], attrs["start"] or 0
    extent, length = source.shape[dim], result.shape[dim]
    if not is_static(start):
        return dict(attrs)
    if start < 0:
        start = extent + start
    if is_static(start, extent):
        start = min(max(start, 0), extent)
    end = as_size(start + length) if step == 1 else attrs["end"]
    if step != 1 and is_static(extent, end):
        end = min(end + extent if end < 0 else end, extent)
    return {**attrs, "dim": dim, "start": as_size(start), "end": end}
