"""``plan report``: tables, files, another device's records, and errors in one line."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import report_samples as samples

import fuseplan.planner
from fuseplan.planner.cli import main
from fuseplan.planner.errors import FuseplanError
from fuseplan.planner.reports import frames
from fuseplan.search.store.database import Database

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main.run([str(arg) for arg in argv])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def assert_user_error(outcome: tuple[int, str, str], *words: str) -> None:
    status, _, err = outcome
    assert status == 2 and err.startswith("plan: error: ") and len(err.strip().splitlines()) == 1, err
    for word in words:
        assert word in err, (word, err)


@pytest.fixture
def sampled(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "tuning.db"
    samples.sample_database(path).close()
    return ("--db", str(path), "--device-key", samples.DEVICE, "--device", "cpu")


def test_report_as_tables(plan: Run, sampled: tuple[str, ...]) -> None:
    status, out, _ = plan("report", *sampled)
    assert status == 0
    for words in ("silu+mul 32x8192", "Coverage", "gelu 7x13", "2 of 3 groups are fused"):
        assert words in out, words
    assert "geometric mean" not in out
    status, out, _ = plan("report", "accuracy", *sampled)
    assert status == 0 and "spearman" in out and "median" in out


def test_a_device_with_records_is_named_by_any_part_of_its_name(
    plan: Run, sampled: tuple[str, ...], tmp_path: Path
) -> None:
    where = sampled[:2]
    status, out, err = plan("report", *where, "--device", "Sample CPU")
    assert status == 0 and "silu+mul 32x8192" in out, err
    status, out, err = plan("report", *where, "--device", "h200")  # shipped
    assert status == 0 and "nvidia-h200" in out, err
    assert_user_error(plan("report", *where, "--device", "b200"), "no device with records", samples.DEVICE, "h200")
    assert_user_error(plan("report", *where, "--device", "a"), "several devices", samples.DEVICE, "h200")
    assert_user_error(plan("report", *where, "--device", ""), "no device with records")


def test_report_as_files(plan: Run, sampled: tuple[str, ...], tmp_path: Path) -> None:
    status, out, _ = plan("report", "--format", "csv", *sampled)
    assert status == 0 and out.startswith("workload,group,place,ops")
    status, out, _ = plan("report", "accuracy", "--format", "csv", *sampled)
    assert status == 0 and "relative_error" in out.splitlines()[0]
    status, out, _ = plan("report", "accuracy", "--format", "markdown", *sampled)
    assert status == 0 and "## Predicted against measured" in out
    assert plan("report", "--format", "markdown", "--out", tmp_path / "new" / "r.md", *sampled)[0] == 0
    written = (tmp_path / "new" / "r.md").read_text()
    assert "## Coverage" in written and "over unfused: 2.38x" in written
    assert plan("report", "--format", "html", "--out", tmp_path / "r.html", *sampled)[0] == 0
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert_user_error(plan("report", "--format", "html", "--out", "/proc/nowhere/r.html", *sampled), "/proc/nowhere")


@pytest.mark.parametrize("topic", ["groups", "steps", "accuracy"])
@pytest.mark.parametrize("style", ["table", "csv", "markdown", "json"])
def test_out_is_honoured_for_every_format_and_topic(
    plan: Run, sampled: tuple[str, ...], tmp_path: Path, topic: str, style: str
) -> None:
    file = tmp_path / "answer"
    status, printed, err = plan("report", topic, "--format", style, *sampled)
    assert status == 0, err
    status, out, err = plan("report", topic, "--format", style, "--out", file, "--quiet", *sampled)
    assert (status, out) == (0, ""), err
    assert len(file.read_text()) > 100
    if style != "table":
        assert file.read_text().rstrip("\n") == printed.rstrip("\n")
    if style == "json":
        found = json.loads(file.read_text())
        assert found["sentences"] and all(isinstance(rows, list) for rows in found.values())
        assert ("saved" in found) == (topic != "accuracy")


def test_numbers_of_json_and_csv_are_those_of_the_frames(plan: Run, sampled: tuple[str, ...]) -> None:
    path = sampled[1]
    with Database(path, mode="read") as database:
        frame = frames.group_frame(frames.load_report(database, samples.DEVICE))
    rows = json.loads(plan("report", "--format", "json", *sampled)[1])["groups"]
    assert [row["unfused_us"] for row in rows] == frame["unfused_us"].tolist()
    assert [list(row) for row in rows] == [list(frame.columns)] * len(frame)
    found = pd.read_csv(io.StringIO(plan("report", "--format", "csv", *sampled)[1]))
    assert found["speedup"].tolist() == frame["speedup"].tolist()


def test_steps_come_first_and_a_pipe_has_every_column(plan: Run, sampled: tuple[str, ...]) -> None:
    lines = plan("report", *sampled)[1].splitlines()
    step = r"(decode|prefill) .*: [\d.]+ -> [\d.]+ ms a step \([\d.]+x\)"
    assert [bool(re.match(step, line)) for line in lines[:4]] == [False, True, True, False]
    assert lines[0].startswith("llama on ") and lines[3].startswith("    saves ")
    header = next(line for line in lines if line.startswith("workload\tgroup\t"))
    assert "key" in header.split("\t") and "│" not in "".join(lines)


@pytest.mark.parametrize(("line", "words"), [
    ("report nosuch", "'topic': 'nosuch' is not one of"), ("probe --device tpu", "'--device': 'tpu' is not one of"),
    ("report --format pdf", "'--format': 'pdf' is not one of"),
])
def test_what_is_wrong_with_an_option_is_said_in_plain_words(plan: Run, line: str, words: str) -> None:
    assert_user_error(plan(*line.split()), words)


def test_report_of_an_unknown_model(plan: Run, sampled: tuple[str, ...]) -> None:
    assert_user_error(plan("report", "--model", "gpt9", *sampled), "gpt9", "run `plan tune` for it", "`plan report`")
    python = r"run `fuseplan\.tune\(\)` for it first; `fuseplan\.report\(\)` without model"
    with pytest.raises(FuseplanError, match=python):
        fuseplan.planner.report("gpt9", db=sampled[1], device_key=samples.DEVICE)


def test_report_of_nothing(plan: Run, tmp_path: Path) -> None:
    samples.known_machine(tmp_path / "tuning.db")
    here = ("--device", "cpu", "--db", tmp_path / "tuning.db")
    assert_user_error(plan("report", *here), "has no record of device cpu-", "run `plan tune` first")
    with pytest.raises(FuseplanError, match=r"run `fuseplan\.tune\(\)` first"):
        fuseplan.planner.report(device="cpu", db=tmp_path / "tuning.db")
