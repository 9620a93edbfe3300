"""A whole step: what both sides compute is the model, with the weights of the first layer in all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from costmodel_samples import CPU
from graphs import Builder
from reference_backend import ReferenceBackend
from scripted_tuner import TARGET, ScriptedTuner

from fuseplan.costmodel.device import Peak
from fuseplan.planner.cost.step_floor import floor_us
from fuseplan.planner.graph.dataflow import DataflowGraph, Ref
from fuseplan.planner.graph.execute import run_node
from fuseplan.planner.implementations.choices import implementations_for
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.inductor import InductorCode
from fuseplan.planner.partition.by_inductor import compare_step
from fuseplan.planner.tuning.planner import Planner, PlanSettings
from fuseplan.planner.tuning.plans import GraphPlan
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.whole_step import (
    StepTimes,
    Untimed,
    counted,
    measure_again,
    measure_step,
    step_key,
    step_problem,
    stored_steps,
)
from fuseplan.search import policy
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import Leases
from fuseplan.search.store.record import Versions
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.operands import MEMORY, memory_bytes
from fuseplan.search.timing.sequence import Part, SharedOperands, sequence
from fuseplan.search.tune.tuner import Budget
from fuseplan.search.workers.worker import Outcome

pytestmark = pytest.mark.usefixtures("any_gain")

LAYERS = 4
SPEC = replace(CPU, peaks={**CPU.peaks, "fp32_matmul": Peak(1e11, 2e11)})


def layers(
    count: int = LAYERS, rows: int = 3, head: Mapping[str, torch.Tensor] | None = None
) -> tuple[Builder, DataflowGraph]:
    """``x = tanh(silu(x @ w.T) * gate) @ u.T``, again and again, with weights for each layer; ``relu(x @ head.T)``."""
    given = {"x": torch.randn(rows, 17), **(head or {})}
    for at in range(count):
        given |= {f"w{at}": torch.randn(19, 17) / 4, f"gate{at}": torch.randn(19), f"u{at}": torch.randn(17, 19) / 4}
    b = Builder(**given)
    value = "x"
    for at in range(count):
        made = b("aten.silu.default", b("aten.linear.default", value, f"w{at}"))
        value = b("aten.linear.default", b("aten.tanh.default", b("aten.mul.Tensor", made, f"gate{at}")), f"u{at}")
    for name in head or ():
        value = b("aten.relu.default", b("aten.linear.default", value, name))
    return b, b.graph(value)


def with_first_weights(graph: DataflowGraph, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The model's result, with the weights of the first layer in all of them."""
    values = {name: given[name if name == "x" else f"{name[:-1]}0"] for name in graph.inputs}
    for node in graph:
        values.update(zip(node.outputs, run_node(node, [values[name] for name in node.inputs], "cpu"), strict=True))
    return values[graph.outputs[0]]


@dataclass
class Bench:
    """Runs what it is asked to time, in this process."""

    times_us: Mapping[str, float]
    varies: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    fails: Outcome | None = None
    asked: int = 0
    made: int = 0
    results: dict[str, torch.Tensor] | None = None
    operands: Sequence[torch.Tensor] = ()
    runs: list[tuple[Sequence[torch.Tensor], dict[str, torch.Tensor]]] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        self.leases = Leases(Database("sqlite://"))

    def time_sides(
        self, parts: Mapping[str, Part], sides: Mapping[str, Sequence[str]], kept: Collection[str]
    ) -> Outcome:
        self.asked += 1
        if self.fails is not None:
            return self.fails

        def inputs_of(subject: object) -> list[torch.Tensor]:
            self.made += 1
            return subject.make_inputs(0, "cpu")  # type: ignore[attr-defined, no-any-return]

        shared = SharedOperands(inputs_of)  # type: ignore[arg-type]
        runs = {side: sequence([parts[name] for name in names], shared, kept, TARGET) for side, names in sides.items()}
        self.operands = shared.tensors
        self.results = {side: run(*shared.tensors)[-1] for side, run in runs.items()}
        self.runs.append((self.operands, self.results))
        timed = (*sides, MEMORY) if MEMORY in self.times_us else sides
        samples = {side: tuple(self.times_us[side] * one for one in self.varies.get(side, (1, 1, 1))) for side in timed}
        return Outcome(Contest(samples, 0.01, "eager"))

    def play_off(self, parts: Any, sides: Any, kept: Any) -> Contest | None:
        found: Contest | None = self.time_sides(parts, sides, kept).value
        return found


