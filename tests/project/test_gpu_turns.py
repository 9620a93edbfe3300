"""Turns on the device between test processes: shared, alone, and nobody waits forever."""

from __future__ import annotations

import importlib.util
import threading
import uuid
from pathlib import Path

import pytest
from paths import ROOT

SPEC = importlib.util.spec_from_file_location("gpu_conftest", ROOT / "tests" / "gpu" / "conftest.py")
assert SPEC is not None and SPEC.loader is not None
TURNS = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TURNS)


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(TURNS.tempfile, "gettempdir", lambda: str(tmp_path))
    return uuid.uuid4().hex


class Holder(threading.Thread):
    """Takes its turn, and keeps it until told to go."""

    def __init__(self, name: str, alone: bool) -> None:
        super().__init__(daemon=True)
        self.holds, self.go = threading.Event(), threading.Event()
        self._turn = name, alone
        self.start()

    def run(self) -> None:
        with TURNS.turn(*self._turn):
            self.holds.set()
            self.go.wait(20)


def test_tests_share_the_device(name: str) -> None:
    both = [Holder(name, alone=False) for _ in range(2)]
    assert all(one.holds.wait(10) for one in both)
    for one in both:
        one.go.set()
        one.join()


def test_one_alone_waits_for_others_and_keeps_later_ones_out(name: str) -> None:
    first = Holder(name, alone=False)
    assert first.holds.wait(10)
    alone = Holder(name, alone=True)
    assert not alone.holds.wait(0.2)
    later = Holder(name, alone=False)
    assert not later.holds.wait(0.2)  # though the device is only shared
    first.go.set()
    assert alone.holds.wait(10) and not later.holds.wait(0.2)
    alone.go.set()
    assert later.holds.wait(10)
    later.go.set()
    for one in (first, alone, later):
        one.join()


def test_a_failing_test_gives_its_turn_back(name: str) -> None:
    with pytest.raises(ValueError), TURNS.turn(name, alone=True):
        raise ValueError
    holder = Holder(name, alone=True)
    assert holder.holds.wait(10)
    holder.go.set()
    holder.join()
