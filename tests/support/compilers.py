"""The C++ compiler of this machine, for tests that need one."""

from __future__ import annotations

from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.native.build import COMPILER_NAMES, Compiler, required_compiler


def find_compiler(names: tuple[str, ...] = COMPILER_NAMES) -> Compiler | None:
    """The first compiler on PATH that works, or None."""
    try:
        return required_compiler(names)
    except BuildError:
        return None
