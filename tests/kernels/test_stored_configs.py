"""What a stored configuration may make a back end do: nothing that a search could not have chosen."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ir_samples as samples
import pytest

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.cpp.config import run_settings
from fuseplan.kernels.ir.backend import SM90, Backend, BuildError, Config, Target, checked, config_key, misfit
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.search.tune.space import enumerate_space

pytestmark = pytest.mark.uncovered  # many cases of code that other tests cover

CPU = Target("cpu", "native", 8, l2_bytes=2**25)
TARGETS: Mapping[type[Backend], Target] = {CppBackend: CPU, TritonBackend: SM90, NinetoothedBackend: SM90}
MAKERS = [CppBackend, TritonBackend, NinetoothedBackend]
#: Runs when it is imported, wherever in a module it ends up.
CODE = '"""\nimport sys\nsys.fuseplan_was_here = True\n"""'
#: The first three are equal to honest choices; their texts are not.
HOSTILE: list[Any] = [
    True, 1.0, "1", CODE, "1;system(\"true\")", "\n#include </etc/passwd>\n", "", 0, -1, 97, 2**31, 2**63, 10**400,
    math.nan, math.inf, None, [1], {"a": 1}, "１",
]


def with_value(config: Config, name: str, value: Any) -> dict[str, Any]:
    return {**config, name: value}


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.name)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    made: Backend = request.param(tmp_path)
    return made


def hostile_configs(backend: Backend, honest: Config) -> list[dict[str, Any]]:
    """Honest but for one value or key."""
    found = [with_value(honest, name, value) for name in honest for value in HOSTILE]
    words = {parameter.name: parameter.choices for parameter in backend.parameters}
    found = [one for one in found if any(type(v) not in (int, str) or v not in words[n] for n, v in one.items())]
    return [*found, *(with_value(honest, key, 1) for key in (CODE, "", "block_row", "__class__", "名"))]


@pytest.mark.parametrize(
    "sample", [samples.rms_norm(37, 3000), samples.swiglu(5, 70, "bfloat16"), samples.softmax(64, 300)],
    ids=samples.label,
)
def test_no_hostile_value_reaches_an_emitter_s_text(backend: Backend, sample: samples.Sample, tmp_path: Path) -> None:
    target = TARGETS[type(backend)]
    for config in hostile_configs(backend, backend.default_config(sample.ir, target)):
        assert backend.refuse_config(sample.ir, config, target)
        with pytest.raises(BuildError, match="the configuration cannot be used"):
            backend.source(sample.ir, config)
        with pytest.raises(BuildError, match="the configuration cannot be used"):
            backend.prepare(sample.ir, config, target)
    assert not hasattr(sys, "fuseplan_was_here")
    assert [*tmp_path.rglob("*")] == []


def test_no_hostile_value_bounds_a_loop(tmp_path: Path) -> None:
    """Threads, rows and columns of a task are arguments of a C++ kernel: no text is made of them."""
    backend, sample = CppBackend(tmp_path), samples.swiglu(5, 70)
    for config in hostile_configs(backend, backend.default_config(sample.ir, CPU)):
        with pytest.raises(BuildError, match="the configuration cannot be used"):
            run_settings(sample.ir, config, CPU)


def test_reasons_repeat_nothing_of_a_config(backend: Backend) -> None:
    """They go to counters, logs and terminals."""
    sample, target = samples.rms_norm(37, 3000), TARGETS[type(backend)]
    honest = backend.default_config(sample.ir, target)
    marks = ["\x1b[31m", "[/red]", "secret"]
    for mark in marks:
        for config in (with_value(honest, name, mark) for name in [*honest, mark]):
            reason = backend.refuse_config(sample.ir, config, target)
            assert reason is not None
            assert not any(one in reason for one in marks)


@pytest.mark.parametrize("sample", samples.static_samples(), ids=samples.label)
def test_what_a_search_may_choose_is_accepted(backend: Backend, sample: samples.Sample) -> None:
    target = TARGETS[type(backend)]
    if backend.refuse(sample.ir, target):
        pytest.skip("the back end cannot express it")
    space = enumerate_space(backend, sample.ir, target)
    for config in space.configs[:: max(1, len(space) // 50)]:
        assert backend.refuse_config(sample.ir, dict(config), target) is None
        assert misfit(config, backend.parameters, complete=False) is None
    # Among all that the words allow, only what was enumerated.
    listed = {config_key(config) for config in space.configs}
    default = dict(space.default)
    for parameter in backend.parameters:
        for value in parameter.choices[:130]:
            config = with_value(default, parameter.name, value)
            assert (backend.refuse_config(sample.ir, config, target) is None) == (config_key(config) in listed)


def test_a_config_that_lacks_a_parameter_is_refused(backend: Backend) -> None:
    sample, target = samples.softmax(64, 300), TARGETS[type(backend)]
    honest = backend.default_config(sample.ir, target)
    for name in honest:
        assert name in (backend.refuse_config(sample.ir, {n: v for n, v in honest.items() if n != name}, target) or "")
    assert backend.refuse_config(sample.ir, {}, target)


def test_checked_hands_back_what_it_was_given(backend: Backend) -> None:
    honest = backend.default_config(samples.softmax(64, 300).ir, TARGETS[type(backend)])
    assert checked(honest, backend.parameters) is honest


def test_a_space_finds_what_it_holds_and_not_what_is_spelled_alike(backend: Backend) -> None:
    sample, target = samples.softmax(64, 300), TARGETS[type(backend)]
    space = enumerate_space(backend, sample.ir, target)
    assert space.find(space.default) == 0
    for name, value in space.default.items():
        if isinstance(value, int):
            assert space.find(with_value(space.default, name, str(value))) is None
            assert space.find(with_value(space.default, name, float(value))) is None


@pytest.mark.parametrize("cols", [3, 64, 100, 1500])
@pytest.mark.parametrize("dtype", ["uint8", "bool", "bfloat16"])
def test_a_default_is_one_of_the_choices(backend: Backend, dtype: str, cols: int) -> None:
    """Also where an element moves three bytes: a tile's rows and columns are powers of two."""
    buffers = [samples.contiguous("x", dtype, (4096, 2 * cols))]
    buffers.append(samples.contiguous("y", "bfloat16", (4096, cols), True))
    b = samples.Body(buffers, (4096,), cols)
    b.store("y", b.at, b.cast(b.load("x", b.at), "float32"))
    ir = KernelIR(tuple(buffers), (b.segment(),))
    assert misfit(backend.default_config(ir, TARGETS[type(backend)]), backend.parameters, complete=False) is None