@pytest.fixture
def session(tmp_path: Path) -> Session:
    database = Database(tmp_path / "t.db", "write", Versions.current("cpu"))
    return Session(database, "dev", SPEC, TARGET, (ReferenceBackend(),), PlanSettings(inductor="off"))


def planned(session: Session, graph: DataflowGraph) -> GraphPlan:
    tuner = ScriptedTuner(session.database, lambda subject: 3.0)
    made = Planner(session.database, session.spec, "dev", TARGET, session.backends, session.settings, tuner)  # type: ignore[arg-type]
    return made.plan_graph(graph)


def decided(plan: GraphPlan, when: str) -> GraphPlan:
    """The same plan, decided at another time."""
    evidence = replace(plan.regions[0].record.evidence, created=when)
    return GraphPlan(tuple(replace(one, record=replace(one.record, evidence=evidence)) for one in plan.regions))


TIMES = {"unfused": 200.0, "planned": 50.0}


def test_both_sides_compute_the_model_with_shared_weights(session: Session) -> None:
    _, graph = layers()
    plan = planned(session, graph)
    assert any(group.is_kernel for one in plan.regions for group in one.record.groups)
    bench = Bench(TIMES)
    found = measure_step(session, graph, plan, bench)
    assert isinstance(found, StepTimes) and (found.unfused_us, found.planned_us, found.noise) == (200.0, 50.0, 0.01)
    assert bench.results is not None
    shapes = [tuple(one.shape) for one in bench.operands]
    wanted = {"x": (3, 17), "w0": (19, 17), "gate0": (19,), "u0": (17, 19)}
    assert sorted(shapes) == sorted(wanted.values())  # however many layers there are
    expected = with_first_weights(graph, {name: bench.operands[shapes.index(shape)] for name, shape in wanted.items()})
    for result in bench.results.values():
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scatters", ["aten.index_add.default", "aten.scatter_add.default"])
def test_opaque_ops_are_part_of_a_step(session: Session, scatters: str) -> None:
    """Every side computes the model, and ops that scatter get positions that exist."""
    session = replace(session, settings=replace(session.settings, inductor="default"))
    run = torch.scatter_add if "scatter" in scatters else torch.index_add
    target = torch.randint(4097, (127, 1)).expand(127, 3) if "scatter" in scatters else torch.randint(4097, (127,))
    b = Builder(x=torch.randn(127, 3), table=torch.zeros(4097, 3), target=target)
    ones = b("aten.ones_like.default", "target", dtype="float32")  # asks first for numbers, and reads none
    total = b(scatters, b("aten.relu.default", "table"), "target", b("aten.silu.default", "x"), dim=-2)
    graph = b.graph(ones, b("aten.tanh.default", b("aten.add.Tensor", total, "table")))
    bench = Bench({**TIMES, "inductor": 60.0})
    found = measure_step(session, graph, planned(session, graph), bench)
    assert isinstance(found, StepTimes) and found.opaque == 1 and bench.asked == 2
    assert {name for _, results in bench.runs for name in results} == {"unfused", "planned", "inductor"}
    for operands, results in bench.runs:
        given = {(tuple(one.shape), one.dtype): one for one in operands}
        x, table = (given[shape, torch.float32].double() for shape in ((127, 3), (4097, 3)))
        (positions,) = (one for one in operands if one.dtype == torch.int64)
        assert 1000 < int(positions.max()) < 4097 and int(positions.min()) >= 0
        expected = torch.tanh(run(table.relu(), 0, positions, torch.nn.functional.silu(x)) + table)
        for result in results.values():
            torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_opaque_ops_read_through_views_exists(session: Session) -> None:
    """Positions are chosen behind views, too. Integers that are no positions of a scatter are 0."""
    session = replace(session, settings=replace(session.settings, inductor="default"))
    b = Builder(x=torch.randn(127, 3), table=torch.zeros(5, 3), target=torch.randint(5, (127, 1)),
                counts=torch.randint(9, (127,)))
    at = b("aten.expand.default", "target", size=(127, 3))
    total = b("aten.scatter_add.default", b("aten.relu.default", "table"), at, b("aten.silu.default", "x"), dim=0)
    graph = b.graph(b("aten.tanh.default", total), b("aten.count_nonzero.default", "counts"))
    bench = Bench({**TIMES, "inductor": 60.0})
    found = measure_step(session, graph, planned(session, graph), bench)
    assert isinstance(found, StepTimes) and found.opaque == 2 and bench.asked == 2
    integers = [one for operands, _ in bench.runs for one in operands if one.dtype == torch.int64]
    assert {int(one.max()) for one in integers if one.dim() == 2} == {4}
    assert {int(one.max()) for one in integers if one.dim() == 1} == {0}


