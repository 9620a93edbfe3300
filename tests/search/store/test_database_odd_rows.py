"""One odd row costs only itself: in every command, in reports and at dispatch."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_samples import DEVICE
from search_records import HERE, SPEC, plan, tuning

from fuseplan.planner.cli import main
from fuseplan.search.store import codec, maintenance
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.record import RecordKey, Trial

#: Every table, and its column that names a row.
TABLES = {
    "tuning_records": "workload", "plan_records": "workload", "trials": "workload", "misses": "workload",
    "devices": "device", "captures": "name",
}
#: What a payload may hold instead of what was written, as SQL.
PAYLOADS = {
    "NULL": "NULL",
    "blob": "x'ff00fe'",
    "number": "12",
    "broken UTF-8": "cast(x'7b22ff' as text)",
    "empty": "''",
    "a list": "'[]'",
    "2000 levels": f"'{'[' * 2000}{']' * 2000}'",
    "2000 objects": "'" + '{"a":' * 2000 + "1" + "}" * 2000 + "'",
    "5000 digits": f"'{{\"a\": {'9' * 5000}}}'",
    "NaN": "'{\"a\": NaN}'",
    "half a character": "'{\"a\": \"\\ud800\"}'",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.db"
    with Database(path, versions=HERE) as database:
        for name in ("sound", "odd"):
            database.put_record(tuning(name, device=DEVICE))
            database.put_plan(plan(name, device=DEVICE))
            database.put_device(f"cpu-{name}", SPEC)
            database.put_capture(name, {"nodes": [1]})
            database.log_trial(Trial(tuning(name).key, "cpp", {"threads": 1}, 1.0), HERE)
            database.log_misses([Missed(RecordKey(name, DEVICE))])
    return path


def name_of_odd(table: str) -> str:
    return {"devices": "cpu-odd", "captures": "odd"}.get(table, "odd")


def run_sql(path: Path, statement: str, *values: object) -> None:
    """Change the file as anybody may: without the constraints that the tables were made with."""
    with contextlib.closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("pragma writable_schema=on")
        raw.execute("update sqlite_master set sql = replace(sql, ' NOT NULL', '')")
        raw.execute("pragma writable_schema=reset")
        raw.execute(statement, values)


def spoil(path: Path, table: str, value: str) -> None:
    """Put ``value`` (SQL) in the odd row's payload, with the right checksum where there is one."""
    name = name_of_odd(table)
    run_sql(path, f"update {table} set payload = {value} where {TABLES[table]} = ?", name)
    with contextlib.closing(sqlite3.connect(path)) as raw, raw:
        raw.text_factory = bytes
        stored = raw.execute(f"select payload from {table} where {TABLES[table]} = ?", (name,)).fetchone()[0]
        columns = [column[1].decode() for column in raw.execute(f"pragma table_info({table})")]
        if "checksum" in columns and isinstance(stored, bytes):
            digest = codec.checksum(stored.decode(errors="replace"))
            raw.execute(f"update {table} set checksum = ? where {TABLES[table]} = ?", (digest, name))


