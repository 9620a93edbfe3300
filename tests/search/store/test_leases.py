"""Leases: one owner a key, until it lets go, closes, or is not heard of for as long as a lease lasts."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from paths import SUPPORT

from fuseplan.search.store import leases as module
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import LASTS_S, Leases, listed
from fuseplan.search.store.record import RecordKey

KEYS = [RecordKey(f"{number:064d}", "dev") for number in range(4)]


def key_of(lease: Mapping[str, Any]) -> RecordKey:
    return RecordKey(lease["workload"], lease["device"], lease["regime"], lease["numerics"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "t.db"


class Clock:
    """A clock that is set by hand, in the place of a database's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = 1000.0
        monkeypatch.setattr(module, "clock", lambda _: sa.literal(self.s))
        monkeypatch.setattr(module, "_renew", lambda *_: None)  # only when it is said


@given(st.lists(st.tuples(
    st.sampled_from(["take", "release", "renew", "close", "wait"]), st.integers(0, 2),
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)), max_size=25))
def test_three_owners_against_a_model_of_them(steps: list[tuple[str, int, list[RecordKey]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock, database = Clock(patch), Database("sqlite://")
        owners = [Leases(database, f"owner {number}") for number in range(3)]
        held: dict[RecordKey, tuple[int, float]] = {}  # what the database says
        mine = [Counter[RecordKey]() for _ in owners]  # what each of them thinks it has, and how often
        for step, who, keys in steps:
            if step == "take":
                expected = {key for key in keys if mine[who][key] or key not in held or held[key][0] == who
                            or held[key][1] < clock.s}
                assert owners[who].take(keys) == expected
                held.update({key: (who, clock.s + LASTS_S) for key in expected if not mine[who][key]})
                mine[who].update(expected)
            elif step == "release":
                owned = [key for key in set(keys) if mine[who][key]]
                owners[who].release(owned)
                mine[who] -= Counter(owned)
                held = {key: (owner, ends) for key, (owner, ends) in held.items()
                        if owner != who or key not in owned or mine[who][key]}
            elif step == "renew":
                owners[who]._renew()
                if mine[who]:
                    held = {key: (owner, clock.s + LASTS_S if owner == who else ends)
                            for key, (owner, ends) in held.items()}
            elif step == "close":
                owners[who].close()
                held = {key: (owner, ends) for key, (owner, ends) in held.items() if owner != who or not mine[who][key]}
                mine[who].clear()
            else:
                clock.s += LASTS_S / 2 + 1
            found = {key_of(one): int(one["owner"].split()[1]) for one in listed(database)}
            assert found == {key: owner for key, (owner, ends) in held.items() if ends > clock.s}


KILLED = """
import os, signal, sys
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import Leases
from fuseplan.search.store.record import RecordKey
assert Leases(Database(sys.argv[1])).take([RecordKey("0" * 64, "dev")])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_lease_of_a_killed_process_ends_by_itself(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(file)], check=False, cwd=SUPPORT, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    mine = Leases(Database(file))
    assert not mine.take(KEYS[:1])
    (lease,) = listed(Database(file))
    assert 0 < lease["left_s"] <= LASTS_S <= 30  # a minute at most until somebody else goes on
    later = module.clock
    monkeypatch.setattr(module, "clock", lambda connection: later(connection) + LASTS_S + 1)
    assert mine.take(KEYS[:1]) == set(KEYS[:1])


def test_a_living_owner_renews_what_it_holds(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEWED_S", 0.001)
    renewed = threading.Event()
    database = Database(file)
    owner = Leases(database)
    real = owner._renew

    def renew() -> None:
        real()
        renewed.set()

    monkeypatch.setattr(owner, "_renew", renew)
    owner.take(KEYS[:1])
    assert renewed.wait(60)
    owner.close()
    assert listed(database) == []


def test_many_processes_never_hold_one_key_together(file: Path) -> None:
    """Each appends to a file while it holds the key: marks of two never interleave."""
    Database(file).close()
    script = (
        "import sys\n"
        "from fuseplan.search.store.database import Database\n"
        "from fuseplan.search.store.leases import Leases\n"
        "from fuseplan.search.store.record import RecordKey\n"
        "leases, marks = Leases(Database(sys.argv[1])), open(sys.argv[2], 'a', buffering=1)\n"
        "for _ in range(5):\n"
        "    with leases.alone(RecordKey('0' * 64, 'dev')):\n"
        "        marks.write(f'{leases.owner}\\n'); marks.write(f'{leases.owner}\\n')\n"
    )
    marks = file.with_name("marks")
    crowd = [subprocess.Popen([sys.executable, "-c", script, file, marks], cwd=SUPPORT) for _ in range(4)]
    assert [one.wait(300) for one in crowd] == [0] * 4
    lines = marks.read_text().splitlines()
    assert len(lines) == 40 and lines[::2] == lines[1::2]
    assert set(Counter(lines).values()) == {10}


def test_what_is_found_meanwhile_is_not_looked_for_again(file: Path) -> None:
    other, mine = Leases(Database(file)), Leases(Database(file))
    found: list[str] = []
    waits = threading.Event()

    def known() -> str | None:
        waits.set()
        return found[0] if found else None

    def find() -> str:
        raise AssertionError("another has found it")

    with other.taking(KEYS[:1]):
        answer: list[str] = []
        thread = threading.Thread(target=lambda: answer.append(mine.once(KEYS[0], known, find)))
        thread.start()
        assert waits.wait(60)
        found.append("theirs")
    thread.join(60)
    assert answer == ["theirs"]


def test_a_commit_that_sqlite_refuses_is_made_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so on a busy machine, and has written nothing then."""
    with Database(file) as database, Database(file) as other:
        assert database.engine is not None
        commit, refusals = database.engine.dialect.do_commit, iter([True])

        def refuse_once(connection: Any) -> None:
            if next(refusals, False):
                raise sqlite3.OperationalError("cannot commit transaction - SQL statements in progress")
            commit(connection)

        own = Leases(database, "me")
        for step in (own.take, own.release):
            refusals = iter([True])
            monkeypatch.setattr(database.engine.dialect, "do_commit", refuse_once)
            step([KEYS[0]])
            assert next(refusals, None) is None
            assert [key_of(one) for one in listed(other)] == ([KEYS[0]] if step == own.take else [])
