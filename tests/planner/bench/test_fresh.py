"""Fresh processes of the bench: what they are told, what they find, and how they fail."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import fresh_starts as fresh
import model_samples
import pytest
import torch
from fresh_starts import Order, Stopwatch
from generation import Sizes

from fuseplan.planner.models.sources import find_source
from fuseplan.planner.peers.contestant import EAGER, PeerError


@pytest.fixture
def order(tmp_path: Path) -> Order:
    source = find_source(config=model_samples.write_config(tmp_path, "llama"), dtype="float32")
    return Order(source, Sizes(2, 5, 3), EAGER, "cpu", {"db": "postgresql://me:secret@host/tuning"})


def test_an_order_is_read_as_it_was_written(order: Order) -> None:
    assert Order.from_json(order.to_json()) == order


def test_each_token_has_its_time(order: Order) -> None:
    times = fresh.serve(order)
    assert len(times) == 3 and 0 < times[0] < times[1] < times[2]


def test_the_prompt_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 13.0, 16.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    watch = Stopwatch(start=fresh.time.perf_counter())
    for tokens in (torch.zeros(2, 5), torch.zeros(2), torch.zeros(2)):
        watch.put(tokens)
    watch.end()
    assert watch.tokens == [3.0, 6.0]


def test_a_process_of_its_own_generates(order: Order) -> None:
    assert len(fresh.fresh_times(order, cold=True)) == 3


def test_a_process_that_fails_says_why(order: Order) -> None:
    nowhere = Order(order.source, order.sizes, order.name, "nowhere", order.options)
    with pytest.raises(PeerError, match=r"exit status 1: .*cannot be built"):
        fresh.fresh_times(nowhere)


@pytest.mark.parametrize("cold", [False, True])
def test_caches_are_empty_only_where_that_is_asked_for(
    order: Order, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    seen: list[dict[str, Any]] = []

    def run(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        seen.append({"command": command, **given})
        return subprocess.CompletedProcess(command, 0, "chatter\n[0.5, 2.0, 2.1]\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert fresh.fresh_times(order, cold) == [0.5, 2.0, 2.1]
    (call,) = seen
    assert "secret" not in " ".join(call["command"]) and json.loads(call["input"])["options"] == order.options
    changed = [word.partition("=")[0] for word in call["command"] if "=" in word]
    assert changed == (["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"] if cold else [])


def test_a_process_that_never_ends_is_a_reason_too(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, given["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(PeerError, match="not done after 3600 s"):
        fresh.fresh_times(order)
