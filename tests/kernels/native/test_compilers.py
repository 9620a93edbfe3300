"""Compilers that hang, fail or have nowhere to write: what is said, and that nothing of them is left running."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from compilers import find_compiler

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.native import allowance as limited
from fuseplan.kernels.native import build
from fuseplan.kernels.native.allowance import Allowance, activity, in_threads
from fuseplan.kernels.native.build import Compiler, build_library, required_compiler

#: The compiler proper: a child of the driver, which would go on without it.
HANGS = """
sh -c 'echo $$ > "{pids}.new"; mv "{pids}.new" "{pids}"; while :; do sleep 1000; done' &
wait
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    build._search.cache_clear()
    yield
    build._search.cache_clear()
    build._HUNG.clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


@pytest.fixture
def runs_out(monkeypatch: pytest.MonkeyPatch, pids: Path) -> list[float]:
    """Every allowance runs out as soon as the compiler proper is there; the seconds that were waited for in one go."""
    limits: list[float] = []
    monkeypatch.setattr(limited, "SLICE_S", float("inf"))
    monkeypatch.setattr(limited, "activity", lambda pid: (0.0, False))
    original = subprocess.Popen.communicate

    def communicate(self: Any, input: Any = None, timeout: float | None = None) -> Any:
        if timeout is None or not hanging(self.args):
            return original(self, input, timeout)
        limits.append(timeout)
        while not pids.exists():
            time.sleep(0.005)
        raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    return limits


def hanging(args: Sequence[str]) -> bool:
    return "hangs" in args[0] and ("--version" not in args or "at-once" in args[0])


def ended(pid: int) -> bool:
    """Wait for the end of a process that was killed."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 60)[0])
    finally:
        os.close(handle)


def test_what_a_driver_has_started_ends_with_it(tmp_path: Path, pids: Path, runs_out: list[float]) -> None:
    driver = script(tmp_path / "hangs", HANGS.format(pids=pids))
    with pytest.raises(subprocess.TimeoutExpired):
        Allowance(5.0).run([driver])
    assert runs_out == [5.0] and ended(int(pids.read_text()))


def test_an_interrupt_ends_it_too(tmp_path: Path, pids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def communicate(self: Any, *args: Any, **options: Any) -> Any:
        while not pids.exists():
            time.sleep(0.005)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(KeyboardInterrupt):
        Allowance(5.0).run([script(tmp_path / "hangs", HANGS.format(pids=pids))])
    assert ended(int(pids.read_text()))


@pytest.mark.parametrize("items", [3, 7])
def test_an_interrupt_ends_what_other_threads_wait_for(items: int, tmp_path: Path) -> None:
    """The caller is interrupted while two threads wait for drivers; those that wait for their turn start nothing."""
    drivers = [script(tmp_path / f"hangs{at}", HANGS.format(pids=tmp_path / f"pids{at}")) for at in range(items)]

    def work(at: int) -> None:
        if at > 0:
            Allowance(1000.0).run([drivers[at]])
        while not all((tmp_path / f"pids{at}").exists() for at in (1, 2)):
            time.sleep(0.005)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_threads(work, range(items), 3)
    started = list(tmp_path.glob("pids?"))
    assert len(started) >= 2 and all(ended(int(path.read_text())) for path in started)
    said = in_threads(lambda at: Allowance(60.0).run(["echo", str(at)]).stdout, range(5), 3)
    assert said == [f"{at}\n" for at in range(5)]


def test_errors_in_threads_are_raised_and_results_are_in_order() -> None:
    assert in_threads(lambda x: x * x, range(9), 4) == in_threads(lambda x: x * x, range(9), 1)
    assert in_threads(str, [], 4) == []
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda x: 1 // x, [3, 0, 2], 2)


def test_output_and_status_are_handed_back(tmp_path: Path) -> None:
    done = Allowance(60.0).run([script(tmp_path / "cc", 'echo "out $1"; printf "\\377err" >&2; exit 3'), "x"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out x\n", "\ufffderr")


def spent(monkeypatch: pytest.MonkeyPatch, seen: list[tuple[float, bool]], total_s: float = 10.0) -> int:
    """Slices of a second that an allowance lasts for a command that is seen so, in this order, the last for ever."""
    slices: list[float] = []

    def communicate(self: Any, timeout: float) -> Any:
        slices.append(timeout)
        raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    monkeypatch.setattr(limited, "activity", lambda pid: seen[min(len(slices), len(seen)) - 1])
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        Allowance(total_s).run(["sleep", "1000"])
    assert raised.value.timeout == total_s
    return len(slices)


def test_sleeping_and_computing_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spent(monkeypatch, [(0.25, False)]) == 10
    assert spent(monkeypatch, [(float(n), True) for n in range(1, 50)]) == 10
    assert spent(monkeypatch, [(n / 4, True) for n in range(1, 200)]) == 40


def test_waiting_for_a_busy_machine_counts_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spent(monkeypatch, [(0.25, True)]) == 100
    assert spent(monkeypatch, [(0.0, True)] * 50 + [(0.0, False)]) == 60


def test_commands_share_an_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is seen once, and ends after."""
    seen: list[Any] = []
    original = subprocess.Popen.communicate

    def communicate(self: Any, timeout: float) -> Any:
        if self not in seen:
            seen.append(self)
            raise subprocess.TimeoutExpired(self.args, timeout)
        return original(self)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    monkeypatch.setattr(limited, "activity", lambda pid: (4.0, True))
    allowance = Allowance(10.0)
    assert [allowance.run(["true"]).returncode for _ in range(2)] == [0, 0]
    assert allowance.left_s == 2.0


