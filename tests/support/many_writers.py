"""64 processes that write the same and different keys to one database at the same time.

Run as a script it takes the database's location, and prints what it took. They are forked from one process, which has
imported all that they need.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable

from search_records import HERE, SPEC, plan, tuning

from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.location import resolve_url
from fuseplan.search.store.record import Trial

WRITERS, ROUNDS = 64, 2
#: Keys that every process writes.
SHARED = ("s1", "s2", "s3")


def write(where: str, writer: int) -> None:
    """What one process writes: in each round its own keys, and in another order than its neighbours the shared ones."""
    with Database(where, versions=HERE) as db:
        for number in range(ROUNDS):
            own, shared = f"w{writer}-{number}", SHARED[writer % len(SHARED):] + SHARED[:writer % len(SHARED)]
            for name in (own, *shared):
                db.log_trial(Trial(tuning(name).key, "cpp", {"threads": writer}, 5.0), HERE)
                db.put_record(tuning(name, us=float(writer + 1)))
                db.put_plan(plan(name, planned_us=float(writer + 1)))
                db.put_device(f"cpu-{name}", SPEC)
                db.put_capture(f"step/{name}", {"writer": writer})
            assert db.log_misses([Missed(plan(name).key, "missed", {"writer": writer}) for name in (own, *shared)])
            assert db.get_plans([plan(own).key])[plan(own).key].hit is not None


def lost(where: str) -> list[str]:
    """What is missing or wrong in the database after all have written; [] when nothing is."""
    names = [*SHARED, *(f"w{writer}-{number}" for writer in range(WRITERS) for number in range(ROUNDS))]
    with Database(where, "inspect", HERE) as db:
        records = {record.key.workload: record for record in db.records()}
        plans = {one.key.workload: one for one in db.plans()}
        devices, captures = db.devices(), db.captures("step/")
        misses = {miss["workload"]: miss["count"] for miss in db.misses()}
        trials = {name: len(db.trials(tuning(name).key)) for name in names}
    kinds = {"record": records, "plan": plans, "miss": misses}
    found = [f"{kind} {name}" for kind, there in kinds.items() for name in names if name not in there]
    found += [f"device {name}" for name in names if devices.get(f"cpu-{name}") != SPEC]
    found += [f"capture {name}" for name in names if f"step/{name}" not in captures]
    for name in names:
        writers = range(WRITERS) if name in SHARED else [int(name[1:].split("-")[0])]
        times = len(writers) * (ROUNDS if name in SHARED else 1)
        if misses.get(name) != times:
            found.append(f"{name} was missed {times} times and is counted {misses.get(name)} times")
        if trials[name] != len(writers):
            found.append(f"{name} has {trials[name]} trials of {len(writers)}")
        if name in records and records[name] not in [tuning(name, us=float(writer + 1)) for writer in writers]:
            found.append(f"record {name} is of nobody")
    return found


def run(where: str) -> tuple[list[int], float]:
    """As :func:`forked`, for the processes of :func:`write`."""
    return forked(where, WRITERS, lambda writer: write(where, writer))


def forked(where: str, processes: int, work: Callable[[int], None]) -> tuple[list[int], float]:
    """The exit statuses of processes that do some ``work``, each with its number, on the database ``where``; and the
    seconds from the start of all to the end of the last.
    """
    resolve_url(where).get_dialect().import_dbapi()
    waiting, go = os.pipe()
    children = []
    for writer in range(processes):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                warnings.simplefilter("error")
                os.read(waiting, 1)
                work(writer)
                status = 0
            except BaseException as error:
                print(f"{writer}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        children.append(child)
    begun = time.monotonic()
    os.write(go, bytes(processes))
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return statuses, time.monotonic() - begun


if __name__ == "__main__":
    assert "torch" not in sys.modules
    statuses, seconds = run(sys.argv[1])
    wrong = lost(sys.argv[1])
    failed = sum(map(bool, statuses))
    print(f"{WRITERS} processes, {ROUNDS} rounds each: {seconds:.1f} s, {failed} failed, {len(wrong)} lost")
    print("\n".join(wrong[:20]))
    sys.exit(bool(wrong or any(statuses)))
