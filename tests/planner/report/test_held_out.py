"""Figures of the cost model's bars, on samples whose times are known functions of their work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from costmodel_samples import GPU
from graphs import Builder
from held_out import ChoiceSample, RegionSamples, regret_frame, sample_frame, stored_samples, verdict_frame
from reference_backend import ReferenceBackend
from scripted_tuner import TARGET, ScriptedTuner

from fuseplan.costmodel.roofline import predict
from fuseplan.costmodel.work import Work
from fuseplan.planner.tuning.planner import Planner
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import RecordKey


def sample(ops: tuple[int, ...], family: str, nbytes: float, scale: float, fused: bool = False) -> ChoiceSample:
    """A kernel that takes ``scale`` times what the roofline says."""
    work = Work({"fp32": nbytes / 8}, nbytes, launches=1)
    time_us = scale * predict(work, GPU, "graph")
    name, label = "triton" if fused else "unfused", f"{family} {nbytes:g}"
    return ChoiceSample(ops, "kernel" if fused else "aten", name, label, family, label, "graph", work, time_us)


def region(number: int, nbytes: float, scale: float = 1.2, odd: float = 1.0) -> RegionSamples:
    """Two ops, alone and together; the fused kernel of ``odd`` regions takes that many times longer than others."""
    first = f"f{number}"
    samples = (
        sample((0,), f"{first}.a", nbytes, scale), sample((2,), f"{first}.b", nbytes, scale),
        sample((0, 2), f"{first}.ab", 1.5 * nbytes, scale * odd, fused=True),
    )
    return RegionSamples(RecordKey(f"key{number}", "dev", "graph"), f"region {number}", ((0, 2),), 3, samples)


REGIONS = [region(number, 1e5 * 1.7**number) for number in range(10)]
PHASES = {f"key{number}": "decode" if number < 5 else "prefill" for number in range(10)}


def verdicts(regions: list[RegionSamples]) -> pd.DataFrame:
    return verdict_frame(regions, sample_frame(regions, GPU, PHASES)).set_index(["left out of the fit", "figure"])


def test_a_model_that_is_only_off_by_a_factor_meets_every_bar() -> None:
    table = verdicts(REGIONS)
    assert set(table["verdict"]) == {"met"}
    assert table.loc[("kernels that compute the same", "median error"), "value"] == pytest.approx(0.0, abs=0.02)
    assert table.loc[("shapes: decode, from the others", "median error"), "value"] == pytest.approx(0.0, abs=0.05)
    assert (table["over"].str.contains("10 regions, 10 measured exhaustively")).sum() == 8


def test_a_kernel_is_predicted_without_itself() -> None:
    odd = [*REGIONS[:-1], region(9, 1e5 * 1.7**9, odd=5.0)]
    frame = sample_frame(odd, GPU, PHASES)
    row = frame[frame["family"] == "f9.ab"].iloc[0]
    # All others say 1.2; only its own fit could know of the 6.
    assert row["other_families_us"] / row["measured_us"] == pytest.approx(0.2, rel=0.1)


def test_regret_is_what_the_predicted_cover_costs_and_says_why() -> None:
    odd = [*REGIONS[:-1], region(9, 1e5 * 1.7**9, odd=5.0)]
    frame = sample_frame(odd, GPU, PHASES)
    table = regret_frame(odd, frame, "other_families_us")
    worst = table.iloc[0]
    apart, together = odd[9].samples[:2], odd[9].samples[2]
    expected = together.measured_us / sum(one.measured_us for one in apart) - 1.0
    assert worst["region"] == "region 9"
    assert worst["regret"] == pytest.approx(expected)
    assert worst["top8_regret"] == 0.0
    assert "f9.ab" in worst["why"] and f"{apart[0].label} by aten" in worst["why"]
    assert (table["regret"].iloc[1:] == 0).all()
    assert verdicts(odd).loc[("kernels that compute the same", "worst regret of the model's first choice"),
                             "verdict"] == "MISSED"


def test_a_choice_of_many_regions_counts_once() -> None:
    """Ten regions share an op whose time is odd; nothing but their own op is in each of the figures."""
    shared = sample((0,), "shared", 3e5, 7.0)
    regions = [replace(one, samples=(shared, *one.samples[1:])) for one in REGIONS]
    frame = sample_frame(regions, GPU, PHASES)
    table = verdict_frame(regions, frame).set_index(["left out of the fit", "figure"])
    row = table.loc[("kernels that compute the same: unfused", "median error")]
    assert row["over"] == "11 distinct choices"
    errors = (frame["other_families_us"] / frame["measured_us"] - 1).abs()
    once = errors[(frame["kind"] == "unfused") & ~frame["group"].duplicated()]
    assert row["value"] == pytest.approx(once.median())


def test_without_phases_shapes_are_told_apart_by_size() -> None:
    frame = sample_frame(REGIONS, GPU, {})
    assert set(frame["phase"]) == {"small", "large"}
    assert frame.groupby("phase")["work_dram_bytes"].max()["small"] < frame[frame["phase"] == "large"][
        "work_dram_bytes"].min()


def test_the_frame_has_what_a_refit_needs() -> None:
    frame = sample_frame(REGIONS, GPU, PHASES)
    assert len(frame) == 30
    assert {"term_launch_us", "term_memory_us", "work_dram_bytes", "work_flops", "mode"} <= set(frame.columns)
    assert not frame[["predicted_us", "other_families_us", "other_phases_us"]].isna().any().any()


def test_nothing_measured_gives_empty_frames() -> None:
    frame = sample_frame([], GPU, {})
    assert frame.empty
    assert set(verdict_frame([], frame)["verdict"]) == {"unknown"}


def test_a_plan_has_what_was_measured_for_it(tmp_path: Path) -> None:
    b = Builder(x=torch.randn(3, 127))
    graph = b.graph(b("aten.exp.default", b("aten.neg.default", "x")))
    with Database(tmp_path / "t.db") as database:
        tuner = ScriptedTuner(database, lambda subject: 4.0)
        planner = Planner(database, None, "dev", TARGET, (ReferenceBackend(),), tuner=tuner)  # type: ignore[arg-type]
        plan = planner.plan_graph(graph).regions[0]
        (found,) = stored_samples(planner, [graph])
        assert found.key == plan.record.key
        assert {(one.ops, one.implementation) for one in found.samples} >= {
            ((0,), "aten"), ((1,), "aten"), ((0, 1), "kernel")
        }
        assert found.edges == ((0, 1),)
        assert all(one.measured_us == (4.0 if one.implementation == "kernel" else 10.0) for one in found.samples)
        assert all(one.work.launches == 1 for one in found.samples)
