"""Handing tests to processes under a memory checker: order, hangs, crashes, what is run again, what the report says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import CHECKS
from sanitize import SINGLE, Attempt, Findings, Run, read_logs

pytest.importorskip("xdist")

#: Runs its command and writes what compute-sanitizer would: an error for each line that its processes left for it.
#: The control, which needs a GPU, is taken to have run.
TOOL = r'''#!{python}
import os, subprocess, sys, pathlib
if "--version" in sys.argv: print("Version 0.0 (a fake)"); sys.exit()
log = pathlib.Path(sys.argv[sys.argv.index("--log-file") + 1])
command = sys.argv[sys.argv.index(str(log)) + 1:]
control = "sanitize_control.py" in " ".join(command)
checked = log.with_suffix("")
checked.mkdir()
process = subprocess.Popen(["true"] if control else command, env={{**os.environ, "CHECKED": str(checked)}})
try: status = process.wait()
except KeyboardInterrupt: status = process.wait()
if control: (checked / "1.errors").write_text("Invalid __global__ write of size 4\n")
wrong = [line for path in checked.glob("*.errors") for line in path.read_text().splitlines()]
lines = ["COMPUTE-SANITIZER", *wrong, f"ERROR SUMMARY: {{len(wrong)}} errors"]
if {dying_words} or not list(checked.glob("*.died")):
    log.write_text("".join(f"========= {{line}}\n" for line in lines))
sys.exit(86 if wrong else status)
'''
TESTS = '''
import atexit, os, signal, time, pytest
ERRORS = os.environ.get("CHECKED") and os.path.join(os.environ["CHECKED"], f"{os.getpid()}.errors")
if ERRORS:
    for path in (ERRORS, ERRORS.replace("errors", "died")): open(path, "w").close()
    atexit.register(os.remove, ERRORS.replace("errors", "died"))
CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
def note(name):
    with open(os.environ["NOTES"], "a") as file: file.write(f"{name} {bool(ERRORS)} {CACHING}\\n")
@pytest.mark.parametrize("number", range(4))
def test_fine(number): note("fine")
def test_skipped(): pytest.skip("one device")
@pytest.mark.xfail
def test_expected(): assert False
@pytest.mark.faulty
def test_faults(): assert False
'''


@pytest.fixture
def sanitize(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs the script over tests: its status, what it printed, and the page it wrote."""

    def run(tests: str, *args: str, dying_words: bool = True, controls: bool = False) -> tuple[int, str, str]:
        folder = tmp_path / "bin"
        folder.mkdir()
        tool = folder / "compute-sanitizer"
        tool.write_text(TOOL.format(python=sys.executable, dying_words=dying_words))
        tool.chmod(0o755)
        tests_file, page = tmp_path / "test_some.py", tmp_path / "page.md"
        tests_file.write_text(TESTS + tests)
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  faulty: f\n  timed: t\n")
        # Its runs are no part of the one that this test may run in.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
        environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes")}
        # A start of pytest takes a second with all plugins that are installed.
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}
        command = [
            sys.executable, str(CHECKS / "sanitize.py"), "--tests", str(tests_file), "--slices", "2", "--minutes",
            "1", "--out", str(page), *([] if controls else ["--no-control"]), *args,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path, timeout=600
        )
        assert page.exists(), done.stdout + done.stderr
        return done.returncode, done.stdout, page.read_text()

    return run


