"""Signs that a job goes on while it does one thing that takes long."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fuseplan.search.timing import signs


@pytest.fixture
def told() -> Iterator[threading.Event]:
    event = threading.Event()
    signs.listen(event.set)
    yield event
    signs.listen(None)


def test_they_come_meanwhile_and_end_with_it(told: threading.Event) -> None:
    with signs.going_on(600.0):
        assert told.wait(60.0)
    assert not [one for one in threading.enumerate() if one.daemon and one.name.endswith("(tell)")]


def test_none_come_after_the_limit(told: threading.Event) -> None:
    with signs.going_on(-1.0):
        assert not told.wait(2.5)


def test_nobody_listens_and_nothing_starts() -> None:
    signs.listen(None)
    before = threading.active_count()
    with signs.going_on(600.0):
        assert threading.active_count() == before
