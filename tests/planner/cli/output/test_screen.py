"""A command's screen: what is printed where, in which format, and what ``--quiet`` leaves."""

from __future__ import annotations

import errno
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fuseplan.planner.cli.output.progress_log import EVERY_S, ProgressLog
from fuseplan.planner.cli.output.screen import Screen, check_writable
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.reports.document import Document, Sentence, Table, write_text
from fuseplan.search.store.database import Database

TIMES = Table("times", ("workload", "time_us"), (("decode 1", 1.0 / 3.0),), "Times")
OTHERS = Table("others", ("name",), (("x",),), "Others")


def answer(screen: Screen) -> None:
    """What commands do."""
    screen.show(Document("Report", "times", [OTHERS, TIMES, Sentence("a third of a microsecond")]))
    screen.say("stored somewhere")
    screen.finish()


def test_a_pipe_has_tables_sentences_and_talk(capsys: pytest.CaptureFixture[str]) -> None:
    answer(Screen())
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "Others", "name", "x", "", "Times", "workload\ttime_us", "decode 1\t0.33", "", "a third of a microsecond",
        "stored somewhere",
    ]


@pytest.mark.parametrize("style", ["table", "csv", "markdown", "json"])
def test_every_format_goes_to_the_file_and_the_rest_does_not(
    style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "answer"
    answer(Screen(style, file))
    out, _ = capsys.readouterr()
    text = file.read_text()
    assert str(file) in out and "decode 1" not in out and "stored somewhere" in out
    assert "decode 1" in text and "stored somewhere" not in text
    answer(Screen(style))
    out, err = capsys.readouterr()
    assert out.startswith(text.rstrip("\n")) and ("stored" in err) == (style != "table")


def test_csv_has_the_main_table_and_json_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    answer(Screen("csv"))
    assert capsys.readouterr().out == f"workload,time_us\ndecode 1,{1 / 3}\n"
    answer(Screen("json"))
    assert json.loads(capsys.readouterr().out) == {
        "others": [{"name": "x"}], "times": [{"workload": "decode 1", "time_us": 1 / 3}],
        "sentences": ["a third of a microsecond"],
    }


def test_quiet_leaves_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(quiet=True, log=ProgressLog(lambda line: pytest.fail(line)))
    screen.add(replace(TIMES, shown="talk"))
    screen.add(OTHERS)
    screen.tell("seen")
    screen.tell("not seen", "talk")
    screen.say("not seen")
    with screen.status("not seen") as say:
        say("not seen")
    assert screen.log is None
    out, err = capsys.readouterr()
    assert out.splitlines() == ["Others", "name", "x", "", "seen"] and err == ""


def terminal(width: int) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=width, color_system="standard", highlight=False), out


def test_a_terminal_is_told_which_columns_are_left_out() -> None:
    console, out = terminal(60)
    wide = Table("t", ("name", "place", "time"), (("a" * 40, "b" * 60, 1.0),), spare=("place",), keep=("name", "time"))
    Screen(terminal=console).add(wide)
    lines = out.getvalue().splitlines()
    assert "a" * 40 in lines[1] and "b" not in lines[1]
    assert "left out: place" in lines[2] and "\x1b[2m" in lines[2]  # dim
    assert len(lines) == 3
    Screen(terminal=console).add(Table("t", ("name",), (), "Nothing"))
    assert "Nothing" not in out.getvalue()


def test_a_line_that_is_too_long_for_a_terminal_loses_its_end() -> None:
    console, out = terminal(60)
    Screen(terminal=console).tell("decode 1: 2.0 -> 1.0 ms a step (2.00x); " + "more " * 20, one_line=True)
    (line,) = out.getvalue().splitlines()
    assert line.startswith("decode 1: 2.0 -> 1.0 ms a step (2.00x); ") and line.endswith("…") and len(line) <= 60


def test_a_terminal_obeys_no_stored_text() -> None:
    console, out = terminal(60)
    screen = Screen(terminal=console)
    screen.add(Table("t", ("name",), (("\x1b]0;owned\x07[bold]x[/bold]",),)))
    screen.tell("\x1b[2J[red]y[/red]")
    screen.code("int x = 1; // \x1b[2J", "cpp")
    text = out.getvalue()
    assert "\x1b]0" not in text and "\x1b[2J" not in text and "[bold]x[/bold]" in text and "[red]y[/red]" in text


def test_code_is_highlighted_on_a_terminal_and_plain_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    code = "static int answer() {\n  return 42;\n}"
    console, out = terminal(80)
    Screen(terminal=console).code(code, "cpp")
    assert "\x1b[" in out.getvalue() and "return" in out.getvalue()
    Screen().code(code, "cpp")
    assert capsys.readouterr().out == code + "\n"


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "file.csv", "--out")
    assert not (tmp_path / "new" / "file.csv").exists()
    (tmp_path / "file").write_text("kept")
    check_writable(tmp_path / "file", "--out")
    assert (tmp_path / "file").read_text() == "kept"
    # Root may write everywhere, by its permissions.
    for bad in (tmp_path, tmp_path / "file" / "new.csv", Path("/proc/new.csv"), Path("/proc/nowhere/file.csv"),
                Path("/dev/null/file.csv")):
        with pytest.raises(ConfigError, match=rf"^cannot write --out {bad} \(.*\); give a file that can be written$"):
            check_writable(bad, "--out")


def test_a_look_whether_a_file_can_be_written_leaves_links_and_pipes_alone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    check_writable(tmp_path / "link", "--out")
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "there").exists()
    os.mkfifo(tmp_path / "pipe")
    check_writable(tmp_path / "pipe", "--out")  # would wait for a reader


def test_no_answer_takes_the_place_of_a_database(tmp_path: Path) -> None:
    Database(path := tmp_path / "tuning.db").close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"^cannot write --out .*tuning.db \(a database lies there\); give a file"):
        check_writable(path, "--out")
    with pytest.raises(FileExistsError, match="a database lies there"):
        write_text(path, "words")
    assert path.read_bytes() == before


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(path := tmp_path / "answer.csv", "first")
    (plain := tmp_path / "plain").touch()
    assert path.stat().st_mode == plain.stat().st_mode  # others may read it

    def full(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text[:3].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: .*answer.csv"):
        write_text(path, "second")
    assert path.read_text() == "first" and not list(tmp_path.glob("*.part"))


def test_a_log_has_a_line_for_each_phase_and_one_now_and_then() -> None:
    now, lines = [100.0], list[str]()
    log = ProgressLog(lines.append, lambda: now[0])
    log.phase("capturing")
    for _ in range(int(3 * EVERY_S)):  # a second each
        now[0] += 1.0
        log.update(f"at {now[0]:.0f}")
    now[0] += 1.0
    log.phase("tuning")
    seconds = [int(line.split("[")[1].split(" s]")[0]) for line in lines]
    assert seconds == [0, 10, 20, 30, 31]
    assert "capturing" in lines[0] and "at 110" in lines[1] and "tuning" in lines[-1]
    assert all(line.startswith("plan: [") for line in lines)


def test_status_in_a_log_is_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    now, lines = [0.0], list[str]()
    screen = Screen(log=ProgressLog(lines.append, lambda: now[0]))
    with screen.status("probing") as say:
        say("probing: 10%")
        now[0] = EVERY_S
        say("probing: 90%\x1b[31m")
    assert lines == ["plan: [0 s] probing", f"plan: [{EVERY_S:.0f} s] probing: 90%\\x1b[31m"]
    assert capsys.readouterr() == ("", "")
