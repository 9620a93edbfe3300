"""Generated GPU modules: written to the user's cache, imported by path, compiled to a cubin with or without a GPU."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import platformdirs

from fuseplan.kernels.ir.backend import MAX_REGISTERS, REGISTER_FILE, BuildError, MachineError, Resources, Target
from fuseplan.kernels.native.allowance import Allowance
from fuseplan.kernels.native.own_folder import is_exposed, own_folder

#: Storage type -> Triton's spelling in a kernel signature.
POINTER_TYPES: Mapping[str, str] = {
    "float64": "*fp64", "float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int64": "*i64",
    "int32": "*i32", "int16": "*i16", "int8": "*i8", "uint8": "*u8", "bool": "*i1",
    "float8_e4m3fn": "*fp8e4nv",
}

#: Name of the explicit limit on registers among a kernel's facts; 0 where there is none.
_LIMIT = "register_limit"
#: Seconds that NVIDIA's tools may take over one kernel.
_TOOL_LIMIT_S = 60.0


def warm_up() -> None:
    """Import and compute what compiling needs once in every process. Starts no thread and touches no device."""
    import triton.compiler
    import triton.runtime.cache
    from triton.backends.nvidia.compiler import get_ptxas

    for module in (triton.runtime.cache, triton.compiler.compiler):
        key = getattr(module, "triton_key", None)  # a hash of the whole package, remembered
        if key is not None:
            key()
    with suppress(Exception):
        _ = get_ptxas(90).version


def digest(text: str) -> str:
    """A short content hash for file names."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class ModuleStore:
    """A folder of generated Python modules in ``cache_dir`` (the user's cache folder), each named by the hash of its
    text.
    """

    def __init__(self, kind: str, cache_dir: Path | str | None = None) -> None:
        self._wanted = Path(cache_dir or platformdirs.user_cache_dir("fuseplan")) / kind

    @property
    def folder(self) -> Path:
        """Where modules are kept and loaded from: nobody else may write there. :class:`BuildError` where it cannot be
        made.
        """
        try:
            return own_folder(self._wanted)
        except OSError as error:
            raise BuildError(f"cannot write generated kernels to {self._wanted}: {error}") from error

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
    """What a compiler needs beside a kernel's source.

    Attributes:
        signature: Triton type of every argument, in order, by name (``"*bf16"``, ``"i32"``).
        aligned: Names of arguments that are multiples of 16 (addresses in bytes, integers by value).
        constants: Values of compile-time arguments (their type in ``signature`` is ``"constexpr"``).
        overlapped: The kernel waits for the one ahead of it itself, and is launched so that it may start before.
    """

    signature: Mapping[str, str]
    aligned: Sequence[str]
    num_warps: int
    num_stages: int = 1
    constants: Mapping[str, Any] | None = None
    overlapped: bool = False


