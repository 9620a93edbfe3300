"""Kernels that cannot be launched directly: which they are, and what is said about it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ir_samples as samples
import pytest
from fake_driver import Machine, aligned, compiled_kernel, needs_compiler, pretend_cuda

from fuseplan.kernels.gpu import direct
from fuseplan.kernels.gpu.direct import DriverEntry, entry_of, ptx_parameter_bits
from fuseplan.kernels.gpu.launch import Variant
from fuseplan.kernels.ir.backend import SM90, BuildError
from fuseplan.kernels.native import build
from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
from fuseplan.kernels.triton.backend import TritonBackend


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)


@needs_compiler
@pytest.mark.parametrize(
    "changes", [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}]
)
def test_special_kernels_stay_with_triton(changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="fuseplan")
    machine = Machine(addresses=1)
    kernel = machine.kernel(((0, 0),), 1, **changes)
    for _ in range(3):
        kernel(aligned(4))
    assert len(machine.slow) == 3 and not machine.direct
    (message,) = caplog.messages  # once, not for every call
    assert message.startswith("a kernel goes through Triton's launcher: it ")


def test_unexpected_parameters_stay_with_triton() -> None:
    def entry(bits: list[int], expected: list[int]) -> DriverEntry:
        return entry_of(compiled_kernel(bits, print), expected)

    assert entry([64, 64, 32, 64, 64], [64, 64, 32]) == DriverEntry(1, 128, 77)
    assert entry([64, 64, 32], [64, 64, 32]) == DriverEntry(1, 128, 77)
    for bits, expected in (([64, 32], [64, 64]), ([64], [64, 64]), ([64, 32], [64]), ([64] * 5, [64, 64]), ([], [64])):
        with pytest.raises(BuildError, match="its parameters have"):
            entry(bits, expected)


def test_compiled_kernels_have_the_parameters_that_launches_pass() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("ninetoothed")
    dynamic, static = samples.dynamic_samples()[4].ir, samples.swiglu(3, 20).ir
    triton, ninetoothed = TritonBackend(), NinetoothedBackend()
    for wide in (False, True):
        compiled = triton._compile(dynamic, triton.default_config(dynamic, SM90), SM90, Variant(wide))
        found = ptx_parameter_bits(compiled.asm["ptx"])
        assert found[:3] == (64, 64, 64 if wide else 32) and set(found[3:]) <= {64}
    for backend in (triton, ninetoothed):
        compiled = backend._compile(static, backend.default_config(static, SM90), SM90, Variant())
        compiled.function = 12
        # Without a device the handle is missing, nothing else.
        addresses = len(compiled.src.signature) - list(compiled.src.signature.values()).count("constexpr")
        entry = entry_of(compiled, [64] * addresses)
        assert entry.function == 12 and entry.threads == 32 * compiled.metadata.num_warps


# -- no launcher ------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_search() -> Iterator[None]:
    direct._search.cache_clear()
    yield
    direct._search.cache_clear()


def test_without_a_compiler_or_a_driver_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, fresh_search: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fuseplan")

    def missing() -> Any:
        raise BuildError("no C++17 compiler on PATH")

    monkeypatch.setattr(build, "required_compiler", missing)
    for _ in range(2):
        assert direct.find_launcher() is None
        assert direct.launcher_problem() == "no C++17 compiler on PATH"
    assert len(caplog.messages) == 1


@needs_compiler
def test_a_launcher_that_does_not_build_is_a_reason(monkeypatch: pytest.MonkeyPatch, fresh_search: None) -> None:
    def refuse(*_: Any) -> Any:
        raise BuildError("cpp: c++ failed: error: no")

    monkeypatch.setattr(direct, "load_extension", refuse)
    assert direct.find_launcher() is None
    assert direct.launcher_problem() == "cpp: c++ failed: error: no"


def test_a_missing_driver_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(BuildError, match=r"driver cannot be used: libcuda\.so\.1"):
        direct.cuda_driver()


def test_a_kernel_is_loaded_without_what_triton_would_launch_it_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 3.6 that is compiled by a C compiler, for each signature."""
    from triton import runtime
    from triton.backends.nvidia import driver as nvidia

    loads: list[tuple[object, ...]] = []

    class Utils:
        @staticmethod
        def load_binary(*given: object) -> tuple[int, int, int, int, int]:
            loads.append(given)
            return 11, 2**63 + 5, 32, 0, 1024

    class Active:
        utils = Utils

        @staticmethod
        def get_current_device() -> int:
            return 3

    class Kernel:
        name, kernel, metadata, function = "fused", b"cubin", SimpleNamespace(shared=77), None

        @property
        def run(self) -> None:
            raise AssertionError("it was asked for its launcher")

    monkeypatch.setattr(nvidia, "make_launcher", None, raising=False)
    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=Active))
    kernel = Kernel()
    assert [direct.load_function(kernel) for _ in range(2)] == [2**63 + 5] * 2
    assert loads == [("fused", b"cubin", 77, 3)]
