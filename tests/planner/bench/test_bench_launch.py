"""The pattern bench on the command line, and tuning what is not stored."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import report_samples as samples
import torch
from graphs import Builder
from group_bench import measure_groups
from inline_executor import InlineExecutor

from fuseplan.planner.bench.patterns import PatternBench
from fuseplan.planner.cli import main
from fuseplan.planner.cli.bench import topics
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.models.sources import find_source, workloads_for
from fuseplan.planner.patterns.cells import cell
from fuseplan.planner.peers import contestant
from fuseplan.planner.peers.contestant import EAGER, OURS
from fuseplan.planner.tuning.planner import Planner
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.search.errors import DatabaseError, MachineFailureError
from fuseplan.search.tune.tuner import Budget, make_pool

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A database that knows this machine's CPU, so that no command has to probe it."""
    return samples.known_machine(tmp_path / "tuning.db")


@pytest.fixture
def session(db: Path) -> Session:
    return open_session("cpu", db)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], db: Path, tmp_path: Path) -> Run:
    def run(*argv: str, out: str = "out") -> tuple[int, str, str]:
        capsys.readouterr()
        common = ["--device", "cpu", "--db", str(db), "--out", str(tmp_path / out), "--seconds", "0.01"]
        status = main.run(["bench", *argv, *common])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


# -- tuning -----------------------------------------------------------------------------------------------------


_BRIEFLY = Budget(trials=1, seconds=0.1)


def test_a_cell_is_tuned_once_and_found_by_the_bench(session: Session) -> None:
    one, said = cell("swiglu", "3x33", "float32"), list[str]()
    graph = contestant.trace_cell(one, "cpu")[0].graph
    assert session.planner().undecided(graph)
    with make_pool("cpu") as pool:
        topics.tune_cells(session, [one], _BRIEFLY, pool, said)
    assert not session.planner().undecided(graph) and not said
    with make_pool("cpu") as unused:
        topics.tune_cells(session, [one], _BRIEFLY, unused, said)
        assert unused._process is None  # nothing was missing, so no process was started
    (ours,) = [row for row in PatternBench(session, (), ("eager",), 0.0).rows(one) if row.contestant == OURS]
    assert "not tuned" not in ours.note and ours.median_us is not None


