"""A part that several regions have is decided once: in a graph, in a tune, and in a database. Times are scripted."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Builder
from reference_backend import ReferenceBackend
from scripted_tuner import TARGET, ScriptedTuner, compute_nodes
from ways import WAYS

from fuseplan.costmodel.roofline import nominal_us
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.planner.cost.prices import part_shares
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.regions import find_regions, region_parts
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.tunable_group import TunableGroup, group_label
from fuseplan.planner.partition.plan_check import accepted_plan
from fuseplan.planner.tuning.planner import Planner, RegionPlan
from fuseplan.planner.tuning.tune import TuneResult, WorkloadPlan
from fuseplan.planner.work.group_work import op_work
from fuseplan.search import policy
from fuseplan.search.store import transfer
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import LayeredDatabase
from fuseplan.search.store.record import TuningRecord, Versions

pytestmark = pytest.mark.usefixtures("any_gain")

LINEAR = "aten.linear.default"
BEFORE, AFTER, OTHER = ("exp", "tanh", "neg"), ("sigmoid", "sin"), ("cos", "abs")


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matmuls are ATen's."""
    monkeypatch.setattr("fuseplan.planner.implementations.choices.LIBRARY_CALLS", ())


def block(b: Builder, value: str, *islands: tuple[str, ...]) -> str:
    """Islands of pointwise ops with a matmul between each two."""
    for number, island in enumerate(islands):
        value = b(LINEAR, value, "w", bias=None) if number else value
        for op in island:
            value = b(f"aten.{op}.default", value)
    return value


def graph_of(*regions: tuple[tuple[str, ...], ...]) -> DataflowGraph:
    """Regions one after another, each of islands."""
    b = Builder(x=torch.randn(5, 8), w=torch.randn(8, 8))
    value = "x"
    for number, islands in enumerate(regions):
        value = b("aten.rrelu.default", value) if number else value
        value = block(b, value, *islands)
    return b.graph(value)


def tuner_of(database: Database, kind: type[ScriptedTuner] = ScriptedTuner, **script: Any) -> ScriptedTuner:
    """Kernels of two ops are the cheapest."""
    times = {1: 7.0, 2: 4.0, 3: 14.0}
    return kind(database, lambda subject: times[len(compute_nodes(subject))], **script)


def planner_of(store: Any, tuner: ScriptedTuner | None) -> Planner:
    return Planner(store, None, "dev", TARGET, (ReferenceBackend(),), tuner=tuner)  # type: ignore[arg-type]


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "t.db", "write", Versions.current("cpu"))


def covered(graph: DataflowGraph, plan: RegionPlan) -> list[tuple[str, ...]]:
    """The ops of each group of a plan, in the order of the region's plan."""
    names = ([graph.op(name).op.split(".")[1] for name in plan.group_ops(one)] for one in plan.record.groups)
    return [tuple(sorted(group)) for group in names]


def test_a_shared_part_is_measured_for_the_first_region_alone(database: Database) -> None:
    graph = graph_of((BEFORE, AFTER), (BEFORE, OTHER))
    tuner = tuner_of(database)
    first, second = planner_of(database, tuner).plan_graph(graph).regions
    assert len(tuner.screened) == len(set(tuner.screened)) and len(tuner.tuned) == len(set(tuner.tuned))
    assert covered(graph, first)[:2] == covered(graph, second)[:2]  # the groups of the island
    shared = {one.key for one in region_parts(graph, first.region)} & {
        one.key for one in region_parts(graph, second.region)}
    decided = [{record.key.workload for record in plan.decided} for plan in (first, second)]
    assert len(shared) == 2 and shared <= decided[0] and not shared & decided[1]  # the island and the matmul
    assert {len(one) for one in decided} == {3, 1}


