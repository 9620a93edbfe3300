"""The call path: arguments, sharing rows among threads, the OpenMP runtime, and life without the extension."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ir_samples as samples
import pytest
import torch
from compilers import find_compiler
from paths import SUPPORT

from fuseplan.kernels.cpp import launch
from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.cpp.launch import CppKernel, load_launcher
from fuseplan.kernels.ir.backend import Config, Target, fused_call
from fuseplan.kernels.ir.index import symbol
from fuseplan.kernels.native.build import shared_openmp

REASON = CppBackend().unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
TARGET = Target("cpu", "native", 8)
ROWS, COLS = 37, 24


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> CppBackend:
    return CppBackend(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=["extension", "ctypes"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both call paths."""
    if request.param == "ctypes":
        monkeypatch.setattr(launch, "load_launcher", lambda *_: None)
    return str(request.param)


def config(**changes: int) -> Config:
    return {"threads": 1, "rows_per_task": 1, "col_tile": 1024, "unroll": 1, "stage": 0, "stream": 0, **changes}


def softmax(dynamic: bool = False) -> samples.Sample:
    if dynamic:
        return samples.softmax(symbol("n"), COLS, symbols={"n": ROWS})
    return samples.softmax(ROWS, COLS)


def test_both_paths_compute_static_and_dynamic_kernels(backend: CppBackend, path: str) -> None:
    for dynamic in (False, True):
        sample = softmax(dynamic)
        (x,) = sample.inputs()
        sizes = [ROWS] if dynamic else []
        kernel = backend.load(sample.ir, config(), TARGET)
        y = torch.zeros_like(x)
        kernel(x, y, *sizes)
        torch.testing.assert_close(y, torch.softmax(x, -1))
        torch.testing.assert_close(fused_call(kernel, sample.ir)(x, *sizes), y, rtol=0, atol=0)


def test_several_outputs_come_as_a_tuple(backend: CppBackend, path: str) -> None:
    sample = samples.add_rms_norm(3, 20)
    h, _ = backend.fused_callable(sample.ir, config(), TARGET)(*sample.inputs())
    torch.testing.assert_close(h, sum(sample.inputs()[:2]))


def test_a_wrong_number_of_arguments_is_a_type_error(backend: CppBackend, path: str) -> None:
    kernel = backend.load(softmax().ir, config(), TARGET)
    with pytest.raises(TypeError, match="2 tensors and 0 sizes"):
        kernel(torch.zeros(ROWS, COLS))


def test_something_else_than_a_tensor_is_an_error(backend: CppBackend) -> None:
    call = backend.fused_callable(softmax(dynamic=True).ir, config(), TARGET)
    with pytest.raises((TypeError, AttributeError)):
        call("a string", 3)
    with pytest.raises(TypeError):
        call(torch.zeros(ROWS, COLS), "three")


def test_a_failing_allocator_is_passed_on(backend: CppBackend) -> None:
    call = backend.fused_callable(softmax(dynamic=True).ir, config(), TARGET)
    with pytest.raises(RuntimeError):
        call(torch.zeros(ROWS, COLS), -5)


