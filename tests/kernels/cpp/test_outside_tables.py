"""An index outside its table, in C++ kernels: the call raises, and nothing that others see has changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import ir_samples as samples
import pytest
import torch
from ir_samples import FAR, Sample, label, lookups

from fuseplan.kernels.cpp import launch
from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.cpp.config import _GIL_ELEMENTS
from fuseplan.kernels.ir.backend import Config, OutsideTable, Target, fused_call
from fuseplan.kernels.ir.gathers import may_fail

REASON = CppBackend().unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
TARGET = Target("cpu", "native", 4)


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> CppBackend:
    return CppBackend(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=["extension", "ctypes"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both call paths."""
    if request.param == "ctypes":
        monkeypatch.setattr(launch, "load_launcher", lambda *_: None)


def configs(backend: CppBackend, sample: Sample) -> Iterator[Config]:
    yield backend.default_config(sample.ir, TARGET)
    for unroll, stage, threads in ((1, 0, 1), (4, 1, 3)):
        yield {"threads": threads, "rows_per_task": 1, "col_tile": 32, "unroll": unroll, "stage": stage, "stream": 0}


@pytest.mark.parametrize("sample", lookups(), ids=label)
def test_a_number_outside_its_table_fails_and_changes_nothing(
    sample: Sample, backend: CppBackend, path: None
) -> None:
    sizes = list(sample.symbols.values())
    first, middle, last = sample.places
    for config in configs(backend, sample):
        kernel = backend.load(sample.ir, config, TARGET)
        call = fused_call(kernel, sample.ir)
        expected = call(*sample.inputs(), *sizes)
        for place, number in ((first, sample.extent), (last, -1), (middle, FAR), (last, -(2**63))):
            given, before = sample.outside(place, number), sample.outside(place, number)
            with pytest.raises(OutsideTable):
                call(*given, *sizes)
            with pytest.raises(OutsideTable):
                kernel(*given, *sample.outputs(), *sizes)
            assert all(map(torch.equal, given, before))
        again = call(*sample.inputs(), *sizes)
        for one, other in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (again, expected)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_calls_from_several_threads_fail_each_for_itself(backend: CppBackend) -> None:
    cols = 127
    rows = _GIL_ELEMENTS // cols + 1
    sample = samples.picked(rows, cols, 5)
    call = backend.fused_callable(sample.ir, backend.default_config(sample.ir, TARGET), TARGET)
    right, wrong = sample.inputs(), sample.outside(rows * cols - 1, 5)
    found: list[bool] = []

    def run(inputs: list[torch.Tensor]) -> None:
        for _ in range(5):
            try:
                call(*inputs)
                found.append(inputs is right)
            except OutsideTable:
                found.append(inputs is wrong)

    workers = [threading.Thread(target=run, args=(inputs,)) for inputs in (right, wrong, right, wrong)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [True] * 20


def test_what_looks_nothing_up_has_no_checks(backend: CppBackend, tmp_path: Path) -> None:
    looked_up = samples.embedded(5, 11, 127)
    plain = samples.rms_norm(5, 127)
    texts = [backend.source(one.ir, backend.default_config(one.ir, TARGET)) for one in (looked_up, plain)]
    assert ["outside" in text for text in texts] == [True, False]
    assert may_fail(looked_up.ir) and not may_fail(plain.ir)
