"""Tuners that share a database: what two measure together beside what one does, and what killed ones leave behind.

    python tests/checks/check_shared_tunes.py [--kills 10] [--db-prefix postgresql://user@host/] -- --model llama ...

Whole processes, on this device. The databases are files in a scratch folder, or with ``--db-prefix`` empty databases
called ``alone``, ``together`` and ``killed`` of a server. What follows ``--`` goes to ``plan tune``.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import listed

Plans = dict[str, tuple[tuple[tuple[int, ...], str], ...]]


def start(db: str, what: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fuseplan.planner", "tune", "--db", db, "--no-shipped", *what],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def measured(process: subprocess.Popen[str]) -> int:
    """Candidates that a tune measured, once it has ended."""
    said, _ = process.communicate()
    assert process.returncode == 0, said
    found = re.search(r"measured ([\d,]+) of", said)
    return int(found[1].replace(",", "")) if found else 0


def plans(db: str) -> Plans:
    """The groups of each region's plan, each with what runs it."""
    with Database(db, mode="inspect") as database:
        return {plan.key.workload: tuple((group.ops, group.implementation) for group in plan.groups)
                for plan in database.plans()}


def compare(name: str, found: Plans, expected: Plans) -> None:
    same = sum(found.get(key) == groups for key, groups in expected.items())
    print(f"{name}: {same} of {len(expected)} plans have the groups and the implementations of the tune alone; "
          f"{len(found)} are stored")


def leased(db: str) -> dict[str, str]:
    """Who is at work on which region, part or group now."""
    with Database(db, mode="inspect") as database:
        found = listed(database) if database.engine is not None else []
    return {one["workload"]: one["owner"] for one in found if one["workload"] != "probe"}


def killed_tunes(db: str, what: Sequence[str], kills: int, longest_s: float) -> set[str]:
    """Kill tunes while they measure; who had what is left behind."""
    rng, owners = random.Random(0), list[str]()
    while len(owners) < kills:
        process, before = start(db, what), set(leased(db).values())
        while process.poll() is None and not (new := set(leased(db).values()) - before):
            time.sleep(0.1)
        if process.poll() is not None:
            print(f"a tune ended after {len(owners)} were killed")
            break
        time.sleep(rng.uniform(0.0, longest_s))
        process.kill()
        process.wait()
        owners += new
    print(f"killed {len(owners)} tunes, each while it measured")
    return set(owners)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--db-prefix", default="")
    parser.add_argument("what", nargs="*", default=["--model", "llama"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        def db(name: str) -> str:
            return given.db_prefix + name if given.db_prefix else str(Path(folder, f"{name}.db"))

        began = time.monotonic()
        alone = measured(start(db("alone"), given.what))
        alone_s = time.monotonic() - began
        print(f"alone: {alone} measured in {alone_s:.0f} s", flush=True)
        expected = plans(db("alone"))

        began = time.monotonic()
        pair = [start(db("together"), given.what) for _ in range(2)]
        counts = [measured(one) for one in pair]
        print(f"together: {counts[0]} + {counts[1]} = {sum(counts)} measured ({sum(counts) / alone:.3f}x) "
              f"in {time.monotonic() - began:.0f} s", flush=True)
        compare("together", plans(db("together")), expected)

        dead = killed_tunes(db("killed"), given.what, given.kills, alone_s / 20)
        began = time.monotonic()
        left = len([owner for owner in leased(db("killed")).values() if owner in dead])
        last = start(db("killed"), given.what)
        while last.poll() is None and dead & set(leased(db("killed")).values()):
            time.sleep(0.2)
        print(f"the {left} leases that the last ones left were gone after {time.monotonic() - began:.0f} s", flush=True)
        print(f"the tune after them measured {measured(last)} in {time.monotonic() - began:.0f} s")
        compare("killed", plans(db("killed")), expected)


if __name__ == "__main__":
    main()
