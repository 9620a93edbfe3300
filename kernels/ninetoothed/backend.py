"""The ninetoothed back end: what it can express, what can be tuned, and how its generated kernel is built."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch

from fuseplan.kernels.gpu.backend import GpuBackend
from fuseplan.kernels.gpu.build import POINTER_TYPES, KernelSpec, ModuleStore, digest, load_file
from fuseplan.kernels.gpu.launch import Arguments, Variant
from fuseplan.kernels.gpu.overlap import OVERLAP, OVERLAP_IMPORT, is_overlapped, overlap_of, overlapped
from fuseplan.kernels.gpu.tile import needs_int64, next_power_of_2, segment_programs, tile_of
from fuseplan.kernels.ir.backend import SM90, BuildError, Config, MachineError, Target, Tunable
from fuseplan.kernels.ir.gathers import may_fail
from fuseplan.kernels.ir.ir import ITEMSIZE, KernelIR, Reduce
from fuseplan.kernels.ir.kernel_name import kernel_name
from fuseplan.kernels.native.build import is_exposed
from fuseplan.kernels.ninetoothed.emitter import View, Views, emit_ninetoothed
from fuseplan.kernels.triton.config import MAX_PERSISTENT_COLS, PARAMETERS, default_config, infeasible, tunables
from fuseplan.kernels.triton.helpers import plain_helper_sources

_GENERATION = threading.Lock()
#: How ninetoothed spells Triton's language in what it generates.
_LANGUAGE = "triton.language"


class NinetoothedBackend(GpuBackend):
    """Generated ninetoothed kernels: arrangement and application, compiled by Triton."""

    name: ClassVar[str] = "ninetoothed"
    packages: ClassVar[tuple[str, ...]] = ("triton", "ninetoothed")
    parameters: ClassVar[tuple[Tunable, ...]] = PARAMETERS
    source = staticmethod(emit_ninetoothed)

    def _refuse(self, ir: KernelIR, target: Target) -> str | None:
        if ir.symbols:
            return f"dynamic sizes ({', '.join(ir.symbols)}) would become part of every block's bounds"
        for segment in ir.segments:
            if segment.products:
                return "a matmul: its kernels are Triton's"
            if segment.has_scan():
                return "a running sum or the like of a row: ninetoothed has none"
            if any(isinstance(instr, Reduce) and instr.kind == "prod" for instr in segment.body):
                return "a product of all elements of a row: ninetoothed folds by its own functions only"
            if segment.has_reduction() and next_power_of_2(segment.cols) > MAX_PERSISTENT_COLS:
                return f"a reduction over {segment.cols} columns does not fit one block (at most {MAX_PERSISTENT_COLS})"
            if segment.num_rows == 0 or segment.cols == 0:
                return "an empty iteration space has no blocks"
            if any(store.scatter is not None for store in segment.stores):
                return "an element that is stored where data says has no view"
        if needs_int64(ir):
            return "an element offset beyond 32 bits: ninetoothed computes offsets in 32 bits"
        return None

    def tunables(self, ir: KernelIR, target: Target) -> tuple[Tunable, ...]:
        found = {tunable.name: tunable for tunable in tunables(ir, target)}
        found.pop("num_stages", None)
        widest = max((next_power_of_2(s.cols) for s in ir.segments if s.has_reduction()), default=0)
        if widest:
            # Smaller blocks could not hold a row; only pointwise segments beside it could use larger ones.
            found["block_cols"] = Tunable("block_cols", (widest,))
        return tuple(found.values())

    def infeasible(self, ir: KernelIR, config: Config, target: Target) -> str | None:
        for segment in ir.segments:
            if tile_of(segment, config).looped:
                return f"block_cols={config['block_cols']} does not hold a row of {segment.cols}"
        return infeasible(ir, config, target)

    def default_config(self, ir: KernelIR, target: Target) -> Config:
        config = dict(default_config(ir, target))
        config.pop("num_stages", None)
        cols = {t.name: t.choices for t in self.tunables(ir, target)}["block_cols"]
        if config["block_cols"] not in cols:
            # A row that Triton would walk in blocks: as many threads as there are hold it at once.
            rows = max(1, min(int(config["block_rows"]), MAX_PERSISTENT_COLS // int(cols[-1])))
            config |= {"block_rows": rows, "block_cols": cols[-1], "num_warps": 32}
        return config

    def common(self, source: str) -> tuple[str, ...]:
        return tuple(plain_helper_sources(source))

    def versions(self) -> str:
        import triton

        return f"{triton.__version__}|{_version()}"

    def _function(self, ir: KernelIR, config: Config, variant: Variant) -> Any:
        """The Triton function that ninetoothed generates; what needs wide indices was refused."""
        source, folder = self.source(ir, config), self.store.folder
        try:
            return _generated(folder, source, kernel_name(ir), int(config["num_warps"]), overlap_of(config))
        except BuildError:
            raise
        except Exception as error:
            kind = MachineError if isinstance(error, OSError) else BuildError
            raise kind(f"ninetoothed could not generate the kernel: {type(error).__name__}: {error}") from error

    def _spec(self, ir: KernelIR, config: Config, variant: Variant) -> KernelSpec:
        """Strides become constants; addresses stay arguments."""
        parameters = list(self._parameters(ir, config))
        signature = {
            name: POINTER_TYPES[ir.buffers[view.buffer].dtype] if dimension is None else "constexpr"
            for name, view, dimension in parameters
        }
        constants = {name: view.strides[dim] for name, view, dim in parameters if dim is not None}
        addresses = {name: _byte_offset(ir, view) for name, view, dimension in parameters if dimension is None}
        aligned = [name for name, offset in addresses.items() if variant.aligned and offset % 16 == 0]
        return KernelSpec(
            signature, aligned, int(config["num_warps"]), 1, constants, is_overlapped(config), may_fail(ir))

    def _programs(self, ir: KernelIR, config: Config, target: Target, sizes: Mapping[str, int]) -> int:
        """Segments share programs, so the longest decides."""
        return max(segment_programs(segment, config, sizes) for segment in ir.segments)

    def _arguments(self, ir: KernelIR, config: Config) -> Arguments:
        """Addresses as buffer and byte offset, strides as constants."""
        return tuple(
            (view.buffer, _byte_offset(ir, view)) if dimension is None else (None, view.strides[dimension])
            for _, view, dimension in self._parameters(ir, config)
        )

    def _parameters(self, ir: KernelIR, config: Config) -> Iterator[tuple[str, View, int | None]]:
        """The generated function's: ``(name, view, dimension)`` for a stride, dimension None for an address."""
        known: dict[str, tuple[View, int | None]] = {}
        for view in Views(ir).all:
            known[f"ninetoothed_{view.name}_pointer"] = (view, None)
            for dimension in range(len(view.shape)):
                known[f"ninetoothed_{view.name}_stride_{dimension}"] = (view, dimension)
        for name in self._function(ir, config, Variant()).arg_names:
            if name not in known:
                raise BuildError(f"ninetoothed generated a parameter '{name}' that no argument explains")
            yield name, *known[name]