def test_an_opaque_op_does_not_choose_positions_for_others(session: Session) -> None:
    """0 in the place of all positions would hide a cache from what reads it."""
    b = Builder(table=torch.randn(4097, 3), at=torch.randint(4097, (127,)))
    found = b("aten.silu.default", b("aten.index.Tensor", "table", "at", indices=(Ref(1),)))
    graph = b.graph(found, b("aten.count_nonzero.default", "at"))
    bench = Bench(TIMES)
    times = measure_step(session, graph, planned(session, graph), bench)
    assert isinstance(times, StepTimes) and times.opaque == 0
    assert {int(one.max()) > 1000 for one in bench.operands if one.dtype == torch.int64} == {True}


def test_a_step_is_timed_without_opaque_ops_that_do_not_take_what_they_are_given(session: Session) -> None:
    session = replace(session, settings=replace(session.settings, inductor="default"))
    b = Builder(x=torch.randn(127, 3), count=torch.randint(1, 9, (127,)))
    share = b("aten.floor_divide.default", "count", "count")  # by 0
    graph = b.graph(share, b("aten.tanh.default", b("aten.silu.default", "x")))

    class Careful(Bench):
        def time_sides(self, parts: Any, sides: Any, kept: Any) -> Outcome:
            try:
                return super().time_sides(parts, sides, kept)
            except RuntimeError as error:
                return Outcome(failure=str(error))

    found = measure_step(session, graph, planned(session, graph), Careful({**TIMES, "inductor": 60.0}))
    assert isinstance(found, StepTimes) and found.opaque == 0 and found.inductor_us == pytest.approx(60.0)


def test_layers_make_no_operands_of_their_own(session: Session) -> None:
    made = []
    for count in (3, 9):
        _, graph = layers(count)
        bench = Bench(TIMES)
        assert isinstance(measure_step(session, graph, planned(session, graph), bench), StepTimes)
        made.append(bench.made)
    assert made[0] == made[1]


def test_a_step_is_timed_once_for_a_plan(session: Session) -> None:
    _, graph = layers()
    plan, bench = planned(session, graph), Bench(TIMES)
    first = measure_step(session, graph, plan, bench)
    assert measure_step(session, graph, plan, bench) == first and bench.asked == 1
    assert isinstance(measure_step(session, graph, decided(plan, "9999"), bench), StepTimes)
    assert bench.asked == 2  # the plan was decided anew


def test_a_step_has_the_gains_of_its_rounds(session: Session) -> None:
    _, graph = layers()
    found = measure_step(session, graph, planned(session, graph), Bench(TIMES, varies={"planned": (1.0, 1.25, 0.8)}))
    assert isinstance(found, StepTimes) and found.unfused_us / found.planned_us == 4.0
    assert (found.gain_low, found.gain_high, found.rounds) == (4 / 1.25, 4 / 0.8, 3)


def test_a_tenth_of_many_rounds_is_left_out_at_each_end(session: Session) -> None:
    _, graph = layers()
    ones = dict.fromkeys(TIMES, (1.0,) * 20)
    bench = Bench(TIMES, varies=ones | {"planned": (9.0, 0.1, 2.0, 0.5, 0.1, 9.0, *[1.0] * 14)})
    found = measure_step(session, graph, planned(session, graph), bench)
    assert isinstance(found, StepTimes) and (found.gain_low, found.gain_high, found.rounds) == (2.0, 8.0, 20)