def test_a_region_that_cannot_be_planned_costs_only_itself(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Planner._decide

    def fails_for_logarithms(self: Planner, graph: DataflowGraph, region: Region, *rest: Any) -> Any:
        if any(graph.op(name).op == "aten.log.default" for name in region.ops):
            raise ZeroDivisionError("no groups")
        return decide(self, graph, region, *rest)

    b = Builder(x=torch.randn(5, 5), weight=torch.randn(5, 5))
    left = b("aten.mul.Tensor", b("aten.sigmoid.default", "x"), "x")
    right = b("aten.log.default", b("aten.exp.default", "weight"))
    graph = b.graph(b("aten.mm.default", left, right))
    monkeypatch.setattr(Planner, "_decide", fails_for_logarithms)
    one = cell("swiglu", "3x33", "float32")
    said: list[str] = []
    monkeypatch.setattr(contestant, "trace_cell", lambda *_: (SimpleNamespace(graph=graph), {}))
    with InlineExecutor() as pool:
        topics.tune_cells(session, [one], _BRIEFLY, pool, said)
    (failure,) = said
    assert failure.startswith(f"{one.key}: ") and "ZeroDivisionError: no groups" in failure
    assert len(session.planner().undecided(graph)) == 1  # the other region is stored


@pytest.mark.parametrize("error", [MachineFailureError("no space left"), DatabaseError("no space left")])
def test_what_would_fail_for_every_cell_is_raised(
    session: Session, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(Planner, "_decide", fails)
    one, said = cell("swiglu", "3x33", "float32"), list[str]()
    with InlineExecutor() as pool, pytest.raises(type(error), match="no space left"):
        topics.tune_cells(session, [one], _BRIEFLY, pool, said)
    assert said == []


# -- the command line -------------------------------------------------------------------------------------------

_QUICK = ("--no-tune", "--peers", "eager,cpp-default")


def test_patterns_are_measured_and_published(plan: Run, tmp_path: Path) -> None:
    sizes = ("--rows", "1,3", "--cols", "17", "--dtype", "fp32")
    status, out, err = plan("patterns", "--pattern", "swiglu", *sizes, *_QUICK)
    assert status == 0, err
    frame = pd.read_csv(tmp_path / "out" / "patterns-swiglu-cells.csv")
    assert frame["contestant"].tolist() == [OURS, EAGER, "cpp default"] * 2
    assert frame["workload"].unique().tolist() == ["1x17", "3x17"] and frame["median_us"].notna().all()
    text = (tmp_path / "out" / "patterns-swiglu-cells.md").read_text()
    assert "eager, swiglu: " in text and "| best_peer | vs_best |" in text
    assert "1 region by the cost model, not tuned" in out
    facts = json.loads((tmp_path / "out" / "patterns-swiglu-cells.json").read_text())
    assert facts["versions"]["torch"] == version("torch")


def test_a_region_that_cannot_be_tuned_is_said(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Planner._decide

    def untunable(self: Planner, *rest: Any) -> Any:
        if self.tuner is not None:
            raise ZeroDivisionError("no groups")
        return decide(self, *rest)

    monkeypatch.setattr(Planner, "_decide", untunable)
    tuned = ("--trials", "1", "--tune-seconds", "0.1")
    sizes = ("--pattern", "swiglu", "--shape", "3x17", "--dtype", "fp32")
    status, out, err = plan("patterns", *sizes, "--no-inductor", *tuned)
    assert status == 0, err
    assert "swiglu 3x17 float32: " in out and "is not planned and runs unfused: ZeroDivisionError: no groups" in out


def test_groups_are_measured_without_the_region_that_cannot_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decide = Planner._decide

    def fails_for_tanh(self: Planner, graph: DataflowGraph, region: Region, *rest: Any) -> Any:
        if any(graph.op(name).op == "aten.tanh.default" for name in region.ops):
            raise ZeroDivisionError("no groups")
        return decide(self, graph, region, *rest)

    monkeypatch.setattr(Planner, "_decide", fails_for_tanh)
    session = open_session("cpu", samples.known_machine(tmp_path / "tuning.db"))
    source = find_source(module="toy_models:two_regions")
    rows = measure_groups(session, source, workloads_for(source, "cpu", None, None, None), (EAGER,), 0.0)
    err = capsys.readouterr().err
    assert "tanh" in err and "is not planned and runs unfused: ZeroDivisionError: no groups" in err
    assert {row.subject for row in rows} == {"silu+mul 3x24 float32"}


def test_a_machine_that_fails_ends_the_bench(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise MachineFailureError("no space left")

    monkeypatch.setattr(Planner, "_decide", fails)
    status, _, err = plan("patterns", "--pattern", "swiglu", "--shape", "3x17", "--dtype", "fp32", "--no-inductor")
    assert status == 1 and "no space left" in err and "Traceback" not in err


def test_an_interrupted_bench_keeps_its_cells_and_goes_on(
    plan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = PatternBench.rows
    seen: list[str] = []

    def interrupted(self: PatternBench, one: Any) -> Any:
        seen.append(one.size)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return rows(self, one)

    monkeypatch.setattr(PatternBench, "rows", interrupted)
    argv = ("patterns", "--pattern", "swiglu", "--rows", "1,3,5", "--cols", "17", *_QUICK)
    status, _, err = plan(*argv)
    assert status == 130 and "interrupted" in err
    path = tmp_path / "out" / "patterns-swiglu-cells.csv"
    assert pd.read_csv(path)["workload"].unique().tolist() == ["1x17"]
    assert (path.with_suffix(".md")).exists()
    assert plan(*argv, "--resume")[0] == 0
    assert seen == ["1x17", "3x17", "3x17", "5x17"]
    assert pd.read_csv(path)["workload"].unique().tolist() == ["1x17", "3x17", "5x17"]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["patterns", "--pattern", "swiglou"], ["unknown pattern 'swiglou'", "swiglu"]),
        (["patterns", "--pattern", "swiglu", "--rows", "0"], ["--rows: '0'", "1,8,32"]),
        (["patterns", "--pattern", "swiglu", "--cols", "x"], ["--cols: 'x'"]),
        (["patterns", "--shape", "3x8"], ["--shape needs --pattern"]),
        (["patterns", "--pattern", "swiglu", "--shape", "3x8", "--rows", "1"], ["leave out --rows"]),
        (["patterns", "--pattern", "swiglu", "--shape", "3x8x1x1"], ["swiglu", "32x4096"]),
        (["patterns", "--peers", "ligr"], ["no peer 'ligr'", "liger"]),
        (["patterns", "--modes", "warm"], ["no mode 'warm'", "eager, graph, cold"]),
        (["patterns", "--modes", "cold"], ["cold needs a CUDA device"]),
        (["patterns", "--modes", ","], ["--modes is empty"]),
        (["patterns", "--dtype", "int3"], ["int3", "bfloat16"]),
        (["patterns", "--model", "llama"], ["named patterns"]),
        (["model", "--rows", "1"], ["plan bench patterns"]),
    ],
)
def test_mistakes_are_one_line(plan: Run, argv: list[str], words: list[str]) -> None:
    status, _, err = plan(*argv, "--no-tune")
    assert status == 2, err
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("plan: error: ")
    for word in words:
        assert word in err, (word, err)


def test_the_bench_imports_no_peer_before_it_is_asked_for() -> None:
    import subprocess

    code = (
        "import sys, fuseplan.planner.peers.peers; "
        "print([name for name in ('liger_kernel', 'flashinfer', 'torch._inductor.compile_fx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