def test_calls_from_several_threads_agree(backend: CppBackend) -> None:
    sample = samples.swiglu(64, 4096)
    call = backend.fused_callable(sample.ir, config(threads=2, rows_per_task=4), TARGET)
    inputs = sample.inputs()
    expected, results = call(*inputs), []
    workers = [threading.Thread(target=lambda: results.append(call(*inputs))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4
    assert all(torch.equal(result, expected) for result in results)


class Team:
    """Stands in for an OpenMP runtime: runs the members one after another and keeps what was asked for."""

    def __init__(self, granted: int, limit: int = 64) -> None:
        self.requested: list[int] = []
        self._me, self._granted, self._limit = 0, granted, limit
        work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        count = ctypes.CFUNCTYPE(ctypes.c_int)

        def parallel(function: int, data: int, threads: int, _: int) -> None:
            self.requested.append(threads)
            for member in range(min(self._granted, threads)):
                self._me = member
                work(function)(data)

        self._functions: list[Any] = [
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(parallel),
            count(lambda: self._me),
            count(lambda: min(self._granted, self.requested[-1])),
            count(lambda: self._limit),
        ]

    def runtime(self) -> tuple[int, ...]:
        return tuple(ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self._functions)


@pytest.fixture
def load_with(
    backend: CppBackend, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Team, samples.Sample, Config], CppKernel]:
    def load(team: Team, sample: samples.Sample, settings: Config) -> CppKernel:
        monkeypatch.setattr(launch, "shared_openmp", team.runtime)
        return backend.load(sample.ir, settings, TARGET)

    return load


Load = Callable[[Team, samples.Sample, Config], CppKernel]


@pytest.mark.parametrize("rows_per_task", [1, 4, 50])
@pytest.mark.parametrize("granted", [1, 2, 3, 8])
def test_any_team_covers_every_row_once(load_with: Load, granted: int, rows_per_task: int) -> None:
    team, sample = Team(granted), softmax()
    kernel = load_with(team, sample, config(threads=8, rows_per_task=rows_per_task))
    (x,), y = sample.inputs(), torch.full((ROWS, COLS), torch.nan)
    kernel(x, y)
    torch.testing.assert_close(y, torch.softmax(x, -1))
    assert team.requested == ([min(8, -(-ROWS // rows_per_task))] if rows_per_task < ROWS else [])


@pytest.mark.parametrize("granted", [2, 5])
def test_any_team_covers_segments_and_column_tiles(load_with: Load, granted: int) -> None:
    for sample in (samples.rope(2, 3, 4, 2, 16), samples.broadcast_add(7, 3000), samples.transposed_copy(70, 50)):
        team = Team(granted)
        kernel = load_with(team, sample, config(threads=8, rows_per_task=3, col_tile=1024))
        inputs, outputs, alone = sample.inputs(), sample.outputs(), sample.outputs()
        kernel(*inputs, *outputs)
        load_with(Team(1, limit=1), sample, config())(*inputs, *alone)
        assert team.requested
        for one, other in zip(outputs, alone, strict=True):
            assert torch.equal(one, other)


def test_torch_s_limit_of_threads_holds(load_with: Load) -> None:
    team = Team(granted=1, limit=1)
    kernel = load_with(team, softmax(), config(threads=8))
    fused_call(kernel, softmax().ir)(*softmax().inputs())
    assert team.requested == []


def test_small_dynamic_work_stays_on_one_thread(load_with: Load) -> None:
    team, sample = Team(2), softmax(dynamic=True)
    call = fused_call(load_with(team, sample, config(threads=8)), sample.ir)
    call(torch.zeros(8, COLS), 8)
    assert team.requested == []
    call(torch.zeros(9000, COLS), 9000)
    assert team.requested == [6]


def test_without_an_openmp_runtime_one_thread_does_all(
    backend: CppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "shared_openmp", lambda: (0, 0, 0, 0))
    (x,) = softmax().inputs()
    torch.testing.assert_close(backend.fused_callable(softmax().ir, config(threads=8), TARGET)(x), torch.softmax(x, -1))


def test_the_launcher_is_built_once(backend: CppBackend, tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    assert load_launcher(compiler, tmp_path) is load_launcher(compiler, tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert load_launcher(compiler, blocked) is None


ONE_RUNTIME = """
import sys, torch, re
sys.path.insert(0, sys.argv[2])
import ir_samples as samples
from pathlib import Path
from fuseplan.kernels.ir.backend import Target
from fuseplan.kernels.cpp.backend import CppBackend
sample = samples.swiglu(64, 4096)
torch.ones(1000, 1000).exp().sum()
config = {"threads": 2, "rows_per_task": 4, "col_tile": 1024, "unroll": 2, "stage": 0, "stream": 0}
backend = CppBackend(Path(sys.argv[1]))
backend.fused_callable(sample.ir, config, Target("cpu", "native", 2))(*sample.inputs())
maps = open("/proc/self/maps").read()
print(len(set(re.findall(r"/\\S*lib(?:g|i)?omp\\S*", maps))))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_kernels_share_torch_s_openmp_runtime(tmp_path: Path) -> None:
    if not any(shared_openmp()):
        pytest.skip("this torch has no GOMP_parallel to share")
    command = [sys.executable, "-c", ONE_RUNTIME, str(tmp_path), str(SUPPORT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "1", done.stderr