def _byte_offset(ir: KernelIR, view: View) -> int:
    return view.offset * ITEMSIZE[ir.buffers[view.buffer].dtype]


@functools.lru_cache(maxsize=4096)
def _generated(folder: Path, source: str, name: str, num_warps: int, overlap: str) -> Any:
    """The function, from the file of an earlier generation where there is one: generating takes a tenth of a second."""
    store = ModuleStore(folder.name, folder.parent)
    path = store.folder / f"generated_{digest(f'{_version()}|{name}|{num_warps}|{overlap}|{source}')}.py"
    if is_exposed(path):
        function = _make(store.load(source), name, num_warps)
        text = Path(inspect.getfile(function.fn)).read_text(encoding="utf-8")
        store.write_text(path, _overlapped_module(text, name, {OVERLAP: overlap}))
    return getattr(load_file(path), name)


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("ninetoothed")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _make(module: ModuleType, name: str, num_warps: int) -> Any:
    import ninetoothed

    arrangement, application, tensors = module.premake()
    with _GENERATION, _driver_for_generation():
        handle = ninetoothed.make(
            arrangement, application, tensors, kernel_name=name, num_warps=num_warps, num_stages=1
        )
    return handle._kernel


def _overlapped_module(text: str, name: str, config: Config) -> str:
    """A generated module with what ``config`` wants of overlap in kernel ``name``; ninetoothed has no word for it."""
    if not is_overlapped(config):
        return text
    module = ast.parse(text)
    kernel = next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name)
    statements = [ast.unparse(node) for node in kernel.body]
    placed = overlapped(statements, config, f"{_LANGUAGE}.load(", f"{_LANGUAGE}.store(")
    kernel.body = ast.parse("\n".join(placed)).body
    return f"{OVERLAP_IMPORT}\n{ast.unparse(module)}\n"


#: Stands for a GPU's driver while ninetoothed generates source: it asks for limits that a fixed config never uses.
_LIMITS = {"max_num_regs": SM90.gpu.register_file, "max_shared_mem": SM90.gpu.shared_bytes}
_NO_DEVICE = SimpleNamespace(
    get_current_device=lambda: 0, utils=SimpleNamespace(get_device_properties=lambda device: _LIMITS)
)


@contextmanager
def _driver_for_generation() -> Iterator[None]:
    """An active Triton driver, which ninetoothed wants even to generate. Where no GPU is in use that is a stand-in: a
    process that only compiles must not open the device, which stalls whoever measures on it.
    """
    import triton

    if torch.cuda.is_initialized():
        yield
        return
    driver = triton.runtime.driver
    # What was active (None as a rule) goes back: resetting to the default fails where there is none.
    before = vars(driver).get("_active")
    driver.set_active(_NO_DEVICE)
    try:
        yield
    finally:
        driver.set_active(before)
