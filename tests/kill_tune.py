"""Kill a tune with SIGKILL at random moments, finish it, and compare with one that was left alone.

    python tests/kill_tune.py [times] [plan tune options]

The options are ``--model llama-3.2-1b --layers 2 --decode 1 --prefill 64`` by default. Exits with status 1 when a
stored record was lost or changed, the database is damaged, or the plan differs. pytest does not collect it: it takes
minutes.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fuseplan.search.database import Database

PLAN = [sys.executable, "-c", "from fuseplan.planner.cli import main; main()"]
DEFAULT = ["--model", "llama-3.2-1b", "--layers", "2", "--decode", "1", "--prefill", "64"]

#: Seconds in which a tune has imported, captured and begun to measure.
START_S = 5.0

Partition = dict[str, tuple[tuple[tuple[int, ...], str], ...]]


def tune(db: Path, options: list[str]) -> subprocess.Popen[bytes]:
    command = [*PLAN, "tune", *options, "--db", str(db), "--device", "cpu"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(db: Path, options: list[str]) -> float:
    """Seconds a whole tune takes."""
    start = time.monotonic()
    process = tune(db, options)
    _, errors = process.communicate()
    if process.returncode != 0:
        sys.exit(f"plan tune failed: {errors.decode().strip()}")
    return time.monotonic() - start


def stored(db: Path) -> tuple[dict[str, str], Partition]:
    """Tuning records (key -> creation time and config) and partitions (region key -> groups)."""
    database = Database(db, "read")
    records = {r.key.workload: f"{r.evidence.created} {r.backend} {dict(r.config)}" for r in database.records()}
    plans = {p.key.workload: tuple((group.ops, group.kind) for group in p.groups) for p in database.plans()}
    return records, plans


def main() -> None:
    words = sys.argv[1:]
    times = int(words.pop(0)) if words and words[0].isdigit() else 10
    options = words or DEFAULT
    generator = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        alone, killed = Path(folder) / "alone.db", Path(folder) / "killed.db"
        whole_s = finish(alone, options)
        records, plans = stored(alone)
        print(f"left alone: {whole_s:.1f} s, {len(records)} records, {len(plans)} plans", flush=True)
        before: dict[str, str] = {}
        for number in range(times):
            process = tune(killed, options)
            time.sleep(START_S + generator.uniform(0.0, 1.0) * (whole_s - START_S) / times)
            process.send_signal(signal.SIGKILL)
            process.wait()
            if not killed.exists():
                continue
            check = subprocess.run([*PLAN, "db", "verify", "--db", str(killed)], capture_output=True, text=True)
            records, plans = stored(killed)
            lost = [key for key, value in before.items() if records.get(key) != value]
            print(f"kill {number + 1}: {len(records)} records, {len(plans)} plans, {len(lost)} lost, "
                  f"verify exit status {check.returncode}", flush=True)
            if lost or check.returncode != 0:
                sys.exit(f"lost {lost} {check.stderr.strip()}")
            before = records
        finish(killed, options)
        (_, expected), (_, found) = stored(alone), stored(killed)
        different = [key for key in expected if found.get(key) != expected[key]]
        print(f"finished: {len(found)} plans, {len(different)} with another partition than the tune left alone")
        for key in different:
            print(f"  {key[:12]}: {expected[key]} alone, {found.get(key)} killed")
        sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
