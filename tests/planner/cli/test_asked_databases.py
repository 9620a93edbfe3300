"""A database that is asked for and is not there, one that is damaged, and devices that one does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import report_samples as samples
from check_commands import PROGRESS
from database_files import damage_pages

import fuseplan.planner
from fuseplan.planner.cli import main
from fuseplan.planner.errors import FuseplanError, PlanError
from fuseplan.planner.reports.frames import load_report
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.location import default_path
from fuseplan.search.store.record import RecordKey

Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Run:
    """Status, output and errors of a command, without its progress."""

    def run(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main.run(line.split())
        out, err = capsys.readouterr()
        return status, out, "\n".join(one for one in err.splitlines() if not PROGRESS.match(one))

    return run


@pytest.fixture
def sampled(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.db"
    samples.sample_database(path).close()
    return path


@pytest.mark.parametrize("command", [
    "db prune", "db prune --misses", "db ls", "db misses", "db show silu", "db export {folder}/out.jsonl", "db verify",
    "report --device cpu", "report --device h200", "report --device-key x", "report --format html",
    "explain --pattern swiglu --shape 3x8 --device cpu", "bench --device cpu --out {folder}/results",
])
def test_a_database_that_was_asked_for_has_to_be_there(plan: Run, tmp_path: Path, command: str) -> None:
    missing = tmp_path / "none" / "typo.db"
    status, out, err = plan(f"{command.format(folder=tmp_path)} --db {missing}")
    assert (status, out) == (2, "")
    assert err.startswith(f"plan: error: there is no tuning database at {missing}; ") and "`plan tune`" in err
    assert "\n" not in err and list(tmp_path.iterdir()) == []


def test_who_asks_what_is_missing_may_name_a_database_to_come(plan: Run, tmp_path: Path) -> None:
    missing = tmp_path / "new.db"
    status, out, _ = plan(f"fleet status --db {missing}")
    assert status == 0 and f"nobody tunes into {missing}, which is not there yet" in out
    status, out, _ = plan(f"env --device cpu --db {missing}")
    assert status == 0 and f"database: {missing} (not there yet)" in out
    assert not missing.exists()


def test_python_says_the_same(tmp_path: Path) -> None:
    missing = tmp_path / "typo.db"
    for ask in (fuseplan.planner.report, fuseplan.planner.misses, fuseplan.planner.explain):
        given = {"pattern": "swiglu", "shape": "3x8"} if ask is fuseplan.planner.explain else {}
        with pytest.raises(FuseplanError, match=r"no tuning database at .*typo\.db; .*`fuseplan\.tune\(\)`"):
            ask(db=missing, device="cpu", **given)  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []


def test_the_other_database_of_a_comparison_has_to_be_there_too(plan: Run, sampled: Path) -> None:
    where = f"report --db {sampled} --device-key {samples.DEVICE} --against"
    status, _, err = plan(f"{where} {sampled.parent}/typo.db")
    assert status == 2 and "--against" in err and "typo.db" in err and "`plan tune`" in err and "--db" not in err
    (sampled.parent / "text").write_text("no database\n" * 100)
    status, _, err = plan(f"{where} {sampled.parent}/text")
    assert status == 2 and err.endswith("pass another file with --against")


def test_the_default_database_need_not_be_there(plan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert not default_path().exists()
    status, out, _ = plan("report --device h200")
    assert status == 0 and "h200" in out.splitlines()[0]
    assert plan("db ls")[0] == plan("db misses")[0] == 0
    status, out, _ = plan("db prune")
    assert status == 0 and out.startswith("nothing to delete: there is no tuning database at ")
    assert not default_path().exists()


def test_pruning_a_damaged_file_says_that_it_is_set_aside(plan: Run, sampled: Path) -> None:
    damage_pages(sampled)
    status, out, err = plan(f"db prune --db {sampled}")
    (kept,) = (one for one in sampled.parent.glob("*.corrupt-*") if not one.name.endswith(("-wal", "-shm")))
    assert status == 0 and str(kept) in err and err.startswith("plan: warning: ")
    assert out == f"the damaged file was set aside whole; {sampled} is new and empty\n"
    assert plan(f"db prune --db {sampled}") == (0, f"nothing deleted from {sampled}\n", "")


@pytest.mark.parametrize("command", ["db prune", "db misses", "db export {folder}/out.jsonl", "report"])
def test_an_unknown_device_is_told_with_those_that_are_known(plan: Run, sampled: Path, command: str) -> None:
    before = sampled.read_bytes()
    status, out, err = plan(f"{command.format(folder=sampled.parent)} --db {sampled} --device-key cpu-typo")
    assert (status, out) == (2, "") and err.startswith("plan: error: --device-key 'cpu-typo': no device")
    assert samples.DEVICE in err and sampled.read_bytes() == before
    assert not (sampled.parent / "out.jsonl").exists()
    with pytest.raises(FuseplanError, match=f"^device_key 'cpu-typo': .* {samples.DEVICE}"):
        fuseplan.planner.misses(sampled, device_key="cpu-typo")


def test_a_known_device_without_misses_is_no_mistake(plan: Run, sampled: Path) -> None:
    assert plan(f"db prune --misses --db {sampled}")[0] == 0
    status, out, _ = plan(f"db misses --db {sampled} --device-key {samples.DEVICE}")
    assert status == 0 and out.startswith("no misses are logged for this device")


def test_a_regime_without_plans_is_told_with_those_that_have_some(plan: Run, sampled: Path) -> None:
    where = f"--db {sampled} --device-key {samples.DEVICE}"
    assert plan(f"report {where} --regime eager")[0] == 0
    status, out, err = plan(f"report {where} --regime graph")
    assert (status, out) == (2, "")
    assert err.startswith("plan: error: --regime graph: no such plan is stored") and err.endswith("stored: eager")
    with Database(sampled) as database, pytest.raises(PlanError, match=r"stored for model 'llama' .*; stored: eager"):
        load_report(database, samples.DEVICE, model="llama", regime="graph")


def test_misses_of_a_regime_without_plans_are_reported(plan: Run, sampled: Path) -> None:
    """Plans for launches alone were tuned, and dispatch asked for others."""
    with Database(sampled) as database:
        database.log_misses([Missed(RecordKey("e" * 64, samples.DEVICE, regime="graph"), "gelu 9x17 float32")])
    status, out, err = plan(f"report --db {sampled} --device-key {samples.DEVICE} --regime graph --format json")
    assert (status, err) == (0, "")
    assert "gelu 9x17" in out and "gelu 7x13" not in out
