"""Generated modules on disk, compile facts, and the launcher's choices (with a stand-in for the device)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ir_samples as samples
import pytest
import torch
from ptx_paths import vector_bytes

from fuseplan.kernels.gpu import build
from fuseplan.kernels.gpu.build import KernelSpec, ModuleStore, compile_kernel
from fuseplan.kernels.gpu.launch import Geometry, GpuKernel, Loader, Variant
from fuseplan.kernels.gpu.targets import Nvidia
from fuseplan.kernels.ir.backend import SM90, CompiledKernel, Config, MachineError, Resources, Target
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.triton.backend import TritonBackend


def test_equal_sources_share_a_file_and_a_module(tmp_path: Path) -> None:
    store = ModuleStore("triton", tmp_path)
    first, second = store.write("ANSWER = 42\n"), store.write("ANSWER = 42\n")
    assert first == second and first.read_text() == "ANSWER = 42\n"
    assert store.load("ANSWER = 42\n").ANSWER == 42
    assert store.load("ANSWER = 42\n") is ModuleStore("triton", tmp_path).load("ANSWER = 42\n")
    assert store.write("ANSWER = 43\n") != first
    assert [path for path in store.folder.iterdir() if path.name.startswith(".partial")] == []


def test_the_default_folder_is_the_users_cache() -> None:
    assert "fuseplan" in str(ModuleStore("triton").folder)


def test_an_unwritable_folder_is_named_and_no_fault_of_a_kernel(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file")
    with pytest.raises(MachineError, match="blocked"):
        ModuleStore("triton", tmp_path / "blocked").write("x = 1\n")


def test_a_damaged_resource_record_is_forgotten(tmp_path: Path) -> None:
    cache = ModuleStore("triton", tmp_path)
    assert cache.resources("key") is None
    cache.keep_resources("key", Resources(32, 0, 16, {"register_limit": 16}))
    assert cache.resources("key") == Resources(32, 0, 16, {"register_limit": 16})
    next(cache.folder.glob("resources_*")).write_text("[1, 2")
    assert cache.resources("key") is None


def test_vector_width_is_the_narrowest_vector_access() -> None:
    ptx = "ld.global.v4.b32 {a};\nst.global.L1::evict_last.v2.b32 [p], {q};\nld.global.b16 x;"
    assert vector_bytes(ptx) == 8
    assert vector_bytes("ld.global.b16 x;") == 0


@pytest.mark.parametrize(("roomy_spill", "kept"), [(0, "roomy"), (40, "first")])
def test_a_spilling_kernel_gets_a_second_chance(monkeypatch: pytest.MonkeyPatch, roomy_spill: int, kept: str) -> None:
    asked: list[int] = []

    def fake_compile(function: Any, spec: KernelSpec, target: Target, register_limit: int = 0) -> str:
        asked.append(register_limit)
        return "roomy" if register_limit else "first"

    facts = {"first": (40, 8), "roomy": (46, roomy_spill)}
    monkeypatch.setattr(build, "compile_once", fake_compile)
    monkeypatch.setattr(Nvidia, "registers_and_spills", lambda self, compiled: facts[compiled])
    assert compile_kernel(None, KernelSpec({}, (), num_warps=4), SM90) == kept
    assert asked == [0, 255]
    assert Nvidia().options(False, 255) == {"maxnreg": 255} and Nvidia().options(True, 0) == {"launch_pdl": True}


def test_a_kernel_at_the_register_limit_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(build, "compile_once", lambda *args: calls.append(args) or "only")
    monkeypatch.setattr(Nvidia, "registers_and_spills", lambda self, compiled: (64, 100))
    assert compile_kernel(None, KernelSpec({}, (), num_warps=32), SM90) == "only"
    assert len(calls) == 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records launches; CPU tensors (device -1) stand for tensors on the current device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    return []


def recording(launches: list[tuple[Any, ...]]) -> Callable[[Variant], Any]:
    def compile_variant(variant: Variant) -> Any:
        def run(*args: Any) -> None:
            launches.append((variant, args[0], args[3], args[9:]))

        return SimpleNamespace(run=run, function=1, packed_metadata=(), metadata=None)

    return compile_variant


def test_the_launcher_picks_a_binary_for_alignment_and_size(launches: list[tuple[Any, ...]]) -> None:
    def geometry(sizes: tuple[int, ...]) -> Geometry:
        return Geometry(sizes[0] // 2, sizes[0] > 100)

    kernel = GpuKernel(Loader(recording(launches), geometry, ("n",), ((0, 0), (1, 0)), 2), Resources())
    storage = torch.zeros(64)
    base = next(offset for offset in range(4) if storage[offset:].data_ptr() % 16 == 0)
    aligned, odd = storage[base:], storage[base + 1 :]
    kernel(aligned, aligned, 8)
    kernel(aligned, odd, 8)
    kernel(aligned, aligned, 200)
    kernel(aligned, aligned, 0)
    address = aligned.data_ptr()
    assert launches == [
        (Variant(False, True), 4, 7, (address, address, 8)),
        (Variant(False, False), 4, 7, (address, address + 4, 8)),
        (Variant(True, True), 100, 7, (address, address, 200)),
    ]


def test_views_and_constants_take_their_places(launches: list[tuple[Any, ...]]) -> None:
    arguments = ((0, 0), (None, 128), (0, 64), (1, 0))
    kernel = GpuKernel(Loader(recording(launches), lambda _: Geometry(3, False), (), arguments, 2), Resources())
    x, y = torch.zeros(64), torch.zeros(64)
    kernel(x, y)
    assert launches[0][3] == (x.data_ptr(), 128, x.data_ptr() + 64, y.data_ptr())


def test_a_kernel_on_another_device_switches_to_it(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []

    @contextlib.contextmanager
    def switch(device: int) -> Any:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", switch)
    kernel = GpuKernel(Loader(recording(launches), lambda _: Geometry(1, False), (), ((0, 0),), 1), Resources())
    kernel(torch.zeros(4))
    assert entered == [-1] and len(launches) == 1


def test_fused_callable_allocates_what_the_kernel_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder(CompiledKernel):
        def __call__(self, *args: Any) -> None:
            *tensors, rows = args
            assert [tuple(tensor.shape) for tensor in tensors] == [(rows, 96), (rows, 48)]
            tensors[1].fill_(rows)

    def load(self: TritonBackend, ir: KernelIR, config: Config, target: Target) -> CompiledKernel:
        return Recorder()

    monkeypatch.setattr(TritonBackend, "load", load)
    ir = samples.dynamic_samples()[4].ir
    call = TritonBackend().fused_callable(ir, {}, SM90)
    for rows in (3, 5, 3):
        out = call(torch.zeros(rows, 96), rows)
        assert isinstance(out, torch.Tensor) and out.shape == (rows, 48) and out[0, 0] == rows


def test_warming_up_leaves_no_thread_behind() -> None:
    """Workers are forked after it."""
    code = (
        "import threading; from fuseplan.kernels.gpu.targets import warm_up; "
        "warm_up(); print(threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


def test_what_launches_a_kernel_is_built_where_triton_compiles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver

    compiled, built = SimpleNamespace(src="source", metadata="metadata"), []

    def launcher(source: str, metadata: str) -> None:
        built.append((source, metadata))
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr(driver, "CudaLauncher", launcher)
    monkeypatch.delattr(driver, "make_launcher", raising=False)
    Nvidia().build_launcher(compiled)
    assert built == []  # one launcher for all signatures, which needs a GPU
    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    Nvidia().build_launcher(compiled)
    assert built == [("source", "metadata")]
