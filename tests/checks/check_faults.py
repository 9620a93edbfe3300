"""Faults of every kind during a small tune and a compiled call: nothing is lost, nothing poisoned, no process left.

    python tests/checks/check_faults.py [--count 25] [--jobs 1] [--only kill,term]
        [--tune "--model llama-3.2-1b --layers 1"]

Each time, a tune meets a fault of ``FAULTS``. Then it is checked that what was stored before is still there and the
database sound, that no verdict "do not fuse" was stored, that it ended with one line and a status that fits, that no
process is left, that a compiled function gives eager's results under the fault, if it lasts, and that the same tune
finishes once the fault is gone, after ``kill`` with the partitions of a tune left alone. Exits with status 1 when
something is not so. Linux; full disks and read-only folders are small file systems, which only root may mount:
without that they are skipped, and said. pytest runs one each of two (``test_faults.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import report_samples

from fuseplan.costmodel.identity import current_identity
from fuseplan.search.store import maintenance
from fuseplan.search.store.database import Database

PLAN = [sys.executable, "-c", "from fuseplan.planner.cli.main import main; main()"]
#: A tune of seconds whose every verdict is to fuse, by far.
TUNE = "--pattern sin_chain --shape 3x127 --dtype float32 --trials 1 --seconds 0.1"
#: Compiles a function under the fault, and compares.
CALL = """
import sys, torch
def f(x): return torch.sin((x + 1) * 2) * x
x = torch.arange(381.0).reshape(3, 127)
with torch.no_grad():
    fast = torch.compile(f, backend="fuseplan", options={"db": sys.argv[1]})
    for _ in range(2): torch.testing.assert_close(fast(x), f(x))
