"""The Triton back end: what can be tuned, what is not worth trying, and how a kernel is built."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

from fuseplan.kernels.gpu.backend import GpuBackend
from fuseplan.kernels.gpu.build import POINTER_TYPES, KernelSpec
from fuseplan.kernels.gpu.launch import Arguments, Variant
from fuseplan.kernels.gpu.overlap import is_overlapped
from fuseplan.kernels.gpu.tile import LAUNCH, launches, needs_int64, programs
from fuseplan.kernels.ir.backend import BuildError, Config, Target, Tunable
from fuseplan.kernels.ir.gathers import may_fail
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.ir.kernel_name import kernel_name
from fuseplan.kernels.triton import contraction_config
from fuseplan.kernels.triton.config import PARAMETERS, default_config, infeasible, tunables
from fuseplan.kernels.triton.contraction_config import contracts
from fuseplan.kernels.triton.emitter import buffer_names, emit_triton
from fuseplan.kernels.triton.helpers import helper_sources
from fuseplan.kernels.triton.index import symbol_argument
from fuseplan.kernels.triton.split_sums import COUNTERS, PARTIALS, scratch
from fuseplan.kernels.triton.suggestions import suggestions
from fuseplan.kernels.triton.tiles import is_tiled, persistent_programs


class TritonBackend(GpuBackend):
    """Generated Triton kernels."""

    name: ClassVar[str] = "triton"
    parameters: ClassVar[tuple[Tunable, ...]] = PARAMETERS
    scratch = staticmethod(scratch)

    def _refuse(self, ir: KernelIR, target: Target) -> str | None:
        if contracts(ir) and (reason := contraction_config.refuse(ir, target)) is not None:
            return reason
        if not ir.symbols:  # only a dynamic size can be one that cannot be written
            return None
        try:
            emit_triton(ir, self.default_config(ir, target))
        except BuildError as error:
            return str(error)
        return None

    def tunables(self, ir: KernelIR, target: Target) -> tuple[Tunable, ...]:
        return (contraction_config.tunables if contracts(ir) else tunables)(ir, target)

    def infeasible(self, ir: KernelIR, config: Config, target: Target) -> str | None:
        return (contraction_config.infeasible if contracts(ir) else infeasible)(ir, config, target)

    def default_config(self, ir: KernelIR, target: Target) -> Config:
        return (contraction_config.default_config if contracts(ir) else default_config)(ir, target)

    def suggestions(self, ir: KernelIR, target: Target) -> tuple[Config, ...]:
        return () if contracts(ir) else suggestions(ir, target)

    def likeness(self, ir: KernelIR) -> Hashable | None:
        return contraction_config.likeness(ir) if contracts(ir) else None

    def source(self, ir: KernelIR, config: Config) -> str:
        return emit_triton(ir, config, needs_int64(ir))

    def common(self, source: str) -> tuple[str, ...]:
        return tuple(helper_sources(source))

    def versions(self) -> str:
        import triton

        return str(triton.__version__)

    def _function(self, ir: KernelIR, config: Config, variant: Variant) -> Any:
        source = emit_triton(ir, config, variant.wide or needs_int64(ir), variant.aligned)
        return getattr(self.store.load(source), kernel_name(ir))

    def _spec(self, ir: KernelIR, config: Config, variant: Variant) -> KernelSpec:
        names = buffer_names(ir)
        pointers = {name: POINTER_TYPES[buffer.dtype] for name, buffer in zip(names, ir.buffers, strict=True)}
        if any(self.scratch(ir, config)):
            pointers |= {PARTIALS: "*fp32", COUNTERS: "*i32"}
        integers = [*map(symbol_argument, ir.symbols), *([LAUNCH] if launches(ir, config) > 1 else [])]
        sizes = dict.fromkeys(integers, "i64" if variant.wide else "i32")
        warps, stages = int(config["num_warps"]), int(config.get("num_stages", 1))
        aligned = tuple(pointers) if variant.aligned else ()
        return KernelSpec(
            {**pointers, **sizes}, aligned, warps, stages, overlapped=is_overlapped(config), asserts=may_fail(ir))

    def _programs(self, ir: KernelIR, config: Config, target: Target, sizes: Mapping[str, int]) -> int:
        return persistent_programs(ir, config, target, sizes) if is_tiled(ir) else programs(ir, config, sizes)

    def _arguments(self, ir: KernelIR, config: Config) -> Arguments:
        inputs, own = len(ir.inputs), 2 if any(self.scratch(ir, config)) else 0
        # Memory of the kernel's own is given behind the inputs, and taken behind the outputs.
        outputs = range(inputs + own, len(ir.buffers) + own)
        return tuple((number, 0) for number in (*range(inputs), *outputs, *range(inputs, inputs + own)))