def test_all_is_well(sanitize: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    status, said, page = sanitize("", "--warm", "*fine?1*", "--caching", "*fine?2*", controls=True)
    assert status == 0, said
    assert "clean: 5 of 6 tests passed under memcheck, 0 failed, 1 skipped, 0 not reached, 0 memcheck errors" in said
    assert "1 left out (faulty)" in said and "test_faults (faulty)" in page and "1 x Skipped: one device" in page
    assert "here: seen\nworker: seen" in page and "Version 0.0" in page
    notes = sorted((tmp_path / "notes").read_text().splitlines())
    # One in a process that keeps the allocator, three in others, one of them without the tool before.
    assert notes == ["fine False True", *["fine True False"] * 3, "fine True True"]


def test_failures_keep_their_messages_and_are_looked_at_again(
    sanitize: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    status, said, page = sanitize("""
def test_never(): assert 1 == 2, "never right"
def test_checked(): assert not ERRORS, "slow"
def test_counts(): assert CACHING, "counts blocks"
def test_beyond():
    with open(ERRORS, "a") as file: file.write("Invalid __global__ read of size 2 bytes\\n")
""", "--keep", str(tmp_path / "kept"))
    assert status == 1
    assert "NOT CLEAN: 7 of 10 tests passed under memcheck, 2 failed" in said and "1 memcheck errors" in said
    for words in (
        "test_never (fails without memcheck too)", "never right", "test_checked (passed without memcheck)", "slow",
        "passed (caching): test_some.py::test_counts", "counts blocks",
        "Invalid __global__ read of size 2 bytes",
    ):
        assert words in said and words in page, words
    kept = tmp_path / "kept"
    assert list(kept.glob("*-one-by-one/*.log")) and list(kept.glob("*-one-by-one/output.txt"))


def test_a_broken_device_costs_its_test_alone(sanitize: Callable[..., tuple[int, str, str]]) -> None:
    tests = """
def test_breaks(): open(os.environ["NOTES"] + str(os.getpid()), "w").close(); assert False, "CUDA error: unspecified"
def broken(): return os.path.exists(os.environ["NOTES"] + str(os.getpid()))
@pytest.mark.parametrize("number", range(5))
def test_uses(number): assert not broken()
"""
    _, said, _ = sanitize(tests, "--slices", "1")
    assert "1 failed" in said and "CUDA error: unspecified" in said and "-- failed and passed" not in said


@pytest.mark.parametrize("dying_words", [True, False], ids=["summary", "no summary"])
def test_hangs_and_crashes_cost_themselves(
    sanitize: Callable[..., tuple[int, str, str]], dying_words: bool, tmp_path: Path
) -> None:
    tests = """
def test_slow():
    try: time.sleep(100)
    except Exception: pass
def test_stuck():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(100)
def test_crash(): os.kill(os.getpid(), signal.SIGSEGV)
def test_last(): note("last")
"""
    limits = ("--test-seconds", "1", "--grace-seconds", "1")
    status, said, _ = sanitize(tests, *limits, "--caching", "*", dying_words=dying_words)
    assert status == 1
    assert "6 of 10 tests passed under memcheck, 3 failed, 1 skipped, 0 not reached, 0 memcheck errors" in said, said
    for words in ("Timeout (>1.0s)", "crashed while running", "in test_stuck", "in test_crash", "Segmentation fault"):
        assert words in said, words
    assert "last True True" in (tmp_path / "notes").read_text()


def test_the_time_limit_leaves_summaries(sanitize: Callable[..., tuple[int, str, str]]) -> None:
    tests = "@pytest.mark.parametrize('n', range(1000))\ndef test_long(n): time.sleep(0.4)\n"
    status, said, _ = sanitize(tests, "--minutes", "0.1", "--slices", "1")
    assert status == 1 and "-- not reached" in said and "0 memcheck errors" in said
    assert "without a summary" not in said


LOG = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at store+0x80 in kernel.py:12
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f0000000014 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f0000000000 of size 20 bytes
"""


def test_logs_are_read_with_and_without_a_summary(tmp_path: Path) -> None:
    (tmp_path / "1.log").write_text(LOG)  # a worker that was killed
    (tmp_path / "2.log").write_text(f"{LOG}=========\n========= ERROR SUMMARY: 3 errors\n")
    (tmp_path / "3.log").write_text(
        "========= COMPUTE-SANITIZER\n========= Target application returned an error\n"
        "========= Error: Target application terminated before first instrumented API call\n"
        "========= Tracking kernels launched by child processes requires the --target-processes all option.\n"
        "========= Error: process didn't terminate successfully\n========= ERROR SUMMARY: 0 errors\n"
    )
    (tmp_path / "4.log").write_text("========= Error: No attachable process found. compute-sanitizer timed-out.\n")
    found = read_logs(tmp_path)
    assert (found.summaries, found.errors, len(found.descriptions)) == ({2, 3}, 4, 2)
    assert "is out of bounds" in found.descriptions[0] and found.trouble == [
        "4.log: Error: No attachable process found. compute-sanitizer timed-out."
    ]


def test_what_is_not_clean() -> None:
    def run(attempt: Attempt, **changes: Any) -> Run:
        return Run(["x"], {}, {"x": [attempt]}, Findings(summaries={1}), **changes)

    passed = Attempt(SINGLE, "passed", 1.0, "", 1)
    assert run(passed, blind={"here": ""}).clean
    blind = run(passed, blind={"here": "", "worker": "nothing"})
    assert not blind.clean and "worker: nothing" in blind.markdown(["a device"])
    silent = run(replace(passed, process=2))
    assert silent.unread == ["x"] and not silent.clean
    assert not run(replace(passed, outcome="skipped", message="no device")).clean
    assert not Run(["x"]).clean and Run(["x"]).those("not reached") == ["x"]
