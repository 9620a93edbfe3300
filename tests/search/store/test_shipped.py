"""The records that come with the package: readable, of the device their name says, found by a session of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fuseplan.planner.tuning.session import open_session
from fuseplan.search.store.layered import shipped_files
from fuseplan.search.store.record import PlanRecord, TuningRecord
from fuseplan.search.store.transfer import read_bundle


@pytest.mark.parametrize("path", shipped_files(), ids=lambda path: path.stem)
def test_shipped_records_are_whole_and_of_their_device(path: Path) -> None:
    found = re.fullmatch(r"(cuda-.+-[0-9a-f]{12})-(eager|graph)", path.stem)
    assert found is not None
    stored = [entry.value for entry in read_bundle(path)]
    plans = [one for one in stored if isinstance(one, PlanRecord)]
    records = [one for one in stored if isinstance(one, TuningRecord)]
    assert plans and records
    for one in (*plans, *records):
        assert (one.key.device, one.key.regime) == found.groups()
        assert one.evidence.versions.torch and one.evidence.versions.triton
    known = {record.key.workload for record in records}
    used = {group.workload for plan in plans for group in plan.groups if group.is_kernel}
    assert used <= known


def test_a_session_finds_the_records_of_its_device_and_no_others(tmp_path: Path) -> None:
    session = open_session("cpu", tmp_path / "t.db")
    assert not shipped_files(session.device)
    path = next(path for path in shipped_files() if path.stem.endswith("eager"))
    plan = next(entry.value for entry in read_bundle(path) if isinstance(entry.value, PlanRecord))
    there = replace(session, device=plan.key.device)
    there.database.versions = plan.evidence.versions
    assert there.store.get_plans([plan.key])[plan.key].hit == plan
    assert replace(there, shipped=False).store.get_plans([plan.key])[plan.key].hit is None
