"""C++ source -> shared library or CPython extension, with the system's compiler, cached by content.

A cache entry is one file: the library followed by the sha256 of its bytes, written aside and moved into place, so that
concurrent processes and interrupted ones leave a good entry or none. An entry that does not check is built again.

Nobody but this user may write to folders whose files are loaded as code: what somebody else put there would run here.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import platformdirs
import torch

from fuseplan.kernels.ir.backend import BuildError, MachineError
from fuseplan.kernels.native.allowance import Allowance

logger = logging.getLogger(__name__)

#: Searched for on PATH, in this order.
COMPILER_NAMES = ("c++", "g++", "clang++")
#: NaN and signed zeros count, so no -ffast-math; errno and floating-point traps do not.
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fwrapv", "-w", "-fPIC",
          "-shared")
#: Ways to ask for this processor's instructions, best first (clang spells the second one on ARM).
_NATIVE_FLAGS: tuple[tuple[str, ...], ...] = (("-march=native",), ("-mcpu=native",), ())
#: Seconds that one kernel may take, and that the trials of one compiler may take together.
COMPILE_LIMIT_S = 120
_PROBE_LIMIT_S = 10
#: What a compiler says when the machine fails it, whatever it compiles.
_STARVED = ("No space left on device", "Cannot allocate memory", "Read-only file system", "Disk quota exceeded",
            "fatal error: Killed signal")
_DIGEST_BYTES = 32
#: What kernels call of OpenMP.
OPENMP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")


def own_folder(wanted: Path) -> Path:
    """``wanted``, made with mode 0700, if nobody else may write there; else a private folder of this process."""
    wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = is_exposed(wanted)
    return wanted if reason is None else _private_folder(wanted, reason)


def is_exposed(path: Path) -> str | None:
    """Why others could have written a file or folder, or None. What does not exist is exposed, too."""
    try:
        found = path.stat()
    except OSError as error:
        return error.strerror or "it cannot be read"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write there (mode {stat.S_IMODE(found.st_mode):o})"
    return None


@lru_cache
def _private_folder(wanted: Path, reason: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuseplan-"))
    atexit.register(_remove, folder, os.getpid())
    logger.warning(
        "the kernel cache %s is not used: %s; kernels are kept in %s until this process ends. Remove that cache or "
        "give it mode 700", wanted, reason, folder,
    )
    return folder


def _remove(folder: Path, owner: int) -> None:
    """Of processes that share the folder by a fork, the one that made it removes it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler, the first line of its ``--version`` and the flags it takes for this processor."""

    path: str
    version: str
    native: tuple[str, ...]


def required_compiler(names: tuple[str, ...] = COMPILER_NAMES) -> Compiler:
    """The first compiler on PATH that builds a C++17 library, looked for once in a process; BuildError without one."""
    found = _search(names)
    if isinstance(found, Compiler):
        return found
    raise BuildError(found)


@lru_cache(maxsize=8)
def _search(names: tuple[str, ...]) -> Compiler | str:
    """The compiler, or what stands against each that is on PATH."""
    problems: dict[str, str] = {}
    for name in names:
        path = shutil.which(name)
        if path is None or os.path.realpath(path) in problems:
            continue
        try:
            return _tried_out(path)
        except (OSError, subprocess.SubprocessError, BuildError) as error:
            problems[os.path.realpath(path)] = f"{path}: {_why(error)}"
    if problems:
        return f"no C++ compiler works ({'; '.join(problems.values())})"
    return f"no C++17 compiler on PATH (looked for {', '.join(names)}); install g++ or clang++"


def _tried_out(path: str) -> Compiler:
    """A compiler that has built a library; an error of its own, of the system or of the allowance where it has not."""
    allowance = Allowance(_PROBE_LIMIT_S)

    def output(*arguments: str) -> str:
        done = allowance.run([path, *arguments])
        if done.returncode != 0:
            raise BuildError(_first_error(done.stderr))
        return done.stdout

    version = output("--version")
    with tempfile.TemporaryDirectory(prefix="fuseplan-") as folder:
        source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
        source.write_text("constexpr int one() { return 1; }\nstatic_assert(one() == 1);\n")
        reason = "it builds nothing"
        for native in _NATIVE_FLAGS:
            try:
                output(*_FLAGS, *native, str(source), "-o", str(library))
            except BuildError as error:
                reason = str(error).replace(folder + os.sep, "")
                continue
            if version and library.is_file():
                return Compiler(path, version.splitlines()[0], native)
    raise BuildError(reason)


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it did not answer within {_PROBE_LIMIT_S:g} s"
    if isinstance(error, OSError):
        return f"{error.filename or 'it'}: {error.strerror or error}"
    return str(error)


@lru_cache(maxsize=1)
def processor() -> str:
    """What ``-march=native`` depends on: the architecture and the instruction sets the kernel reports."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = " ".join(sorted(found[1].split())) if found else ""
    return f"{platform.machine()} {flags or platform.processor()}"


