"""The CPU back end: KernelIR -> C++ -> shared library -> callable."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from fuseplan.kernels.cpp.config import PARAMETERS, config_space, default_settings, infeasible, run_settings
from fuseplan.kernels.cpp.contraction import refusal
from fuseplan.kernels.cpp.emitter import emit_cpp, prelude
from fuseplan.kernels.cpp.launch import CppKernel, load_kernel
from fuseplan.kernels.ir.backend import Backend, BuildError, Config, Resources, Target, Tunable, checked
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.native.build import COMPILER_NAMES, build_library, default_cache_dir, required_compiler


class CppBackend(Backend):
    """Generated C++ loops, compiled for this processor by the first of ``compilers`` on PATH, kept in ``cache_dir``."""

    name: ClassVar[str] = "cpp"
    device_type: ClassVar[str] = "cpu"
    raises_outside: ClassVar[bool] = True
    parameters: ClassVar[tuple[Tunable, ...]] = PARAMETERS
    tunables = staticmethod(config_space)
    infeasible = staticmethod(infeasible)
    default_config = staticmethod(default_settings)

    def __init__(self, cache_dir: Path | None = None, compilers: tuple[str, ...] = COMPILER_NAMES) -> None:
        self._cache_dir = cache_dir or default_cache_dir()
        self._compilers = compilers

    def unavailable(self) -> str | None:
        try:
            required_compiler(self._compilers)
        except BuildError as error:
            return str(error)
        return None

    def refuse(self, ir: KernelIR, target: Target) -> str | None:
        if target.device_type != self.device_type:
            return f"the C++ back end compiles for cpu, not {target.device_type}"
        if any(segment.products for segment in ir.segments) and (reason := refusal(ir)) is not None:
            return reason
        try:
            emit_cpp(ir)
        except (BuildError, KeyError) as error:
            return str(error)
        return None

    def source(self, ir: KernelIR, config: Config) -> str:
        """The C++ text; only ``unroll``, ``stage`` and ``stream`` change it."""
        config = checked(config, PARAMETERS)
        stage, stream = (bool(int(config.get(name, 0))) for name in ("stage", "stream"))
        return emit_cpp(ir, int(config["unroll"]), stage, stream)

    def common(self, source: str) -> tuple[str, ...]:
        return (prelude(),)

    def prepare(self, ir: KernelIR, config: Config, target: Target) -> Resources:
        build_library(self.source(ir, config), required_compiler(self._compilers), self._cache_dir)
        return Resources()

    def load(self, ir: KernelIR, config: Config, target: Target) -> CppKernel:
        settings, compiler = run_settings(ir, config, target), required_compiler(self._compilers)
        return load_kernel(ir, self.source(ir, config), settings, compiler, self._cache_dir)