def test_rounds_of_another_time_are_added(session: Session) -> None:
    """Whether both sides were slower then or only one, times and range are those of all rounds."""
    _, graph = layers()
    session = replace(session, settings=replace(session.settings, inductor="default"))
    plan = planned(session, graph)
    first = measure_step(session, graph, plan, Bench({**TIMES, "inductor": 60.0}))
    assert isinstance(first, StepTimes) and first.inductor_us == pytest.approx(60.0)
    fails = Bench(TIMES, fails=Outcome(failure="no memory"))
    measure_again(session, graph, plan, fails, first)
    assert stored_steps(session.database) == {step_key(counted(plan)): first} and fails.asked == 2
    measure_again(session, graph, plan, Bench({"unfused": 300.0, "planned": 30.0, "inductor": 81.0}), first)
    (found,) = stored_steps(session.database).values()
    assert (found.unfused_us, found.planned_us, found.rounds) == (250.0, 40.0, 6)
    assert (found.gain_low, found.gain_high) == (4.0, 10.0)
    assert found.inductor_us == pytest.approx(40 * (60 / 50 * 81 / 30) ** 0.5) and found.floor_us == first.floor_us


def test_the_speed_of_memory_stands_beside_the_rounds(session: Session) -> None:
    _, graph = layers()
    session = replace(session, target=replace(session.target, l2_bytes=2**26))
    bench = Bench({**TIMES, MEMORY: memory_bytes(2**26) * 1e-3 / 50}, varies={MEMORY: (1.0, 1.25, 2.0)})
    found = measure_step(session, graph, planned(session, graph), bench)
    assert isinstance(found, StepTimes) and found.unfused_us / found.planned_us == 4.0
    assert (found.read_low, found.read_high) == pytest.approx((25.0, 50.0))


def test_the_floor_has_memory_as_fast_as_it_was_seen(session: Session) -> None:
    """A step is not below its floor where others used the memory while it was probed."""
    _, graph = layers()
    quick = replace(SPEC, peaks=dict.fromkeys(SPEC.peaks, Peak(1e18, 1e18)))
    session = replace(session, target=replace(session.target, l2_bytes=2**26), spec=quick)
    plan, table = planned(session, graph), GroupTable(graph, session.settings.numerics, "cpu")
    first = measure_step(session, graph, plan, Bench({**TIMES, MEMORY: 1e12}))
    assert isinstance(first, StepTimes) and first.floor_us == floor_us(table, quick, "eager")
    measure_again(session, graph, plan, Bench({**TIMES, MEMORY: memory_bytes(2**26) * 1e-3 / 1e5}), first)
    (again,) = stored_steps(session.database).values()
    assert again.read_high == pytest.approx(1e5)
    assert again.floor_us is not None and first.floor_us is not None and again.floor_us < first.floor_us


def test_another_plan_or_number_of_layers_is_another_step(session: Session) -> None:
    plan = planned(session, layers()[1])
    counts = counted(plan)
    key = step_key(counts)
    assert key == step_key(reversed(counts)) != step_key(counted(planned(session, layers(5)[1])))
    assert step_key(counted(decided(plan, "9999"))) != key


@pytest.mark.parametrize("what", [
    "a run that fails", "a step that takes long", "no probed device", "a region without a plan", "nothing to plan",
])
def test_what_cannot_be_timed_is_not_stored(session: Session, what: str) -> None:
    _, graph = layers()
    plan = planned(session, graph)
    if what == "a step that takes long":
        longer = (replace(one, record=replace(one.record, unfused_us=3e5)) for one in plan.regions)
        plan = GraphPlan(tuple(longer))
    if what == "a region without a plan":
        plan = GraphPlan(plan.regions[1:])
    if what == "nothing to plan":
        plan = GraphPlan(())
    if what == "no probed device":
        session = replace(session, spec=None)
    why = {"a run that fails": "RuntimeError: no memory", "a step that takes long": "it takes about 1"}.get(what, "")
    bench = Bench(TIMES, fails=Outcome(failure=why) if what == "a run that fails" else None)
    for asked in (1, 2):  # and it is tried again: memory may be free by then
        found = measure_step(session, graph, plan, bench)
        assert isinstance(found, Untimed) and found.why.startswith(why) and bool(found.why) == bool(why)
        assert bench.asked == (asked if what == "a run that fails" else 0)
        assert step_problem("decode 1", found).startswith("decode 1: ") == bool(why)
    assert not session.database.captures("")


