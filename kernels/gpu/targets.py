"""How Triton compiles for the GPUs of each vendor, and how what a kernel takes is read back from the binary."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuseplan.costmodel.devices import Architecture
from fuseplan.kernels.ir.backend import MachineError, Resources
from fuseplan.kernels.native.allowance import Allowance

#: Name of the explicit limit on registers among a kernel's facts; 0 where there is none.
LIMIT = "register_limit"
#: Seconds that NVIDIA's tool may take over one kernel.
TOOL_LIMIT_S = 60.0


class Toolchain(ABC):
    """What is a vendor's own about compiling with Triton. ``compiled`` is Triton's ``CompiledKernel``."""

    @abstractmethod
    def name_of(self, gpu: Architecture) -> str | int:
        """The architecture as Triton's ``GPUTarget`` has it."""

    def register_limit(self, gpu: Architecture, warps: int) -> int:
        """The limit to compile a kernel with again that spills; 0 where the compiler takes none."""
        return 0

    def options(self, overlapped: bool, register_limit: int) -> dict[str, Any]:
        """Options of ``triton.compile`` for a kernel that is launched ``overlapped``; a limit of 0 is none."""
        return {}

    @abstractmethod
    def registers_and_spills(self, compiled: Any) -> tuple[int | None, int | None]:
        """Registers, and bytes spilled, of one thread; None where the tool that tells is missing."""

    def build_launcher(self, compiled: Any) -> None:
        """Have Triton compile what it launches the kernel with, before that is timed."""
        return  # as a rule it compiles none


class Nvidia(Toolchain):
    """``ptxas`` makes a cubin, which ``cuobjdump`` reads."""

    def name_of(self, gpu: Architecture) -> int:
        return int(re.sub(r"\D", "", gpu.name))

    def register_limit(self, gpu: Architecture, warps: int) -> int:
        return min(gpu.registers, gpu.register_file // (gpu.warp * warps) // 8 * 8)

    def options(self, overlapped: bool, register_limit: int) -> dict[str, Any]:
        limit = {"maxnreg": register_limit} if register_limit else {}
        return limit | ({"launch_pdl": True} if overlapped else {})

    def registers_and_spills(self, compiled: Any) -> tuple[int | None, int | None]:
        usage = _cubin_usage(compiled.asm["cubin"], compiled.metadata.name)
        stack = usage.get("STACK")
        # The stack also holds local arrays (the slow path of a sine has one), and is a multiple of 8 bytes.
        arrays = sum(map(int, re.findall(r"\.local\s.*\[(\d+)\];", compiled.asm["ptx"]))) if stack else 0
        return usage.get("REG"), None if stack is None else max(0, stack - -(-arrays // 8) * 8)

    def build_launcher(self, compiled: Any) -> None:
        from triton.backends.nvidia import driver

        if hasattr(driver, "make_launcher"):  # up to 3.6, for every signature of arguments
            with suppress(Exception):  # whoever launches the kernel is told why
                driver.CudaLauncher(compiled.src, compiled.metadata)


class Amd(Toolchain):
    """LLVM makes assembly, at whose end is what the kernel takes (AMDGPU code object metadata)."""

    def name_of(self, gpu: Architecture) -> str:
        return gpu.name

    def registers_and_spills(self, compiled: Any) -> tuple[int | None, int | None]:
        found = dict(re.findall(r"^\s+\.(vgpr_count|vgpr_spill_count):\s+(\d+)$", compiled.asm["amdgcn"], re.MULTILINE))
        return int(found["vgpr_count"]), 4 * int(found["vgpr_spill_count"])


_TOOLCHAINS: dict[str, Toolchain] = {"cuda": Nvidia(), "hip": Amd()}


def toolchain(gpu: Architecture) -> Toolchain:
    return _TOOLCHAINS[gpu.vendor]


def read_resources(compiled: Any) -> Resources:
    """Registers per thread, spilled bytes per thread and shared memory of a compiled kernel, read from its binary."""
    registers, spilled = _TOOLCHAINS[compiled.metadata.target.backend].registers_and_spills(compiled)
    limit = getattr(compiled.metadata, "maxnreg", None) or 0
    return Resources(registers, spilled, int(compiled.metadata.shared), {LIMIT: limit})


def _cubin_usage(cubin: bytes, name: str) -> dict[str, int]:
    """``{"REG": 32, "STACK": 0, ...}`` as cuobjdump reports it; empty where that tool is missing."""
    tool = cuobjdump()
    if tool is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            told = Allowance(TOOL_LIMIT_S).run([tool, "--dump-resource-usage", file.name])
        except subprocess.TimeoutExpired:
            raise MachineError(f"{tool} did not finish within {TOOL_LIMIT_S:g} s") from None
    match = re.search(rf"Function {re.escape(name)}:\s*\n\s*(.*)", told.stdout)
    return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", match[1])} if match else {}


@functools.cache
def cuobjdump() -> str | None:
    """The tool, which ships with Triton; None where it does not."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    return str(tool) if tool.exists() else None


def warm_up() -> None:
    """Import and compute what compiling needs once in every process."""
    import triton.compiler
    import triton.runtime.cache
    from triton.backends.nvidia.compiler import get_ptxas

    for module in (triton.runtime.cache, triton.compiler.compiler):
        key = getattr(module, "triton_key", None)  # a hash of the whole package, remembered
        if key is not None:
            key()
    with suppress(Exception):
        _ = get_ptxas(90).version
