"""Matmuls as choices: measured, stored, checked, run; and whole regions against plain ATen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import compiled
from graphs import Builder
from reference_backend import ReferenceBackend
from scripted_tuner import TARGET, ScriptedTuner

import fuseplan.planner
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.candidates import single_candidates
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.libraries.library_call import Call, LibraryCall, OpGroup
from fuseplan.planner.tuning.planner import Planner, PlanSettings, RegionPlan
from fuseplan.search import policy
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import ATEN, Versions
from fuseplan.search.timing.contest import Contest, mean_contest
from fuseplan.search.timing.timers import CpuTimer
from fuseplan.search.workers.jobs import Bench, Calls, contest_calls

pytestmark = pytest.mark.usefixtures("any_gain")

LINEAR = "aten.linear.default"


@dataclass(frozen=True)
class Doubled(LibraryCall):
    """A linear op as the transposed product of the transposed operands, or something wrong, or something that fails."""

    name: str = "fake.linear"
    broken: bool = False

    def refuse(self, group: OpGroup) -> str | None:
        return None if group.node.op == LINEAR else "it runs linear ops"

    def plan(self, group: OpGroup) -> Callable[[], Call]:
        def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise RuntimeError("no such algorithm")
            CALLS.append(self.name)
            return (w @ x.t()).t().contiguous()

        return lambda: run


CALLS: list[str] = []


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Doubled:
    """The only library call there is."""
    call = Doubled(broken=getattr(request, "param", False))
    monkeypatch.setattr("fuseplan.planner.implementations.choices.LIBRARY_CALLS", (call,))
    CALLS.clear()
    return call


def gated() -> DataflowGraph:
    """Pointwise ops before and after a matmul."""
    b = Builder(x=torch.randn(4, 8), w=torch.randn(6, 8))
    inner = b(LINEAR, b("aten.tanh.default", b("aten.exp.default", "x")), "w", bias=None)
    return b.graph(b("aten.neg.default", b("aten.exp.default", inner)))


def planned(folder: Path, **script: Any) -> tuple[RegionPlan, ScriptedTuner, Planner]:
    database = Database(folder / "t.db", "write", Versions.current("cpu"))
    tuner = ScriptedTuner(database, lambda subject: 5.0, **script)
    planner = Planner(database, None, "dev", TARGET, (ReferenceBackend(),), tuner=tuner)  # type: ignore[arg-type]
    (plan,) = planner.plan_graph(gated()).regions
    return plan, tuner, planner


@pytest.mark.parametrize(("library_us", "name"), [(6.0, "fake.linear"), (12.0, "aten"), (None, "aten")])
def test_the_faster_way_to_run_a_matmul_is_chosen(
    tmp_path: Path, library: Doubled, library_us: float | None, name: str
) -> None:
    times = {} if library_us is None else {library.name: library_us}
    plan, _, planner = planned(tmp_path, library_us=times)
    runs = {group.implementation for group in plan.record.groups}
    assert runs == {"cpp", name}
    assert plan.record.planned_us == pytest.approx(5.0 + 5.0 + min(library_us or 10.0, 10.0))
    assert plan.record.unfused_us == pytest.approx(50.0)
    lost = {one.implementation: one for one in plan.record.rejected if len(one.ops) == 1}
    if library_us is None:
        assert "wrong result" in lost[library.name].reason
    else:
        assert ({"aten", library.name} - {name}) <= lost.keys()
    # What was stored is found, and passes the check.
    again = Planner(planner.store, None, "dev", TARGET, (ReferenceBackend(),), PlanSettings()).plan_graph(gated())
    assert [one.source for one in again.regions] == ["database"]
    assert again.regions[0].record.groups == plan.record.groups


@pytest.mark.parametrize(("library_us", "name"), [(9.5, "aten"), (9.3, "fake.linear")])
def test_a_call_that_hardly_gains_leaves_the_matmul_to_aten(
    tmp_path: Path, library: Doubled, library_us: float, name: str
) -> None:
    plan, _, _ = planned(tmp_path, library_us={library.name: library_us})
    assert name in {group.implementation for group in plan.record.groups}
    kept = "no call of a library gains 6.0% on ATen's op beyond noise" in plan.record.evidence.reason
    assert kept is (name == "aten")


def test_medians_say_what_a_call_gains(tmp_path: Path, library: Doubled, monkeypatch: pytest.MonkeyPatch) -> None:
    """14 % from median to median, 4 % in the median of the differences."""
    samples = {ATEN: (20.0, 20.0, 28.0, 28.0, 28.0), library.name: (19.0, 19.0, 24.0, 27.0, 27.0)}
    found = Calls(Contest(samples, 0.0, "eager"), {})
    monkeypatch.setattr(ScriptedTuner, "contest_calls", lambda *_: lambda: found)
    plan, _, _ = planned(tmp_path, library_us={library.name: 24.0})
    assert library.name in {group.implementation for group in plan.record.groups}
    assert "gains 14.3% on ATen's op" in plan.record.evidence.reason


def test_launches_and_the_devices_own_time_decide_together(
    tmp_path: Path, library: Doubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that takes 1.25 times as long to launch, and half as long on the device."""
    launched = Contest({ATEN: (20.0,) * 7, library.name: (25.0,) * 7}, 0.0, "eager")
    alone = Contest({ATEN: (18.0,) * 7, library.name: (9.0,) * 7}, 0.0, "graph")
    found = Calls(mean_contest(launched, alone, policy.MAX_LAUNCH_LOSS), {})
    monkeypatch.setattr(ScriptedTuner, "contest_calls", lambda *_: lambda: found)
    plan, _, _ = planned(tmp_path, library_us={library.name: 24.0})
    (group,) = (one for one in plan.record.groups if one.implementation == library.name)
    assert group.measured_us == pytest.approx(25.0)  # what a launch of it takes


