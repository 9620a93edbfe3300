"""C++ source -> shared library, with the system's compiler, cached by content; and the OpenMP runtime to share.

A cache entry is one file: the library followed by the sha256 of its bytes, written aside and moved into place, so that
concurrent processes and interrupted ones leave a good entry or none. An entry that does not check is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import platformdirs
import torch

from fuseplan.kernels.backend import BuildError

#: Searched for on PATH, in this order.
COMPILER_NAMES = ("c++", "g++", "clang++")
#: NaN and signed zeros count, so no -ffast-math; errno and floating-point traps do not.
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-w", "-fPIC", "-shared")
#: Ways to ask for this processor's instructions, best first (clang spells the second one on ARM).
_NATIVE_FLAGS: tuple[tuple[str, ...], ...] = (("-march=native",), ("-mcpu=native",), ())
_COMPILE_LIMIT_S = 120
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler, the first line of its ``--version`` and the flags it takes for this processor."""

    path: str
    version: str
    native: tuple[str, ...]


@lru_cache(maxsize=8)
def find_compiler(names: tuple[str, ...] = COMPILER_NAMES) -> Compiler | None:
    """The first compiler on PATH that builds a C++17 shared library, or None."""
    for name in names:
        path = shutil.which(name)
        version = _output([path, "--version"]) if path is not None else None
        if path is None or not version:
            continue
        for native in _NATIVE_FLAGS:
            if _builds(path, native):
                return Compiler(path, version.splitlines()[0], native)
    return None


def _builds(path: str, native: tuple[str, ...]) -> bool:
    with tempfile.TemporaryDirectory(prefix="fuseplan-") as folder:
        source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
        source.write_text("constexpr int one() { return 1; }\nstatic_assert(one() == 1);\n")
        return _output([path, *_FLAGS, *native, str(source), "-o", str(library)]) is not None and library.is_file()


def _output(command: Sequence[str]) -> str | None:
    """Standard output of a command, or None when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


@lru_cache(maxsize=1)
def processor() -> str:
    """What ``-march=native`` depends on: the architecture and the instruction sets the kernel reports."""
    flags = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo.read_text(), re.MULTILINE)
        flags = " ".join(sorted(found.group(1).split())) if found else ""
    return f"{platform.machine()} {flags or platform.processor()}"


def default_cache_dir() -> Path:
    """The user's cache folder for compiled kernels."""
    return Path(platformdirs.user_cache_dir("fuseplan")) / "cpp"


def build_library(source: str, compiler: Compiler, cache_dir: Path, flags: Sequence[str] = ()) -> Path:
    """Compile ``source`` into a shared library, or find it in the cache.

    Args:
        source: C++ text.
        compiler: What to compile with.
        cache_dir: Folder of finished libraries; made when missing.
        flags: More compiler flags.

    Returns:
        The library. Equal sources, flags, compilers and processors share one.

    Raises:
        BuildError: The compiler refuses, is too slow or is gone, or the folder cannot be written.
    """
    parts = [source, compiler.path, compiler.version, *compiler.native, *_FLAGS, *flags, processor()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = cache_dir / f"{key}.so"
    if not is_sound(path):
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            _compile(source, compiler, flags, path)
        except OSError as error:
            raise BuildError(f"cpp: cannot write the kernel cache {cache_dir}: {error.strerror or error}") from error
    return path


def is_sound(path: Path) -> bool:
    """True when a cache entry exists and its digest is right: a truncated library would crash the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return bool(body) and hashlib.sha256(body).digest() == digest


def _compile(source: str, compiler: Compiler, flags: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        text, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        text.write_text(source)
        command = [compiler.path, *_FLAGS, *compiler.native, *flags, str(text), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"cpp: {compiler.path} did not finish: {error}") from error
        if done.returncode != 0:
            raise BuildError(f"cpp: {compiler.path} failed: {_first_error(done.stderr).replace(folder + os.sep, '')}")
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())
        library.replace(path)


def _first_error(stderr: str) -> str:
    lines = stderr.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])


@dataclass(frozen=True)
class OpenMP:
    """Addresses of the OpenMP runtime's functions; all 0 where there is none to share."""

    parallel: int = 0
    thread_num: int = 0
    num_threads: int = 0
    max_threads: int = 0


@lru_cache(maxsize=1)
def shared_openmp() -> OpenMP:
    """The OpenMP runtime that torch itself uses, so that kernels and ATen share one pool of threads.

    A look-up through torch's own library finds the runtime that library is bound to, whatever its file is called.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        torch_cpu = ctypes.CDLL(str(library))
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")
        addresses = [ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p).value or 0 for name in names]
    except (OSError, AttributeError):
        return OpenMP()
    return OpenMP(*addresses)