def test_activity_of_a_driver_is_that_of_what_it_started(tmp_path: Path, pids: Path) -> None:
    """The compiler proper computes: processor time goes up. It sleeps: nobody is awake any more."""
    driver = script(tmp_path / "cc", """
        sh -c 'while [ ! -e PIDS.stop ]; do :; done; echo > PIDS; exec sleep 1000' & wait""".replace("PIDS", str(pids)))
    with subprocess.Popen([driver]) as process:
        try:
            while (busy := activity(process.pid))[0] < 0.1:
                pass
            assert busy[1]
            pids.with_suffix(".stop").touch()
            while (idle := activity(process.pid))[1] or not pids.exists():
                pass
            assert idle[0] >= busy[0] and process.poll() is None
        finally:
            limited.kill_tree(process.pid)


@pytest.mark.parametrize("name", ["hangs", "hangs-at-once"])
def test_a_compiler_that_hangs_costs_one_limit_once(
    name: str, tmp_path: Path, pids: Path, runs_out: list[float]
) -> None:
    """Also under its other names, and for all ways to ask for this processor's instructions."""
    driver = script(tmp_path / name, 'case "$*" in --version) [ "${0%at-once}" = "$0" ] && echo 1 && exit;; esac'
                    + HANGS.format(pids=pids))
    twin = tmp_path / f"{name}++"
    twin.symlink_to(driver)
    backend = CppBackend(tmp_path, (driver, str(twin)))
    for _ in range(3):
        reason = backend.unavailable()
        assert reason is not None and driver in reason and "did not answer within 10 s" in reason
    assert runs_out == [10] and ended(int(pids.read_text()))


def test_the_next_compiler_is_tried(tmp_path: Path, pids: Path, runs_out: list[float]) -> None:
    broken = script(tmp_path / "broken", "echo 'broken: error: no licence' >&2; exit 1")
    with pytest.raises(BuildError, match="broken: broken: error: no licence"):
        required_compiler((broken,))
    good = find_compiler()
    if good is not None:
        assert find_compiler((broken, good.path)) == good
        assert find_compiler((script(tmp_path / "hangs-at-once", HANGS.format(pids=pids)), good.path)) == good


def test_no_name_on_path_is_said() -> None:
    with pytest.raises(BuildError, match=r"no C\+\+17 compiler on PATH \(looked for nowhere\)"):
        required_compiler(("nowhere",))


def test_a_full_temporary_folder_is_the_reason_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: Any) -> Any:
        raise OSError(28, "No space left on device", "/tmp/fuseplan-x")

    driver = script(tmp_path / "cc", "echo 1")
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    reason = str(CppBackend(tmp_path, (driver,)).unavailable())
    assert "No space left on device" in reason and "/tmp/fuseplan-x" in reason and "on PATH" not in reason


def test_kernels_do_not_wait_for_a_compiler_that_hung_before(
    tmp_path: Path, pids: Path, runs_out: list[float]
) -> None:
    compiler = Compiler(script(tmp_path / "hangs", HANGS.format(pids=pids)), "1", ())
    with pytest.raises(BuildError, match="did not finish within 120 s"):
        build_library("int one;", compiler, tmp_path / "cache")
    assert ended(int(pids.read_text()))
    with pytest.raises(BuildError, match="is not asked again"):
        build_library("int two;", compiler, tmp_path / "cache")
    assert runs_out == [120] and [*(tmp_path / "cache").iterdir()] == []


def test_a_compiler_that_cannot_write_its_own_files_is_quoted(tmp_path: Path) -> None:
    driver = script(tmp_path / "cc", """
        [ "$1" = --version ] && echo 1 && exit
        echo "cc1plus: error: writing to /tmp/ccX.s: No space left on device" >&2; exit 1""")
    with pytest.raises(BuildError, match=r"/tmp/ccX\.s: No space left on device"):
        required_compiler((driver,))
    with pytest.raises(BuildError, match=r"/tmp/ccX\.s: No space left on device"):
        build_library("int one;", Compiler(driver, "1", ()), tmp_path / "cache")