def test_a_step_that_timed_out_is_timed_again_with_a_longer_limit_alone(session: Session) -> None:
    _, graph = layers()
    plan = planned(session, graph)
    bench = Bench(TIMES, fails=Outcome(failure="no result within 7 s", timed_out=True))
    for limit_s, asked in ((7.0, 1), (7.0, 1), (6.0, 1), (8.0, 2), (8.0, 2)):
        bench.budget = Budget(job_limit_s=limit_s)
        found = measure_step(session, graph, plan, bench)
        assert isinstance(found, Untimed) and "no result within 7 s" in step_problem("decode 1", found)
        assert bench.asked == asked
    bench.fails = None
    for limit_s, kind in ((8.0, Untimed), (9.0, StepTimes), (7.0, StepTimes)):  # at last it is known
        bench.budget = Budget(job_limit_s=limit_s)
        assert isinstance(measure_step(session, graph, plan, bench), kind)
    other = Bench(TIMES, budget=Budget(job_limit_s=7.0))
    assert isinstance(measure_step(session, graph, decided(plan, "9999"), other), StepTimes)


def test_whoever_waits_is_told_what_a_step_takes_before_it_is_timed(session: Session) -> None:
    _, graph = layers()
    plan, told = planned(session, graph), list[float]()
    for _ in range(2):
        measure_step(session, graph, plan, Bench(TIMES), on_start=told.append)
    assert told == [pytest.approx(sum(one.record.unfused_us for one in plan.regions))]  # what is stored is not timed


# -- beside TorchInductor -------------------------------------------------------------------------------------