"""
#: Marks every process that an attempt starts.
TAG = "FUSEPLAN_FAULT"
#: Seconds after which something is taken for hanging.
PATIENCE_S = 600.0
#: What to wait for before a signal that meets a compiler at work.
_NOTE = "compiling"
_numbers = itertools.count()


@dataclass
class Place:
    """Folders and an environment for one attempt.

    Attributes:
        folder: Its own.
        options: Of ``plan tune``.
        random: Where chance comes from.
    """

    folder: Path
    options: list[str]
    random: random.Random
    tag: str = field(default_factory=lambda: f"{os.getpid()}-{next(_numbers)}")

    def __post_init__(self) -> None:
        for name in ("data", "cache", "tmp", "home", "bin"):
            (self.folder / name).mkdir(parents=True)

    @property
    def db(self) -> Path:
        return self.folder / "data" / "tuning.db"

    def environment(self, **changed: str | None) -> dict[str, str]:
        """Of the attempt's processes; None takes a name away."""
        made = {
            **os.environ, TAG: self.tag, "HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp"),
            "XDG_DATA_HOME": str(self.folder / "data"), "XDG_CACHE_HOME": str(self.folder / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "tmp" / "inductor"), **changed,
        }
        return {name: value for name, value in made.items() if value is not None}

    def tune(self, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        command = [*PLAN, "tune", *self.options, "--device", "cpu", "--db", str(self.db)]
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=environment or self.environment(), cwd=self.folder,
        )

    def compiler(self, kernels: str) -> dict[str, str]:
        """An environment whose compiler does with kernels what the shell commands ``kernels`` say."""
        real = shutil.which("c++") or shutil.which("g++") or ""
        script = f"""#!/bin/sh
case "$*" in *--version*|*probe*) exec {real} "$@";; esac
touch {self.folder / _NOTE}
{kernels}
"""
        for name in ("c++", "g++", "clang++"):
            (self.folder / "bin" / name).write_text(script)
            (self.folder / "bin" / name).chmod(0o755)
        return self.environment(PATH=f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")

    @contextlib.contextmanager
    def mounted(self, name: str, kib: int, writable: bool) -> Iterator[None]:
        """One of the folders on a small file system of its own, with what was in it; then in the folder again."""
        folder, kept = self.folder / name, self.folder / f"{name}-kept"
        shutil.copytree(folder, kept)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], check=True)
        try:
            shutil.copytree(kept, folder, dirs_exist_ok=True)
            if not writable:
                subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
            yield
        finally:
            shutil.rmtree(kept)
            shutil.copytree(folder, kept)
            subprocess.run(["umount", "-l", str(folder)], check=True)
            shutil.rmtree(folder)
            kept.rename(folder)

    def left(self) -> list[int]:
        """Processes of this attempt that still run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                words = (entry / "environ").read_bytes().split(b"\0")
                if state != "Z" and f"{TAG}={self.tag}".encode() in words:
                    found.append(int(entry.name))
        return found


@dataclass(frozen=True)
class Ended:
    """How the tune under a fault ended, and what was wrong with a call under it."""

    status: int
    err: str
    call: str = ""


def ended(process: subprocess.Popen[str], call: str = "") -> Ended:
    err = process.communicate(timeout=PATIENCE_S)[1]
    return Ended(process.returncode, err, call)


def under(place: Place, environment: dict[str, str]) -> Ended:
    """A tune and a call in an environment that does not change."""
    tuned = ended(place.tune(environment))
    command = [sys.executable, "-c", CALL, str(place.db)]
    called = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S, cwd=place.folder
    )
    return replace(tuned, call=called.stderr[-400:] if called.returncode else "")


def signalled(number: signal.Signals) -> Callable[[Place], Ended]:
    """A signal at a random moment: a while after the start, or when a compiler is at work."""

    def fault(place: Place) -> Ended:
        slow = f'sleep {place.random.uniform(0, 0.5):.2f}; exec {shutil.which("c++")} "$@"'
        process = place.tune(place.compiler(slow))
        if place.random.random() < 0.3:
            time.sleep(place.random.uniform(0.0, 6.0))
        else:
            await_compiler(place, process)
            time.sleep(place.random.uniform(0.0, 4.0))
        process.send_signal(number)
        return ended(process)

    return fault


def await_compiler(place: Place, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not (place.folder / _NOTE).exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)


def full_disk(place: Place) -> Ended:
    name = place.random.choice(["data", "cache", "tmp"])
    used = sum(path.stat().st_size for path in (place.folder / name).rglob("*")) // 1024
    with place.mounted(name, used + place.random.choice([4, 20, 60, 200]), writable=True):
        return under(place, place.environment())


def read_only(name: str) -> Callable[[Place], Ended]:
    def fault(place: Place) -> Ended:
        with place.mounted(name, 4096, writable=False):
            return under(place, place.environment())

    return fault


def no_home(place: Place) -> Ended:
    nothing: dict[str, str | None] = {"XDG_DATA_HOME": None, "XDG_CACHE_HOME": None, "HOME": "/proc/nowhere"}
    return under(place, place.environment(**nothing))


def failing_compiler(place: Place) -> Ended:
    ways = ("exit 1", "echo 'internal compiler error' >&2; exit 4", "exit 0", "kill -9 $$",
            'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "echo 'No space left on device' >&2; exit 1")
    return under(place, place.compiler(place.random.choice(ways)))


def hanging_compiler(place: Place) -> Ended:
    """Somebody loses patience with it."""
    process = place.tune(place.compiler(place.random.choice(["exec sleep 100000", "sleep 100000 & wait", "cat"])))
    await_compiler(place, process)
    process.send_signal(place.random.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
    return ended(process)


FAULTS: dict[str, Callable[[Place], Ended]] = {
    "kill": signalled(signal.SIGKILL), "int": signalled(signal.SIGINT), "term": signalled(signal.SIGTERM),
    "full disk": full_disk, "read-only database": read_only("data"), "read-only cache": read_only("cache"),
    "no home": no_home, "failing compiler": failing_compiler, "hanging compiler": hanging_compiler,
}
#: These need a file system of their own.
MOUNTED = ("full disk", "read-only database", "read-only cache")
#: Statuses that a signal may lead to, the tune's being done already included.
_OF_SIGNALS = {0, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}


def template(folder: Path) -> Path:
    """A database that knows this device and holds records."""
    path = folder / "template.db"
    identity = current_identity("cpu")
    with report_samples.sample_database(path) as database:
        spec = replace(report_samples.SPEC, identity=identity)
        database.put_device(identity.key(), json.loads(spec.to_json()))
    return path


def stored(path: Path) -> dict[str, str]:
    """What is stored, by its key; the answer is part of the key."""
    with Database(path, "inspect") as database:
        records = {f"record {one.key.workload} {one.key.device}": f"{one.fuse} {one!r}" for one in database.records()}
        plans = {f"plan {one.key.workload} {one.key.device}": repr(one) for one in database.plans()}
    return records | plans


def poison(path: Path, before: dict[str, str]) -> list[str]:
    """Labels of new answers "do not fuse" that no kernel's time speaks for: a busy machine may find fusing slower."""
    with Database(path, "inspect") as database:
        records = [one for one in database.records() if f"record {one.key.workload} {one.key.device}" not in before]
        plans = [one for one in database.plans() if f"plan {one.key.workload} {one.key.device}" not in before]
    timed = any(one.fused is not None for one in records)
    unfused = [plan for plan in plans if not any(group.is_kernel for group in plan.groups)]
    return [one.label for one in records if one.fused is None] + [one.label for one in unfused if not timed]


def end_leases(path: Path) -> None:
    """Those of a tune that was killed would end by themselves, in half a minute; ``test_leases.py`` has that."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE leases SET expires = 0")


def partitions(path: Path) -> dict[str, str]:
    """The groups of each stored plan, by the region's key."""
    with Database(path, "inspect") as database:
        return {
            one.key.workload: repr([(group.ops, group.implementation) for group in one.groups])
            for one in database.plans()
        }


