"""The rows of one cell of the pattern bench: who is right gets a time, who is not a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_samples import cpu_session

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.bench import patterns
from fuseplan.planner.bench.patterns import PatternBench, copy_of
from fuseplan.planner.patterns.cells import cell
from fuseplan.planner.peers.contestant import EAGER, OURS, Case, Contestant, PeerError
from fuseplan.planner.peers.peers import PEERS, Peer
from fuseplan.planner.tuning.session import Session


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return cpu_session(tmp_path_factory.mktemp("bench"))


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of swiglu that are right, wrong, misshapen, broken, and absent."""

    def joined(case: Case) -> Contestant:
        def overwrite(both: torch.Tensor) -> None:
            gate, up = both.chunk(2, -1)
            gate.copy_(_swiglu(gate, up))

        return Contestant(
            overwrite, lambda gate, up: (torch.cat([gate, up], -1),),
            lambda result, operands: [operands[0].chunk(2, -1)[0]], "in place",
        )

    def broken(case: Case) -> Contestant:
        raise RuntimeError("no\ncompiler")

    def absent(case: Case) -> Contestant:
        raise PeerError("it is not installed")

    makers = {
        "joined": joined, "wrong": lambda case: Contestant(lambda gate, up: gate * up),
        "short": lambda case: Contestant(lambda gate, up: _swiglu(gate, up)[:1]), "broken": broken, "absent": absent,
    }
    peers = {name: Peer(make) for name, make in makers.items()}
    elsewhere = Peer(absent, is_gpu)
    monkeypatch.setattr(patterns, "PEERS", {EAGER: PEERS[EAGER], **peers, "elsewhere": elsewhere})


@pytest.mark.usefixtures("rivals")
def test_everyone_gets_a_row_and_only_who_is_right_a_time(session: Session) -> None:
    names = (EAGER, "joined", "wrong", "short", "broken", "absent", "elsewhere")
    found = PatternBench(session, names, ("eager",), 0.0).rows(cell("swiglu", "3x127", "float32"))
    rows = {row.contestant: row for row in found}
    assert len(found) == len(rows) == 8
    for name in (OURS, EAGER, "joined"):
        assert rows[name].median_us is not None and rows[name].error is not None and rows[name].error < 1e-6
    assert rows["joined"].note == "in place" and rows["joined"].gain is not None
    said = {name: rows[name].note for name in ("wrong", "short", "broken", "absent", "elsewhere")}
    assert said["wrong"].startswith("another result: its error")
    assert said["short"] == "another result: its outputs have shapes [(1, 127)], not [(3, 127)]"
    assert said["broken"] == "RuntimeError: no compiler"
    assert said["absent"] == "it is not installed"
    assert said["elsewhere"] == "elsewhere does not run on cpu"
    assert all(rows[name].median_us is None for name in said)
    for row in found:
        assert (row.subject, row.workload, row.key) == ("swiglu", "3x127", "swiglu 3x127 float32")
        assert (row.dtype, row.bytes, row.kernels) == ("float32", 3 * 3 * 127 * 4, 1)


def test_a_cell_that_cannot_be_made_leaves_the_others_in_the_bench(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("64 GiB are too many")

    monkeypatch.setattr(patterns, "plan_case", fail)
    (only,) = PatternBench(session, (EAGER,), ("eager",), 0.0).rows(cell("swiglu", "3x8", "float32"))
    assert (only.contestant, only.median_us, only.note) == (OURS, None, "MemoryError: 64 GiB are too many")
    assert only.key == "swiglu 3x8 float32"


def test_a_copy_moves_as_many_bytes() -> None:
    contestant = copy_of(4096.0, "cpu")
    target, source = contestant.prepare()
    assert target.numel() * 4 + source.numel() * 4 == 4096
    source.fill_(7)
    contestant.run(target, source)
    assert bool((target == 7).all())
