"""The memory side of a replay: where arguments are copied to, and how results come out. Knows no CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from fuseplan.planner.runtime.recordable import Roles

#: Makes one result for the caller from the arguments of the call and the copies of what it computed.
_Result: TypeAlias = Callable[[Sequence[Any], Sequence[torch.Tensor]], Any]

#: Kernels are compiled for addresses that are, or are not, multiples of this.
_ALIGNMENT = 16


class NotRecordable(Exception):
    """A call cannot be recorded; the message says why."""


class StaticInputs:
    """Memory for the copied arguments of a recording, laid out like those of the call that is recorded."""

    def __init__(self, args: Sequence[Any], roles: Roles) -> None:
        self._positions: list[int] = []
        self._statics: list[torch.Tensor] = []
        self._flat: list[torch.Tensor | None] = []
        with torch.inference_mode(False):  # callers in either mode may write to it
            for position in roles.copied:
                flat = _like(args[position])
                static = flat.as_strided(args[position].shape, args[position].stride(), flat.storage_offset())
                self._positions.append(position)
                self._statics.append(static)
                self._flat.append(flat if _overlaps(static) else None)
        self._at_once = len(self._statics) > 1 and not any(flat is not None for flat in self._flat)

    def replace(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments to record with: those that are copied stand in the static memory."""
        replaced = list(args)
        for position, static in zip(self._positions, self._statics, strict=True):
            replaced[position] = static
        return tuple(replaced)

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

    A result that lies in an argument's memory is the argument, or the same view of it, in every call. One that the
    module holds is itself. Any other lies in memory that the next replay overwrites, and is copied; results that share
    memory still share it.

    ``args`` are what the function was recorded with, ``held`` the tensors that the module holds. Without ``copy`` the
    memory of the recording itself is handed out.

    Raises:
        NotRecordable: An output is neither a tensor nor plain data, or reinterprets memory as another dtype.
    """

    def __init__(self, outputs: Any, args: Sequence[Any], held: Iterable[torch.Tensor] = (), copy: bool = True) -> None:
        if not isinstance(outputs, tuple | list):
            raise NotRecordable(f"the graph returns a {type(outputs).__name__}, not a tuple")
        self._type = type(outputs)
        self._args: Sequence[Any] = args
        self._owners = {
            _storage(arg): position for position, arg in reversed(list(enumerate(args)))
            if isinstance(arg, torch.Tensor) and arg.numel()
        }
        self._held = {_storage(tensor) for tensor in held}
        self._copy = copy
        self._groups: dict[int, list[torch.Tensor]] = {}
        for one in outputs:
            if isinstance(one, torch.Tensor):
                self._groups.setdefault(_storage(one), []).append(one)
        self._fresh: dict[int, int] = {}  # storage -> position among the copies
        self._copies: list[Callable[[], torch.Tensor]] = []
        self._results: list[_Result] = [self._result(one) for one in outputs]
        self._args, self._owners, self._groups = (), {}, {}  # the caller's tensors are not kept alive

    def make(self, args: Sequence[Any]) -> Any:
        """The results of a replay, for the arguments of its call."""
        fresh = [copy() for copy in self._copies]
        return self._type([result(args, fresh) for result in self._results])

    def _result(self, output: Any) -> _Result:
        if output is None or isinstance(output, int | float | bool | str):
            return lambda args, fresh: output
        if not isinstance(output, torch.Tensor):
            raise NotRecordable(f"the graph returns a {type(output).__name__}")
        storage = _storage(output)
        if storage in self._held or not output.numel():
            return lambda args, fresh: output
        if storage in self._owners:
            return self._part_of_argument(output, self._owners[storage])
        return self._part_of_copy(output, self._groups[storage]) if self._copy else lambda args, fresh: output

    def _part_of_argument(self, output: torch.Tensor, position: int) -> _Result:
        for other, arg in enumerate(self._args):
            if isinstance(arg, torch.Tensor) and _place(arg) == _place(output):
                return lambda args, fresh: args[other]
        owner = self._args[position]
        if owner.dtype != output.dtype:
            raise NotRecordable(f"a result reads an argument of {owner.dtype} as {output.dtype}")
        shape, strides, shift = output.shape, output.stride(), output.storage_offset() - owner.storage_offset()
        return lambda args, fresh: args[position].as_strided(shape, strides, args[position].storage_offset() + shift)

    def _part_of_copy(self, output: torch.Tensor, group: Sequence[torch.Tensor]) -> _Result:
        if len({one.dtype for one in group}) > 1:
            raise NotRecordable("two results read the same memory as different dtypes")
        start = min(one.storage_offset() for one in group)
        end = max(one.storage_offset() + _extent(one) for one in group)
        number = self._fresh.get(_storage(output))
        if number is None:
            number = self._fresh[_storage(output)] = len(self._copies)
            whole = output if len(group) == 1 else output.as_strided((end - start,), (1,), start)
            self._copies.append(_copier(whole))
        if len(group) == 1:
            return lambda args, fresh: fresh[number]
        shape, strides, offset = output.shape, output.stride(), output.storage_offset() - start
        return lambda args, fresh: fresh[number].as_strided(shape, strides, offset)


def _copier(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that copies the tensor as it then is, strides included."""
    shape, strides = tensor.shape, tensor.stride()
    if _overlaps(tensor):
        flat = _span(tensor)
        return lambda: flat.clone().as_strided(shape, strides)
    if tensor.clone().stride() == strides:
        return tensor.clone
    return lambda: torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


# -- memory -----------------------------------------------------------------------------------------------


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
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


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
