"""A tune whose server is killed ten times ends as one that was left alone."""

from __future__ import annotations

import itertools
import threading
import warnings
from pathlib import Path

import pytest
from postgres_server import Server
from scripted_sessions import OPS, covers, graph_of, session_on, tuned

from fuseplan.search.store import connections
from fuseplan.search.store.leases import listed

pytestmark = pytest.mark.usefixtures("any_gain")

KILLS = 10


def test_a_tune_whose_server_is_killed_ten_times(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuseplan.planner.implementations.choices.LIBRARY_CALLS", ())
    monkeypatch.setattr(connections, "_AWAITED", set())
    pairs = list(itertools.combinations(OPS, 2))
    graph = graph_of(*zip(pairs[:7], pairs[7:14], strict=True))
    alone = session_on(tmp_path / "alone.db")
    expected = tuned(alone, graph)
    assert len(alone.scripted.tuned) > KILLS

    starting: list[threading.Thread] = []

    def kill() -> None:
        if len(starting) < KILLS:
            if starting:
                starting[-1].join()
            server.kill()
            starting.append(threading.Thread(target=server.start))
            starting[-1].start()

    session = session_on(server.url(), kill)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        found = tuned(session, graph)
    for thread in starting:
        thread.join()
    assert len(starting) == KILLS and len(caught) == 1 and "waiting for the database" in str(caught[0].message)
    assert covers(found) == covers(expected)
    assert session.scripted.tuned == alone.scripted.tuned
    database = session.database
    known = alone.database
    assert [(one.key, one.fuse) for one in database.records()] == [(one.key, one.fuse) for one in known.records()]
    assert [(one.key, one.groups) for one in database.plans()] == [(one.key, one.groups) for one in known.plans()]
    assert listed(database) == []
