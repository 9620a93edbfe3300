"""Samples keep what was called, those from before there were names are read, and no other text gets in."""

from __future__ import annotations

import json

import pytest

from fuseplan.costmodel.work import Work
from fuseplan.planner.cost.samples import ChoiceSample, RegionSamples
from fuseplan.search.store import codec
from fuseplan.search.store.record import RecordKey

WORK = Work({"bf16_matmul": 1e6}, 1e4, launches=1, call="sdpa.flash", elements=7.0, lanes=5.0, threads=3)


def stored(work: Work) -> str:
    sample = ChoiceSample((0,), "sdpa.flash", "library", "attention", "sdpa", "g", "eager", work, 5.0)
    return codec.dumps(RegionSamples(RecordKey("k" * 64, "cpu-test"), "attention", (), 1, (sample,)))


def test_a_call_is_stored() -> None:
    assert codec.loads(RegionSamples, stored(WORK)).samples[0].work == WORK


def test_older_samples_have_none() -> None:
    older = json.loads(stored(WORK))
    for name in ("call", "elements", "lanes", "threads"):
        del older["samples"][0]["work"][name]
    text = json.dumps(older)
    assert codec.loads(RegionSamples, text).samples[0].work == Work({"bf16_matmul": 1e6}, 1e4, launches=1)


@pytest.mark.parametrize("call", ["<b>", "a b", "x" * 129, "a/../b", "\n"])
def test_what_is_no_name_is_refused(call: str) -> None:
    damaged = json.loads(stored(WORK))
    damaged["samples"][0]["work"]["call"] = call
    with pytest.raises(Exception, match="name of a call"):
        codec.loads(RegionSamples, json.dumps(damaged))


def test_what_older_versions_stored_and_nobody_reads_is_passed_over() -> None:
    older = json.loads(stored(WORK))
    older["samples"][0]["delay_us"] = 2.0
    older["samples"][0]["work"] |= {
        "instructions": 7.0, "requested_bytes": 8.0, "row_instructions": 9.0,
        "traffic": [{"moved_bytes": 1.0, "requested_bytes": 2.0, "written_bytes": 0.5}],
    }
    assert codec.dumps(codec.loads(RegionSamples, json.dumps(older))) == stored(WORK)
    older["samples"][0]["work"]["instruction"] = 7.0
    with pytest.raises(Exception, match="unknown fields"):
        codec.loads(RegionSamples, json.dumps(older))