def default_cache_dir() -> Path:
    """The user's cache folder for compiled kernels."""
    return Path(platformdirs.user_cache_dir("fuseplan")) / "cpp"


#: Compilers that have hung on a kernel in this process: the next kernel would be waited for as long.
_HUNG: set[Compiler] = set()


def build_library(source: str, compiler: Compiler, cache_dir: Path, flags: Sequence[str] = ()) -> Path:
    """Compile C++ text into a shared library in ``cache_dir``, or find it there: equal sources, flags, compilers and
    processors share one. BuildError where the compiler refuses, is too slow or gone, or the folder cannot be written.
    """
    parts = [source, compiler.path, compiler.version, *compiler.native, *_FLAGS, *flags, processor()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    try:
        path = own_folder(cache_dir) / f"{key}.so"
        if not is_sound(path):
            _compile(source, compiler, flags, path)
    except OSError as error:
        raise MachineError(f"cpp: cannot write the kernel cache {cache_dir}: {error.strerror or error}") from error
    return path


def is_sound(path: Path) -> bool:
    """True when a cache entry is this user's and its digest is right: a truncated library would crash the process."""
    if is_exposed(path):
        return False
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return bool(body) and hashlib.sha256(body).digest() == digest


def _compile(source: str, compiler: Compiler, flags: Sequence[str], path: Path) -> None:
    if compiler in _HUNG:
        raise MachineError(f"cpp: {compiler.path} took more than {COMPILE_LIMIT_S} s before, and is not asked again")
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        text, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        text.write_text(source)
        command = [compiler.path, *_FLAGS, *compiler.native, *flags, str(text), "-o", str(library)]
        try:
            done = Allowance(COMPILE_LIMIT_S).run(command)
        except subprocess.TimeoutExpired:
            _HUNG.add(compiler)
            raise BuildError(f"cpp: {compiler.path} did not finish within {COMPILE_LIMIT_S} s") from None
        except OSError as error:
            raise MachineError(f"cpp: {compiler.path} cannot be started: {error.strerror or error}") from error
        if done.returncode != 0:
            starved = any(words in done.stderr for words in _STARVED)
            kind = MachineError if starved else BuildError
            raise kind(f"cpp: {compiler.path} failed: {_first_error(done.stderr).replace(folder + os.sep, '')}")
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())
        library.chmod(0o700)
        library.replace(path)


def load_extension(file: str | Path, compiler: Compiler | None = None, cache_dir: Path | None = None) -> Any:
    """The module ``fuseplan_<stem>`` of a source in this room, headers included; BuildError if it cannot be built."""
    source, compiler = Path(__file__).parent / file, compiler or required_compiler()
    name = f"fuseplan_{source.stem}"
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(f"{name}: Python's headers are missing ({include}); install python3-dev or its like")
    abi = f"// {sysconfig.get_config_var('SOABI')}\n"

    def expanded(line: re.Match[str]) -> str:
        header = source.parent / line[1]
        return header.read_text(encoding="utf-8") if header.is_file() else line[0]

    text = re.sub(r'^#include "([^"]+)"$', expanded, source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    path = build_library(abi + text, compiler, cache_dir or default_cache_dir(), (f"-I{include}",))
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{name}: the compiled module does not load: {error}") from error
    return module


def _first_error(stderr: str) -> str:
    lines = stderr.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])


def address(function: Any) -> int:
    """Where a function of a library that ctypes loaded lies."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def data_ptr_address() -> int:
    """Where PyTorch's function from a tensor to its address lies; 0 where this PyTorch shows none."""
    return int(getattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr", 0))


@lru_cache(maxsize=1)
def shared_openmp() -> tuple[int, ...]:
    """Addresses of :data:`OPENMP_FUNCTIONS` in torch's OpenMP runtime, whose threads kernels share; 0 without one."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return tuple(address(getattr(torch_cpu, name)) for name in OPENMP_FUNCTIONS)
    except (OSError, AttributeError):
        return (0,) * len(OPENMP_FUNCTIONS)
