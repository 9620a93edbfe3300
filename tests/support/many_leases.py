"""Processes that take leases of random keys in random order from one database, at the same time.

Run as a script it takes the database's location, the processes and the rounds of each; it prints what became of them.
It is a process of its own, since it forks.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from many_writers import forked

from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import Leases, listed
from fuseplan.search.store.record import RecordKey

KEYS = [RecordKey(f"{number:064d}", "dev") for number in range(20)]


def take(where: str, seed: int, rounds: int, marks: Path) -> float:
    """What one process does; the seconds of its slowest call. A file in ``marks`` stands for a key that is held."""
    chance, slowest = random.Random(seed), 0.0
    with Database(where) as database:
        leases = Leases(database)
        for _ in range(rounds):
            begun = time.monotonic()
            held = leases.take(chance.sample(KEYS, chance.randint(2, len(KEYS))))
            slowest = max(slowest, time.monotonic() - begun)
            files = [marks / key.workload for key in held]
            for file in files:
                file.touch(exist_ok=False)  # an error where two hold one key
            for file in files:
                file.unlink()
            leases.release(held)
        leases.close()
    return slowest


def run(where: str, processes: int, rounds: int) -> tuple[int, int, float]:
    """How many processes failed, how many leases they left behind, and the seconds of the slowest call."""
    Database(where).close()
    with TemporaryDirectory() as folder:
        marks = Path(folder) / "marks"
        marks.mkdir()

        def work(number: int) -> None:
            Path(folder, str(number)).write_text(str(take(where, number, rounds, marks)))

        statuses, _ = forked(where, processes, work)
        slowest = max((float(file.read_text()) for file in Path(folder).iterdir() if file.is_file()), default=0.0)
    with Database(where, "inspect") as database:
        return sum(map(bool, statuses)), len(listed(database)), slowest


if __name__ == "__main__":
    assert "torch" not in sys.modules
    failed, left, slowest = run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(f"{failed} of {sys.argv[2]} processes failed, {left} leases are left, the slowest call took {slowest:.2f} s")
    sys.exit(bool(failed or left))
