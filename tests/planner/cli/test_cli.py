"""The ``plan`` command: help, one-line errors, and the whole way from tune to report on tiny inputs."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pandas as pd
import pytest
import report_samples as samples
import torch
from check_commands import PROGRESS
from fast_tunes import count_instead_of_timing
from sqlalchemy import text

from fuseplan.costmodel.device import Peak
from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe import probe
from fuseplan.planner.cli import main
from fuseplan.planner.tuning import session
from fuseplan.planner.tuning.session import stored_spec
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


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A database that knows this machine's CPU, so that no command has to probe it."""
    path = tmp_path / "tuning.db"
    identity = current_identity("cpu")
    with Database(path) as database:
        spec = replace(samples.SPEC, identity=identity)
        database.put_device(identity.key(), json.loads(spec.to_json()))
    return path


def assert_user_error(outcome: tuple[int, str, str], *words: str) -> None:
    status, _, err = outcome
    assert status == 2
    lines = [line for line in err.strip().splitlines() if not PROGRESS.match(line)]
    assert len(lines) == 1 and lines[0].startswith("plan: error: "), err
    for word in words:
        assert word in err, (word, err)


# -- help and start-up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [[], ["tune"], ["explain"], ["bench"], ["report"], ["probe"], ["backends"], ["db"], ["db", "prune"]]
)
def test_every_command_has_help(plan: Run, command: list[str]) -> None:
    status, out, _ = plan(*command, "--help")
    assert status == 0
    assert out.startswith("Usage: plan") and len(out.splitlines()) > 5
    assert plan(*command, "-h")[:2] == (0, out)


def test_the_command_is_a_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fuseplan.planner", "--version"], capture_output=True, text=True, check=True)
    assert metadata.version("fuseplan") in done.stdout


@pytest.mark.parametrize("command", [[], ["db"]])
def test_a_group_without_a_command_shows_its_help(plan: Run, command: list[str]) -> None:
    status, out, err = plan(*command)
    assert status == 2 and out == ""
    assert err.startswith("Usage: plan") and "Commands:" in err


def test_version(plan: Run) -> None:
    status, out, _ = plan("--version")
    assert status == 0 and out.startswith("fuseplan 0.")


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, fuseplan.planner.cli.main; "
        "heavy = ('torch', 'pandas', 'matplotlib', 'transformers', 'sqlalchemy'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_backends_says_what_can_be_used(plan: Run) -> None:
    status, out, _ = plan("backends")
    assert status == 0
    for name in ("cpp", "triton", "ninetoothed"):
        assert name in out
    if not torch.cuda.is_available():
        assert "no CUDA device" in out


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "missing", "extra"), [
    ("tune --model llama", "transformers", "fuseplan[models]"),
    ("probe --plot found.png", "matplotlib", "fuseplan[plot]"),
])
def test_a_package_that_is_missing_is_named_with_its_extra(
    line: str, missing: str, extra: str, plan: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else find(name, *rest))
    monkeypatch.chdir(tmp_path)
    assert_user_error(plan(*line.split()), missing, f"pip install '{extra}'")


