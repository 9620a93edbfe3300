"""Every second of the account's thread is in exactly one category."""

from __future__ import annotations

import threading

import pytest

from fuseplan.search.tune.time_account import TimeAccount, process_age_s


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nested_categories_add_up() -> None:
    clock = Clock()
    account = TimeAccount(before_s=4.0, clock=clock)
    clock.now += 0.5
    with account.spend("planning"):
        clock.now += 1.0
        for _ in range(2):
            with account.spend("screening"):
                clock.now += 3.0
        clock.now += 0.25
    clock.now += 0.125
    spent = account.spent()
    assert spent == {
        "starting": (4.0, 0), "planning": (1.25, 1), "screening": (6.0, 2), "other": (0.625, 0)
    }
    assert list(spent)[-1] == "other"
    assert sum(own_s for own_s, _ in spent.values()) == 4.0 + clock.now - 100.0
    assert account.line() == (
        "where the time went: 11.9 s = starting 4.0 s, planning 1.2 s, screening 6.0 s (2x), other 0.6 s"
    )


def test_an_exception_closes_its_categories_and_a_running_one_counts() -> None:
    clock = Clock()
    account = TimeAccount(clock=clock)
    with pytest.raises(ValueError, match="stop"), account.spend("planning"), account.spend("screening"):
        clock.now += 1.0
        raise ValueError("stop")
    with account.spend("deciding"):
        clock.now += 2.0
        assert account.spent()["deciding"][0] == 2.0
    assert account.spent() == {"screening": (1.0, 1), "planning": (0.0, 1), "deciding": (2.0, 1),
                               "other": (0.0, 0)}


def test_a_category_within_itself_is_counted_once() -> None:
    clock = Clock()
    account = TimeAccount(clock=clock)
    with account.spend("storing"), account.spend("storing"):
        clock.now += 1.0
    assert account.spent()["storing"] == (1.0, 2)


def test_other_threads_book_nothing() -> None:
    clock = Clock()
    account = TimeAccount(clock=clock)

    def work() -> None:
        with account.spend("elsewhere"):
            clock.now += 5.0

    thread = threading.Thread(target=work)
    with account.spend("here"):
        thread.start()
        thread.join()
    assert account.spent() == {"here": (5.0, 1), "other": (0.0, 0)}


def test_an_empty_account_has_a_line() -> None:
    assert TimeAccount(clock=Clock()).line() == "where the time went: 0.0 s = other 0.0 s"


def test_a_process_knows_its_age() -> None:
    first = process_age_s()
    assert 0.0 <= first <= process_age_s()
