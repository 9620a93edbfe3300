"""Records keep the work of a kernel, those of older versions are read, and no other text gets in."""

from __future__ import annotations

import json

import pytest
import search_records

from fuseplan.costmodel.work import Work
from fuseplan.search.store import codec
from fuseplan.search.store.record import GroupChoice, TuningRecord

WORK = Work({"bf16_matmul": 1e6}, 1e4, launches=1, call="sdpa.flash", elements=7.0, lanes=5.0, threads=3)


def stored() -> str:
    return codec.dumps(search_records.tuning(work=WORK))


def test_a_call_is_stored() -> None:
    assert codec.loads(TuningRecord, stored()).work == WORK


def test_older_records_have_none() -> None:
    older = json.loads(stored())
    for name in ("call", "elements", "lanes", "threads"):
        del older["work"][name]
    assert codec.loads(TuningRecord, json.dumps(older)).work == Work({"bf16_matmul": 1e6}, 1e4, launches=1)


@pytest.mark.parametrize("call", ["<b>", "a b", "x" * 129, "a/../b", "\n"])
def test_what_is_no_name_is_refused(call: str) -> None:
    damaged = json.loads(stored())
    damaged["work"]["call"] = call
    with pytest.raises(Exception, match="name of a call"):
        codec.loads(TuningRecord, json.dumps(damaged))


def test_what_older_versions_stored_and_nobody_reads_is_passed_over() -> None:
    older = json.loads(stored())
    older["work"] |= {
        "instructions": 7.0, "requested_bytes": 8.0, "row_instructions": 9.0,
        "traffic": [{"moved_bytes": 1.0, "requested_bytes": 2.0, "written_bytes": 0.5}],
    }
    assert codec.dumps(codec.loads(TuningRecord, json.dumps(older))) == stored()
    older["work"]["instruction"] = 7.0
    with pytest.raises(Exception, match="unknown fields"):
        codec.loads(TuningRecord, json.dumps(older))
    group = GroupChoice((0,), "aten", measured_us=3.0)
    assert codec.loads(GroupChoice, json.dumps(json.loads(codec.dumps(group)) | {"delay_us": 2.0})) == group
