"""No report says what cannot be: of the shipped records, of parts of a database, of changed databases."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
from database_mutations import Canary, edit_groups, edit_json, odd_values, reseal
from frame_checks import impossible

from fuseplan.planner.api.report import Report, report
from fuseplan.planner.cli import main
from fuseplan.planner.errors import PlanError
from fuseplan.planner.tuning import summary
from fuseplan.planner.tuning.whole_step import StepTimes, step_key
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import shipped_devices

pytestmark = pytest.mark.uncovered  # many cases of code that other tests cover

#: What deletes one kind of things from a database.
PARTS = {
    "records": "delete from tuning_records", "plans": "delete from plan_records",
    "summaries": "delete from captures where name like 'summary/%'",
    "steps": "delete from captures where name like 'step/%'", "misses": "delete from misses",
    "devices": "delete from devices",
}


def sample(path: Path) -> Path:
    """A database with a whole step, too."""
    counted = [(16, samples.SWIGLU_PLAN), (32, samples.NORM_PLAN)]
    with samples.sample_database(path) as database:
        times = StepTimes(5500.0, 1400.0, 0.02, 1100.0, device=samples.DEVICE)
        database.put_capture(f"step/{step_key(counted)}", vars(times))
    return path


def loaded(path: Path, **options: Any) -> Report:
    return report(db=str(path), device_key=samples.DEVICE, **options)


@pytest.mark.parametrize("regime", ["graph", None])
@pytest.mark.parametrize("device", shipped_devices())
def test_shipped_records_say_nothing_that_cannot_be(device: str, regime: str | None, tmp_path: Path) -> None:
    Database(tmp_path / "empty.db").close()
    with suppress(PlanError) if regime is not None else nullcontext():  # not every device has plans for both
        found = report(db=str(tmp_path / "empty.db"), device_key=device, regime=regime)
        assert impossible(found) == [] and len(found.groups)
        assert set(found.steps["measured"]) <= {"end to end, on another machine", "by regions"}


def test_the_sample_says_nothing_that_cannot_be(tmp_path: Path) -> None:
    found = loaded(sample(tmp_path / "t.db"))
    assert impossible(found) == [] and "end to end" in set(found.steps["measured"])
    assert found.coverage["coverage"].tolist() == [(2 * 16 + 4 * 32) / (2 * 16 + 4 * 32 + 3 * 16), 1.0]


def test_matmuls_and_views_in_kernels_are_no_fused_ops(tmp_path: Path) -> None:
    """A kernel around a matmul counts by the ops that it takes from the others, so no share is above the whole."""
    kinds = ("compute", "compute", "anchor", "view")
    with Database(sample(tmp_path / "t.db")) as database:
        region = replace(samples.REGIONS[1], kinds=kinds)
        whole = replace(samples.workload("decode b4", (region,)), ops=32 * 4, views=32, externs=32)
        summary.store_summary(database, whole)
    row = loaded(tmp_path / "t.db").coverage.set_index("workload").loc["decode b4"]
    assert (row["fusable"], row["fused"], row["coverage"], row["launches"]) == (64, 64, 1.0, 0)


# -- parts of a database ----------------------------------------------------------------------------------------


#: None, one or two, or all but one or none of them.
LEFT_OUT = [names for count in (0, 1, 2, len(PARTS) - 1, len(PARTS)) for names in combinations(PARTS, count)]
STYLES = ("table", "csv", "json", "markdown", "html")


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=",".join)
def test_every_page_of_every_part_of_a_database(
    left_out: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sample(tmp_path / "t.db")
    with sqlite3.connect(path) as raw:
        for name in left_out:
            raw.execute(PARTS[name])
    empty = {"records", "plans"} <= set(left_out)
    where = ["--db", str(path), "--device-key", samples.DEVICE, "--quiet"]
    for number, topic in enumerate(("groups", "steps", "accuracy"), LEFT_OUT.index(left_out)):
        # All styles say the same: where several parts are gone, one of them, another one for the next topic.
        for style in STYLES if len(left_out) < 2 else (STYLES[number % len(STYLES)],):
            status = main.run(["report", topic, *where, "--format", style, "--out", str(tmp_path / "page")])
            said = capsys.readouterr().err
            assert status == (2 if empty else 0), (topic, style, said)
            assert not empty or said.count("\n") == 1
    if empty:
        with pytest.raises(PlanError, match=r"`fuseplan\.tune\(\)`|no device with records"):
            loaded(path)
    else:
        assert impossible(loaded(path)) == []
        assert str(loaded(path)) and loaded(path)._repr_html_()


# -- changed databases ------------------------------------------------------------------------------------------


def scale(rng: random.Random, path: Path) -> None:
    """Numbers that could be, but do not go together: times, bounds and counts in stored JSON, sealed again."""
    def scaled(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: scaled(one, key) for key, one in value.items()}
        if isinstance(value, list):
            return [scaled(one, name) for one in value]
        if isinstance(value, bool) or not isinstance(value, int | float) or rng.random() < 0.7 or name == "ops":
            return value
        factor = rng.choice((0, 0.001, 0.5, 2, 50, 1e4))
        return int(value * factor) if isinstance(value, int) else value * factor

    table = rng.choice(("tuning_records", "plan_records", "plan_records", "captures"))
    reseal(rng, path, table, lambda data: (json.dumps(scaled(data)), False))


CHANGES: dict[str, Callable[[random.Random, Path], None]] = {
    "scaled": scale,
    "JSON": lambda rng, path: edit_json(rng, path, Canary(path.with_name("canary"))),
    "groups": lambda rng, path: edit_groups(rng, path, Canary(path.with_name("canary"))),
    "values": lambda rng, path: odd_values(rng, path, Canary(path.with_name("canary"))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_changed_databases_say_nothing_that_cannot_be(change: str, tmp_path: Path) -> None:
    made = sample(tmp_path / "made.db").read_bytes()
    told = 0
    for seed in range(16):
        path = tmp_path / f"{seed}.db"  # one of its own: a report that failed may still hold the last one open
        path.write_bytes(made)
        rng = random.Random(seed)
        for _ in range(rng.choice((1, 3))):
            with suppress(IndexError, ValueError):  # what came before has left nothing to change, or no JSON
                CHANGES[change](rng, path)
        try:
            found = loaded(path)
        except PlanError:
            continue
        assert impossible(found) == [], (change, seed)
        assert found.html() and str(found), (change, seed)
        told += 1
    assert told > 8
