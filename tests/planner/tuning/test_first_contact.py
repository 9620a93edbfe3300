"""The first commands on a machine whose device has shipped records: an empty folder, everything found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples
from fast_tunes import count_instead_of_timing

from fuseplan.costmodel.identity import current_identity
from fuseplan.planner.cli import main
from fuseplan.planner.tuning import session
from fuseplan.planner.tuning.recheck import Rechecked, recheck_verdict
from fuseplan.search.store import codec, layered, transfer
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import RecordKey

Run = Callable[..., tuple[int, str, str]]
TOY = ("--module", "toy_models:gated", "--device", "cpu")
BUDGET = ("--trials", "1", "--seconds", "0.1")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Commands whose tunes count in this process; :mod:`test_cli` has one that measures in worker processes."""
    count_instead_of_timing(monkeypatch)

    def run(*argv: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main.run([str(arg) for arg in argv])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device types that were probed; a probe finds the sample device."""
    found: list[str] = []

    def fake(kind: str, *_: object, **__: object) -> object:
        found.append(kind)
        return replace(samples.SPEC, identity=current_identity("cpu"))

    monkeypatch.setattr(session, "probe", fake)
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a tune on another machine with this processor leaves, exported."""
    folder = tmp_path_factory.mktemp("elsewhere")
    database, path = folder / "tuning.db", folder / f"{current_identity('cpu').key()}-eager.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "probe", lambda *_, **__: replace(samples.SPEC, identity=current_identity("cpu")))
        count_instead_of_timing(patch)
        assert main.run(["tune", *TOY, *BUDGET, "--db", str(database)]) == 0
    with Database(database) as opened:
        transfer.export(opened, path)
    return path


@pytest.fixture
def shipped(exported: Path, probes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with records of this machine's processor, as the package has them of an H200."""
    folder = tmp_path / "records"
    folder.mkdir()
    shutil.copy(exported, folder)
    monkeypatch.setattr(layered, "FOLDER", folder)
    return folder


def test_tune_report_and_explain_work_in_this_order(
    plan: Run, shipped: Path, probes: list[str], tmp_path: Path
) -> None:
    db = tmp_path / "mine.db"
    status, out, err = plan("tune", *TOY, *BUDGET, "--db", db)
    assert status == 0, err
    assert "nothing was measured" in out and "come with fuseplan" in out
    assert "shipped" in out and "silu+mul 3x24 float32" in out
    assert probes == ["cpu"]
    with Database(db) as database:
        assert database.get_device(current_identity("cpu").key()) is not None
        assert not list(database.plans()) and not list(database.records())
        assert len(codec.stored(database, Rechecked, "recheck")) == 1
    assert "measured again 1 of the kernels that come with fuseplan" in out
    for command in (("report", "--model", "toy_models:gated", "--device", "cpu"), ("explain", *TOY)):
        status, out, err = plan(*command, "--db", db)
        assert status == 0, err
        assert "shipped" in out or "comes with fuseplan" in out
    again = plan("tune", *TOY, *BUDGET, "--db", db)
    assert again[0] == 0 and probes == ["cpu"]


@pytest.mark.slow
def test_report_and_explain_work_before_any_tune(plan: Run, shipped: Path, tmp_path: Path) -> None:
    db = tmp_path / "mine.db"
    Database(db).close()
    status, out, err = plan("report", "--device", "cpu", "--db", db)
    assert status == 0, err
    assert "silu+mul 3x24 float32" in out and "shipped" in out
    status, out, err = plan("explain", *TOY, "--db", db)
    assert status == 0, err
    assert "plan that comes with fuseplan, measured on another such device" in out and "why: the" in out
    status, out, err = plan("report", "--model", "toy_models:gated", "--device", "cpu", "--db", db)
    assert status == 0 and "silu+mul 3x24 float32" in out, err  # what a report says of models ships, too
    status, _, err = plan("report", "--model", "toy_models:other", "--device", "cpu", "--db", db)
    assert status == 2 and "plan tune" in err and "`plan report` without --model" in err
    for style in ("csv", "markdown", "html"):
        status, _, err = plan("report", "--format", style, "--device", "cpu", "--db", db, "--out", tmp_path / "r")
        assert status == 0, err


def test_what_is_measured_here_lies_over_what_is_shipped(plan: Run, shipped: Path, tmp_path: Path) -> None:
    db = tmp_path / "mine.db"
    status, out, err = plan("tune", *TOY, *BUDGET, "--db", db, "--no-shipped")
    assert status == 0, err
    assert "measured again" not in out and "nothing was measured" not in out
    status, out, err = plan("report", "--model", "toy_models:gated", "--device", "cpu", "--db", db)
    assert status == 0 and "stored" in out and "shipped" not in out


def test_shipped_plans_of_parts_serve_a_region_without_one(
    plan: Run, shipped: Path, tmp_path: Path
) -> None:
    """The island and the first matmul come with the package; the second matmul and the whole region are measured."""
    db, model = tmp_path / "mine.db", "toy_models:widened"
    status, out, err = plan("tune", "--module", model, "--device", "cpu", *BUDGET, "--db", db)
    assert status == 0, err
    with Database(db) as database:
        assert not list(database.records())  # no kernel was tuned
        assert sorted(len(one.groups) for one in database.plans()) == [1, 3]
    assert "in 1 region (" in out and "measured again 1 of the kernels that come with fuseplan" in out
    for words in (out, plan("report", "--model", model, "--device", "cpu", "--db", db)[1]):
        (line,) = [line for line in words.splitlines() if "silu+mul" in line and "saves" not in line]
        assert "shipped" in line


def test_shipped_records_of_other_versions_are_not_reported(plan: Run, shipped: Path, tmp_path: Path) -> None:
    (path,) = shipped.iterdir()
    with Database(tmp_path / "older.db") as database:
        transfer.import_bundle(database, path)
        for record in list(database.records()):
            older = replace(record.evidence, versions=replace(record.evidence.versions, torch="1.0"))
            database.put_record(replace(record, evidence=older))
        for one in list(database.plans()):
            older = replace(one.evidence, versions=replace(one.evidence.versions, torch="1.0"))
            database.put_plan(replace(one, evidence=older))
        transfer.export(database, path)
    Database(tmp_path / "mine.db").close()
    status, _, err = plan("report", "--device", "cpu", "--db", tmp_path / "mine.db")
    assert status == 2 and "run `plan tune` first" in err


def checked(stored_us: float, measured_us: float | None, failure: str = "") -> Rechecked:
    return Rechecked(RecordKey("w", "d"), "silu 3x8", stored_us, measured_us, failure)


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ((1.0, 1.1, 0.9), ["1.00x their stored times (0.90x to 1.10x)", "hold here"]),
        ((1.5, 1.6, 1.0), ["1.50x", "do not hold here", "--no-shipped"]),
        ((0.5, 0.6, 0.7), ["0.60x", "do not hold here", "--no-shipped"]),
    ],
)
def test_the_verdict_gives_the_ratio_and_what_to_do(ratios: tuple[float, ...], words: list[str]) -> None:
    line = recheck_verdict(checked(10.0, 10.0 * ratio) for ratio in ratios)
    assert "\n" not in line and all(word in line for word in words), line


def test_the_verdict_names_a_kernel_that_fails_here() -> None:
    line = recheck_verdict([checked(10.0, 10.0), checked(10.0, None, "wrong result")])
    assert "1 failed here (silu 3x8: wrong result)" in line and "--no-shipped" in line
    assert recheck_verdict([]) == ""

