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
