"""A PostgreSQL server that many use, and one that is killed while it is used.

    python tests/checks/check_server.py [--kills 10] [--tune "--pattern residual_chain --shape 32x4096"] [--seed 0]
    python tests/checks/check_server.py --leases 40

64 processes write the same and different keys, to a file and to a server, and nothing is lost. 40 processes (with
--leases that many, and nothing else is checked) take leases of 20 keys in random order from a server: none of them
ends, and no call takes 5 seconds. A tune's server is
killed ten times: the tune ends as one that was left alone does, says once that it waits, and what was stored is there
and sound. A server is killed ten times while functions are compiled: they give eager's results, with one warning.
Prints how long each took; exits with status 1 when something is not so. Slices of it are tests.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import many_leases
import many_writers
import report_samples
from postgres_server import Server, running_server

from fuseplan.search.store.database import Database
from fuseplan.search.store.maintenance import verify_database
from fuseplan.search.store.record import RecordKey

#: Seconds that no call for leases takes.
SLOWEST_S = 5.0
PLAN = [sys.executable, "-c", "from fuseplan.planner.cli.main import main; main()"]
TUNE = "--pattern residual_chain --shape 32x4096 --device cpu --trials 300 --seconds 20"
#: Compiles a function for one size after another until it is told to stop, and says what it was warned of.
CALLS = """
import sys, threading, warnings
import torch
def f(x): return torch.nn.functional.silu(x + 1) * x
told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
compiled = 0
with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", UserWarning)
    while not told.is_set():
        torch._dynamo.reset()
        fast = torch.compile(f, backend="fuseplan", options={"db": sys.argv[1]}, dynamic=False)
        x = torch.randn(3, 8 + compiled % 50)
        torch.testing.assert_close(fast(x), f(x))
        compiled += 1
        if compiled == 1: print("begun", flush=True)
print(f"{compiled} functions compiled")
print("\\n".join(str(one.message) for one in caught))
"""


@contextmanager
def killed(server: Server, kills: int, chance: random.Random, up_s: float, down_s: float) -> Iterator[threading.Thread]:
    """Kill the server again and again while the context lasts, at random moments; it is up at the end."""

    def kill() -> None:
        for _ in range(kills):
            time.sleep(chance.uniform(0.1, up_s))
            server.kill()
            time.sleep(chance.uniform(0.1, down_s))
            server.start()

    thread = threading.Thread(target=kill)
    thread.start()
    yield thread
    thread.join()


def in_use(server: Server, name: str) -> bool:
    """Whether anybody is connected to a database."""
    return bool(server.sql(f"select 1 from pg_stat_activity where datname = '{name}'"))


def plans(where: str) -> list[RecordKey]:
    """Keys of the plans in a sound database, which has the record of each of their kernels."""
    with Database(where, "inspect") as database:
        assert verify_database(database) == []
        found, known = list(database.plans()), {one.key.workload for one in database.records()}
    assert all(group.workload in known for one in found for group in one.groups if group.is_kernel)
    return [one.key for one in found]


def check_tune(server: Server, folder: Path, options: str, kills: int, chance: random.Random) -> list[str]:
    """What is wrong with a tune whose server is killed."""
    alone, url = str(folder / "alone.db"), server.url("tuned")
    for where in (alone, url):
        report_samples.known_machine(where)
    tune = [*PLAN, "tune", *options.split()]
    subprocess.run([*tune, "--db", alone], check=True, capture_output=True)
    begun = time.monotonic()
    running = subprocess.Popen([*tune, "--db", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not in_use(server, "tuned") and running.poll() is None:
        time.sleep(0.05)
    with killed(server, kills, chance, up_s=0.4, down_s=0.4) as killing:
        err = running.communicate()[1]
        early = killing.is_alive()
    print(f"a tune whose server is killed {kills} times: {time.monotonic() - begun:.1f} s")
    wrong = [f"status {running.returncode}: {err[-500:]}"] if running.returncode else []
    wrong += ["the tune ended before all kills"] if early else []
    if (said := err.count("waiting for the database")) != 1:
        wrong.append(f"it says {said} times that it waits: {err[-500:]}")
    if plans(url) != plans(alone):
        wrong.append(f"{plans(url)} are planned, and {plans(alone)} by a tune left alone")
    return wrong


def check_calls(server: Server, kills: int, chance: random.Random) -> list[str]:
    """What is wrong with functions that are compiled while the server is killed."""
    url = server.url("called")
    report_samples.known_machine(url)
    subprocess.run([*PLAN, "db", "pull", url], check=True)
    running = subprocess.Popen(
        [sys.executable, "-c", CALLS, url], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    running.stdout.readline()
    with killed(server, kills, chance, up_s=1.0, down_s=1.0):
        pass
    out, err = running.communicate("stop\n")
    print(f"while the server is killed {kills} times: {out}")
    if running.returncode:
        return [f"compiled functions fail: {err[-1000:]}"]
    warned = [line for line in out.splitlines()[1:] if line]
    return [] if len(warned) == 1 and "snapshot" in warned[0] else [f"{len(warned)} warnings: {warned}"]


def check_leases(server: Server, processes: int) -> list[str]:
    """What is wrong where many processes take leases of the same keys."""
    failed, left, slowest = many_leases.run(server.url("leases"), processes, rounds=20)
    print(f"{processes} processes take leases of {len(many_leases.KEYS)} keys: {failed} failed, {left} are left, the "
          f"slowest call took {slowest:.2f} s", flush=True)
    wrong = [f"{failed} processes failed"] * bool(failed) + [f"{left} leases are left"] * bool(left)
    return wrong + [f"a call took {slowest:.2f} s"] * (slowest >= SLOWEST_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--tune", default=TUNE, help="options of plan tune")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leases", type=int, metavar="PROCESSES", help="check leases alone, with so many processes")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, running_server() as server:
        os.environ["XDG_DATA_HOME"] = folder
        wrong += check_leases(server, arguments.leases or 40)
        if arguments.leases:
            return verdict(wrong)
        for where in (str(Path(folder) / "many.db"), server.url("many")):
            statuses, seconds = many_writers.run(where)
            lost = many_writers.lost(where)
            failed = sum(map(bool, statuses))
            kind = "a server" if "://" in where else "a file"
            print(f"64 processes on {kind}: {seconds:.1f} s, {failed} failed, {len(lost)} lost", flush=True)
            wrong += lost + [f"{failed} writers failed"] * bool(failed)
        wrong += check_tune(server, Path(folder), arguments.tune, arguments.kills, chance)
        wrong += check_calls(server, arguments.kills, chance)
    return verdict(wrong)


def verdict(wrong: list[str]) -> int:
    print("\n".join(wrong) or "nothing is lost")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
