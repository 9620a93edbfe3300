"""What a graph does with its arguments in a replay of a CUDA graph, why it may have none, and how results come out.

A replay repeats launches with their addresses. So an argument is *kept* (used where it lies: parameters, what the graph
writes) or *copied* into memory of the recording; what the host computes from data, or on the CPU, would be frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fuseplan.kernels.native.overlap import span_bytes
from fuseplan.planner.rewrites.trace_edit import fake_tensors, is_static

#: Makes one result for the caller from the arguments of the call and the copies of what it computed.
_Result: TypeAlias = Callable[[Sequence[Any], Sequence[torch.Tensor]], Any]

#: Kernels are compiled for addresses that are, or are not, multiples of this.
_ALIGNMENT = 16


class NotRecordable(Exception):
    """A call cannot be recorded; the message says why."""


# -- roles of arguments -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roles:
    """Positions of a graph's arguments by role; an unused argument has none.

    Attributes:
        kept: Tensors used where they lie.
        copied: Tensors whose values are copied in before each replay.
        sizes: Numbers: dynamic sizes and other scalars.
        shaped: Tensors with a dynamic size.
        held: Tensors that the module itself holds; used where they lie.
    """

    kept: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    shaped: tuple[int, ...] = ()
    held: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def of(module: fx.GraphModule, stationary: Collection[int]) -> Roles:
        """The roles of a pre-dispatch trace's arguments; tensors at ``stationary`` positions are kept."""
        kept, copied, sizes, shaped = [], [], [], []
        for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
            fake = node.meta.get("val")
            if not isinstance(fake, torch.Tensor):
                sizes.append(position)
                continue
            if not is_static(fake):
                shaped.append(position)
            if position in stationary:
                kept.append(position)
            elif node.users:
                copied.append(position)
        attributes = (attrgetter(str(node.target))(module) for node in module.graph.find_nodes(op="get_attr"))
        held = tuple(attribute for attribute in attributes if isinstance(attribute, torch.Tensor))
        return Roles(tuple(kept), tuple(copied), tuple(sizes), tuple(shaped), held)


def why_unrecordable(module: fx.GraphModule, device_type: str = "cuda") -> str | None:
    """Why a pre-dispatch trace cannot be replayed as it was recorded, None when nothing speaks against it."""
    return next(filter(None, (_why_unrepeatable(node, device_type) for node in module.graph.nodes)), None)


def _why_unrepeatable(node: fx.Node, device_type: str) -> str | None:
    def elsewhere(fakes: Iterable[torch.Tensor]) -> bool:
        return any(fake.device.type != device_type for fake in fakes)

    target, operands = node.target, [fake for operand in node.all_input_nodes for fake in fake_tensors(operand)]
    if node.op == "placeholder" and node.users and elsewhere(fake_tensors(node)):
        return f"argument {node.name} is on the CPU: its value would be frozen"
    if node.op == "output" and elsewhere(operands):
        return "it returns a tensor that is not on the GPU"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"{target.name()} may branch on data"
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if torch.Tag.data_dependent_output in target.tags or free_unbacked_symbols(node.meta.get("val")):
        return f"{target} hands data to the host"
    if not elsewhere(fake_tensors(node)):
        return None
    # An op that computes on the CPU is not part of a replay.
    if any(one.device.type == device_type for one in operands):
        return f"{target} copies to the CPU"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return f"{target} draws random numbers on the CPU"
    return f"{target} writes to a CPU tensor" if target._schema.is_mutable else None


# -- memory of a recording --------------------------------------------------------------------------------