def left_alone(folder: Path, source: Path, options: list[str]) -> dict[str, str]:
    """The partitions of a tune that meets no fault."""
    place = Place(folder, options, random.Random(0))
    shutil.copy(source, place.db)
    if (alone := ended(place.tune())).status:
        sys.exit(f"a tune left alone fails: {alone.err.strip()[-300:]}")
    return partitions(place.db)


def attempt(
    name: str, folder: Path, source: Path, options: list[str], seed: int, expected: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """Status of one tune under a fault, and everything that was wrong; ``expected`` are a sound tune's partitions."""
    place = Place(folder, options, random.Random(f"{name} {seed}"))
    shutil.copy(source, place.db)
    before = stored(place.db)
    outcome = FAULTS[name](place)
    wrong = [f"the call: {outcome.call}"] if outcome.call else []
    wrong += said_badly(name, outcome)
    end = time.monotonic() + 60
    while place.left() and time.monotonic() < end:
        time.sleep(0.1)
    for pid in place.left():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        wrong.append(f"process left: {words[:120]}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wrong += checked(place.db, before)
    wrong += [f"stored as not to be fused: {label}" for label in poison(place.db, before)]
    middle = stored(place.db)
    end_leases(place.db)
    again = ended(place.tune())
    if again.status:
        wrong.append(f"the tune afterwards: status {again.status}, {again.err.strip()[-300:]}")
    wrong += checked(place.db, middle)
    wrong += [f"not fused afterwards: {label}" for label in poison(place.db, before)]
    if len(stored(place.db)) == len(before):
        wrong.append("nothing new is stored afterwards")
    found = partitions(place.db)
    others = [(key, cut) for key, cut in (expected or {}).items() if found.get(key) != cut]
    wrong += [f"cut otherwise than left alone: {key[:12]}: {found.get(key)}, alone {cut}" for key, cut in others]
    return outcome.status, wrong


def said_badly(name: str, outcome: Ended) -> list[str]:
    """What a user would hold against the way the tune ended."""
    killed = name in ("kill", "int", "term", "hanging compiler")
    wrong = []
    if outcome.status not in (_OF_SIGNALS if killed else {0, 1, 2}):
        wrong.append(f"status {outcome.status}: {outcome.err.strip()[-600:]}")
    lines = [line for line in outcome.err.splitlines() if line.startswith("plan: error:")]
    if not killed and outcome.status and len(lines) != 1:
        wrong.append(f"{len(lines)} lines of errors: {outcome.err.strip()[-300:]}")
    # Before the command's own code runs, Python itself answers Ctrl-C.
    if "Traceback" in outcome.err and not (killed and "fuseplan/planner/cli" not in outcome.err):
        wrong.append(f"a traceback: {outcome.err.strip()[-300:]}")
    return wrong


def checked(path: Path, before: dict[str, str]) -> list[str]:
    with Database(path, "inspect") as database:
        wrong = [f"{one.table}: {one.row}: {one.what}" for one in maintenance.verify_database(database)]
    now = stored(path)
    return wrong + [f"lost or changed: {key}" for key, value in before.items() if now.get(key) != value]


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        return done.returncode == 0 and subprocess.run(["umount", folder], check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=25, help="times each")
    parser.add_argument("--jobs", type=int, default=1, help="attempts at a time")
    parser.add_argument("--only", default="", help="faults, joined by commas")
    parser.add_argument("--tune", default=TUNE, help="options of plan tune")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    names = [name for name in FAULTS if not args.only or name in args.only.split(",")]
    if not can_mount():
        print(f"skipped, since nothing can be mounted here: {', '.join(set(names) & set(MOUNTED))}")
        names = [name for name in names if name not in MOUNTED]
    failed = 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.jobs) as pool:
        source, options = template(Path(scratch)), args.tune.split()
        expected = left_alone(Path(scratch) / "alone", source, options) if "kill" in names else {}

        def one(name: str, number: int) -> tuple[int, list[str]]:
            with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as folder:
                try:
                    cuts = expected if name == "kill" else {}
                    return attempt(name, Path(folder) / "place", source, options, number, cuts)
                except Exception as error:
                    return -1, [f"{type(error).__name__}: {error}"]

        for name in names:
            results = list(pool.map(one, [name] * args.count, range(args.count)))
            statuses = Counter(status for status, _ in results)
            bad = [(number, wrong) for number, (_, wrong) in enumerate(results) if wrong]
            failed += len(bad)
            said = ", ".join(f"{status} ({times}x)" for status, times in sorted(statuses.items()))
            print(f"{name}: {args.count} times, {len(bad)} wrong; statuses {said}", flush=True)
            for number, wrong in bad:
                print("".join(f"    {number}: {line}\n" for line in wrong), end="", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
