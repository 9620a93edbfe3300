"""Stored plans are taken only where a planner could have written them for the region; a bad one costs its region."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from dispatch_samples import Block, compiled, fresh_start, store_plans, swiglu
from graphs import Builder
from reference_backend import ReferenceBackend, use
from scripted_tuner import TARGET
from ways import WAYS

import fuseplan.planner
from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.partition.plan_check import RefusedPlanError, accepted_plan
from fuseplan.planner.tuning.planner import Planner
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import GroupChoice, PlanRecord, Versions

HONEST = {"unroll": 1}
Edit = Callable[[PlanRecord], PlanRecord]


def fork() -> DataflowGraph:
    """Two chains of two ops, and one op that reads both; beside views, which are nobody's op."""
    b = Builder(x=torch.randn(4, 8))
    left = b("aten.neg.default", b("aten.exp.default", "x"))
    right = b("aten.abs.default", b("aten.tanh.default", b("aten.view.default", "x", size=(4, 8))))
    return b.graph(b("aten.add.Tensor", left, right), right)


def partitions(items: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = [item for item in rest if item not in others]
            yield from ([(first, *others), *more] for more in partitions(left))


def planned(graph: DataflowGraph) -> tuple[Callable[[Any, PlanRecord], PlanRecord], Any, PlanRecord]:
    database = Database("sqlite://", versions=Versions.current("cpu"))
    plan = Planner(database, None, "dev", TARGET, (ReferenceBackend(),)).plan_graph(graph).regions[0]
    return partial(accepted_plan, GroupTable(graph, "fp32", "cpu"), WAYS), plan.region, plan.record


def choice(ops: Sequence[int], **fields: Any) -> GroupChoice:
    return GroupChoice(tuple(ops), "cpp", workload="w", config=HONEST, **fields)


def test_of_all_ways_to_group_ops_those_that_can_run_are_accepted() -> None:
    """Against networkx: a cover can run where the graph with each group contracted has no cycle."""
    graph = fork()
    check, region, record = planned(graph)
    positions = [at for at, name in enumerate(region.ops) if "view" not in graph.op(name).op]
    assert len(positions) == 5 < len(region.ops)
    verdicts = []
    for groups in partitions(positions):
        contracted = nx.DiGraph()
        owner = {region.ops[at]: number for number, group in enumerate(groups) for at in group}
        views = [name for name in graph.graph if name not in owner]
        owner |= {name: len(groups) + number for number, name in enumerate(views)}
        contracted.add_edges_from((owner[a], owner[b]) for a, b in graph.graph.edges if owner[a] != owner[b])
        runs = nx.is_directed_acyclic_graph(contracted)
        verdicts.append(runs)
        changed = replace(record, groups=tuple(map(choice, groups)))
        if runs:
            assert [one.ops for one in check(region, changed).groups] == [tuple(group) for group in groups]
        else:
            with pytest.raises(RefusedPlanError):
                check(region, changed)
    assert len(verdicts) == 52 and 5 < sum(verdicts) < 47


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([], "in no group"),
        ([(0, 1, 2, 3)], "in no group"),
        ([(0, 1, 2, 3, 4), (4,)], "in two groups"),
        ([(0, 0, 1, 2, 3, 4)], "in two groups"),
        ([(0, 1, 2, 3, 4), ()], "no ops"),
        ([(0, 1, 2, 3, 4, 99)], "does not have"),
        ([(0, 1, 2, 3, 4, 10**30)], "does not have"),
        ([(-1, 1, 2, 3, 4)], "does not have"),
    ],
)
def test_what_is_no_cover_is_refused(groups: list[tuple[int, ...]], reason: str) -> None:
    check, region, record = planned(fork())
    compute = sorted(at for one in record.groups for at in one.ops)
    view = next(at for at in range(len(region.ops)) if at not in compute)
    places = {**dict(enumerate(compute)), 99: view}
    changed = tuple(choice([places.get(at, at) for at in group]) for group in groups)
    with pytest.raises(RefusedPlanError, match=reason):
        check(region, replace(record, groups=changed))


def test_groups_without_a_kernel_are_refused() -> None:
    check, region, record = planned(fork())
    (whole,) = record.groups
    for changes, reason in (
        ({"implementation": "[/red]"}, "none for cpu"), ({"implementation": ""}, "none for cpu"),
        ({"implementation": "sdpa.cudnn"}, "none for cpu"), ({"config": {}}, "lacks unroll"),
        ({"config": {"unroll": 3}}, "its unroll is none"), ({"config": {"unroll": "1"}}, "its unroll is none"),
        ({"config": {**HONEST, "\x1b[31m": 1}}, "unknown here"), ({"implementation": "aten"}, "without a kernel"),
    ):
        changed = replace(record, groups=(replace(whole, **changes),))  # type: ignore[arg-type]
        with pytest.raises(RefusedPlanError, match=reason) as caught:
            check(region, changed)
        assert "red" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_a_group_that_does_not_lower_is_refused() -> None:
    """Rows of two lengths, one of which needs the other's sum."""
    b = Builder(x=torch.randn(3, 8), y=torch.randn(3, 6))
    mean = b("aten.mean.dim", "x", dim=(1,), keepdim=True)
    graph = b.graph(b("aten.softmax.int", b("aten.mul.Tensor", "y", mean), dim=1))
    (region,) = find_regions(graph)
    table = GroupTable(graph, "fp32", "cpu")
    assert table.legal(region.ops) is not None
    record = replace(planned(fork())[2], groups=(choice(range(len(region.ops))),))
    with pytest.raises(RefusedPlanError, match="cannot be one kernel"):
        accepted_plan(table, WAYS, region, record)