@pytest.mark.parametrize(("fails", "name"), [((0,), "fake.linear"), ((0, 1), "aten")])
def test_where_the_run_of_all_calls_fails_they_are_timed_one_by_one(
    tmp_path: Path, library: Doubled, monkeypatch: pytest.MonkeyPatch, fails: tuple[int, ...], name: str
) -> None:
    runs: list[bool] = []
    contest = ScriptedTuner.contest_calls

    def failing(self: ScriptedTuner, *args: Any) -> Any:
        runs.append(len(runs) in fails)
        return (lambda: None) if runs[-1] else contest(self, *args)

    monkeypatch.setattr(ScriptedTuner, "contest_calls", failing)
    plan, _, _ = planned(tmp_path, library_us={library.name: 6.0})
    assert {group.implementation for group in plan.record.groups} == {"cpp", name}
    lost = [one.reason for one in plan.record.rejected if one.implementation == library.name]
    assert ("does not work: its run failed" in lost) is (name == "aten")


def test_calls_of_one_op_are_checked_and_timed_beside_it(library: Doubled) -> None:
    """For real: one right, one that raises, and one that is wrong."""
    graph = gated()
    (linear,) = (node.name for node in graph if node.op == LINEAR)
    table = GroupTable(graph, "fp32", "cpu")
    (group,) = (one for region in find_regions(graph) for one in single_candidates(graph, region)
                if one.ops == (linear,))

    class Wrong(Doubled):
        def build(self, group: OpGroup) -> Call:
            return lambda x, w: torch.nn.functional.linear(x, w) * 1.5

    plain = table.subject(group)
    calls = {name: replace(table.subject(group), library=call) for name, call in {
        "right": library, "raises": Doubled(broken=True), "wrong": Wrong(),
    }.items()}
    found = contest_calls(Bench(TARGET, CpuTimer(), decide_s=0.002), plain, calls)
    assert set(found.contest.samples) == {ATEN, "right"} and CALLS
    assert found.failed["raises"] == "RuntimeError: no such algorithm"
    assert found.failed["wrong"].startswith("wrong result: output 0")


def test_a_plan_whose_library_call_is_gone_is_refused(tmp_path: Path, library: Doubled, monkeypatch: Any) -> None:
    _, _, planner = planned(tmp_path, library_us={library.name: 1.0})
    monkeypatch.setattr("fuseplan.planner.implementations.choices.LIBRARY_CALLS", ())
    later = Planner(planner.store, None, "dev", TARGET, (ReferenceBackend(),), PlanSettings())
    plans = later.plan_graph(gated()).regions  # its islands have plans of their own, which still serve
    assert [(plan.source, *(group.implementation for group in plan.record.groups)) for plan in plans] == [
        ("database", "cpp"), ("database", "cpp")]
    assert ["none for cpu" in reason for reason in later.refused.values()] == [True]


