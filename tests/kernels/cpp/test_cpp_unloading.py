"""Libraries of kernels go from the process's memory with the last call path into them, and never before."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import ir_samples as samples
import pytest
import torch
from mapped_files import mapped

from fuseplan.kernels.cpp import launch
from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import Target, fused_call
from fuseplan.kernels.ir.index import symbol
from fuseplan.kernels.native.build import required_compiler

REASON = CppBackend().unavailable()
pytestmark = [
    pytest.mark.usefixtures("quick_collections"),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped"),
]
TARGET = Target("cpu", "native", 2)


@pytest.fixture(scope="module")
def launcher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension's, apart from the kernels: it stays loaded."""
    return tmp_path_factory.mktemp("launcher")


@pytest.fixture(params=["extension", "ctypes"])
def backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher_folder: Path
) -> CppBackend:
    """Both call paths, with a folder of their own."""
    load, extended = launch.load_launcher, request.param == "extension"
    monkeypatch.setattr(
        launch, "load_launcher", lambda compiler, _: load(compiler, launcher_folder) if extended else None)
    assert (launch.load_launcher(required_compiler(), tmp_path) is not None) == extended
    return CppBackend(tmp_path / "kernels")


def kernels(folder: Path) -> set[str]:
    return mapped(folder / "kernels")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("rows", [1, 3, 127, "n"])
def test_a_library_goes_with_its_last_call_path(
    backend: CppBackend, tmp_path: Path, rows: int | str, dtype: str
) -> None:
    symbols = {"n": 3} if rows == "n" else {}
    sample = samples.softmax(symbol("n") if rows == "n" else rows, 24, dtype=dtype, symbols=symbols)
    (x,) = sample.inputs()
    sizes = list(symbols.values())
    kernel = backend.load(sample.ir, backend.default_config(sample.ir, TARGET), TARGET)
    fused = fused_call(kernel, sample.ir)
    expected = fused(x, *sizes)
    assert len(kernels(tmp_path)) == 1
    del kernel
    gc.collect()
    assert len(kernels(tmp_path)) == 1  # another call path is kept
    assert torch.equal(fused(x, *sizes), expected)
    del fused
    gc.collect()
    assert kernels(tmp_path) == set()


def test_two_kernels_of_one_library_do_not_take_it_from_each_other(backend: CppBackend, tmp_path: Path) -> None:
    sample = samples.softmax(3, 24)
    (x,) = sample.inputs()
    config = backend.default_config(sample.ir, TARGET)
    first, second = (backend.fused_callable(sample.ir, config, TARGET) for _ in range(2))
    expected = first(x)
    assert len(kernels(tmp_path)) == 1
    del first
    gc.collect()
    assert torch.equal(second(x), expected) and len(kernels(tmp_path)) == 1
    del second
    gc.collect()
    assert kernels(tmp_path) == set()


def test_nothing_goes_while_a_call_runs_in_another_thread(
    backend: CppBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is stopped where it allocates its result; meanwhile everybody else lets go of the kernel."""
    inside, go_on, results = threading.Event(), threading.Event(), list[torch.Tensor]()
    allocate = torch.empty_strided

    def stopping(shape: Any, strides: Any, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        inside.set()
        go_on.wait()
        return allocate(shape, strides, dtype=dtype, device=device)

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", stopping)
    monkeypatch.setattr(torch, "empty_strided", stopping)
    sample = samples.softmax(3, 24)
    (x,) = sample.inputs()
    held = [backend.fused_callable(sample.ir, backend.default_config(sample.ir, TARGET), TARGET)]
    thread = threading.Thread(target=lambda: results.append(held.pop()(x)))
    thread.start()
    assert inside.wait(600)
    gc.collect()
    assert held == [] and len(kernels(tmp_path)) == 1
    go_on.set()
    thread.join(600)
    torch.testing.assert_close(results[0], torch.softmax(x, -1))
    gc.collect()
    assert kernels(tmp_path) == set()
