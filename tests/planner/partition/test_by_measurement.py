"""The decision between the nominal cover and the cheapest one found: noise must not sway it, a real gain must."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from check_plans import HopefulPrices, best_of_all, loss_of
from reference_backend import ReferenceBackend
from scripted_tuner import TARGET, ScriptedTuner, chain, compute_nodes

from fuseplan.costmodel.devices import ByDevice
from fuseplan.planner.groups.candidates import enumerate_candidates
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.choices import implementations_for, region_problem
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.tunable_group import TunableGroup
from fuseplan.planner.tuning.planner import Planner
from fuseplan.search import policy
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import PlanRecord, TuningRecord, Versions
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.sequence import Part


@pytest.fixture(autouse=True)
def all_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "GAP_TOLERANCE", 0.0)
    monkeypatch.setattr(policy, "MEASURED_LIMIT", ByDevice(100, 100))


class Named(ReferenceBackend):
    """The reference interpreter under the name that the scripted records carry."""

    name = "cpp"


def plan(
    folder: Path, tuner_of: type[ScriptedTuner], ops: int = 4, **script: object
) -> tuple[PlanRecord, ScriptedTuner]:
    database = Database(folder / "t.db", "write", Versions.current("cpu"))
    tuner = tuner_of(database, **script)  # type: ignore[arg-type]
    planner = Planner(database, None, "dev", TARGET, (Named(),), tuner=tuner)  # type: ignore[arg-type]
    return planner.plan_graph(chain(ops)).regions[0].record, tuner


def by_length(*times_us: float) -> dict[int, float]:
    return dict(enumerate(times_us, 1))


def sizes(record: PlanRecord) -> list[int]:
    return sorted(len(group.ops) for group in record.groups)


@pytest.mark.parametrize(("ops", "fused_us", "way"), [
    (1, 7.6, "aten"), (1, 7.4, "cpp"),  # the kernel of one op saves no launch: it has to gain 25 %
    (2, 16.8, "cpp"), (2, 20.2, "aten"),
])
def test_the_kernel_of_one_op_has_to_gain_as_much_as_a_librarys_call(
    tmp_path: Path, ops: int, fused_us: float, way: str
) -> None:
    table = by_length(*(15.0,) * (ops - 1), fused_us)
    record, _ = plan(tmp_path, ScriptedTuner, ops, fused_us=lambda subject: table[len(compute_nodes(subject))],
                     refuses=lambda subject: table[len(compute_nodes(subject))] > 10.0 * len(compute_nodes(subject)))
    assert {group.implementation for group in record.groups} == {way}


@pytest.mark.parametrize("seed", range(8))
def test_noise_never_unseats_the_nominal_cover(tmp_path: Path, seed: int) -> None:
    """One kernel of 10.2 us or two of 5 us: 2 % apart, under screenings that are off by up to 30 %."""
    table = by_length(6.0, 5.0, 9.0, 10.2)
    noise = random.Random(seed)
    record, _ = plan(
        tmp_path, ScriptedTuner, fused_us=lambda subject: table[len(compute_nodes(subject))],
        noisy=lambda: noise.uniform(0.7, 1.3),
    )
    assert sizes(record) == [4]


@pytest.mark.parametrize("seed", range(8))
def test_a_real_gain_wins_whatever_the_noise(tmp_path: Path, seed: int) -> None:
    table = by_length(30.0, 5.0, 45.0, 40.0)
    noise = random.Random(seed)
    record, _ = plan(
        tmp_path, ScriptedTuner, fused_us=lambda subject: table[len(compute_nodes(subject))], unfused_us=30.0,
        noisy=lambda: noise.uniform(0.8, 1.2),
    )
    assert sizes(record) == [2, 2]
    assert record.planned_us < 40.0


@pytest.mark.parametrize(("fused_us", "fused"), [(5.0, True), (20.0, False)])
def test_an_op_by_itself_is_a_kernel_where_that_is_faster(tmp_path: Path, fused_us: float, fused: bool) -> None:
    record, _ = plan(tmp_path, ScriptedTuner, ops=1, fused_us=lambda subject: fused_us, unfused_us=10.0)
    assert [group.is_kernel for group in record.groups] == [fused]


def test_a_gain_within_the_margin_is_not_taken(tmp_path: Path) -> None:
    table = by_length(6.0, 5.0, 9.0, 10.3)
    record, tuner = plan(tmp_path, ScriptedTuner, fused_us=lambda subject: table[len(compute_nodes(subject))])
    assert sizes(record) == [4]
    assert record.planned_us == pytest.approx(10.3)
    assert not tuner.play_offs  # the prices settle it
    assert {len(other.ops) for other in record.rejected if other.implementation != "aten"} >= {2}


def test_a_play_off_settles_what_prices_suggest(tmp_path: Path) -> None:
    table = by_length(6.0, 5.0, 9.0, 14.0)
    record, tuner = plan(tmp_path, ScriptedTuner, fused_us=lambda subject: table[len(compute_nodes(subject))])
    assert sizes(record) == [2, 2]
    assert tuner.play_offs[0] == (1, 2)  # one kernel against two
    assert "in an interleaved run" in record.evidence.reason


def test_whole_covers_take_part_and_shared_kernels_count(tmp_path: Path) -> None:
    """Of five ops the first two are one kernel in both covers: 60 us. The other three: 10 us, or 2 + 4 us."""
    order = {node.name: number for number, node in enumerate(chain(5))}
    times = {(0, 1): 60.0, (2, 3, 4): 10.0, (2, 3): 2.0, (4,): 4.0}

    def time_us(subject: TunableGroup) -> float:
        return times.get(tuple(sorted(order[node.name] for node in compute_nodes(subject))), 500.0)

    record, tuner = plan(tmp_path, ScriptedTuner, ops=5, fused_us=time_us, unfused_us=500.0)
    assert tuner.play_offs[-1] == (2, 3)
    assert tuner.kept[-1] == tuple(chain(5).outputs)
    assert sizes(record) == [1, 2, 2]
    assert "gains 5.7%" in record.evidence.reason  # 4 of 70 us


def test_a_failing_play_off_leaves_it_to_the_prices(tmp_path: Path) -> None:
    class Broken(ScriptedTuner):
        def play_off(self, *args: object, **kwargs: object) -> Contest | None:
            return None

    table = by_length(6.0, 5.0, 9.0, 14.0)
    record, _ = plan(tmp_path, Broken, fused_us=lambda subject: table[len(compute_nodes(subject))])
    assert sizes(record) == [2, 2]
    assert "by the times of its groups (their interleaved run failed)" in record.evidence.reason


def test_noise_of_the_play_off_keeps_the_incumbent(tmp_path: Path) -> None:
    class Noisy(ScriptedTuner):
        def play_off(
            self, parts: Mapping[str, Part], sides: Mapping[str, Sequence[str]], kept: Collection[str] = ()
        ) -> Contest | None:
            found = super().play_off(parts, sides, kept)
            assert found is not None
            return Contest(found.samples, 0.6, "eager")

    table = by_length(6.0, 5.0, 9.0, 14.0)
    record, _ = plan(tmp_path, Noisy, fused_us=lambda subject: table[len(compute_nodes(subject))])
    assert sizes(record) == [4]
    assert "gains 28.6%" in record.evidence.reason and "too little" in record.evidence.reason
    assert record.gap == pytest.approx(4 / 14)


def test_an_incumbent_that_must_not_be_fused_gives_way_under_noise_too(tmp_path: Path) -> None:
    """Each nominal cover seems quick until it is tuned, and no interleaved run can tell anything."""
    class Hopeless(ScriptedTuner):
        def play_off(
            self, parts: Mapping[str, Part], sides: Mapping[str, Sequence[str]], kept: Collection[str] = ()
        ) -> Contest | None:
            found = super().play_off(parts, sides, kept)
            assert found is not None
            return Contest(found.samples, 1.03, "eager")

    table = by_length(50.0, 15.0, 9.0, 10.0)
    record, _ = plan(
        tmp_path, Hopeless, fused_us=lambda subject: table[len(compute_nodes(subject))], unfused_us=12.0,
        refuses=lambda subject: len(compute_nodes(subject)) in (2, 4),
    )
    assert sizes(record) == [1, 3]
    times = [group.measured_us for group in record.groups]
    assert all(time is not None and math.isfinite(time) for time in times)
    assert Database(tmp_path / "t.db", "read").get_plans([record.key])[record.key].record == record


def test_a_plan_that_rests_on_noise_is_no_hit(tmp_path: Path) -> None:
    class Unsure(ScriptedTuner):
        def tune(
            self, subject: TunableGroup, neighbours: Sequence[TuningRecord] = (), minor: bool = False
        ) -> TuningRecord:
            return replace(super().tune(subject, neighbours, minor), fuse=False, undecided=True)

    record, tuner = plan(tmp_path, Unsure, fused_us=lambda subject: 5.0)
    assert record.undecided and record.planned_us == pytest.approx(5.0)
    assert tuner.database.get_plans([record.key])[record.key].hit is None
    assert tuner.database.get_plans([record.key])[record.key].record == record
    again, _ = plan(tmp_path, ScriptedTuner, fused_us=lambda subject: 5.0)
    assert not again.undecided and tuner.database.get_plans([record.key])[record.key].hit == again


def test_a_refused_incumbent_gives_way(tmp_path: Path) -> None:
    table = by_length(6.0, 5.0, 9.0, 8.0)
    record, _ = plan(
        tmp_path, ScriptedTuner, fused_us=lambda subject: table[len(compute_nodes(subject))],
        refuses=lambda subject: len(compute_nodes(subject)) == 4,
    )
    assert 4 not in sizes(record)
    assert record.planned_us == pytest.approx(10.0)


def test_the_check_of_plans_finds_the_best_partition_and_runs_it_beside_another(tmp_path: Path) -> None:
    graph, times_us = chain(4), by_length(6.0, 5.0, 9.0, 20.0)
    (region,), table = find_regions(graph), GroupTable(graph, "fp32", "cpu")
    problem = region_problem(table, region, enumerate_candidates(graph, region, table.legal),
                             implementations_for("eager", (Named(),), TARGET))
    tuner = ScriptedTuner(Database(tmp_path / "t.db"), lambda subject: times_us[len(compute_nodes(subject))])
    prices = HopefulPrices(table, None, tuner)  # type: ignore[arg-type]
    best = best_of_all(problem, prices)
    whole = [one for one in problem.choices if len(one.group.ops) == 4]
    assert [len(one.group.ops) for one in best] == [2, 2]
    assert loss_of(whole, best, problem, prices)[0] == pytest.approx(0.5) and tuner.play_offs == [(2, 1)]
