"""Generated GPU modules: written to the user's cache, imported by path, compiled with or without a GPU."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import platformdirs

from fuseplan.kernels.gpu.targets import LIMIT, toolchain
from fuseplan.kernels.ir.backend import BuildError, MachineError, Resources, Target
from fuseplan.kernels.native.build import is_exposed, own_folder

#: Storage type -> Triton's spelling in a kernel signature.
POINTER_TYPES: Mapping[str, str] = {
    "float64": "*fp64", "float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int64": "*i64",
    "int32": "*i32", "int16": "*i16", "int8": "*i8", "uint8": "*u8", "bool": "*i1",
    "float8_e4m3fn": "*fp8e4nv",
}


def digest(text: str) -> str:
    """A short content hash for file names."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class ModuleStore:
    """A folder of generated Python modules in ``cache_dir`` (the user's), each named by the hash of its text."""

    def __init__(self, kind: str, cache_dir: Path | str | None = None) -> None:
        self._wanted = Path(cache_dir or platformdirs.user_cache_dir("fuseplan")) / kind

    @property
    def folder(self) -> Path:
        """The folder in which modules are kept. Raises :class:`MachineError` where it cannot be made."""
        try:
            return own_folder(self._wanted)
        except OSError as error:
            raise MachineError(f"cannot write generated kernels to {self._wanted}: {error}") from error

    def write(self, source: str) -> Path:
        """The file that holds ``source``; written whole or not at all, so that processes can share the folder."""
        path = self.folder / f"kernel_{digest(source)}.py"
        if is_exposed(path) or path.read_text(encoding="utf-8", errors="replace") != source:
            self.write_text(path, source)
        return path

    def write_text(self, path: Path, text: str) -> None:
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).replace(path)
        except OSError as error:
            raise MachineError(f"cannot write generated kernels to {path.parent}: {error}") from error

    def load(self, source: str) -> ModuleType:
        """The module of ``source``, imported from its file (Triton reads a kernel's text from there)."""
        return load_file(self.write(source))

    def resources(self, key: str) -> Resources | None:
        """What :meth:`keep_resources` kept, so that a second look imports no compiler; None without it."""
        with suppress(OSError, ValueError, TypeError):
            return Resources(**json.loads(self._resources_path(key).read_text(encoding="utf-8")))
        return None

    def keep_resources(self, key: str, resources: Resources) -> None:
        self.write_text(self._resources_path(key), json.dumps(asdict(resources)))

    def _resources_path(self, key: str) -> Path:
        return self.folder / f"resources_{digest(key)}.json"


@functools.lru_cache(maxsize=4096)
def load_file(path: Path) -> ModuleType:
    """The module in a generated file, imported once."""
    spec = importlib.util.spec_from_file_location(f"fuseplan_generated_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class KernelSpec:
    """What a compiler needs beside a kernel's source."""

    #: Triton type of every argument, in order, by name (``"*bf16"``, ``"i32"``).
    signature: Mapping[str, str]
    #: Names of arguments that are multiples of 16 (addresses in bytes, integers by value).
    aligned: Sequence[str]
    num_warps: int
    num_stages: int = 1
    #: Values of compile-time arguments (their type in ``signature`` is ``"constexpr"``).
    constants: Mapping[str, Any] | None = None
    #: The kernel waits for the one ahead of it itself, and is launched so that it may start before.
    overlapped: bool = False
    #: The kernel has assertions, which Triton leaves out by default.
    asserts: bool = False


def compile_kernel(function: Any, spec: KernelSpec, target: Target, known: Resources | None = None) -> Any:
    """Compile a ``@triton.jit`` function to Triton's ``CompiledKernel``, through Triton's cache. Needs no GPU.

    Left alone, ptxas may spill a few registers of a small kernel for the sake of occupancy. The kernel is then compiled
    again with an explicit limit, which ptxas fills first; ``known`` facts of an earlier compilation say which it was.
    BuildError with the first complaint of Triton or ptxas where one refuses.
    """
    tools = toolchain(target.gpu)
    if known is not None and LIMIT in known.extra:
        return compile_once(function, spec, target, int(known.extra[LIMIT]))
    compiled = compile_once(function, spec, target)
    limit = tools.register_limit(target.gpu, spec.num_warps)
    registers, spilled = tools.registers_and_spills(compiled)
    if not spilled or registers is None or registers >= limit:
        return compiled
    roomy = compile_once(function, spec, target, limit)
    return roomy if (tools.registers_and_spills(roomy)[1] or 0) < spilled else compiled


def compile_once(function: Any, spec: KernelSpec, target: Target, register_limit: int = 0) -> Any:
    """:func:`compile_kernel` with a limit on registers, 0 for the compiler's own."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, gpu = list(spec.signature), target.gpu
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in spec.aligned}
    constants = {(names.index(name),): value for name, value in (spec.constants or {}).items()}
    options: dict[str, Any] = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True}
    options |= toolchain(gpu).options(spec.overlapped, register_limit)
    if spec.asserts:
        options |= {"debug": True, "sanitize_overflow": False}
    try:
        source = ASTSource(function, dict(spec.signature), constants, attributes)
        made_for = GPUTarget(gpu.vendor, toolchain(gpu).name_of(gpu), gpu.warp)
        return triton.compile(source, target=made_for, options=options)
    except BuildError:
        raise
    except Exception as error:
        # Triton wraps the reason in source excerpts: it is the innermost cause's last line.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        kind = MachineError if isinstance(cause, OSError) else BuildError
        complaint = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or ['no message'])[-1].strip()}"
        raise kind(f"triton could not compile the kernel for {target.arch}: {complaint}") from error
