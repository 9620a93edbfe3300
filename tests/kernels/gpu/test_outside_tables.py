"""An index outside its table in kernels for GPUs: the device asserts, here under Triton's interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import ir_samples as samples
import pytest
from ir_samples import Sample, label, lookups
from paths import SUPPORT
from ptx_paths import ptx_of

from fuseplan.kernels.gpu.backend import GpuBackend
from fuseplan.kernels.gpu.direct import ptx_parameter_bits
from fuseplan.kernels.ir.backend import SM90
from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
from fuseplan.kernels.triton.backend import TritonBackend

pytestmark = pytest.mark.uncovered  # many cases of code that other tests cover

BACKENDS = {"triton": TritonBackend, "ninetoothed": NinetoothedBackend}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GpuBackend:
    pytest.importorskip(request.param)
    return BACKENDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("name", BACKENDS)
def test_numbers_outside_their_tables_fail_and_no_others(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "interpret_outside.py"), name, str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len({one["name"] for one in found}) >= (8 if name == "triton" else 4)
    assert [one for one in found if not one["right"] or one["failed"] < one["bad"]] == []


@pytest.mark.parametrize("sample", lookups(), ids=label)
def test_assertions_cost_a_kernel_no_stack(sample: Sample, backend: GpuBackend) -> None:
    if backend.refuse(sample.ir, SM90) is not None:
        pytest.skip("refused")
    config = backend.default_config(sample.ir, SM90)
    ptx = ptx_of(backend, sample.ir, config)
    assert "__assertfail" in ptx
    # A direct launch passes addresses and sizes, and nothing else.
    assert set(ptx_parameter_bits(ptx)) <= {32, 64}
    assert backend.prepare(sample.ir, config, SM90).spill_bytes == 0


def test_a_position_that_all_share_is_asserted_once(backend: GpuBackend) -> None:
    sample = samples.embedded(1, 3, 64, "bfloat16")
    source = backend.source(sample.ir, backend.default_config(sample.ir, SM90))
    assert len(re.findall("device_assert", source)) == 1


def test_what_looks_nothing_up_asserts_nothing(backend: GpuBackend) -> None:
    for sample in (samples.rms_norm(4, 64, "bfloat16"), samples.cat_rows(2, 3, 37)):
        assert "assert" not in ptx_of(backend, sample.ir, backend.default_config(sample.ir, SM90))
