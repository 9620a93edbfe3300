"""Planning a graph: look-ups, the measured loop, "do not fuse", and what the record says. Times are scripted."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from graphs import Builder
from reference_backend import ReferenceBackend
from scripted_tuner import TARGET, ScriptedTuner, chain, compute_nodes

from fuseplan.costmodel.device import DeviceSpec
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec, bind_graph
from fuseplan.planner.groups.candidates import enumerate_candidates, single_candidates
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.tunable_group import TunableGroup
from fuseplan.planner.partition.plan_record import peak_bytes
from fuseplan.planner.tuning.planner import Planner, PlanSettings
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import RecordKey, Trial, Versions

pytestmark = pytest.mark.usefixtures("any_gain")


def planner(database: Database, tuner: ScriptedTuner | None = None, spec: DeviceSpec | None = None) -> Planner:
    return Planner(database, spec, "dev", TARGET, (ReferenceBackend(),), tuner=tuner)  # type: ignore[arg-type]


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "t.db", "write", Versions.current("cpu"))


def test_without_a_probed_device_the_fewest_launches_win(database: Database) -> None:
    plan = planner(database).plan_graph(chain(4)).regions[0]
    assert plan.source == "model"
    assert [group.is_kernel for group in plan.record.groups] == [True]
    assert len(plan.group_ops(plan.record.groups[0])) == 4
    assert "nothing was measured" in plan.record.evidence.reason


def test_measured_times_decide_and_the_next_plan_is_looked_up(database: Database) -> None:
    # Pairs are cheap, longer kernels expensive: 2 + 2 beats every other cover of four ops.
    times = {1: 9.0, 2: 3.0, 3: 20.0, 4: 30.0}
    tuner = ScriptedTuner(database, lambda subject: times[len(compute_nodes(subject))])
    first = planner(database, tuner).plan_graph(chain(4)).regions[0]
    assert first.source == "tuned"
    assert [len(group.ops) for group in first.record.groups] == [2, 2]
    assert first.record.planned_us == pytest.approx(6.0)
    assert first.record.unfused_us == pytest.approx(40.0)
    assert first.record.margin == pytest.approx(1 - 6 / 40)
    assert {len(other.ops) for other in first.record.rejected if other.implementation != "aten"} >= {4}
    assert len(tuner.tuned) == 3  # the incumbent (one kernel) and what the cover uses; nothing else is searched
    again = planner(database, None).plan_graph(chain(4)).regions[0]
    assert again.source == "database"
    assert again.record == first.record


def test_do_not_fuse_is_an_answer(database: Database) -> None:
    tuner = ScriptedTuner(database, lambda subject: 5.0, refuses=lambda subject: True)
    record = planner(database, tuner).plan_graph(chain(3)).regions[0].record
    assert [group.implementation for group in record.groups] == ["aten"] * 3
    assert record.planned_us == pytest.approx(30.0)
    assert record.unfused_us == pytest.approx(30.0)
    assert any("not clearly faster" in other.reason for other in record.rejected)


@pytest.mark.parametrize("seed", range(6))
def test_the_plan_is_the_cheapest_cover(database: Database, seed: int) -> None:
    """Against brute force over all covers of a chain into runs, with random times."""
    generator = torch.Generator().manual_seed(seed)
    length = 5
    table = (torch.rand(length, length, generator=generator) * 20 + 4).tolist()
    graph = chain(length)
    order = {node.name: number for number, node in enumerate(graph)}

    def time_of(subject: TunableGroup) -> float:
        numbers = sorted(order[node.name] for node in subject.nodes)
        return float(table[numbers[0]][numbers[-1]])

    tuner = ScriptedTuner(database, time_of)
    record = planner(database, tuner).plan_graph(graph).regions[0].record
    best = math.inf
    for cuts in itertools.product([0, 1], repeat=length - 1):
        starts = [0, *(at + 1 for at, cut in enumerate(cuts) if cut)]
        ends = [*(at for at, cut in enumerate(cuts) if cut), length - 1]
        runs = list(zip(starts, ends, strict=True))
        best = min(best, sum(min(table[a][b], 10.0) if a == b else table[a][b] for a, b in runs))
    assert record.planned_us == pytest.approx(best)


def test_equal_regions_are_planned_once_and_named_in_each_occurrence(database: Database) -> None:
    b = Builder(x=torch.randn(4, 8))
    first = b("aten.tanh.default", b("aten.exp.default", "x"))
    second = b("aten.tanh.default", b("aten.exp.default", b("aten.rrelu.default", first)))
    tuner = ScriptedTuner(database, lambda subject: 1.0)
    labels: list[str] = []
    graph = b.graph(second)
    planner = Planner(
        database, None, "dev", TARGET, (ReferenceBackend(),), PlanSettings(), tuner)  # type: ignore[arg-type]
    planner.on_region = lambda label, number, total: labels.append(f"{label} {number}/{total}")
    planned = planner.plan_graph(graph)
    assert len(planned.regions) == 2
    assert len(planned.unique()) == len(labels) == 1
    assert labels[0].endswith("1/1")
    groups = [plan.group_ops(plan.record.groups[0]) for plan in planned.regions]
    assert [{graph.op(name).op for name in ops} for ops in groups] == [{"aten.exp.default", "aten.tanh.default"}] * 2
    assert not set(groups[0]) & set(groups[1])


def test_a_kernel_that_never_works_leaves_its_ops_unfused(database: Database) -> None:
    class Failing(ScriptedTuner):
        def screen(self, subject: TunableGroup) -> Trial:
            return Trial(RecordKey(subject.key, "dev"), "cpp", {}, None, "does not compile: no such register")

    record = planner(database, Failing(database, lambda subject: 1.0)).plan_graph(chain(2)).regions[0].record
    assert {group.implementation for group in record.groups} == {"aten"}
    assert any("no such register" in other.reason for other in record.rejected)


def test_a_back_end_that_cannot_run_is_never_planned_for(database: Database) -> None:
    store = Planner(database, None, "dev", TARGET, (ReferenceBackend(missing="no compiler"),), PlanSettings())
    record = store.plan_graph(chain(3)).regions[0].record
    assert {group.implementation for group in record.groups} == {"aten"}


def test_peak_memory_of_a_partition() -> None:
    graph = chain(3)  # three values of 4*8*4 = 128 bytes
    region = find_regions(graph)[0]
    table = GroupTable(graph, "fp32", "cpu")
    enumeration = enumerate_candidates(graph, region, legal=table.legal)
    whole = [group for group in enumeration.candidates if len(group.ops) == 3]
    alone = single_candidates(graph, region)
    assert peak_bytes(graph, whole, region.outputs) == 128
    assert peak_bytes(graph, alone, region.outputs) == 256  # an op's operand and result live together
    over = [{group.outputs[0]: (group.inputs[0],)} for group in alone]
    assert peak_bytes(graph, alone, region.outputs, over) == 128  # each but the first writes over its operand
    every = [value for group in alone for value in group.outputs]
    assert peak_bytes(graph, alone, every, over) == 384  # what is needed to the end is not written over


def test_binding_replaces_sizes_everywhere() -> None:
    from fuseplan.kernels.ir.index import symbol

    s = symbol("s0")
    view = OpNode("aten.view.default", ("x",), ("v",), {"size": (s * 2, 4)})
    nodes = [view, OpNode("aten.exp.default", ("v",), ("y",))]
    specs = {name: TensorSpec.contiguous(shape, "float32") for name, shape in
             (("x", (s, 8)), ("v", (s * 2, 4)), ("y", (s * 2, 4)))}
    graph = DataflowGraph(nodes, specs, ("x",), ("y",), {"s0": 3}, order=[("v", "y")])
    for sizes, rows in ((None, 3), ({"s0": 5}, 5)):
        bound = bind_graph(graph, sizes)
        assert bound.specs["y"] == TensorSpec.contiguous((rows * 2, 4), "float32")
        assert bound.op("v").attrs["size"] == (rows * 2, 4)
        assert [node.name for node in bound] == ["v", "y"]
        assert not bound.symbols


def test_what_another_kernel_produced_is_hot_even_where_the_graph_is_cut() -> None:
    from fuseplan.planner.implementations.tunable_group import group_subject
    from fuseplan.planner.patterns.table import pattern_graph

    graph = pattern_graph("add_rms_norm", "4x64")
    ops = tuple(node.name for node in graph)
    for whole in (graph, bind_graph(graph)):
        subject = group_subject(whole, ops, "key")
        hot = dict(zip(subject.inputs, subject.hot_inputs, strict=True))
        shapes = {value: whole.specs[value].shape for value in subject.inputs}
        assert {shapes[value]: is_hot for value, is_hot in hot.items()} == {(4, 64): True, (64,): False}