@pytest.mark.parametrize(("overhead_us", "words"), [
    (30.0, "gains 0.0% on plain ATen"), (30.1, "loses 0.2% to plain ATen"), (36.0, "loses 12.0% to plain ATen"),
])
def test_a_region_that_loses_to_plain_aten_is_run_by_it(
    tmp_path: Path, library: Doubled, overhead_us: float, words: str
) -> None:
    """Five ops of 10 us; two kernels and a matmul: 20 us, and what they cost each other."""
    plan, tuner, _ = planned(tmp_path, together_us=lambda kernels: overhead_us if kernels > 1 else 0.0)
    kept = words.startswith("gains")
    assert tuner.play_offs[-1] == (5, 3)
    assert {group.implementation for group in plan.record.groups} == ({"cpp", "aten"} if kept else {"aten"})
    assert plan.record.planned_us == pytest.approx(20.0 if kept else 50.0)
    assert words in plan.record.evidence.reason


def test_nothing_measured_means_no_library_call(tmp_path: Path, library: Doubled) -> None:
    database = Database(tmp_path / "t.db", "write", Versions.current("cpu"))
    plans = Planner(database, None, "dev", TARGET, (ReferenceBackend(),), PlanSettings()).plan_graph(gated()).regions
    assert {group.implementation for plan in plans for group in plan.record.groups} == {"cpp"}


@pytest.mark.parametrize(("capability", "name"), [("AVX512", "matmul.rows"), ("AVX2", "aten")])
def test_a_matmul_that_is_not_timed_is_run_by_what_is_known_to_be_faster(
    capability: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(policy, "MINOR_SHARE", 2.0)
    b = Builder(x=torch.randn(2, 512), w=torch.randn(512, 512))
    graph = b.graph(b("aten.neg.default", b(LINEAR, b("aten.exp.default", "x"), "w", bias=None)))
    database = Database(tmp_path / "t.db", "write", Versions.current("cpu"))
    tuner = ScriptedTuner(database, lambda subject: 5.0, library_us={"matmul.rows": 8.0})
    planner = Planner(database, None, "dev", TARGET, (ReferenceBackend(),), tuner=tuner)  # type: ignore[arg-type]
    (plan,) = planner.plan_graph(graph).regions
    (linear,) = (one for one in plan.record.groups if one.label.startswith("linear"))
    assert (linear.implementation, linear.measured_us) == (name, None)


@pytest.mark.parametrize("library", [False, True], indirect=True)
def test_dispatch_makes_the_call_or_falls_back_to_aten(
    tmp_path: Path, library: Doubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.exp().tanh(), w).exp().neg()

    def tuner(session: Any, *args: Any, **kwargs: Any) -> Any:
        return _Scripted(ScriptedTuner(session.database, lambda subject: 5.0, library_us={library.name: 1.0}))

    kernels = ReferenceBackend()
    monkeypatch.setattr("fuseplan.planner.tuning.session.backends_for", lambda device_type: (kernels,))
    monkeypatch.setattr("fuseplan.planner.tuning.session.Session.tuner", tuner)
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    with torch.no_grad():
        fast = compiled(function, tmp_path / "t.db", on_miss="tune")
        for _ in range(2):
            torch.testing.assert_close(fast(x, w), function(x, w))
    stats = fuseplan.planner.stats()
    assert stats.groups_fused == 2 and not stats.fallbacks
    assert stats.library_calls == (0 if library.broken else 1)
    assert ([] if library.broken else [library.name] * 2) == CALLS
    assert any("no such algorithm" in note for note in stats.notes) == library.broken


class _Scripted:
    """A tuner as ``with`` takes it."""

    def __init__(self, tuner: ScriptedTuner) -> None:
        self._tuner = tuner

    def __enter__(self) -> ScriptedTuner:
        return self._tuner

    def __exit__(self, *exc: object) -> None:
        pass
