"""Shared libraries that are unloaded when nothing refers to them any more."""

from __future__ import annotations

import _ctypes
import ctypes
import weakref
from pathlib import Path

from fuseplan.kernels.native.build import address


class Library:
    """A loaded shared library. Whoever calls into it keeps this object; the library is unloaded with it.

    The system counts how often a library was loaded: two objects of one file keep each other's code.
    """

    def __init__(self, path: Path) -> None:
        self.loaded = ctypes.CDLL(str(path))
        # Not when the process ends: other threads may still be in it.
        weakref.finalize(self, _ctypes.dlclose, self.loaded._handle).atexit = False

    def address(self, function: str) -> int:
        """Where a function lies; good for as long as this object."""
        return address(getattr(self.loaded, function))
