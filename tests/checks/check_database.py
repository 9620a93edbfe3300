"""Mutated databases in use. Run by hand; CI runs 30 (test_mutated_databases.py).

    python tests/checks/check_database.py --count 10000 --seed 0 --jobs 16
    python tests/checks/check_database.py --seed 17 --count 1 --keep /tmp/case   # one case; its files are left there

Each case changes a small database (bits, pages, rows, the schema; JSON, configurations and plans, sealed again) or
an export that is then imported, with texts planted that leave a file where they are run. A small model is dispatched
from it and compared with eager, and every `plan db` command and report is used on it. Dispatch calls the back end
itself with a graph, as Dynamo would; Dynamo has no part in what is read. Commands run within the process, every
hundredth case's `verify` and `ls` in processes of their own. Cases run in batches, each in a process, so that a crash
costs one case.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from batches import Outcome, answers, in_batches, worker

#: Cases that one process runs at most.
_BATCH = 75
_BATCH_LIMIT_S = 1200
_SERVED = ("served", "quarantined", "unread", "ignored", "raised", "died")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="databases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one; they are counted up from it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--keep", type=Path, help="work here and leave what was made")
    parser.add_argument("--worker", nargs=2, type=int, metavar=("FIRST", "END"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _work(*options.worker, options.keep)
    if options.keep is not None:
        return _check(options.seed, options.count, options.jobs, options.keep)
    with tempfile.TemporaryDirectory(prefix="databases-") as folder:
        return _check(options.seed, options.count, options.jobs, Path(folder))


def _check(first: int, count: int, jobs: int, folder: Path) -> int:
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    if jobs > 1:
        _process(folder, 0, 0)  # makes the database, and compiles its kernels once for all
    counts: Counter[tuple[str, str]] = Counter()
    failed = sound = done = 0
    size = min(_BATCH, -(-count // jobs))
    for outcome in in_batches(range(first, first + count), size, jobs, partial(_batch, folder)):
        done += 1
        sound += outcome["sound"]
        counts[outcome["mutation"], outcome["served"]] += 1
        if outcome["complaints"]:
            failed += 1
            print(f"seed {outcome['seed']} ({outcome['mutation']}): {'; '.join(outcome['complaints'])}", flush=True)
    print("\n".join(_table(counts)))
    print(f"{done} mutated databases, {sound} of them sound to `plan db verify`, {failed} failed, "
          f"{time.monotonic() - start:.0f} s")
    return 1 if failed or done != count else 0


def _table(counts: Counter[tuple[str, str]]) -> Iterator[str]:
    shown = [how for how in _SERVED if any(served == how for _, served in counts)]
    yield f"{'mutation':<16}" + "".join(f"{how:>13}" for how in shown)
    for name in sorted({name for name, _ in counts}):
        yield f"{name:<16}" + "".join(f"{counts[name, how]:>13}" for how in shown)


def _batch(folder: Path, first: int, end: int) -> Iterator[Outcome]:
    lost = {"mutation": "?", "served": "died", "sound": False}
    return answers(first, end, partial(_process, folder), lambda seed, how: {"seed": seed, **lost, "complaints": [how]})


def _process(folder: Path, first: int, end: int) -> tuple[str, str]:
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(first), str(end), "--keep", str(folder)]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder / "data"),
    }
    return worker(command, environment, _BATCH_LIMIT_S)


def _work(first: int, end: int, folder: Path) -> int:
    from database_runs import make_database, outcomes, run_case

    made = folder / "made"
    if not made.exists():
        made.mkdir()
        make_database(made)
        run_case(0, made, folder / "first")
    # JSON lines alone belong on standard output; what the commands print is caught case by case.
    for outcome in outcomes(first, end, made, folder / f"case-{first}"):
        print(json.dumps(outcome), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