def test_labels_are_made_anew() -> None:
    check, region, record = planned(fork())
    marked = replace(record, label="\x1b[31m", groups=tuple(replace(one, label="[/red]²") for one in record.groups))
    assert check(region, marked) == record


# -- dispatch ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def first_group(**changes: Any) -> Edit:
    def edit(record: PlanRecord) -> PlanRecord:
        return replace(record, groups=(replace(record.groups[0], **changes), *record.groups[1:]))

    return edit


def edited(db: Path, edit: Edit, which: int = 0) -> None:
    database = Database(db)
    database.put_plan(edit(sorted(database.plans(), key=lambda plan: plan.label)[which]))
    database.close()


@pytest.mark.parametrize(
    "edit",
    [
        first_group(implementation="none"), first_group(config={"x": 1}), lambda record: replace(record, groups=()),
        first_group(ops=(0,)), first_group(config={"unroll": 77}),
    ],
)
def test_a_bad_row_costs_its_own_region(edit: Edit, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    use(monkeypatch, ReferenceBackend())
    model, inputs, db = Block(), (torch.randn(4, 33), torch.randn(4, 33)), tmp_path / "t.db"
    store_plans(model, inputs, db, ({},))
    edited(db, edit)
    caplog.set_level(logging.WARNING, logger="fuseplan")
    for one, other in zip(compiled(model, db)(*inputs), model(*inputs), strict=True):
        torch.testing.assert_close(one, other)
    done = fuseplan.planner.stats()
    assert (done.from_database, done.from_model, done.misses, done.quarantined) == (1, 0, 0, 1)
    assert sum("a stored plan is not used" in reason for reason in done.fallbacks) == 1
    assert sum("is not used" in message for message in caplog.messages) == 1
    assert "1 stored plan is unsound" in str(done)


@pytest.mark.parametrize(
    "edit",
    [
        first_group(ops=(0, 10**12)), first_group(ops=()), first_group(config={"unroll": "1;"}),
        lambda record: replace(record, groups=record.groups * 2),
    ],
)
def test_a_row_that_nothing_can_have_written_is_a_miss_of_its_own_region(
    edit: Edit, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, ReferenceBackend())
    model, inputs, db = Block(), (torch.randn(4, 33), torch.randn(4, 33)), tmp_path / "t.db"
    store_plans(model, inputs, db, ({},))
    edited(db, edit)
    results = compiled(model, db)(*inputs)
    assert "damaged row" in caplog.text
    for one, other in zip(results, model(*inputs), strict=True):
        torch.testing.assert_close(one, other)
    done = fuseplan.planner.stats()
    assert (done.from_database, done.from_model, done.misses, done.quarantined) == (1, 1, 1, 0)


def test_a_plan_of_a_neighbouring_size_is_checked_too(tmp_path: Path, monkeypatch: Any) -> None:
    use(monkeypatch, ReferenceBackend())
    db, x = tmp_path / "t.db", torch.randn(12, 7)
    torch._dynamo.mark_dynamic(x, 0)
    store_plans(swiglu, (x, x), db, ({"s0": 8}, {"s0": 16}))
    edited(db, first_group(config={"unroll": 77}))
    call = torch.compile(swiglu, backend="fuseplan", options={"db": str(db), "on_miss": "unfused"})
    torch.testing.assert_close(call(x, x), swiglu(x, x))
    done = fuseplan.planner.stats()
    assert (done.bucketed, done.quarantined, done.misses) == (0, 1, 1)


def test_what_a_tune_finds_unsound_it_measures_anew(tmp_path: Path) -> None:
    graph, database = fork(), Database(tmp_path / "t.db", versions=Versions.current("cpu"))
    planner = Planner(database, None, "dev", TARGET, (ReferenceBackend(),))
    record = planner.plan_graph(graph).regions[0].record
    database.put_plan(record)
    assert planner.undecided(graph) == [] and planner.plan_graph(graph).regions[0].source == "database"
    database.put_plan(first_group(config={"unroll": 0})(record))
    assert [region.key for region in planner.undecided(graph)] == [record.key.workload]
    assert planner.plan_graph(graph).regions[0].source == "model"
    assert list(planner.refused) == [record.key.workload]


@pytest.mark.skipif(CppBackend().unavailable() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["threads", "rows_per_task", "col_tile", "unroll", "stage", "stream"])
@pytest.mark.parametrize("value", [0, -1, 7, "1"])
def test_no_stored_number_reaches_a_cpu_kernel_s_loops(name: str, value: int | str, tmp_path: Path) -> None:
    if value == 0 and name in ("stage", "stream"):
        pytest.skip("an honest choice")
    x, db = torch.randn(64, 5000), tmp_path / "t.db"
    store_plans(swiglu, (x, x), db, ({},))
    edited(db, lambda record: first_group(config={**record.groups[0].config, name: value})(record))
    torch.testing.assert_close(compiled(swiglu, db)(x, x), swiglu(x, x))
    done = fuseplan.planner.stats()
    assert (done.groups_fused, done.quarantined) == (0, 1), done


@pytest.mark.skipif(CppBackend().unavailable() is not None, reason="no C++ compiler")
def test_a_stored_number_beyond_all_bounds_is_no_configuration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, db = torch.randn(64, 5000), tmp_path / "t.db"
    store_plans(swiglu, (x, x), db, ({},))
    edited(db, lambda record: first_group(config={**record.groups[0].config, "rows_per_task": 2**62})(record))
    torch.testing.assert_close(compiled(swiglu, db)(x, x), swiglu(x, x))
    assert "damaged row" in caplog.text
    done = fuseplan.planner.stats()
    assert (done.from_database, done.from_model, done.misses) == (0, 1, 1), done
