"""Stored text on a terminal, in a page, in a log: shown, never obeyed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import DEVICE
from search_records import evidence, plan, tuning

from fuseplan.planner.cli import main
from fuseplan.search.errors import plain
from fuseplan.search.store import codec
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import Alternative, GroupChoice

MARKUP = "[/red] [bold]<script>alert(1)</script> | `x` {y} $z$"
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\r\u202e\u2028"


@given(st.text())
def test_plain_text_is_one_printable_line_that_can_be_written(text: str) -> None:
    assert plain(text).isprintable()
    assert plain(text).encode().decode() == plain(text)


@given(st.text().filter(str.isprintable))
def test_printable_text_stays(text: str) -> None:
    assert plain(text) == text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A label with markup, a reason with escape sequences, and a label with those."""
    path = tmp_path / "tuning.db"
    with Database(path) as database:
        group = GroupChoice((0, 1), "cpp", "w1", MARKUP, {"tile": 64}, 6.0, 4.0, 5.0)
        why = Alternative((0,), MARKUP, ESCAPES, 1.0, 2.0)
        database.put_record(tuning(label=MARKUP, device=DEVICE, evidence=evidence(ESCAPES)))
        database.put_record(tuning("w2", label=MARKUP, device=DEVICE))
        database.put_plan(plan(label=MARKUP, device=DEVICE, groups=(group,), rejected=(why,)))
        database.put_record(tuning("odd", label=ESCAPES, device=DEVICE))
        database.put_plan(plan("odd", label=ESCAPES, device=DEVICE))
    return path


@pytest.mark.parametrize(
    "command",
    ["db ls", "db show [/red]", "db verify", "report", "report accuracy", "report --format markdown", "db export {out}",
     "db import {out}", "report --format html --out {out}", "db prune"],
)
def test_no_command_obeys_stored_text(
    path: Path, tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    device = ["--device-key", DEVICE] if command.startswith("report") else []
    out = tmp_path / "out"
    if "import" in command:
        assert main.run(["db", "export", str(out), "--db", str(path)]) == 0
    status = main.run([*command.format(out=out).split(), *device, "--db", str(path)])
    assert status == (2 if "verify" in command else 0)
    printed = "".join(capfd.readouterr())
    assert all(line.isprintable() for line in re.split("[\n\t]", printed))
    if command in ("db ls", "report"):
        assert "[/red]" in printed
    if "html" in command:
        assert "<script>alert" not in out.read_text()


def test_data_files_have_what_is_stored(path: Path, tmp_path: Path) -> None:
    table, backup = tmp_path / "report.csv", tmp_path / "backup.jsonl"
    where = ["--db", str(path)]
    assert main.run(["report", "--device-key", DEVICE, "--format", "csv", "--out", str(table), *where]) == 0
    assert MARKUP in {row["group"] for row in csv.DictReader(io.StringIO(table.read_text()))}
    assert main.run(["db", "export", str(backup), *where]) == 0
    plans = [json.loads(line).get("plan_record") for line in backup.read_text().splitlines()]
    assert [one["rejected"][0]["reason"] for one in plans if one] == [ESCAPES]


def test_messages_about_damage_hold_no_stored_escape(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    payload = json.dumps({ESCAPES: 1})
    with contextlib.closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(
            "update tuning_records set payload = ?, checksum = ?, label = ? where workload = 'w2'",
            (payload, codec.checksum(payload), ESCAPES),
        )
    for command in ("ls", "verify", "prune"):
        main.run(["db", command, "--db", str(path)])
        assert all(line.isprintable() for line in re.split("[\n\t]", "".join(capfd.readouterr())))
