"""The library calls that there are on a device."""

from __future__ import annotations

from fuseplan.planner.implementations.library_call import LibraryCall


def library_calls(device_type: str) -> tuple[LibraryCall, ...]:
    """In order of preference among equally fast ones."""
    return ()