def test_a_part_that_hardly_counts_is_tuned_with_little_effort(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares by brute force: every op as ATen runs it on the nominal device."""
    graph = graph_of((BEFORE, AFTER), (BEFORE, OTHER), (AFTER,), (BEFORE, AFTER))
    parts = [part for region in find_regions(graph) for part in region_parts(graph, region)]
    times = Counter[str]()
    for part in parts:
        times[part.key] += sum(nominal_us(op_work(graph, name), "cpu", fused=False) for name in part.ops)
    aten = planner_of(database, None).implementations.aten
    shares = part_shares(GroupTable(graph, "fp32", "cpu"), aten)
    assert shares == pytest.approx({key: time_us / sum(times.values()) for key, time_us in times.items()})

    threshold = (min(shares.values()) + max(shares.values())) / 2
    tuner = tuner_of(database)
    planner = planner_of(database, tuner)
    monkeypatch.setattr(policy, "MINOR_SHARE", threshold)
    found = {record.key.workload: record for plan in planner.plan_graph(graph).regions for record in plan.decided}
    tuned = dict(zip(tuner.tuned, tuner.minor, strict=True))
    assert set(tuned.values()) == {True, False}
    for key, record in found.items():
        labels = {group.label for group in record.groups} & set(tuned)
        assert all(tuned[label] is (shares[key] < threshold) for label in labels)


@pytest.mark.parametrize("refused", [(), (3,), (2, 3), (1, 2, 3)])
def test_of_a_part_that_hardly_counts_only_the_nominal_cover_is_measured(
    database: Database, refused: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Islands of three and two ops, one launch each at best; of what is not worth fusing, the next best cover."""
    tuner = tuner_of(database, refuses=lambda subject: len(compute_nodes(subject)) in refused)
    planner = planner_of(database, tuner)
    monkeypatch.setattr(policy, "MINOR_SHARE", 2.0)
    for plan in planner.plan_graph(graph_of((BEFORE, AFTER), (OTHER,))).regions:
        sizes = [len(group.ops) for group in plan.record.groups if not group.is_plain]
        assert not set(sizes) & set(refused)
        assert plan.record.measured <= plan.record.enumerated and math.isfinite(plan.record.planned_us)
        assert 0.0 <= plan.record.gap <= 1.0
    largest = [size for size in (3, 2) if size not in refused]
    assert all(tuner.minor)
    fused = {len(group.ops) for record in database.plans() for group in record.groups if not group.is_plain}
    assert fused <= {*largest, 1} and (not largest or largest[0] in fused)


def test_each_choice_is_counted_once_over_all_workloads(database: Database) -> None:
    """Against the calls that the tuner and its stopwatch got."""
    asked: Counter[tuple[str, str]] = Counter()

    class Counting(ScriptedTuner):
        def time_unfused(self, subject: TunableGroup) -> Any:
            asked[subject.key, "aten"] += 1
            return super().time_unfused(subject)

        def screen(self, subject: TunableGroup) -> Any:
            asked[subject.key, "kernel"] += 1
            return super().screen(subject)

    planner = planner_of(database, tuner_of(database, Counting))
    graphs = [graph_of((BEFORE, AFTER), (BEFORE, OTHER)), graph_of((BEFORE, AFTER), (OTHER, BEFORE), (AFTER,))]
    plans = [WorkloadPlan(str(number), graph, find_regions(graph), {}) for number, graph in enumerate(graphs)]
    assert all(one.go_on(planner, []) for one in plans)
    result = TuneResult(tuple(plans), None, 1.0)  # type: ignore[arg-type]
    # An island that ends in a value for a matmul is the same wherever it stands.
    assert set(asked.values()) == {1}
    assert result.measured == len(asked)
    parts = {part.key for graph in graphs for region in find_regions(graph) for part in region_parts(graph, region)}
    assert sum(len(plan.decided) for _, plan in result.distinct()) == len(parts)
    assert result.measured < sum(plan.record.measured for _, plan in result.distinct())


@pytest.mark.parametrize("seed", range(4))
def test_equal_parts_have_equal_plans_whatever_the_noise(database: Database, seed: int) -> None:
    noise = random.Random(seed)
    tuner = tuner_of(database, noisy=lambda: noise.uniform(0.3, 3.0))
    graph = graph_of((BEFORE, AFTER), (BEFORE, OTHER), (OTHER, BEFORE, AFTER))
    planner = planner_of(database, tuner)
    found: dict[tuple[str, ...], set[tuple[tuple[str, ...], ...]]] = {}
    for plan in planner.plan_graph(graph).regions:
        for island in (BEFORE, AFTER, OTHER):
            groups = tuple(sorted(group for group in covered(graph, plan) if set(group) <= set(island)))
            if groups:
                found.setdefault(island, set()).add(groups)
    assert [len(found[island]) for island in (BEFORE, OTHER)] == [1, 1]


def test_a_region_s_record_is_that_of_its_parts(database: Database) -> None:
    graph = graph_of((BEFORE, AFTER), (BEFORE, AFTER, OTHER))
    planned = planner_of(database, tuner_of(database)).plan_graph(graph)
    for plan in planned.regions:
        record = plan.record
        # 4 us a pair, 7 us an op by itself, 10 us a matmul: three ops are 11 us, two are 4.
        islands = len(region_parts(graph, plan.region)) // 2 + 1
        assert record.planned_us == pytest.approx(11.0 + 4.0 * (islands - 1) + 10.0 * (islands - 1))
        assert record.unfused_us == pytest.approx(10.0 * (3 + 2 * (islands - 1) + islands - 1))
        assert record.gap == pytest.approx(0.0) and not record.undecided
        table = GroupTable(graph, "fp32", "cpu")
        assert accepted_plan(table, WAYS, plan.region, record) == record
        for lost in record.rejected:  # positions are the region's: the label is made of the ops there
            ops = [plan.region.ops[at] for at in lost.ops]
            flow = {name for other in plan.region.ops for name in graph.op(other).inputs if other not in ops}
            outputs = [out for name in ops for out in graph.op(name).outputs if out in flow | set(plan.region.outputs)]
            assert lost.label == group_label(graph, ops, outputs)


# -- stored parts -----------------------------------------------------------------------------------------------------


def test_a_stored_plan_of_a_part_is_taken(database: Database) -> None:
    """A graph that is nothing but the island leaves its plan; a kernel is tuned for the other island alone."""
    whole = graph_of((AFTER, BEFORE))
    island = graph_of((BEFORE,))
    planner_of(database, first := tuner_of(database)).plan_graph(island)
    (plan,) = planner_of(database, tuner := tuner_of(database)).plan_graph(whole).regions
    assert first.tuned and not set(first.screened) & set(tuner.screened)
    assert plan.source == "tuned" and tuner.play_offs  # the region as a whole has to beat ATen all the same
    assert {record.enumerated for record in plan.decided} == {1, 5}  # a matmul, and two ops with three groups


@pytest.mark.parametrize(("torch_version", "since", "taken"), [("", "", True), ("1.0", "", False), ("", "9999", False)])
def test_a_shipped_plan_of_a_part_is_taken_unless_it_is_stale(
    tmp_path: Path, database: Database, torch_version: str, since: str, taken: bool
) -> None:
    with Database(tmp_path / "elsewhere.db", "write", Versions.current("cpu")) as elsewhere:
        planner_of(elsewhere, tuner_of(elsewhere)).plan_graph(graph_of((BEFORE,)))
        for one in list(elsewhere.plans()):
            versions = replace(one.evidence.versions, torch=torch_version or one.evidence.versions.torch)
            elsewhere.put_plan(replace(one, evidence=replace(one.evidence, versions=versions)))
        transfer.export(elsewhere, tmp_path / "shipped.jsonl")
    store = LayeredDatabase(database, [tmp_path / "shipped.jsonl"], since)
    graph = graph_of((AFTER, BEFORE))
    (plan,) = planner_of(store, tuner := tuner_of(database)).plan_graph(graph).regions
    assert [any("tanh" in label for label in tuner.screened)] == [not taken]
    assert sum(len(group) for group in covered(graph, plan)) == 6


def test_a_stored_part_that_cannot_be_right_is_measured_anew(database: Database) -> None:
    planner_of(database, tuner_of(database)).plan_graph(graph_of((BEFORE,)))
    for one in list(database.plans()):
        database.put_plan(replace(one, groups=one.groups[:1]))
    planner = planner_of(database, tuner := tuner_of(database))
    graph = graph_of((AFTER, BEFORE))
    (plan,) = planner.plan_graph(graph).regions
    assert any("tanh" in label for label in tuner.screened)
    assert list(planner.refused.values()) == ["2 of 3 ops are in no group"]
    assert sum(len(group) for group in covered(graph, plan)) == 6


@pytest.mark.parametrize("killed_at", [1, 2, 4, 7, 10, 13])
def test_a_killed_tune_goes_on_to_the_same_plans(tmp_path: Path, killed_at: int) -> None:
    """Killed at any question to the tuner: what was finished is not asked again."""
    graph = graph_of((BEFORE, AFTER), (OTHER, BEFORE))

    class Killed(ScriptedTuner):
        left = killed_at

        def screen(self, subject: TunableGroup) -> Any:
            return self._answer(super().screen(subject))

        def play_off(self, *args: Any, **kwargs: Any) -> Any:
            return self._answer(super().play_off(*args, **kwargs))

        def _answer(self, answer: Any) -> Any:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return answer

    databases = [Database(tmp_path / name, "write", Versions.current("cpu")) for name in ("one.db", "two.db")]
    expected = planner_of(databases[0], tuner_of(databases[0])).plan_graph(graph)
    with pytest.raises(KeyboardInterrupt):
        planner_of(databases[1], tuner_of(databases[1], Killed)).plan_graph(graph)
    finished = {record.key.workload for record in databases[1].plans()}
    resumed = planner_of(databases[1], tuner_of(databases[1])).plan_graph(graph)
    for one, other in zip(expected.regions, resumed.regions, strict=True):
        assert one.record.groups == other.record.groups and one.record.rejected == other.record.rejected
        assert one.record.planned_us == pytest.approx(other.record.planned_us)
    assert not finished & {record.key.workload for plan in resumed.regions for record in plan.decided}
    assert {record.key for record in databases[0].plans()} == {record.key for record in databases[1].plans()}


def test_what_noise_hid_is_asked_once_a_tune_and_again_in_the_next(database: Database) -> None:
    class Noisy(ScriptedTuner):
        def tune(self, subject: TunableGroup, neighbours: Any = (), minor: bool = False) -> TuningRecord:
            return replace(super().tune(subject, neighbours, minor), fuse=False, undecided=True)

    graph = graph_of((BEFORE, AFTER), (BEFORE, OTHER))
    planner = planner_of(database, tuner := tuner_of(database, Noisy))
    plans = planner.plan_graph(graph).regions
    assert all(plan.record.undecided for plan in plans)
    assert len(tuner.screened) == len(set(tuner.screened))
    again = planner.plan_graph(graph)  # as another workload of the same tune
    assert len(tuner.screened) == len(set(tuner.screened)) and not any(plan.decided for plan in again.regions)
    later = planner_of(database, tuner_of(database)).plan_graph(graph)
    assert all(plan.decided and not plan.record.undecided for plan in later.regions[:1])


def test_a_lookahead_prepares_exactly_the_parts_that_lack_a_plan(tmp_path: Path) -> None:
    """And regions that share a part get the same plans with it as without."""

    class AnyDevice(ReferenceBackend):
        def refuse(self, ir: KernelIR, target: object) -> str | None:
            return "a matmul" if any(segment.products for segment in ir.segments) else None

    graph = graph_of((BEFORE, AFTER), (BEFORE, OTHER))
    found = []
    for name in ("alone.db", "ahead.db"):
        database = Database(tmp_path / name, "write", Versions.current("cuda"))
        gpu = replace(TARGET, device_type="cuda")
        planner = Planner(
            database, None, "dev", gpu, (AnyDevice(),), tuner=tuner_of(database),  # type: ignore[arg-type]
        )
        lookahead = planner.lookahead() if name == "ahead.db" else None
        every = [part for region in find_regions(graph) for part in region_parts(graph, region)]
        parts = planner.undecided(graph, every)
        assert [part.key for part in parts] == list(dict.fromkeys(part.key for part in every))
        if lookahead is None:
            found.append(planner.plan_graph(graph))
            assert planner.undecided(graph) == planner.undecided(graph, every) == []
            continue
        with lookahead:
            lookahead.send(graph, parts)
            found.append(planner.plan_graph(graph))
            again = find_regions(graph)[1]
            twin = next(part for part in region_parts(graph, again) if part.key == parts[0].key)
            assert lookahead.problem(parts[0]) is not None and lookahead.problem(twin) is None
    assert [plan.record.groups for plan in found[0].regions] == [plan.record.groups for plan in found[1].regions]
