"""Looking ahead changes when work is done, never what is planned."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from graphs import Builder
from reference_backend import ReferenceBackend
from scripted_tuner import TARGET, ScriptedTuner, chain, compute_nodes

from fuseplan.kernels.ir.backend import Target
from fuseplan.planner.cost.prices import ModelPrices
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.tuning.lookahead import Lookahead
from fuseplan.planner.tuning.planner import Planner
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import PlanRecord, Versions

GPU = replace(TARGET, device_type="cuda")
pytestmark = pytest.mark.usefixtures("any_gain")


class AnyDevice(ReferenceBackend):
    def refuse(self, ir: object, target: Target) -> str | None:
        return None


def planner(folder: Path, name: str, target: Target = GPU) -> tuple[Planner, ScriptedTuner]:
    database = Database(folder / name, "write", Versions.current(target.device_type))
    tuner = ScriptedTuner(database, lambda subject: 3.0 + len(compute_nodes(subject)) ** 2)
    return Planner(database, None, "dev", target, (AnyDevice(),), tuner=tuner), tuner  # type: ignore[arg-type]


def two_regions() -> DataflowGraph:
    b = Builder(x=torch.randn(4, 8))
    first = b("aten.tanh.default", b("aten.exp.default", "x"))
    second = b("aten.neg.default", b("aten.exp.default", b("aten.rrelu.default", first)))
    return b.graph(second)


def essence(record: PlanRecord) -> tuple[object, ...]:
    return record.key, record.groups, record.enumerated, record.measured, round(record.planned_us, 6)


def test_plans_are_the_same_with_and_without(tmp_path: Path) -> None:
    graph = two_regions()
    alone, _ = planner(tmp_path, "a.db")
    ahead, tuner = planner(tmp_path, "b.db")
    lookahead = ahead.lookahead()
    assert lookahead is not None
    with lookahead:
        lookahead.send(graph, ahead.undecided(graph))
        found = ahead.plan_graph(graph)
    expected = alone.plan_graph(graph)
    assert [essence(plan.record) for plan in found.regions] == [essence(plan.record) for plan in expected.regions]
    assert len(found.regions) == 2
    assert len(tuner.prefetched) >= 2
    assert ahead.undecided(graph) == []


def test_a_region_that_was_not_sent_is_planned_all_the_same(tmp_path: Path) -> None:
    ahead, _ = planner(tmp_path, "a.db")
    lookahead = ahead.lookahead()
    assert lookahead is not None
    graph = chain(3)
    with lookahead:
        assert ahead.plan_graph(graph).regions[0].source == "tuned"
        assert lookahead.problem(find_regions(graph)[0]) is None


def test_a_tune_does_not_wait_for_what_is_sent_to_the_compilers(tmp_path: Path) -> None:
    ahead, tuner = planner(tmp_path, "a.db")
    gate = threading.Event()
    tuner.prefetch_default = lambda subjects: gate.wait(20)  # type: ignore[assignment, method-assign, return-value]
    graph = two_regions()
    lookahead = ahead.lookahead()
    assert lookahead is not None
    with lookahead:
        lookahead.send(graph, find_regions(graph))
        assert lookahead.problem(find_regions(graph)[0]) is not None
        assert not gate.is_set()
        gate.set()


def test_a_failure_to_compile_ahead_costs_no_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ahead, tuner = planner(tmp_path, "a.db")

    def broken(subjects: object) -> None:
        raise RuntimeError("the pool is gone")

    tuner.prefetch_default = broken  # type: ignore[method-assign]
    graph = two_regions()
    lookahead = ahead.lookahead()
    assert lookahead is not None
    with lookahead:
        lookahead.send(graph, find_regions(graph))
        found = ahead.plan_graph(graph)
    assert [plan.source for plan in found.regions] == ["tuned", "tuned"]
    assert "RuntimeError: the pool is gone" in caplog.text


def test_leaving_tells_who_waits_for_a_region_that_was_never_prepared(tmp_path: Path) -> None:
    ahead, tuner = planner(tmp_path, "a.db")
    gate = threading.Event()
    tuner.prefetch_default = lambda subjects: gate.wait(20)  # type: ignore[assignment, method-assign, return-value]
    graph = two_regions()
    regions = find_regions(graph)
    lookahead = ahead.lookahead()
    assert lookahead is not None
    with lookahead:
        lookahead.send(graph, regions)
        assert lookahead.problem(regions[0]) is not None
        threading.Timer(0.05, gate.set).start()
    with pytest.raises(CancelledError):
        lookahead.problem(regions[1])


def test_cpus_and_planning_without_measurement_do_not_look_ahead(tmp_path: Path) -> None:
    assert planner(tmp_path, "a.db", TARGET)[0].lookahead() is None
    database = Database(tmp_path / "b.db", "write", Versions.current("cpu"))
    assert Planner(database, None, "dev", GPU, (AnyDevice(),)).lookahead() is None


def test_leaving_ends_the_thread_and_a_failure_reaches_who_asks(tmp_path: Path) -> None:
    ahead, tuner = planner(tmp_path, "a.db")
    graph = two_regions()
    regions = find_regions(graph)

    def broken(*args: object) -> object:
        raise RuntimeError("no candidates today")

    with Lookahead(
        broken, lambda table: ModelPrices(table, ahead.spec), ahead._table,  # type: ignore[arg-type]
        ahead._rehearse, tuner, ahead._is_minor, ahead._nominal_joint,
    ) as lookahead:
        lookahead.send(graph, regions)
        with pytest.raises(RuntimeError, match="no candidates today"):
            lookahead.problem(regions[0])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lookahead")]