def test_inductor_computes_the_same_of_layers_that_are_not_alike_twice(session: Session) -> None:
    _, graph = layers()
    session = replace(session, settings=replace(session.settings, inductor="default"))
    bench = Bench({**TIMES, "inductor": 40.0})
    found = measure_step(session, graph, planned(session, graph), bench)
    assert isinstance(found, StepTimes) and found.by_inductor and found.best_us == found.inductor_us == 40.0
    (results,) = (results for _, results in bench.runs if "inductor" in results)
    torch.testing.assert_close(results["inductor"], results["planned"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("most_ops", "all_take_part"), [(1000, True), (10, False)])
def test_inductors_time_is_that_of_all_layers(
    session: Session, most_ops: int, all_take_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only two layers of each kind take part, their times tell how those of the whole step compare."""
    session = replace(session, settings=replace(session.settings, inductor="default"))
    monkeypatch.setattr(policy, "OPS_OF_ALL_LAYERS", most_ops)
    _, graph = layers(9)
    lengths: dict[bool, int] = {}

    class Fewer(Bench):
        def time_sides(self, parts: Any, sides: Any, kept: Any) -> Outcome:
            lengths["inductor" in sides] = len(sides["planned"])
            self.times_us = {"planned": 100.0, "inductor": 150.0} if "inductor" in sides else TIMES
            return super().time_sides(parts, sides, kept)

    found = measure_step(session, graph, planned(session, graph), Fewer(TIMES))
    assert isinstance(found, StepTimes) and found.inductor_us == pytest.approx(75.0) and not found.by_inductor
    assert (lengths[True] == lengths[False]) is all_take_part


def test_of_a_ratio_and_a_difference_what_flatters_the_plan_less_counts(session: Session) -> None:
    """Few layers by themselves, launched back to back, took the plan 10 us, and TorchInductor's code 25."""
    session = replace(session, settings=replace(session.settings, inductor="default"))
    _, graph = layers()

    class Alone(Bench):
        def play_off(self, parts: Any, sides: Any, kept: Any) -> Contest | None:
            return replace(self, times_us={"planned": 10.0, "inductor": 25.0}).time_sides(parts, sides, kept).value  # type: ignore[no-any-return]

    found = measure_step(session, graph, planned(session, graph), Alone(TIMES))
    assert isinstance(found, StepTimes) and found.inductor_us == pytest.approx(50.0 + 15.0)


def test_what_occurs_once_has_a_ratio_of_its_own(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of nine layers take a time of their own, which counts 9 / 2 times."""
    session = replace(session, settings=replace(session.settings, inductor="default"))
    monkeypatch.setattr(policy, "OPS_OF_ALL_LAYERS", 10)
    _, graph = layers(9, head={"head": torch.randn(23, 17)})
    several: list[int] = []

    class ByPart(Bench):
        def time_sides(self, parts: Any, sides: Any, kept: Any) -> Outcome:
            self.times_us = TIMES
            if "inductor" in sides:
                several.append(sum(one.subject.label.count("tanh") for one in parts.values()))
                self.times_us = {"planned": 10.0, "inductor": 20.0} if several[-1] > 1 else {
                    "planned": 30.0, "inductor": 30.0}
            return super().time_sides(parts, sides, kept)

    found = measure_step(session, graph, planned(session, graph), ByPart(TIMES))
    assert len(several) == 2 and isinstance(found, StepTimes)
    assert found.inductor_us == pytest.approx(50.0 * (4.5 * 20 + 30) / (4.5 * 10 + 30))


def test_a_plan_of_inductors_code_is_timed_in_its_own_mode(session: Session) -> None:
    b = Builder(x=torch.randn(3, 17))
    graph = b.graph(b("aten.tanh.default", b("aten.silu.default", "x")))
    (one,) = planned(session, graph).regions
    whole = replace(one.record.groups[0], ops=(0, 1), implementation="inductor", config={})
    modes: dict[str, list[str]] = {}

    class Modes(Bench):
        def play_off(self, parts: Any, sides: Any, kept: Any) -> Contest:
            modes.update({side: [parts[name].subject.compiled_for for name in names] for side, names in sides.items()})
            return Contest(dict.fromkeys(sides, (1.0, 1.0)), 0.01, "eager")

    ways = implementations_for("eager", session.backends, TARGET, "max-autotune")
    plans = [(one.region, replace(one.record, groups=(whole,)))]
    compare_step(GroupTable(graph, "fp32", "cpu"), plans, {}, ways, Modes(TIMES))  # type: ignore[arg-type]
    assert modes == {"planned": ["default"], "inductor": ["max-autotune"]}


def test_inductor_runs_no_graph_that_looks_up(session: Session) -> None:
    """It takes a negative index from the end, where eager mode fails; what it takes is told all the same."""
    b = Builder(table=torch.randn(17, 9), at=torch.tensor([1, 16, 3]))
    graph = b.graph(b("aten.silu.default", b("aten.embedding.default", "table", "at")))
    session = replace(session, settings=replace(session.settings, inductor="default"))
    found = measure_step(session, graph, planned(session, graph), Bench({**TIMES, "inductor": 40.0}))
    assert isinstance(found, StepTimes) and found.inductor_us == 40.0 and found.best_us == 50.0


@pytest.mark.parametrize("why", ["many ops", "rounds as eager", "no op of ATen"])
def test_where_inductor_is_not_asked_the_step_is_timed_without(
    session: Session, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, graph = layers()
    settings = replace(session.settings, inductor="default", numerics="eager" if why == "rounds as eager" else "fp32")
    session = replace(session, settings=settings)
    plan = planned(session, graph)
    if why == "many ops":
        monkeypatch.setattr(policy, "MOST_OPS_OF_A_STEP", 3)
    if why == "no op of ATen":
        monkeypatch.setattr(InductorCode, "refuse_step", lambda *_: "fuseplan.decode_attention is no op of ATen")
    bench = Bench(TIMES)
    found = measure_step(session, graph, plan, bench)
    assert isinstance(found, StepTimes) and found.inductor_us is None and not found.by_inductor and bench.asked == 1
