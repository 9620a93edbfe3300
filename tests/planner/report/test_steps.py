"""What a plan buys in a step: numbers that one can add up by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import check_gain
import pytest
import report_samples as samples

from fuseplan.planner.module_paths import RepeatedPaths
from fuseplan.planner.reports import frames, step_words, steps
from fuseplan.planner.reports.frames import ReportData, load_report
from fuseplan.planner.tuning import summary
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.planner.tuning.whole_step import StepTimes, step_key
from fuseplan.search.store.record import Alternative, GroupChoice, PlanRecord

MATMUL = GroupChoice((0,), "matmul.cublaslt", "", "linear 1x8", predicted_us=9.0, measured_us=30.0)
NORM = GroupChoice((1, 2), samples.NORM.backend, samples.NORM.key.workload, samples.NORM.label, {}, 25.0, 12.0, 20.0)
SDPA = GroupChoice((4,), "aten", "", "attention", predicted_us=50.0, measured_us=60.0)
RELU = GroupChoice((5,), "aten", "", "relu", predicted_us=7.0)
LAYER = RegionSummary(
    "9" * 64, 10, ("linear.default", "add.Tensor", "mul.Tensor", "view.default",
                   "scaled_dot_product_attention.default", "relu.default"),
    ("anchor", "compute", "compute", "view", "anchor", "compute"), ((0, 1), (1, 2)), ("1x8 bfloat16",) * 6,
)
ALONE = tuple(Alternative((at,), "", "", 1.0, time_us, "aten") for at, time_us in ((0, 40.0), (1, 50.0), (2, 41.0)))


def layer_plan() -> PlanRecord:
    made = samples.plan("9" * 64, "layer", (MATMUL, NORM, SDPA, RELU), 118.0, 198.0)
    return replace(made, rejected=ALONE)


Load = Callable[[StepTimes | None], ReportData]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(times: StepTimes | None) -> ReportData:
        with samples.sample_database(tmp_path / "tuning.db") as database:
            database.put_plan(layer_plan())
            # Ten layers of five ops and a view.
            whole = replace(samples.workload("decode b4", (LAYER,)), ops=60, views=10, externs=20)
            summary.store_summary(database, whole)
            if times is not None:
                database.put_capture(f"step/{step_key([(10, layer_plan())])}", asdict(times))
            return load_report(database, samples.DEVICE, samples.SPEC, "llama")

    return loaded


def decode(data: ReportData) -> steps.Step:
    return next(one for one in steps.steps(data) if one.name == "decode b4")


def test_a_librarys_call_is_compared_with_its_ops(load: Load) -> None:
    groups = frames.group_frame(load(None)).set_index("group")
    matmul = groups.loc[MATMUL.label]
    assert (matmul["fused_us"], matmul["unfused_us"]) == (30.0, 40.0)
    assert matmul["speedup"] == pytest.approx(4 / 3)


def test_linears_with_weights_of_other_sizes_are_told_apart(load: Load) -> None:
    """A label has the shape of the result, not of the weights."""
    data, (workload,) = load(None), [one for one in load(None).workloads if one.workload == "decode b4"]
    key = workload.plan_key(LAYER)
    larger = replace(MATMUL, ops=(5,), measured_us=90.0)
    alone = (*ALONE, Alternative((5,), "", "", 1.0, 140.0, "aten"))
    plan = replace(data.plans[key], groups=(MATMUL, NORM, SDPA, larger), rejected=alone)
    data = replace(data, plans={**data.plans, key: plan})
    saved = [(one.uses, one.unfused_us, one.planned_us) for one in decode(data).saved if one.label == MATMUL.label]
    assert saved == [(10, 140.0, 90.0), (10, 40.0, 30.0)]
    rows = frames.group_frame(data)
    assert rows[rows["group"] == MATMUL.label]["speedup"].tolist() == pytest.approx([4 / 3, 14 / 9])


@pytest.mark.parametrize(("bound_us", "shown_us"), [(29.0, 29.0), (31.0, 30.0), (33.0, 33.0)])
def test_no_floor_is_above_what_was_measured_unless_that_is_in_doubt(
    load: Load, bound_us: float, shown_us: float
) -> None:
    """Rates of the probe's minute are not those of the tune's."""
    data, (workload,) = load(None), [one for one in load(None).workloads if one.workload == "decode b4"]
    key = workload.plan_key(LAYER)
    plan = replace(data.plans[key], groups=(replace(MATMUL, lower_bound_us=bound_us), NORM, SDPA, RELU))
    groups = frames.group_frame(replace(data, plans={**data.plans, key: plan}))
    matmul = groups.set_index("group").loc[MATMUL.label]
    assert matmul["lower_bound_us"] == shown_us
    assert ("9.1% below its floor" in str(matmul["doubt"])) == (bound_us == 33.0)
    assert ("measured below" in frames.headline(groups)) == (bound_us == 33.0)


def test_parts_add_up_by_what_is_in_them(load: Load) -> None:
    parts = decode(load(None)).parts
    assert parts == {
        "matmuls": (400.0, 300.0), "attention": (600.0, 600.0), "fused groups": (0.0, 200.0),
        "unfused ops": (910.0 + 70.0, 70.0),
    }


def test_a_measured_step_tells_what_lies_between_its_parts(load: Load) -> None:
    data = load(StepTimes(2100.0, 1250.0, 0.01, 900.0))
    frame = steps.part_frame(data)
    frame = frame[frame["workload"] == "decode b4"].set_index("part")
    assert frame.loc["launches and gaps", ["unfused_us", "planned_us"]].tolist() == [2100.0 - 1980.0, 1250.0 - 1170.0]
    assert frame[["unfused_us", "planned_us"]].sum().tolist() == pytest.approx([2100.0, 1250.0])
    row = steps.step_frame(data).set_index("workload").loc["decode b4"]
    assert (row["speedup"], row["over_floor"], row["measured"]) == (
        pytest.approx(2100 / 1250), pytest.approx(1250 / 900), "end to end")
    assert step_words.step_words(decode(data)) == "decode b4: 2.10 -> 1.25 ms a step (1.68x); floor 0.90 ms"


def test_torch_compile_stands_beside_the_plan(load: Load) -> None:
    data = load(StepTimes(2100.0, 1250.0, 0.01, 900.0, inductor_us=1500.0))
    assert step_words.step_words(decode(data)).startswith(
        "decode b4: 2.10 -> 1.25 ms a step (1.68x; torch.compile 1.50 ms); floor")
    assert "by torch.compile 1.50 ms" in step_words.answers(decode(data))[0]
    (row,) = steps.step_frame(data).query("workload == 'decode b4'").itertuples()
    assert row.inductor_us == 1500.0 and not row.by_inductor and row.speedup == pytest.approx(1.68)


def test_a_gain_has_the_range_of_its_rounds(load: Load) -> None:
    data = load(StepTimes(2100.0, 1250.0, 0.01, 900.0, inductor_us=1500.0, gain_low=1.61, gain_high=1.704, rounds=7))
    assert "(1.68x, unsteady: 1.61 to 1.70 in 7 rounds; torch.compile 1.50 ms)" in step_words.step_words(decode(data))
    assert step_words.answers(decode(data))[0].startswith(
        "1.68x as fast, unsteady: 1.61 to 1.70 in 7 rounds: a step takes")
    (row,) = steps.step_frame(data).query("workload == 'decode b4'").itertuples()
    assert (row.speedup_low, row.speedup_high) == (1.61, 1.704)
    data = load(StepTimes(2100.0, 1250.0, 0.01, 900.0, inductor_us=1050.0, by_inductor=True, gain_low=1.61,
                          gain_high=1.7, rounds=7))
    assert "rounds" not in step_words.step_words(decode(data))  # the plan does not run


def test_a_range_that_is_small_is_not_called_unsteady(load: Load) -> None:
    data = load(StepTimes(2100.0, 1250.0, 0.01, 900.0, inductor_us=1500.0, gain_low=1.65, gain_high=1.70, rounds=8))
    assert "(1.68x, 1.65 to 1.70 in 8 rounds; torch.compile 1.50 ms)" in step_words.step_words(decode(data))


@pytest.mark.parametrize(("low", "told"), [(0.63, True), (1.01, False)])
def test_rounds_that_contradict_each_other_are_told(load: Load, low: float, told: bool) -> None:
    data = load(StepTimes(2100.0, 1250.0, 0.01, 900.0, gain_low=low, gain_high=4.15, rounds=14))
    assert ("faster in some rounds, slower in others" in step_words.step_words(decode(data))) is told


@pytest.mark.parametrize(("high", "told"), [(72.4, "45 to 72"), (45.3, "45")])
def test_the_speed_of_memory_is_told(load: Load, high: float, told: str) -> None:
    data = load(StepTimes(2100.0, 1250.0, 0.01, 900.0, gain_low=1.3, gain_high=2.0, rounds=16, read_low=45.0,
                          read_high=high))
    assert step_words.step_words(decode(data)) == (
        f"decode b4: 2.10 -> 1.25 ms a step (1.68x, unsteady: 1.30 to 2.00 in 16 rounds); floor 0.90 ms"
        f"; memory was read at {told} GB/s")
    assert told in step_words.answers(decode(data))[0]
    (row,) = steps.step_frame(data).query("workload == 'decode b4'").itertuples()
    assert (row.read_low_gbps, row.read_high_gbps) == (45.0, high)


def test_a_step_that_torch_compile_wins_says_so(load: Load) -> None:
    data = load(StepTimes(2100.0, 1250.0, 0.01, 900.0, inductor_us=1050.0, by_inductor=True))
    assert step_words.step_words(decode(data)).startswith(
        "decode b4: 2.10 -> 1.05 ms a step (2.00x; by torch.compile's own code; the plan takes 1.25 ms); floor")
    assert step_words.answers(decode(data))[0].startswith("2.00x as fast: a step takes 1.05 ms")
    (row,) = steps.step_frame(data).query("workload == 'decode b4'").itertuples()
    assert row.by_inductor and row.speedup == pytest.approx(2.0)


@pytest.mark.parametrize(("times", "by_compile_us", "spread", "alone"), [
    (StepTimes(2100.0, 1250.0, 0.01), None, (None, None), None),
    (StepTimes(2100.0, 1250.0, 0.01, inductor_us=1500.0, inductor_mode="max-autotune", alone=1.32, gain_low=1.61,
               gain_high=1.72, rounds=7), 1500.0, (1.61, 1.72), 1.32),
    (StepTimes(2100.0, 1250.0, 0.01, inductor_us=1050.0, by_inductor=True, alone=0.8), 1050.0, (None, None), 1.0),
])
def test_the_check_of_gains_reads_what_a_step_says(
    load: Load, times: StepTimes, by_compile_us: float | None, spread: tuple[float | None, ...], alone: float | None
) -> None:
    line = step_words.step_words(decode(load(times)))
    printed = check_gain.Printed.of(f"a group is fused\n{line}\n    saves 1 us of decode b4")
    assert printed is not None and printed.line == line and printed.gain == round(2100 / times.best_us, 2)
    assert (printed.times["eager"], printed.times["fuseplan"]) == (2100.0, times.best_us)
    assert (printed.times.get("torch.compile"), (printed.low, printed.high), printed.alone) == (
        by_compile_us, spread, alone)


def test_no_part_takes_negative_time_where_a_step_takes_less_than_its_parts(load: Load) -> None:
    frame = steps.part_frame(load(StepTimes(2100.0, 1050.0, 0.01, 900.0)))
    frame = frame[frame["workload"] == "decode b4"].set_index("part")
    assert frame.loc["launches and gaps", ["unfused_us", "planned_us"]].tolist() == [2100.0 - 1980.0, 0.0]
    assert frame.loc["cache reuse", ["unfused_us", "planned_us", "saved_us"]].tolist() == [0.0, -120.0, 120.0]
    assert frame[["unfused_us", "planned_us"]].sum().tolist() == pytest.approx([2100.0, 1050.0])


def test_without_a_measured_step_its_regions_are_added_and_said_to_be(load: Load) -> None:
    words = step_words.step_words(decode(load(None)))
    assert words.startswith("decode b4: 1.98 -> 1.18 ms a step (1.68x)")
    assert "not timed" in words and "floor" not in words


def test_unplanned_ops_are_said_to_be_missing(load: Load) -> None:
    data = load(StepTimes(2100.0, 1250.0, 0.01, 900.0))
    more = replace(data, workloads=tuple(
        replace(one, ops=63) if one.workload == "decode b4" else one for one in data.workloads))
    assert "excludes 3 unplanned ops" in step_words.step_words(decode(more))
    assert "excludes 3 unplanned ops" in step_words.answers(decode(more))[0]
    assert steps.step_frame(more).set_index("workload").loc["decode b4", "left_out"] == 3
    assert "excludes" not in step_words.step_words(decode(replace(more, steps={
        key: replace(times, opaque=3) for key, times in more.steps.items()})))


def test_steps_that_were_timed_come_first(load: Load) -> None:
    assert steps.steps(load(None))[0].name == "decode b1"
    assert steps.steps(load(StepTimes(200.0, 100.0, 0.05)))[0].name == "decode b4"


def test_steps_that_were_not_timed_are_counted_beside_those_that_were(load: Load) -> None:
    data = load(StepTimes(2100.0, 1250.0, 0.01))
    lines, every = list(step_words.step_lines(data)), list(step_words.step_lines(data, every=True))
    others = len(steps.steps(data)) - 1
    assert [line for line in lines if "a step" in line] == every[:1] and every[0].startswith("decode b4")
    assert f"{others} more workload" in lines[1]
    assert sum("a step" in line for line in every) == others + 1
    assert all("of decode b4" in line for line in lines if "saves" in line)


def test_of_groups_at_one_place_the_one_that_saves_most_is_named(load: Load) -> None:
    data = load(None)
    at_one_place = [
        replace(one, saved=tuple(replace(saved, place="model.norm") for saved in one.saved))
        for one in steps.steps(data)
    ]
    most = max((saved for one in at_one_place for saved in one.saved), key=lambda saved: saved.saved_us)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_words, "steps", lambda _: at_one_place)
        named = [line for line in step_words.step_lines(data) if "saves" in line]
    assert len(named) == 1 and step_words.time_text(most.saved_us) in named[0]


@pytest.mark.parametrize(("device", "regime", "said"), [
    ("cuda-x", "eager", "launched from Python"), ("cuda-x", "graph", "CUDA graph"), ("cpu-x", "eager", ""),
])
def test_how_kernels_of_a_gpu_were_launched_is_said(load: Load, device: str, regime: str, said: str) -> None:
    one = decode(load(StepTimes(2100.0, 1250.0, 0.01)))
    (first, *_) = step_words.answers(replace(one, workload=replace(one.workload, device=device, regime=regime)))
    assert [words in first for words in ("launched from Python", "CUDA graph")] == [
        words == said for words in ("launched from Python", "CUDA graph")]


def test_what_noise_hides_is_said(load: Load) -> None:
    close = decode(load(StepTimes(103.0, 100.0, 0.05)))
    assert "within the noise of 5%" in step_words.step_words(close)
    assert "within the noise of 5%" in step_words.answers(close)[0]
    assert "noise" not in step_words.step_words(decode(load(StepTimes(110.0, 100.0, 0.05))))


def test_groups_are_listed_by_what_they_save(load: Load) -> None:
    frame = steps.saved_frame(load(None))
    frame = frame[frame["workload"] == "decode b4"]
    assert frame["group"].tolist() == [samples.NORM.label, "linear 1x8"]
    # The norm by the run that decided it, 90 us against 20; the library's call against ATen's op.
    assert frame["saved_us"].tolist() == [10 * 70.0, 10 * 10.0]
    assert frame["share"].tolist() == pytest.approx([700 / 1980, 100 / 1980])


def test_the_groups_that_save_most_are_named_where_they_do(load: Load) -> None:
    lines = list(step_words.step_lines(load(None)))
    assert [line.split(":")[0] for line in lines[:3]] == ["decode b1", "decode b4", "prefill 1x128"]
    # SwiGLU runs 16 times in two workloads, the norm 32 times in decode b1 and prefill, and 10 times in decode b4.
    assert [line.strip() for line in lines[3:]] == [
        f"saves 2.24 ms of decode b1, 32 x (90.0 us -> 20.0 us): {samples.NORM.label}",
        f"saves 1.28 ms of decode b1, 16 x (120 us -> 40.0 us): {samples.SWIGLU.label}",
        "saves 100 us of decode b4, 10 x (40.0 us -> 30.0 us): linear 1x8",
    ]
    short = list(step_words.step_lines(load(None), shown=1))
    assert len(short) == 5 and short[4].endswith("2 other groups save less; `plan report steps` lists them")
    short = list(step_words.step_lines(load(None), shown=2))
    assert short[5].endswith("1 other group saves less; `plan report steps` lists it")


def test_a_group_in_several_regions_is_one_line(load: Load) -> None:
    data = load(None)
    other = replace(LAYER, key="8" * 64, occurrences=3)
    plan = replace(layer_plan(), key=replace(layer_plan().key, workload="8" * 64))
    both = samples.workload("decode b4", (LAYER, other))
    data = replace(data, workloads=(both,), plans={**data.plans, plan.key: plan})
    frame = steps.saved_frame(data)
    assert dict(zip(frame["group"], frame["uses"], strict=True)) == {samples.NORM.label: 13, "linear 1x8": 13}


def test_places_of_a_group_in_several_regions_are_told_once(load: Load) -> None:
    def at(layer: int) -> RegionSummary:
        paths = tuple((op, f"model.layers.{layer}.mlp.act_fn") for op in (1, 2))
        return replace(LAYER, key=str(layer) * 64, occurrences=2, places=(RepeatedPaths(2, paths),))

    data = load(None)
    plans = {key: replace(layer_plan(), key=replace(layer_plan().key, workload=key)) for key in ("5" * 64, "6" * 64)}
    found = {**data.plans, **{plan.key: plan for plan in plans.values()}}
    both = replace(data, workloads=(samples.workload("decode b4", (at(5), at(6))),), plans=found)
    (place,) = {saved.place for saved in decode(both).saved if saved.label == samples.NORM.label}
    assert "model.layers.*.mlp.act_fn" in place and "5" not in place
    alone = replace(data, workloads=(samples.workload("decode b4", (at(5),)),), plans=found)
    (place,) = {saved.place for saved in decode(alone).saved if saved.label == samples.NORM.label}
    assert "model.layers.5.mlp.act_fn" in place


def test_a_workload_with_a_region_that_has_no_plan_is_left_out(load: Load) -> None:
    data = load(None)
    plans = {key: plan for key, plan in data.plans.items() if key.workload != "9" * 64}
    assert "decode b4" not in {one.name for one in steps.steps(replace(data, plans=plans))}


@pytest.mark.parametrize(("time_us", "words"), [
    (0.0, "0.00 us"), (9.994, "9.99 us"), (9.996, "10.0 us"), (912.4, "912 us"), (999.6, "1.00 ms"),
    (12345.0, "12.3 ms"), (2.1e6, "2.10 s"), (-250.0, "-250 us"),
])
def test_times_have_three_digits(time_us: float, words: str) -> None:
    assert step_words.time_text(time_us) == words


def test_what_the_named_groups_do_not_explain_is_said(load: Load) -> None:
    timed = decode(load(StepTimes(5000.0, 1000.0, 0.01)))
    named = [saved for saved in timed.saved if saved.saved_us > 0][:3]
    rest_us = 4000.0 - math.fsum(saved.saved_us for saved in named)
    assert step_words.time_text(rest_us) in step_words.answers(timed)[1]
    explained = decode(load(StepTimes(1000.0 + math.fsum(saved.saved_us for saved in named), 1000.0, 0.01)))
    assert "other" not in step_words.answers(explained)[1]
