"""Records and their JSON: exact round trips, strict reading."""

from __future__ import annotations

import dataclasses
import gc
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_records import HERE, evidence, plan, tuning

from fuseplan.search.errors import RecordError
from fuseplan.search.store import codec, limits
from fuseplan.search.store.record import Measurement, PlanRecord, RecordKey, Trial, TuningRecord, Versions

names = st.text("abzAZ09_.+-", max_size=8)
texts = st.text(st.characters(codec="utf-8"), max_size=8)
amounts = st.floats(1e-6, 1e12)
configs = st.dictionaries(names, st.one_of(st.integers(-(2**31), 2**31 - 1), names), max_size=3)


def test_records_survive_json() -> None:
    for cls, record in ((TuningRecord, tuning()), (PlanRecord, plan()), (TuningRecord, tuning(fused=None, fuse=False))):
        text = codec.dumps(record)
        assert codec.loads(cls, text) == record
        assert codec.dumps(codec.loads(cls, text)) == text


class Ended:
    """Garbage that only a collection finds; that calls some functions, one in the other."""

    def __init__(self) -> None:
        self.myself = self

    def __del__(self) -> None:
        self.call(40)

    def call(self, more: int) -> None:
        if more:
            self.call(more - 1)


def test_no_collection_runs_deep_in_nested_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any depth: what it calls would have no stack left, and Python would say so on the terminal."""
    failed: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", failed.append)
    before = gc.get_threshold()
    text = "[" * 5000 + "]" * 5000
    try:
        for depth in range(500, 1100, 10):
            gc.set_threshold(1_000_000)
            for _ in range(20):
                Ended()
            gc.set_threshold(gc.get_count()[0] + depth, 1, 1)
            with pytest.raises(RecordError, match="nested too deeply"):
                codec.parse(text, "it")
    finally:
        gc.set_threshold(*before)
        gc.collect()
    assert not failed and gc.isenabled()


def test_an_infinite_error_of_eager_mode_is_stored() -> None:
    record = tuning(eager_error=limits.WORST_ERROR)
    assert codec.loads(TuningRecord, codec.dumps(record)) == record


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(names, configs, st.one_of(st.none(), amounts), texts)
def test_trials_survive_json(backend: str, config: dict[str, int | str], us: float | None, reason: str) -> None:
    trial = Trial(RecordKey("w", "d"), backend, config, us, reason, us)
    assert codec.loads(Trial, codec.dumps(trial)) == trial


def test_types_survive_json() -> None:
    config = codec.loads(TuningRecord, codec.dumps(tuning())).config
    assert config == {"threads": 2, "col_tile": 1024}
    assert type(config["threads"]) is int
    assert isinstance(codec.loads(PlanRecord, codec.dumps(plan())).groups[0].ops, tuple)


def test_whole_numbers_are_read_as_floats_where_floats_are_meant() -> None:
    text = codec.dumps(Measurement(1.0, 0.0, 1, 1, "eager")).replace("1.0", "1")
    assert type(codec.loads(Measurement, text).median_us) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("gain"), r"missing fields \['gain'\]"),
        (lambda d: d.update(extra=1), r"unknown fields \['extra'\]"),
        (lambda d: d.update(fuse=1), "fuse: expected bool"),
        (lambda d: d.update(measured=1.5), "measured: expected int"),
        (lambda d: d.update(gain="much"), "gain: expected float"),
        (lambda d: d.update(label=None), "label: expected str"),
        (lambda d: d["unfused"].update(median_us=True), r"unfused\.median_us: expected float"),
        (lambda d: d.update(finalists={}), "finalists: expected a list"),
        (lambda d: d.update(config=[1]), "config: expected an object"),
        (lambda d: d.update(config={"threads": [1]}), r"config\.threads"),
        (lambda d: d.update(key="w1"), "key: expected an object"),
    ],
)
def test_anything_foreign_is_refused_with_its_place(change, message: str) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(codec.dumps(tuning()))
    change(data)
    with pytest.raises(RecordError, match=message):
        codec.loads(TuningRecord, json.dumps(data))


def test_an_implementation_has_a_name_that_can_be_shown() -> None:
    text = codec.dumps(plan()).replace('"mkl"', '"<b>"')
    with pytest.raises(RecordError, match="implementation"):
        codec.loads(PlanRecord, text)


def test_what_is_not_json_or_not_finite_is_refused() -> None:
    with pytest.raises(RecordError, match="TuningRecord is not JSON"):
        codec.loads(TuningRecord, '{"key":')
    with pytest.raises(RecordError, match="cannot be stored as JSON"):
        codec.dumps(tuning(gain=math.nan))
    with pytest.raises(RecordError, match="is not finite"):
        codec.loads(Measurement, codec.dumps(Measurement(1.5, 0.0, 1, 1, "eager")).replace("1.5", "1e999"))


def test_fixed_length_tuples_are_checked() -> None:
    @dataclasses.dataclass(frozen=True)
    class Pair:
        both: tuple[int, str]

    with pytest.raises(RecordError, match=r"Pair\.both: expected 2 items, found 3"):
        codec.loads(Pair, '{"both": [1, "a", "b"]}')
    with pytest.raises(RecordError, match=r"Pair\.both\[1\]: expected str, found 2"):
        codec.loads(Pair, '{"both": [1, 2]}')
    assert codec.loads(Pair, '{"both": [1, "a"]}') == Pair((1, "a"))


def test_best_time_is_the_kernels_only_where_fusing_pays() -> None:
    assert tuning().best_us == 5.0
    assert tuning(fuse=False).best_us == 10.0
    assert tuning(fuse=True, fused=None).best_us == 10.0


def test_versions_name_what_differs() -> None:
    other = dataclasses.replace(HERE, torch="2.14.0", driver="590.0")
    assert HERE.mismatch(HERE) == ()
    assert HERE.mismatch(other) == ("torch", "driver")


def test_current_versions_of_a_cpu_leave_the_gpu_out() -> None:
    import torch

    cpu, cuda = Versions.current("cpu"), Versions.current("cuda")
    assert cpu.torch.split("+")[0] == torch.__version__.split("+")[0]
    assert cpu.fuseplan
    assert (cpu.triton, cpu.driver) == ("", "")
    assert cuda.triton


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tuning().gain = 1.0  # type: ignore[misc]
    assert evidence().reason


class _Library:
    """Stands in for NVIDIA's management library."""

    def __init__(self, status: int) -> None:
        self.status = status

    def nvmlInit_v2(self) -> int:  # noqa: N802  # the library's name
        return self.status

    def nvmlSystemGetDriverVersion(self, buffer: object, size: int) -> int:  # noqa: N802
        buffer.value = b"580.159.04"  # type: ignore[attr-defined]
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        return 0


@pytest.mark.parametrize(("status", "version"), [(0, "580.159.04"), (9, "")])
def test_the_drivers_version_comes_from_its_library(
    monkeypatch: pytest.MonkeyPatch, status: int, version: str
) -> None:
    from fuseplan.search.store import record

    monkeypatch.setattr(record.ctypes, "CDLL", lambda name: _Library(status))
    record._driver_version.cache_clear()
    assert record._driver_version() == version
    record._driver_version.cache_clear()