def compile_kernel(function: Any, spec: KernelSpec, target: Target, known: Resources | None = None) -> Any:
    """Compile a ``@triton.jit`` function to Triton's ``CompiledKernel``, through Triton's own on-disk cache. Needs no
    GPU.

    Left alone, ptxas may spill a few registers of a small kernel for the sake of occupancy. The kernel is then compiled
    again with an explicit limit, which ptxas fills first. ``known`` facts of an earlier compilation say which limit it
    was.

    Raises:
        BuildError: Triton or ptxas refused; the message has their first complaint.
    """
    if known is not None and _LIMIT in known.extra:
        limit = int(known.extra[_LIMIT])
        return _compile(function, spec, target, {"maxnreg": limit} if limit else {})
    compiled = _compile(function, spec, target, {})
    limit = min(MAX_REGISTERS, REGISTER_FILE // (32 * spec.num_warps) // 8 * 8)
    registers, spilled = _registers_and_spills(compiled)
    if not spilled or registers is None or registers >= limit:
        return compiled
    roomy = _compile(function, spec, target, {"maxnreg": limit})
    return roomy if (_registers_and_spills(roomy)[1] or 0) < spilled else compiled


def _compile(function: Any, spec: KernelSpec, target: Target, more_options: Mapping[str, int]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(spec.signature)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in spec.aligned}
    constants = {(names.index(name),): value for name, value in (spec.constants or {}).items()}
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True, **more_options}
    if spec.overlapped:
        options["launch_pdl"] = True
    try:
        source = ASTSource(function, dict(spec.signature), constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", compute_capability(target), 32), options=options)
    except BuildError:
        raise
    except Exception as error:
        kind = MachineError if isinstance(_innermost(error), OSError) else BuildError
        raise kind(f"triton could not compile the kernel for {target.arch}: {_complaint(error)}") from error


def _registers_and_spills(compiled: Any) -> tuple[int | None, int | None]:
    """Registers, and bytes spilled, of one thread; None where the tools are missing."""
    usage = _cubin_usage(compiled.asm["cubin"], compiled.metadata.name)
    stack = usage.get("STACK")
    # A stack frame may also hold a local array (the slow path of sin does): only then is ptxas asked for the truth.
    return usage.get("REG"), _spilled_bytes(compiled.asm["ptx"], stack) if stack else stack


def _spilled_bytes(ptx: str, otherwise: int) -> int:
    """Bytes that ptxas stores to spill registers, from its verbose output; ``otherwise`` if it does not say."""
    from triton.backends.nvidia.compiler import get_ptxas

    arch = re.search(r"^\.target\s+(\w+)", ptx, flags=re.MULTILINE)
    if arch is None:
        return otherwise
    tool = get_ptxas(int(re.sub(r"\D", "", arch[1])))
    # What Triton itself passes to a ptxas that knows it.
    more = ["--regAllocOptLevel=2"] if int(str(tool.version).split(".")[0]) >= 13 else []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [tool.path, "-v", *more, f"--gpu-name={arch[1]}", str(source), "-o", str(Path(folder) / "cubin")]
        found = re.findall(r"(\d+) bytes spill stores", _said_by(command).stderr)
    return sum(map(int, found)) if found else otherwise


def compute_capability(target: Target) -> int:
    """``"sm_90"`` -> 90."""
    match = re.fullmatch(r"sm_(\d+)a?", target.arch)
    if match is None:
        raise BuildError(f"cannot compile for architecture '{target.arch}': expected a name such as sm_90")
    return int(match[1])


def _complaint(error: BaseException) -> str:
    """The innermost cause's last line: Triton wraps the reason in source excerpts."""
    error = _innermost(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def build_launcher(compiled: Any) -> None:
    """Have Triton build what will launch a kernel, into its cache. Needs no GPU, but its driver's library.

    Triton up to 3.6 compiles C for every signature of arguments, and would do so where the kernel is timed.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        with suppress(Exception):  # whoever launches the kernel is told why
            driver.CudaLauncher(compiled.src, compiled.metadata)


def read_resources(compiled: Any) -> Resources:
    """Registers per thread, spilled bytes per thread and shared memory of a compiled kernel, read from its cubin."""
    registers, spilled = _registers_and_spills(compiled)
    limit = getattr(compiled.metadata, "maxnreg", None) or 0
    return Resources(registers, spilled, int(compiled.metadata.shared), {_LIMIT: limit})


def _cubin_usage(cubin: bytes, name: str) -> dict[str, int]:
    """``{"REG": 32, "STACK": 0, ...}`` as cuobjdump reports it; empty where that tool is missing."""
    tool = _cuobjdump()
    if tool is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        match = re.search(rf"Function {re.escape(name)}:\s*\n\s*(.*)", _said_by(command).stdout)
    return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", match[1])} if match else {}


def _said_by(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return Allowance(_TOOL_LIMIT_S).run(command)
    except subprocess.TimeoutExpired:
        raise MachineError(f"{command[0]} did not finish within {_TOOL_LIMIT_S:g} s") from None


@functools.cache
def _cuobjdump() -> str | None:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    return str(tool) if tool.exists() else None