@pytest.mark.parametrize(
    "argv, words",
    [
        (["tune", "--model", "lama"], ["unknown model 'lama'", "did you mean llama"]),
        (["tune", "--pattern", "swiglou", "--shape", "3x8"], ["unknown pattern 'swiglou'", "swiglu"]),
        (["tune", "--pattern", "swiglu", "--shape", "3by8"], ["'3by8'", "32x4096"]),
        (["tune", "--pattern", "swiglu"], ["needs --shape"]),
        (["tune", "--pattern", "swiglu", "--shape", "3x8", "--decode", "1"], ["--pattern takes"]),
        (["tune", "--pattern", "swiglu", "--shape", "3x8", "--pack-weights"], ["--pattern takes"]),
        (["tune", "--shape", "3x8"], ["belongs to --pattern"]),
        (["tune", "--most", "3"], ["--most belongs to --misses"]),
        (["tune", "--config", "/nowhere/config.json"], ["/nowhere/config.json", "No such file"]),
        (["tune", "--module", "toy_models:missing"], ["toy_models:missing"]),
        (["tune", "--module", "toy_models:broken"], ["no weights here"]),
        (["tune", "--decode", "0"], ["--decode", "'0'"]),
        (["tune", "--dtype", "int3"], ["int3", "bfloat16"]),
        (["tune", "--trials", "0"], ["--trials"]),
        (["tune", "--frobnicate"], ["--frobnicate"]),
        (["frobnicate"], ["frobnicate"]),
        (["tune", "--pattern", "swiglu", "--shape", "3x8", "--regime", "graph", "--device", "cpu"], ["--regime graph"]),
        (["report", "--format", "pdf"], ["pdf"]),
        (["db", "import", "/nowhere/records.jsonl"], ["/nowhere/records.jsonl"]),
        (["tune", "--db", "nosuchdialect://host/db", "--pattern", "swiglu", "--shape", "3x8"], ["nosuchdialect"]),
        (["tune", "--study", "nosuchdialect://host/db", "--pattern", "swiglu", "--shape", "3x8"], ["nosuchdialect"]),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(plan: Run, argv: list[str], words: list[str]) -> None:
    assert_user_error(plan(*argv), *words)


def test_unwritable_database(plan: Run) -> None:
    outcome = plan("tune", "--pattern", "swiglu", "--shape", "3x8", "--db", "/proc/nowhere/tuning.db")
    assert_user_error(outcome, "/proc/nowhere")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(plan: Run) -> None:
    assert_user_error(plan("tune", "--device", "cuda"), "no CUDA GPU", "--device cpu")


def test_missing_compiler(plan: Run, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuseplan.kernels.cpp.backend import CppBackend

    monkeypatch.setattr(CppBackend, "unavailable", lambda self: "no C++ compiler found; install g++ or clang++")
    outcome = plan("tune", "--pattern", "swiglu", "--shape", "3x8", "--device", "cpu", "--db", db)
    assert_user_error(outcome, "install g++")
    outcome = plan("tune", "--pattern", "swiglu", "--shape", "3x8", "--device", "cpu", "--db", db.with_name("new.db"))
    assert_user_error(outcome, "install g++")
    with Database(db.with_name("new.db")) as database:
        assert stored_spec(database, current_identity("cpu").key()) is None  # was not probed in vain


def test_an_unexpected_error_is_one_line_and_exit_code_1(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("the planner\ndivided by zero")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    status, _, err = plan("backends")
    assert status == 1
    assert err == "plan: error: ZeroDivisionError: the planner divided by zero (add --debug for the traceback)\n"
    status, _, err = plan("backends", "--debug")
    assert status == 1 and "Traceback" in err and err.splitlines()[-1].startswith("plan: error:")


def test_ctrl_c_says_how_to_go_on(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", interrupt)
    status, _, err = plan("backends")
    assert status == 130
    assert err.strip() == main.INTERRUPTED


@pytest.mark.parametrize("command", ["ls", "show x", "verify", "export out.jsonl", "import in.jsonl", "prune"])
def test_what_is_no_database_is_one_line(plan: Run, tmp_path: Path, command: str) -> None:
    path, backup = tmp_path / "tuning.db", tmp_path / "out.jsonl"
    path.write_bytes(b"SQLite format 3\0" + b"junk" * 500)
    backup.write_text("a good backup")
    status, out, err = plan("db", *command.replace("out.jsonl", str(backup)).split(), "--db", path)
    assert status == 2 and out == ""
    assert len(err.strip().splitlines()) == 1 and err.startswith("plan: error: ")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl", "tuning.db"]
    assert backup.read_text() == "a good backup"


# -- probe --------------------------------------------------------------------------------------------------------


def test_probe_prints_stores_and_plots(plan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = replace(samples.SPEC, identity=current_identity("cpu"))
    asked: list[bool] = []

    def fake(kind: str, quick: bool, progress: object, kernel_call: object) -> object:
        asked.append(quick)
        return measured

    monkeypatch.setattr(session, "probe", fake)
    db, plot = tmp_path / "tuning.db", tmp_path / "plots" / "bandwidth.png"
    status, out, _ = plan("probe", "--full", "--device", "cpu", "--db", db, "--plot", plot)
    assert status == 0 and asked == [False]
    assert "launch, eager" in out and str(db) in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    with Database(db, mode="read") as database:
        assert stored_spec(database, current_identity("cpu").key()) == measured


@pytest.mark.parametrize("file", ["/proc/plot.png", "{folder}/text/plot.png", "{folder}/folder.png"])
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(
    plan: Run, db: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setattr(session, "probe", lambda *_: pytest.fail("the device is measured"))
    (db.parent / "text").touch()
    (db.parent / "folder.png").mkdir()
    assert_user_error(
        plan("probe", "--device", "cpu", "--db", db, "--plot", file.format(folder=db.parent)), "cannot write --plot")


def test_a_worse_probe_replaces_no_better_one(plan: Run, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 at a third, as at a load of 62; the doubtful probe is tried twice, and stored only where it is asked for."""
    stored = replace(samples.SPEC, identity=current_identity("cpu"))
    worse = replace(
        stored, peaks={"fp32": Peak(0.5e11, 2e11), "sfu": stored.peaks["sfu"]}, problems=("the machine was busy",),
    )
    asked: list[str] = []
    monkeypatch.setattr(session, "probe", lambda kind, *_: asked.append(kind) or worse)
    status, out, err = plan("probe", "--device", "cpu", "--db", db)
    assert status == 0 and asked == ["cpu", "cpu"]
    assert f"of this device, made at {worse.measured_at}, is doubtful: the machine was busy; run `plan probe`" in err
    assert "not stored" in err
    assert "peak fp32 50 Gop/s, stored 150" in err and "plan probe --force" in err and "stored in" not in out
    known = current_identity("cpu").key()
    with Database(db, mode="read") as database:
        assert stored_spec(database, known) == stored
    status, out, err = plan("probe", "--force", "--device", "cpu", "--db", db)
    assert status == 0 and "stored in" in out
    with Database(db, mode="read") as database:
        assert stored_spec(database, known) == worse


def test_the_less_doubtful_of_two_probes_counts(plan: Run, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = replace(samples.SPEC, identity=current_identity("cpu"), noise=0.01)
    probes = iter([replace(quiet, noise=0.4, problems=("noise",)), quiet])
    monkeypatch.setattr(session, "probe", lambda *_: next(probes))
    status, _, err = plan("probe", "--device", "cpu", "--db", db)
    assert status == 0 and "doubtful" not in err
    with Database(db, mode="read") as database:
        assert stored_spec(database, current_identity("cpu").key()) == quiet


def test_a_doubtful_probe_that_took_long_is_not_repeated(
    plan: Run, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubtful = replace(samples.SPEC, identity=current_identity("cpu"), problems=("the machine was busy",))
    asked: list[str] = []
    monkeypatch.setattr(session, "probe", lambda kind, *_: asked.append(kind) or doubtful)
    monkeypatch.setattr(session, "REPEATED_S", -1.0)
    assert plan("probe", "--device", "cpu", "--db", db)[0] == 0
    assert asked == ["cpu"]


def test_a_tune_on_a_busy_machine_says_so_and_shows_its_noise(
    plan: Run, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = ("tune", "--pattern", "swiglu", "--shape", "3x8", "--device", "cpu", "--db", db, "--trials", "1")
    count_instead_of_timing(monkeypatch)
    monkeypatch.setattr(probe, "machine_load", lambda: probe.MachineLoad(62.0, 2))
    status, out, err = plan(*tune)
    assert status == 0
    assert "62.0 on 2 cores" in err and "--again" in err and "noise of what was measured: " in out
    status, out, err = plan(*tune)  # nothing is measured now
    assert status == 0 and "62.0" not in err and "noise of" not in out


# -- database -----------------------------------------------------------------------------------------------------


def test_database_commands(plan: Run, tmp_path: Path) -> None:
    path, copy, file = tmp_path / "a.db", tmp_path / "b.db", tmp_path / "records.jsonl"
    samples.sample_database(path).close()
    status, out, _ = plan("db", "ls", "--db", path)
    assert status == 0 and "add+rms_norm" in out and "do not fuse" in out
    assert out.splitlines()[0].split("\t")[:3] == ["kind", "workload", "label"]
    csv, markdown, found = (
        plan("db", "ls", "--db", path, "--format", style)[1] for style in ("csv", "markdown", "json")
    )
    labels = [line.split("\t")[2] for line in out.splitlines()[1:]]
    assert pd.read_csv(io.StringIO(csv))["label"].tolist() == labels and markdown.count("| tuning |") == 3
    assert [row["label"] for row in json.loads(found)["records"]] == labels
    status, out, _ = plan("db", "show", "silu+mul", "--db", path)
    assert status == 0
    assert '"TuningRecord"' in out and '"PlanRecord"' in out
    assert_user_error(plan("db", "show", "silu+mol 32x8192 bfloat16", "--db", path), "did you mean")
    assert plan("db", "export", file, "--db", path)[0] == 0
    status, out, _ = plan("db", "import", file, "--db", copy)
    assert status == 0 and out.startswith("9 entries")  # a device, three records, three plans, two workloads
    assert plan("db", "import", file, "--db", copy)[1].endswith("; not taken: 9 here already\n")
    assert plan("db", "import", file, "--db", copy, "--quiet") == (0, "", "")
    assert plan("db", "verify", "--db", copy)[0] == 0
    file.write_text(file.read_text()[:-100])
    assert_user_error(plan("db", "import", file, "--db", copy), "truncated")
    status, out, _ = plan("db", "prune", "--device-key", samples.DEVICE, "--db", copy)
    assert status == 0 and "3 tuning_records, 3 plan_records" in out
    status, out, _ = plan("db", "ls", "--db", copy)
    assert status == 0 and "no records" in out


def test_verify_fails_on_a_damaged_record(plan: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with samples.sample_database(path) as database:
        damage = text("UPDATE tuning_records SET checksum = 'x' WHERE label LIKE 'silu%'")
        database.change(lambda connection: connection.execute(damage))
    status, out, _ = plan("db", "verify", "--db", path)
    assert status == 2 and "silu+mul" in out and "plan db prune" in out
    status, out, _ = plan("db", "verify", "--db", path, "--format", "json")
    assert status == 2 and [row["table"] for row in json.loads(out)["problems"]] == ["tuning_records"]


def test_a_corrupt_database_is_told_with_what_mends_it(plan: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    samples.sample_database(path).close()
    damaged = bytearray(path.read_bytes())
    for at in range(4096, len(damaged), 4096):
        damaged[at : at + 100] = b"\xff" * 100
    path.write_bytes(damaged)
    assert_user_error(plan("db", "ls", "--db", path), "is corrupt", "`plan db prune` sets the damaged file aside")
    status, out, err = plan("db", "verify", "--db", path)
    assert status == 2 and "`plan db prune` sets the damaged file aside" in out + err
    status, out, err = plan("db", "prune", "--db", path)
    assert status == 0 and "is new and empty" in out and "kept as" in err
    assert any(file.read_bytes() == damaged for file in tmp_path.glob("*.corrupt-*"))


def test_verify_names_what_mends_each_problem(plan: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with samples.sample_database(path) as database:
        (first, *_) = database.records()
        later = replace(first.evidence, created="2999-01-01T00:00:00+00:00")
        database.put_record(replace(first, evidence=later))
    status, out, _ = plan("db", "verify", "--db", path)
    assert status == 2 and "1 problem in" in out and first.label in out and "2999" in out
    assert "plan tune --again" in out and "prune" not in out


# -- tune, explain, bench -------------------------------------------------------------------------------------------


def test_a_tune_measures_in_worker_processes(plan: Run, db: Path) -> None:
    status, out, err = plan("tune", "--pattern", "swiglu", "--shape", "3x8", "--device", "cpu", "--db", db,
                            "--trials", "1", "--seconds", "0.1")
    assert status == 0, err
    assert re.search(r"^measured [1-9]\d* of \d+ candidates in 1 region \(", out, re.MULTILINE) and str(db) in out


def test_tune_stores_and_the_second_run_measures_nothing(
    plan: Run, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_instead_of_timing(monkeypatch)
    toy = ("--module", "toy_models:gated", "--device", "cpu", "--db", db)
    command = ("tune", *toy, "--trials", "1", "--seconds", "0.1")
    status, out, err = plan(*command)
    assert status == 0, err
    assert "silu+mul 3x24 float32" in out and "measured" in out and str(db) in out
    answer = r"^forward: [\d.]+ -> [\d.]+ us a step \([\d.]+x, [\d.]+ to [\d.]+ in \d+ rounds\)"
    assert re.search(answer, out, re.MULTILINE), out
    account = next(line for line in out.splitlines() if line.startswith("where"))
    assert out.index(account) < out.index("forward: ")  # it ends with the answer
    assert re.match(r"where the time went: [\d.]+ s = starting [\d.]+ s, ", account)
    status, out, err = plan(*command)
    assert status == 0, err
    assert "nothing was measured: the one distinct region came from the database" in out
    assert "stored" in out

    status, out, err = plan("explain", *toy)
    assert status == 0, err
    assert "plan from the database" in out and "aten.linear.default" in out and "silu" in out

    status, out, err = plan(*command, "--quiet")
    assert status == 0 and not [line for line in err.splitlines() if "warning" not in line], err
    assert re.match(r"forward: [\d.]+ -> [\d.]+ us a step", out) and "stored in" not in out and "\t" not in out
    status, out, err = plan(*command, "--format", "json", "--out", db.parent / "tune.json")
    assert status == 0, err
    written = json.loads((db.parent / "tune.json").read_text())
    assert "silu+mul 3x24 float32" in [one["group"] for one in written["groups"]]
    assert written["steps"][0]["planned_us"] > 0

    status, out, err = plan("explain", "--source", "SILU", *toy)
    assert status == 0, err
    assert "silu+mul 3x24 float32" in out and "segment0" in out and "Region 1" not in out and "--prelude" in out
    status, whole, err = plan("explain", "--source", "all", "--prelude", *toy)
    assert status == 0 and len(whole) > 3 * len(out) and "--prelude" not in whole
    status, text, err = plan("explain", "--source", "all", "--prelude", "--format", "json", *toy)
    (kernel,) = json.loads(text)["kernels"]
    assert status == 0 and kernel["source"].strip() in whole and kernel["workloads"] == "forward"
    assert_user_error(plan("explain", "--source", "sillu+mul 3x24 float32", *toy), "silu+mul 3x24 float32")

    status, out, err = plan("report", "--model", "toy_models:gated", "--device", "cpu", "--db", db)
    assert status == 0, err
    assert "forward" in out

    folder = db.parent / "results"
    status, out, err = plan("bench", *toy, "--no-inductor", "--seconds", "0.01", "--out", folder)
    assert status == 0, err
    rows = pd.read_csv(folder / "toy_models-gated-model.csv")
    assert set(rows["contestant"]) == {"fuseplan", "eager"} and (rows["median_us"] > 0).all()
    facts = json.loads((folder / "toy_models-gated-model.json").read_text())
    assert facts["versions"]["torch"] == metadata.version("torch")  # torch.__version__ may name a build, too
    assert facts["device_key"] == current_identity("cpu").key()
    assert "vs_eager" in (folder / "toy_models-gated-model.md").read_text()


def test_explain_without_a_tune_uses_the_cost_model(plan: Run, db: Path) -> None:
    status, out, err = plan("explain", "--pattern", "add_rms_norm", "--shape", "3x127", "--device", "cpu", "--db", db)
    assert status == 0, err
    assert "not tuned yet" in out and "one cpp kernel" in out
    outcome = plan(
        "explain", "--pattern", "swiglu", "--shape", "3x8", "--workload", "5x8", "--device", "cpu", "--db", db
    )
    assert_user_error(outcome, "'5x8'", "3x8")


def test_packed_weights_are_another_workload(plan: Run, db: Path) -> None:
    toy = ("--module", "toy_models:siblings", "--device", "cpu", "--db", db)
    for flags, name, calls in ((), "forward", 2), (("--pack-weights",), "forward packed", 1):
        status, out, err = plan("explain", *toy, *flags)
        assert status == 0, err
        assert f"{name}: " in out and f"{calls} are matmuls, convolutions or attention" in out
