"""Every library call there is: by device, by the ops it may take, and by name.

A new one is a class in a file of its own, and a row here.
"""

from __future__ import annotations

from functools import cache

from fuseplan.planner.libraries.attention_calls import ATTENTION_CALLS
from fuseplan.planner.libraries.library_call import LibraryCall
from fuseplan.planner.libraries.matmul_calls import MATMUL_CALLS
from fuseplan.planner.libraries.merged_calls import MERGED_CALLS

_CALLS: tuple[LibraryCall, ...] = (*ATTENTION_CALLS, *MATMUL_CALLS, *MERGED_CALLS)


@cache
def library_calls(device_type: str) -> tuple[LibraryCall, ...]:
    """The calls that can run on a kind of device, always in the same order."""
    return tuple(call for call in _CALLS if device_type in call.device_types)


@cache
def library_groups(device_type: str) -> frozenset[tuple[str, ...]]:
    """Op names, in order, of the groups that some call may take. Whoever enumerates groups asks this first.

    >>> ("aten.linear.default", "aten.relu.default") in library_groups("cpu")
    True
    """
    return frozenset(ops for call in library_calls(device_type) for ops in call.takes)


def named(name: str) -> LibraryCall | None:
    """The call that a record names; None where this version has no such call."""
    return next((call for call in _CALLS if call.name == name), None)