def check_that_they_cost_only_themselves(
    path: Path, damaged: set[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """``damaged`` tables have an odd row; all have a sound one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Database(path, "read", HERE) as reader:
            assert reader.get_record(tuning("sound", device=DEVICE).key).hit
            assert reader.get_plans([plan("sound", device=DEVICE).key])[plan("sound", device=DEVICE).key].hit
            assert reader.get_device("cpu-sound") == SPEC
            assert "sound" in reader.captures("")
            assert len(reader.misses()) >= 1
            assert reader.trials(tuning("sound").key)
            assert sorted(problem.table for problem in maintenance.verify_database(reader)) == sorted(damaged)
    db = ["--db", str(path)]
    exported = tmp_path / "out.jsonl"
    for command, status in (
        (["db", "ls"], 0), (["db", "show", "swiglu"], 0), (["db", "export", str(exported)], 0), (["db", "verify"], 2),
        (["report", "--device-key", DEVICE, "--format", "csv"], 0), (["db", "import", str(exported)], 0),
        (["db", "prune"], 0), (["db", "verify"], 0),
    ):
        assert main.run([*command, *db]) == status, command
        out, err = capfd.readouterr()
        assert "Error:" not in err and "Traceback" not in err
        if command[1] == "ls":
            assert "swiglu sound" in out
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    assert sum("plan_record" in line for line in lines) >= 1


@pytest.mark.parametrize("value", PAYLOADS.values(), ids=PAYLOADS)
def test_an_odd_payload(path: Path, tmp_path: Path, value: str, capfd: pytest.CaptureFixture[str]) -> None:
    for table in TABLES:
        spoil(path, table, value)
    check_that_they_cost_only_themselves(path, set(TABLES), tmp_path, capfd)


@pytest.mark.parametrize("value", ["NULL", "x'ff'", "cast(x'ff' as text)", "''"])
def test_an_odd_key(path: Path, tmp_path: Path, value: str, capfd: pytest.CaptureFixture[str]) -> None:
    for table, column in TABLES.items():
        run_sql(path, f"update {table} set {column} = {value} where {column} = ?", name_of_odd(table))
    check_that_they_cost_only_themselves(path, set(TABLES), tmp_path, capfd)


@pytest.mark.parametrize("value", ["NULL", "'many'", "x'01'", "-3", "1.5", "'\ud7ff'"])
def test_an_odd_count_of_misses(path: Path, tmp_path: Path, value: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_sql(path, f"update misses set count = {value} where workload = ?", "odd")
    check_that_they_cost_only_themselves(path, {"misses"}, tmp_path, capfd)


Change = Callable[[dict[str, Any]], object]
IMPOSSIBLE: dict[str, tuple[str, Change, str]] = {
    "negative time": ("tuning_records", lambda d: d["unfused"].update(median_us=-1.0), r"unfused\.median_us: -1"),
    "no time at all": ("tuning_records", lambda d: d["unfused"].update(median_us=0.0), r"unfused\.median_us: 0"),
    "400 digits": ("tuning_records", lambda d: d["unfused"].update(median_us=10**400), "is not finite"),
    "negative count": ("tuning_records", lambda d: d.update(measured=-1), "measured: -1"),
    "huge count": ("tuning_records", lambda d: d.update(measured=10**30), "measured: 10000"),
    "a config's value that is code": (
        "tuning_records", lambda d: d["config"].update(tile='"""\nimport os'), r"config\.tile: .* is not a word"
    ),
    "a config's name that is code": ("tuning_records", lambda d: d["config"].update({'"""\nx': 1}), "is not a word"),
    "a config's number out of range": ("tuning_records", lambda d: d["config"].update(tile=2**40), r"config\.tile"),
    "a config's flag": ("tuning_records", lambda d: d["config"].update(tile=True), r"config\.tile: expected"),
    "a back end that is a path": ("tuning_records", lambda d: d.update(backend="../x"), "backend: .* not a word"),
    "fused without a kernel": ("tuning_records", lambda d: d.update(fused=None), "fuses without a kernel"),
    "another key": ("tuning_records", lambda d: d["key"].update(workload="x"), "under another key"),
    "a workload that is no hash": ("tuning_records", lambda d: d["key"].update(workload="../../x"), "is not a key"),
    "unknown flops": ("tuning_records", lambda d: d["work"]["flops"].update(warp=1.0), "unknown units"),
    "negative bytes": ("tuning_records", lambda d: d["work"].update(dram_bytes=-1.0), "work: -1"),
    "a negative position": (
        "plan_records", lambda d: d["groups"][0].update(ops=[-1, 1]), r"groups\[0\]\.ops: \(-1, 1\) are no positions",
    ),
    "a position twice": ("plan_records", lambda d: d["groups"][0].update(ops=[1, 1]), "names an op twice"),
    "an op in two groups": ("plan_records", lambda d: d["groups"][0].update(ops=[1, 2]), "runs an op twice"),
    "a group of nothing": ("plan_records", lambda d: d["groups"][0].update(ops=[]), "runs no op"),
    "run by nobody": ("plan_records", lambda d: d["groups"][0].update(implementation=""), "run by nothing"),
    "a negative plan": ("plan_records", lambda d: d.update(planned_us=-5.0), "planned_us: -5"),
    "a regime of its own": ("plan_records", lambda d: d["key"].update(regime="warp"), "is not a regime"),
    "a trial's config": ("trials", lambda d: d["config"].update(tile=2), "another configuration"),
    "a spec's type": ("devices", lambda d: d.update(noise="loud"), "noise: expected float"),
    "a spec's peak": ("devices", lambda d: d["peaks"]["fp32"].update(per_s=-1.0), "is required"),
    "a spec's version": ("devices", lambda d: d.update(schema_version=99), "schema version 99"),
}


@pytest.mark.parametrize(("table", "change", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_have_been_written_is_damage(
    path: Path, tmp_path: Path, table: str, change: Change, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(sqlite3.connect(path)) as raw:
        name = name_of_odd(table)
        (text,) = raw.execute(f"select payload from {table} where {TABLES[table]} = ?", (name,)).fetchone()
    data = json.loads(text)
    change(data)
    spoil(path, table, "'" + json.dumps(data).replace("'", "''") + "'")
    with Database(path, "inspect") as database:
        (problem,) = maintenance.verify_database(database)
    assert problem.table == table
    assert re.search(message, problem.what)
    check_that_they_cost_only_themselves(path, {table}, tmp_path, capfd)