class StaticInputs:
    """Memory for the copied arguments of a recording, laid out like those of the call that is recorded."""

    def __init__(self, args: Sequence[Any], roles: Roles) -> None:
        self._positions = roles.copied
        self._statics: list[torch.Tensor] = []
        #: Of those that ATen refuses to write to: all of their memory.
        self._flat: list[torch.Tensor | None] = []
        with torch.inference_mode(False):  # callers in either mode may write to it
            for position in roles.copied:
                flat = _like(args[position])
                static = flat.as_strided(args[position].shape, args[position].stride(), flat.storage_offset())
                self._statics.append(static)
                self._flat.append(flat if _overlaps(static) else None)
        self._at_once = len(self._statics) > 1 and not any(flat is not None for flat in self._flat)

    def replace(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments to record with: those that are copied stand in the static memory."""
        replaced = dict(zip(self._positions, self._statics, strict=True))
        return tuple(replaced.get(position, arg) for position, arg in enumerate(args))

    def fill(self, args: Sequence[Any]) -> None:
        """Copy the arguments of a call in."""
        if self._at_once:
            torch._foreach_copy_(self._statics, [args[position] for position in self._positions])
            return
        for position, static, flat in zip(self._positions, self._statics, self._flat, strict=True):
            if flat is None:
                static.copy_(args[position])
            else:
                flat.copy_(_span(args[position]))


class Results:
    """How to hand out the results of a recording.

    A result in an argument's memory is the argument, or the same view of it, in every call; one that the module holds
    is itself. Others lie in memory that the next replay overwrites, and are copied, unless ``copy`` is False; results
    that share memory still share it. ``args`` are what was recorded with, ``held`` the tensors of the module.

    NotRecordable where an output is neither a tensor nor plain data, or reads memory as another dtype.
    """

    def __init__(self, outputs: Any, args: Sequence[Any], held: Iterable[torch.Tensor] = (), copy: bool = True) -> None:
        if not isinstance(outputs, tuple | list):
            raise NotRecordable(f"the graph returns a {type(outputs).__name__}, not a tuple")
        self._type = type(outputs)
        self._copies: list[Callable[[], torch.Tensor]] = []
        self._copied: dict[int, int] = {}  # storage -> position among the copies
        kept = {_storage(tensor) for tensor in held}
        groups: dict[int, list[torch.Tensor]] = {}
        for one in outputs:
            if isinstance(one, torch.Tensor):
                groups.setdefault(_storage(one), []).append(one)
        self._results: list[_Result] = []
        for one in outputs:
            if isinstance(one, torch.Tensor) and one.numel() and _storage(one) not in kept:
                result = _part_of_argument(one, args)
                if result is None and copy:
                    result = self._part_of_copy(one, groups[_storage(one)])
            elif one is None or isinstance(one, torch.Tensor | int | float | bool | str):
                result = None
            else:
                raise NotRecordable(f"the graph returns a {type(one).__name__}")
            self._results.append(result or _itself(one))

    def make(self, args: Sequence[Any]) -> Any:
        """The results of a replay, for the arguments of its call."""
        fresh = [copy() for copy in self._copies]
        return self._type([result(args, fresh) for result in self._results])

    def _part_of_copy(self, output: torch.Tensor, group: Sequence[torch.Tensor]) -> _Result:
        """``group`` are the outputs in one memory, which is copied once."""
        if len({one.dtype for one in group}) > 1:
            raise NotRecordable("two results read the same memory as different dtypes")
        start = min(one.storage_offset() for one in group)
        end = max(one.storage_offset() + _extent(one) for one in group)
        number = self._copied.setdefault(_storage(output), len(self._copies))
        if number == len(self._copies):
            self._copies.append(_copier(output if len(group) == 1 else output.as_strided((end - start,), (1,), start)))
        if len(group) == 1:
            return lambda args, fresh: fresh[number]
        shape, strides, offset = output.shape, output.stride(), output.storage_offset() - start
        return lambda args, fresh: fresh[number].as_strided(shape, strides, offset)


def _itself(output: Any) -> _Result:
    return lambda args, fresh: output


def _part_of_argument(output: torch.Tensor, args: Sequence[Any]) -> _Result | None:
    """The result as an argument or a view of one; None where it is neither."""
    storage, place = _storage(output), _place(output)
    sharing = [
        position for position, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and arg.numel() and _storage(arg) == storage
    ]
    if not sharing:
        return None
    for same in sharing:
        if _place(args[same]) == place:
            return lambda args, fresh: args[same]
    # Two arguments may lie beside each other in one allocation now, and elsewhere in the next call.
    position = next((at for at in sharing if _lies_in(output, args[at])), sharing[0])
    owner = args[position]
    if owner.dtype != output.dtype:
        raise NotRecordable(f"a result reads an argument of {owner.dtype} as {output.dtype}")
    shape, strides, shift = output.shape, output.stride(), output.storage_offset() - owner.storage_offset()
    return lambda args, fresh: args[position].as_strided(shape, strides, args[position].storage_offset() + shift)


def _lies_in(output: torch.Tensor, owner: torch.Tensor) -> bool:
    """True when a result's memory is a part of an argument's."""
    begin, first = output.data_ptr(), owner.data_ptr()
    return first <= begin and begin + span_bytes(output) <= first + span_bytes(owner)


def _copier(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that copies the tensor as it then is, strides included."""
    shape, strides = tensor.shape, tensor.stride()
    if _overlaps(tensor):
        flat = _span(tensor)
        return lambda: flat.clone().as_strided(shape, strides)
    if tensor.clone().stride() == strides:
        return tensor.clone
    return lambda: torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same elements of the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _overlaps(tensor: torch.Tensor) -> bool:
    """True when ATen refuses to write to the tensor, because it is expanded."""
    return bool(torch._debug_has_internal_overlap(tensor) == 1)


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one in memory."""
    return span_bytes(tensor) // tensor.element_size()


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from a tensor's first element to its last, flat."""
    return tensor.as_strided((_extent(tensor),), (1,), tensor.storage_offset())


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """New flat memory with the extent of a tensor, as far from a multiple of 16 bytes as its memory: kernels differ."""
    itemsize = tensor.element_size()
    shift = tensor.data_ptr() % _ALIGNMENT
    room = torch.empty(_extent(tensor) * itemsize + _ALIGNMENT, dtype=torch.uint8, device=tensor.device)
    start = (shift - room.data_ptr()) % _ALIGNMENT
    return room[start : start + _extent(tensor) * itemsize].view(tensor.dtype)
