"""Command lines that no user means: a part of those of ``check_commands.py``, and how commands end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import report_samples
from check_commands import LINES, Scene, untried

from fuseplan.costmodel.identity import current_identity
from fuseplan.planner.cli import main
from fuseplan.planner.cli.source import decimal, whole
from fuseplan.planner.errors import in_words
from fuseplan.search.store.database import Database

#: Every sixth, and some that once ran on, or left with another status.
SOME = [
    *LINES[::6],
    "tune --model ''", "tune --module toys:exits_well", "tune --module exits_well_on_import:factory",
    "tune --module toys:raises_base", "tune --module syntax_error:factory", "tune --module toys:wrong_shapes",
    "tune --config wrong_layers_billion.json", "tune --config deep.json", "tune --config wrong_encdec.json",
    "tune --layers ２", "db ls --db nosuchdialect://host/db",
]
#: These run as a user's do.
ALONE = ["tune --module toys:forward_exits", "tune --db postgresql://host:notaport/db --pattern swiglu --shape 3x8"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with Scene(tmp_path_factory.mktemp("commands")) as scene:
        yield scene


def test_there_are_two_hundred_bad_lines() -> None:
    assert len(set(LINES)) == len(LINES) >= 200


def test_every_command_and_option_is_tried() -> None:
    assert untried() == []


@pytest.mark.parametrize("line", list(dict.fromkeys(SOME)))
def test_a_bad_line_is_answered_by_one_line(scene: Scene, line: str) -> None:
    ended = scene.here(line)
    assert ended.faults(line) == [], ended.err


@pytest.mark.parametrize("line", ALONE)
def test_a_bad_line_ends_its_process_with_status_2(scene: Scene, line: str) -> None:
    ended = scene.alone(line)
    assert ended.faults(line) == [], ended.err


def test_sigterm_ends_a_command_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr("sys.argv", ["plan", "backends"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err.strip() == main.INTERRUPTED


def test_a_reader_that_has_had_enough_is_no_error(tmp_path: Path) -> None:
    Database(tmp_path / "tuning.db").close()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        command = [sys.executable, "-m", "fuseplan.planner.cli.main", "db", "ls", "--db", str(tmp_path / "tuning.db")]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_a_closed_output_is_no_fault(tmp_path: Path) -> None:
    Database(tmp_path / "tuning.db").close()
    for closed, there, status in (">&-", True, 0), ("2>&-", False, 2), ("<&- >&- 2>&-", True, 0):
        file = tmp_path / ("tuning.db" if there else "other.db")
        command = f"{sys.executable} -m fuseplan.planner db ls --db {file} {closed}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (status, ""), closed
    with Database(tmp_path / "tuning.db") as database:
        assert not list(database.records())


def test_an_export_goes_through_a_pipe(tmp_path: Path) -> None:
    with Database(tmp_path / "one.db") as database:
        database.put_device("cpu-one", json.loads(report_samples.SPEC.to_json()))
    plan = f"{sys.executable} -m fuseplan.planner db"
    command = f"{plan} export - --db {tmp_path}/one.db | {plan} import - --db {tmp_path}/other.db"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with Database(tmp_path / "one.db", "read") as one, Database(tmp_path / "other.db", "read") as other:
        assert other.devices() == one.devices() and other.devices().keys() == {"cpu-one"}
    assert not Path("-").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_told_in_a_line(tmp_path: Path) -> None:
    Database(tmp_path / "tuning.db").close()
    command = f"{sys.executable} -m fuseplan.planner db ls --db {tmp_path}/tuning.db > /dev/full"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "No space left on device" in done.stderr and "debug" not in done.stderr


def test_numbers_are_plain_digits_within_bounds() -> None:
    assert (whole(1)("12"), whole(0)(0), decimal(0.1)("1e-1"), decimal(0.0)(".5"), decimal(0.0)("2.")) == (
        12, 0, 0.1, 0.5, 2.0,
    )
    for read, texts in (
        (whole(1, 99), ["", "0", "100", "１", "1_0", "+1", " 1", "1.0", "9" * 5000]),
        (decimal(0.1, 9.0), ["", "nan", "inf", "１", "1_0", "0.09", "9.1", "1e999", "."]),
    ):
        for text in texts:
            with pytest.raises(Exception, match=r"range from|is not a"):
                read(text)


def test_the_words_of_others_errors_name_no_class() -> None:
    assert in_words(ValueError("torch._dynamo.exc.TorchRuntimeError: no such op\n  File x")) == "no such op"
    assert in_words(KeyError()) == "no reason given"
    assert len(in_words(ValueError("x" * 5000))) == 300


@pytest.fixture
def talkative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a module whose factory prints, without that factory's name; their database knows this CPU."""
    (tmp_path / "talkative.py").write_text("""
import torch
def real(): print("loading"); return torch.nn.GELU(), torch.ones(3, 5)
def complex_numbers(): return torch.nn.Tanh(), torch.ones(3, 5, dtype=torch.complex64)
""")
    monkeypatch.syspath_prepend(tmp_path)
    with Database(tmp_path / "tuning.db") as database:
        spec = replace(report_samples.SPEC, identity=current_identity("cpu"))
        database.put_device(spec.identity.key(), json.loads(spec.to_json()))
    return ["--device", "cpu", "--db", str(tmp_path / "tuning.db"), "--module"]


def test_what_a_factory_prints_is_no_part_of_an_answer_for_programs(
    talkative: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["explain", *talkative, "talkative:real"]
    assert main.run([*line, "--format", "json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["groups"] and "loading" in said.err
    assert main.run(line) == 0 and "loading" in capsys.readouterr().out


def test_a_tune_of_what_only_aten_can_run_says_so(talkative: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["tune", *talkative, "talkative:complex_numbers"]) == 0
    assert "nothing was tuned: only ATen can run these ops; `plan explain` says why" in capsys.readouterr().out
