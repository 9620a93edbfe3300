"""Host times of calls and look-ups: what is timed, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import launch_costs
import pytest
from bench_samples import cpu_session
from launch_costs import ADD, GROUP, PLAN, LaunchRow, LookupRow
from sqlalchemy import event
from sqlalchemy.engine import Engine

from fuseplan.planner.bench.rows import bench_frame
from fuseplan.planner.errors import PlanError
from fuseplan.planner.patterns.cells import cell
from fuseplan.planner.tuning.session import Session


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return cpu_session(tmp_path)


def test_every_kind_of_call_is_timed_and_none_asks_the_database(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = launch_costs._timed
    statements: list[str] = []

    def watched(*args: Any) -> list[LaunchRow]:
        def count(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            statements.append(statement)

        event.listen(Engine, "before_cursor_execute", count)
        try:
            session.store.get_plans([session.planner().key("0" * 64)])
            assert len(statements) == 1  # a look-up is seen
            return timed(*args)
        finally:
            event.remove(Engine, "before_cursor_execute", count)

    monkeypatch.setattr(launch_costs, "_timed", watched)
    cells = [cell(pattern, "1x127", "float32") for pattern in ("swiglu", "add_rms_norm")]
    rows = launch_costs.bench_launch(session, cells, 0)
    kinds = [(GROUP, "allocated"), (GROUP, "given"), (PLAN, "allocated"), (ADD, "allocated"), (ADD, "given")]
    named = [(row.subject, row.what, row.outputs) for row in rows]
    assert named == [(one.key, *kind) for one in cells for kind in kinds]
    for row in rows:
        assert row.host_us is not None and row.p20_us is not None and row.p80_us is not None
        assert 0 < row.p20_us <= row.host_us <= row.p80_us
        assert not row.note
    assert len(statements) == 1


def test_a_launcher_that_fails_leaves_a_reason(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(launch_costs, "fused", fail)
    found = launch_costs.bench_launch(session, [cell("swiglu", "1x8", "float32")], 0)
    rows = {(row.what, row.outputs): row for row in found}
    assert rows[PLAN, "allocated"].host_us is None
    assert rows[PLAN, "allocated"].note == "RuntimeError: no such device"
    assert rows[GROUP, "allocated"].host_us is not None


def test_a_plan_without_a_group_has_no_launch(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_case = launch_costs.plan_case
    monkeypatch.setattr(launch_costs, "plan_case", lambda *args: (replace(plan_case(*args)[0], groups=()), None))
    with pytest.raises(PlanError, match="swiglu 1x8 float32 fuses nothing"):
        launch_costs.bench_launch(session, [cell("swiglu", "1x8", "float32")], 0)


def test_the_launch_verdict_answers_the_bar() -> None:
    calls = bench_frame([
        LaunchRow("s", GROUP, "allocated", 3.5, 3.0, 4.0), LaunchRow("s", ADD, "given", 5.0, 5.0, 5.0),
        LaunchRow("t", GROUP, "allocated", 4.5, 4.0, 5.0), LaunchRow("t", GROUP, "given", 3.9, 3.5, 4.0),
        LaunchRow("t", PLAN, "allocated", note="broken"),
    ])
    lookups = bench_frame([LookupRow("s", 2, 120.0, 300.0)])
    lines = launch_costs.launch_verdict(calls, lookups)
    assert lines == [
        "s: host time of a call: fused group (allocated outputs) 3.50 us, aten add (given outputs) 5.00 us; "
        "calling it, outputs and all, is under 4 us",
        "t: host time of a call: fused group (allocated outputs) 4.50 us, fused group (given outputs) 3.90 us; "
        "launching a fused group is under 4 us; calling it, outputs and all, is over 4 us",
        "s: look-up at compile 120 us a region in the database, 300 us with finding and hashing it",
        "whole plan (allocated outputs), t: broken",
    ]


def test_a_look_up_counts_the_regions_of_a_cell(session: Session) -> None:
    row = launch_costs.bench_lookup(session, cell("swiglu", "3x33", "float32"))
    assert row.regions == 1 and 0 < row.database_us < row.planning_us
