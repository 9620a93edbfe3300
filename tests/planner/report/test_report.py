"""Reports: exact numbers from a hand-made database, and a page that opens in a browser without a network."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
import report_samples as samples
from held_out import phases

from fuseplan.planner.errors import PlanError
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.module_paths import RepeatedPaths
from fuseplan.planner.reports import accuracy, frames, plots
from fuseplan.planner.reports.document import table_of
from fuseplan.planner.reports.frames import ReportData, load_report
from fuseplan.planner.reports.html_page import html_report, table_html
from fuseplan.planner.tuning import summary
from fuseplan.search.store.record import Alternative, GroupChoice


@pytest.fixture
def data(tmp_path: Path) -> ReportData:
    with samples.sample_database(tmp_path / "tuning.db") as database:
        return load_report(database, samples.DEVICE, samples.SPEC, "llama")


# -- frames ---------------------------------------------------------------------------------------------------


def test_group_frame_counts_runs_and_says_do_not_fuse(data: ReportData) -> None:
    frame = frames.group_frame(data).set_index("group")
    swiglu = frame.loc["silu+mul 32x8192 bfloat16"]
    assert swiglu["times"] == 32  # 16 in each of two workloads
    assert swiglu["workload"] == "decode b1, prefill 1x128"
    assert swiglu["speedup"] == pytest.approx(120.0 / 40.0)
    assert swiglu["config"] == "col_tile=1024 threads=2"
    rope = frame.loc["cat|neg <rope> 32x32x64 bfloat16"]
    assert (rope["answer"], rope["speedup"], rope["fused_us"]) == ("do not fuse", 1.0, 55.0)
    assert len(frame) == 3  # the lone neg was no tuning question


def test_places_of_a_group_count_over_regions_and_are_told_once_for_all_workloads(data: ReportData) -> None:
    """Each workload has two regions of SwiGLU here: of most layers, and of the last."""
    def located(one: summary.WorkloadSummary) -> summary.WorkloadSummary:
        first = one.regions[0]
        assert data.plans[one.plan_key(first)].label == samples.SWIGLU_PLAN.label
        paths = ((0, "layers.*.mlp.act_fn"), (1, "layers.*.mlp"))
        most = replace(first, places=(RepeatedPaths(15, paths),))
        paths = ((0, "layers.15.mlp.act_fn"), (1, "layers.15.mlp"))
        last = replace(first, occurrences=1, places=(RepeatedPaths(1, paths),))
        return replace(one, regions=(most, last, *one.regions[1:]))

    found = replace(data, workloads=tuple(map(located, data.workloads)))
    places = frames.group_frame(found).set_index("group")["place"]
    assert places["silu+mul 32x8192 bfloat16"] == "layers.*.mlp: act_fn -> (itself)  x16"
    assert places["cat|neg <rope> 32x32x64 bfloat16"] == ""
    assert "layers.*.mlp: act_fn -&gt; (itself)" in html_report(found)


def test_a_summary_of_an_older_version_reads_and_has_no_places(tmp_path: Path) -> None:
    with samples.sample_database(tmp_path / "tuning.db") as database:
        made = samples.workload("decode b1", samples.REGIONS)
        older = asdict(made)
        for region in older["regions"]:
            del region["places"]
        summary.store_summary(database, made)
        (name,) = [one for one, data in database.captures("summary/").items() if data["workload"] == made.workload]
        database.put_capture(name, older)
        data = load_report(database, samples.DEVICE, samples.SPEC, "llama")
    assert made in data.workloads
    assert set(frames.group_frame(data)["place"]) == {""}


@pytest.mark.parametrize("at", [-1, 2])
def test_places_of_ops_that_a_region_has_not_are_damage(at: int, tmp_path: Path) -> None:
    with samples.sample_database(tmp_path / "tuning.db") as database:
        made = samples.workload("decode b1", samples.REGIONS[:1])
        assert len(made.regions[0].ops) == 2
        odd = replace(made, regions=(replace(made.regions[0], places=(RepeatedPaths(1, ((at, "mlp"),)),)),))
        summary.store_summary(database, odd)
        assert odd.workload not in [one.workload for one in summary.load_summaries(database, samples.DEVICE, "llama")]


def test_what_noise_hid_is_called_undecided(data: ReportData) -> None:
    records = {
        key: replace(one, fuse=False, undecided=one.label.startswith("silu")) for key, one in data.records.items()
    }
    answers = frames.group_frame(replace(data, records=records)).set_index("group")["answer"]
    assert [name for name in answers.index if answers[name] == "undecided"] == ["silu+mul 32x8192 bfloat16"]


def test_coverage_counts_ops_and_launches(data: ReportData) -> None:
    frame = frames.coverage_frame(data).set_index("workload")
    decode = frame.loc["decode b1"]
    # 16 x 2 (swiglu) + 32 x 4 (norm) fused; 16 x 3 (rope) not.
    assert (decode["fusable"], decode["fused"]) == (208, 160)
    assert decode["launches_unfused"] == 208
    assert decode["launches"] == 16 * 1 + 32 * 1 + 16 * (2 + 1)
    assert decode["planned_us"] == pytest.approx(16 * 40.0 + 32 * 20.0 + 16 * 55.5)
    assert frame.loc["prefill 1x128", "coverage"] == 1.0


def test_region_and_miss_frames(data: ReportData) -> None:
    regions = frames.region_frame(data)
    assert len(regions) == 5
    assert regions["speedup"].tolist() == pytest.approx([3.0, 4.5, 1.0, 3.0, 4.5])
    misses = frames.misses_frame(data.misses)
    assert misses[["label", "count"]].to_numpy().tolist() == [["gelu 7x13 float32", 1]]


def test_headline_names_groups_that_lose(data: ReportData) -> None:
    groups = frames.group_frame(data)
    assert frames.headline(groups) == "2 of 3 groups are fused; 0 slower than unfused beyond noise"
    assert frames.geometric_mean(groups["speedup"]) == pytest.approx(2.38, abs=0.005)
    groups.loc[0, "speedup"] = 0.9
    assert "1 slower" in frames.headline(groups)
    assert frames.headline(groups.iloc[:0]) == "no group has been tuned"


def test_an_op_by_a_librarys_call_is_not_called_fused(data: ReportData) -> None:
    call = GroupChoice((0, 1), "matmul.rows", "", "linear 1x8 float32", measured_us=5.0)
    called = {key: replace(one, groups=(call,)) if one.label == "rope" else one for key, one in data.plans.items()}
    found = replace(data, plans=called)
    groups = frames.group_frame(found)
    assert groups.set_index("group")["answer"]["linear 1x8 float32"] == "library call"
    said = "2 of 2 groups are fused; 1 op by a library's call; 0 slower than unfused beyond noise"
    assert frames.headline(groups) == said
    assert "2 of 2 distinct groups are fused, beside 1 of a library's calls" in html_report(found)
    alone = frames.headline(groups[groups["answer"] == "library call"])
    assert alone == "1 op by a library's call; 0 slower than unfused beyond noise"
    code = {key: replace(one, groups=(replace(call, implementation="inductor"),)) for key, one in called.items()}
    assert set(frames.group_frame(replace(data, plans=code))["answer"]) == {"fuse"}


def test_records_without_a_summary_still_make_a_report(data: ReportData) -> None:
    bare = replace(data, workloads=(), model="")
    assert len(frames.group_frame(bare)) == 3
    assert frames.coverage_frame(bare).empty
    page = html_report(bare)
    assert 'class="partition"' not in page and "No whole step was timed" in page
    assert page.index("80.0 us") < page.index("70.0 us")  # what SwiGLU and the norm save each time, most first


def test_names_carry_the_model_when_there_are_several(tmp_path: Path) -> None:
    with samples.sample_database(tmp_path / "tuning.db") as database:
        summary.store_summary(database, samples.workload("decode b1", samples.REGIONS[:1], model="other"))
        everything = load_report(database, samples.DEVICE)
        assert "other decode b1" in frames.coverage_frame(everything)["workload"].tolist()
        assert load_report(database, samples.DEVICE, model="other").plans.keys() == {samples.SWIGLU_PLAN.key}


def test_shortened_models_belong_to_their_model(tmp_path: Path) -> None:
    with samples.sample_database(tmp_path / "tuning.db") as database:
        summary.store_summary(database, samples.workload("decode b16", samples.REGIONS, model="llama:2L"))
        summary.store_summary(database, samples.workload("decode b2", samples.REGIONS, model="llama"))
        found = summary.load_summaries(database, samples.DEVICE, "llama")
        names = [(one.model, one.workload) for one in found]
        assert names == [
            ("llama", "decode b1"), ("llama", "decode b2"), ("llama", "prefill 1x128"), ("llama:2L", "decode b16"),
        ]


def test_nothing_stored_is_an_error_that_names_the_nearest_model(tmp_path: Path) -> None:
    with samples.sample_database(tmp_path / "tuning.db") as database:
        with pytest.raises(PlanError, match=r"lama.*did you mean llama\?"):
            load_report(database, samples.DEVICE, model="lama")
        with pytest.raises(PlanError, match="no record of device nowhere"):
            load_report(database, "nowhere")


@pytest.mark.parametrize("ratios, expected", [([2.0, 8.0], 4.0), ([3.0, float("inf"), 0.0], 3.0)])
def test_geometric_mean(ratios: list[float], expected: float) -> None:
    assert frames.geometric_mean(ratios) == pytest.approx(expected)


def test_text_forms_keep_every_cell(data: ReportData) -> None:
    groups = frames.group_frame(data)
    read = pd.read_csv(StringIO(groups.to_csv(index=False)))
    assert read["fused_us"].tolist() == groups["fused_us"].tolist()
    markdown = table_of(groups, "groups").markdown().splitlines()
    assert len(markdown) == 2 + len(groups)
    assert all(len(re.findall(r"(?<!\\)\|", line)) == len(groups.columns) + 1 for line in markdown)
    assert r"cat\|neg" in markdown[-1]


# -- accuracy ---------------------------------------------------------------------------------------------------


def test_accuracy_pairs_hold_what_was_measured(data: ReportData) -> None:
    pairs = accuracy.accuracy_pairs(data)
    assert {(predicted_us, measured_us) for *_, predicted_us, measured_us in pairs} == {
        (36.0, 40.0), (25.0, 20.0), (48.0, 50.0), (5.0, 5.5), (30.0, 35.0),
    }
    overall = accuracy.accuracy_table(data).iloc[0]
    errors = sorted(abs(predicted_us / measured_us - 1) for *_, predicted_us, measured_us in pairs)
    assert overall["pairs"] == len(errors) == 7
    assert overall["median_error"] == pytest.approx(errors[3])


def test_regret_is_the_cost_of_the_models_own_choice(data: ReportData) -> None:
    # Apart: predicted 8, measured 9. Together: predicted 5, measured 12. The model would fuse and lose 12 / 9.
    plan = replace(
        samples.SWIGLU_PLAN,
        groups=(
            GroupChoice((0,), "aten", "", "silu", predicted_us=4.0, measured_us=4.0),
            GroupChoice((1,), "aten", "", "mul", predicted_us=4.0, measured_us=5.0),
        ),
        rejected=(Alternative((0, 1), "silu+mul", "slower", 5.0, 12.0),),
    )
    table = accuracy.regret_table(replace(data, plans={plan.key: plan}))
    assert table[["best_us", "model_us"]].to_numpy().tolist() == [[pytest.approx(9.0), pytest.approx(12.0)]]
    assert table["regret"].tolist() == [pytest.approx(12.0 / 9.0 - 1.0)]


def test_regret_needs_a_choice(data: ReportData) -> None:
    assert accuracy.regret_table(data).empty


@pytest.mark.parametrize("model", ["joined", ""])
def test_what_regions_share_counts_once(tmp_path: Path, model: str) -> None:
    """Two regions have the same two parts, and one a third: of the 3 choices of each part 2 were measured."""
    parts = {"1" * 64: samples.SWIGLU_PLAN, "2" * 64: samples.NORM_PLAN, "3" * 64: samples.ROPE_PLAN}
    shapes = {region.key: region for region in samples.REGIONS}
    with samples.sample_database(tmp_path / "tuning.db") as database:
        regions = []
        for key, names in (("4" * 64, ["1" * 64, "2" * 64]), ("5" * 64, ["1" * 64, "2" * 64, "3" * 64])):
            groups: list[GroupChoice] = []
            ops = 0
            for name in names:
                groups += [replace(one, ops=tuple(ops + at for at in one.ops)) for one in parts[name].groups]
                ops += len(shapes[name].ops)
            one = samples.plan(key, "joined", tuple(groups), 60.0, 210.0)
            database.put_plan(replace(one, enumerated=3 * len(names), measured=2 * len(names)))
            regions.append(summary.RegionSummary(
                key, 2, ("neg.default",) * ops, ("compute",) * ops, (), ("1x1 float32",) * ops, tuple(names)))
        summary.store_summary(database, samples.workload("decode b1", tuple(regions), "joined"))
        data = load_report(database, samples.DEVICE, samples.SPEC, model)
    assert {key.workload for key in data.decided()} == set(parts)
    assert "6 of 9" in html_report(data)
    # 4 chosen groups, and an alternative in each of three plans.
    once = accuracy.accuracy_pairs(replace(data, workloads=(), plans={plan.key: plan for plan in parts.values()}))
    assert accuracy.accuracy_pairs(data) == once and len(once) == 7
    assert set(phases(data)) >= {"4" * 64, "5" * 64, *parts}
    without = replace(data, plans={key: one for key, one in data.plans.items() if key.workload != "3" * 64})
    assert {key.workload for key in without.decided()} == {"1" * 64, "2" * 64, "5" * 64}  # a part's plan is gone


def test_accuracy_text_without_measurements(data: ReportData) -> None:
    assert accuracy.accuracy_text(replace(data, plans={})) == ["No prediction has been measured yet."]


# -- summaries ------------------------------------------------------------------------------------------------


def _graph() -> tuple[DataflowGraph, dict[str, str]]:
    """Two equal silu * x regions around a running sum."""
    spec = TensorSpec.contiguous((4, 8), "float32")
    nodes = [
        OpNode("aten.silu.default", ("x",), ("a",)),
        OpNode("aten.mul.Tensor", ("a", "x"), ("b",)),
        OpNode("aten.rrelu.default", ("b",), ("c",), {}),
        OpNode("aten.silu.default", ("c",), ("d",)),
        OpNode("aten.mul.Tensor", ("d", "c"), ("e",)),
    ]
    specs = dict.fromkeys("xabcde", spec) | {"w": TensorSpec.contiguous((8, 8), "float32")}
    return DataflowGraph(nodes, specs, ("x", "w"), ("e",)), {}


def test_summarise_counts_repeated_regions_once(tmp_path: Path) -> None:
    graph, _ = _graph()
    regions = find_regions(graph)
    plan = replace(samples.SWIGLU_PLAN, key=replace(samples.SWIGLU_PLAN.key, workload=regions[0].key))
    made = summary.summarise("toy", "decode 1", graph, [(region, plan) for region in regions])
    assert [(region.occurrences, region.ops) for region in made.regions] == [(2, ("silu.default", "mul.Tensor"))]
    assert made.regions[0].edges == ((0, 1),)
    assert (made.ops, made.views, made.externs, made.computes) == (5, 0, 1, 4)
    assert made.extern_ops == {"aten.rrelu.default": 1}
    with samples.sample_database(tmp_path / "tuning.db") as database:
        summary.store_summary(database, made)
        assert summary.load_summaries(database, samples.DEVICE, "toy") == (made,)
        database.put_capture("summary/damaged", {"model": "toy"})
        assert summary.load_summaries(database, samples.DEVICE, "toy") == (made,)
    with pytest.raises(ValueError, match="no region"):
        summary.summarise("toy", "decode 1", graph, [])


# -- pictures and the page --------------------------------------------------------------------------------------


class _Reader(HTMLParser):
    """Collects tags with their attributes, and checks that every element is closed in order."""

    VOID = frozenset({"meta", "link", "br", "img", "path", "rect", "use", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def _read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_page_is_well_formed_and_needs_no_network(data: ReportData) -> None:
    page = html_report(data)
    reader = _read(page)
    for tag, attributes in reader.tags:
        assert tag not in {"link", "iframe"}, f"{tag} in a page that must stand alone"
        assert tag != "script" or not attributes, "a script that is not in the page itself"
        for name in ("src", "href", "xlink:href", "srcset"):
            assert not (attributes.get(name) or "#").startswith(("http", "//")), (tag, attributes)
    assert not re.search(r"@import|url\((?!#)", page)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_page_has_words_for_every_picture_and_a_phone_viewport(data: ReportData) -> None:
    page = html_report(data)
    tags = _read(page).tags
    pictures = [attributes for tag, attributes in tags if tag == "svg"]
    # Plots, the costliest region of either workload, which is the same one, and the other regions.
    assert len(pictures) == 3 + 2 + len(samples.REGIONS) - 1
    drawn = [str(attributes["aria-label"]) for attributes in pictures]
    assert all(any(plan.label in words for words in drawn) for plan in data.plans.values())
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    assert any(tag == "meta" and attributes.get("name") == "viewport" for tag, attributes in tags)
    assert "prefers-color-scheme: dark" in page


def test_page_escapes_labels(data: ReportData) -> None:
    page = html_report(data)
    assert "cat|neg &lt;rope&gt;" in page
    assert "<rope>" not in page


def test_page_without_a_probe_leaves_the_plots_of_the_device_out(data: ReportData) -> None:
    page = html_report(replace(data, spec=None))
    assert "Roofline" not in page
    assert "Predicted and measured" in page


def test_page_without_misses_says_so(data: ReportData) -> None:
    assert "every look-up on this device found its plan" in html_report(replace(data, misses=()))


def test_every_point_of_a_plot_has_its_name_and_workloads(data: ReportData) -> None:
    for plot in (plots.roofline_plot(samples.SPEC, data), plots.scatter_plot(data)):
        assert plot.points
        for point in plot.points:
            assert point.words.count("(decode b1") == 1  # each is of a group of that workload
            assert point.words.split(" ")[0] in {"silu+mul", "add+rms_norm", "cat|neg", "neg", "silu"}
    (fused,) = [one for one in plots.roofline_plot(samples.SPEC, data).points
                if one.tone == "fused" and "silu+mul" in one.words]
    assert (fused.x, fused.y) == pytest.approx((1.5e6 / 1.5e6, 1.5e6 / 40e-6 * 1e-9))
    assert "decode b1, prefill 1x128" in fused.words and "40.0 us" in fused.words


def test_table_html_escapes_and_aligns() -> None:
    table = table_html(pd.DataFrame({"name": ["<b>", None], "share": [0.25, float("nan")]}), "Shares", ("share",))
    assert "&lt;b&gt;" in table and '<td class="number">25.0%</td>' in table and '<td class="number"></td>' in table


def test_misses_of_another_regime_are_left_out(tmp_path: Path) -> None:
    with samples.sample_database(tmp_path / "tuning.db") as database:
        assert len(frames.load_report(database, samples.DEVICE, regime="eager").misses) == 1
        key = replace(samples.SWIGLU_PLAN.key, regime="graph")
        database.put_plan(replace(samples.SWIGLU_PLAN, key=key))
        assert frames.load_report(database, samples.DEVICE, regime="graph").misses == ()
