"""The HTML report in Chromium: nothing overflows, what it draws is what it says, and everybody can use it.

Skipped where there is no Chromium, or no Playwright to drive it. Nothing here waits for a time: Playwright waits until
the browser has answered.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples

from fuseplan.planner.reports.frames import ReportData, load_report
from fuseplan.planner.reports.html_page import html_report
from fuseplan.planner.reports.step_words import bars
from fuseplan.planner.reports.steps import steps
from fuseplan.planner.tuning.session import stored_spec
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.planner.tuning.whole_step import StepTimes, step_key
from fuseplan.search.store.database import Database
from fuseplan.search.store.layered import LayeredDatabase, shipped_devices, shipped_files
from fuseplan.search.store.record import Alternative, GroupChoice

DECODE = [(16, samples.SWIGLU_PLAN), (32, samples.NORM_PLAN), (16, samples.ROPE_PLAN)]
WIDTHS = pytest.mark.parametrize("width", [1440, 1280, 390])
LOOKS = pytest.mark.parametrize("look", ["light", "dark"])
#: Milliseconds that a busy machine may take for one answer.
PATIENCE = 300_000
#: A page in a window: its HTML, the window's width, its look, and whether scripts run.
Open = Callable[..., Any]

#: Many ways past ranks, and several readers of one value.
WEB = RegionSummary(
    "4" * 64, 1, tuple(f"op{at}.default" for at in range(10)), ("compute",) * 10,
    ((0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 5), (0, 5), (4, 6), (5, 7), (6, 8), (0, 8), (7, 8), (2, 9), (8, 9)),
    ("8 float32",) * 10,
)
WEB_PLAN = replace(
    samples.SWIGLU_PLAN, key=replace(samples.SWIGLU_PLAN.key, workload=WEB.key), label="a web of ops",
    groups=tuple(GroupChoice((at,), "aten", "", f"op{at}", {}, 1.0, 0.5, 1.0 + at) for at in range(10)),
    rejected=(Alternative((4, 6), "op4+op6", "measured; the chosen cover costs less", 9.0, 20.0, "cpp"),),
)


@pytest.fixture
def data(tmp_path: Path) -> ReportData:
    with samples.sample_database(tmp_path / "tuning.db") as database:
        database.put_capture(f"step/{step_key(DECODE)}", asdict(StepTimes(6000.0, 2600.0, 0.01, 1300.0)))
        database.put_plan(WEB_PLAN)
        found = load_report(database, samples.DEVICE, samples.SPEC, "llama")
        web = samples.workload("web", (WEB,))
        return replace(found, workloads=(*found.workloads, web), plans={**found.plans, WEB_PLAN.key: WEB_PLAN})


@pytest.fixture(scope="module", params=shipped_devices())
def shipped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the records that come with the package, of each device."""
    device = request.param
    with Database(tmp_path_factory.mktemp("shipped") / "tuning.db") as user:
        database = LayeredDatabase(user, shipped_files(device))
        return html_report(load_report(database, device, stored_spec(database, device)))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no Chromium on PATH ({', '.join(names)})")
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright drives Chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Open]:
    contexts = []

    def of(page: str, width: int = 1280, look: str = "light", scripts: bool = True) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=look, java_script_enabled=scripts, offline=True)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        found = context.new_page()
        found.goto(path.as_uri())
        return found

    yield of
    for context in contexts:
        context.close()


def open_all(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")


def sees(page: Any) -> dict[str, Any]:
    """The extent of the page, and of its first screen's parts."""
    found: dict[str, Any] = page.evaluate("""() => ({
        page: document.documentElement.scrollWidth, window: innerWidth,
        top: document.querySelector(".step").getBoundingClientRect().top,
        text: document.querySelector(".step").innerText,
        plots: [...document.querySelectorAll("svg.plot")].map((one) => one.getBoundingClientRect().width),
        paper: getComputedStyle(document.body).backgroundColor,
    })""")
    return found


@WIDTHS
@LOOKS
def test_nothing_overflows_and_the_answer_is_on_the_first_screen(
    data: ReportData, opened: Open, width: int, look: str
) -> None:
    page = opened(html_report(data), width, look)
    found = sees(page)
    assert found["page"] <= found["window"] == width and found["top"] < 500
    assert found["paper"] == ("rgb(255, 255, 255)" if look == "light" else "rgb(18, 22, 27)")
    for words in ("2.60 ms", "6.00 ms", "2.31x as fast", "measured end to end", "add+rms_norm", "1.30 ms"):
        assert words in found["text"]
    assert len(found["plots"]) == 3 and max(found["plots"]) <= width
    open_all(page)
    assert sees(page)["page"] <= width


@pytest.mark.parametrize(("width", "look"), [(1280, "light"), (390, "dark")])
def test_axe_finds_nothing(data: ReportData, opened: Open, width: int, look: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="it carries axe-core").Axe()
    page = opened(html_report(data, replace(data, steps={})), width, look)
    open_all(page)
    page.locator("svg.plot .mark").first.click(force=True)
    page.locator("svg.partition g").first.click(force=True)
    found = axe.run(page).response
    assert found["passes"]  # it did look
    assert [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found["violations"]] == []


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_shipped_records_is_small_and_fits(shipped: str, opened: Open, width: int) -> None:
    without_traces = re.sub(r"data:application/gzip[^\"]*", "", shipped)
    assert len(without_traces.encode()) < 1_000_000 and len(shipped.encode()) < 1_200_000
    page = opened(shipped, width)
    found = sees(page)
    assert found["page"] <= width and found["top"] < 500
    assert page.locator("table.saved tbody tr").count() > 50
    open_all(page)
    assert sees(page)["page"] <= width


def test_the_page_of_shipped_records_is_read_in_a_few_screens(shipped: str, opened: Open) -> None:
    assert opened(shipped, 1440).evaluate("document.documentElement.scrollHeight") <= 6000  # what folds is folded


@pytest.mark.parametrize("shipped", shipped_devices()[:1], indirect=True)
def test_axe_finds_nothing_in_shipped_records(shipped: str, opened: Open) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="it carries axe-core").Axe()
    page = opened(shipped)
    # Rows of a table are alike, and axe looks at each element: at thousands for ten seconds.
    page.evaluate("document.querySelectorAll('tbody tr:nth-child(n+31)').forEach((one) => one.remove())")
    assert [one["id"] for one in axe.run(page).response["violations"]] == []


def test_records_without_a_model_answer_as_far_as_they_can(data: ReportData, opened: Open) -> None:
    text = sees(opened(html_report(replace(data, model="", workloads=(), steps={}))))["text"]
    assert "No whole step was timed" in text
    assert "80.0 us by silu+mul" in text and "70.0 us by add+rms_norm" in text


def test_a_step_is_drawn_as_long_as_it_takes(data: ReportData, opened: Open) -> None:
    widths = opened(html_report(data)).evaluate("""() =>
        [...document.querySelector(".step").querySelectorAll(".stack")].map((stack) => {
            const pieces = [...stack.querySelectorAll("i:not(.floor)")];
            return pieces.reduce((sum, one) => sum + one.getBoundingClientRect().width, 0)
                / stack.getBoundingClientRect().width;
        })""")
    assert widths == pytest.approx([1.0, 2600 / 6000], abs=0.01)


@pytest.mark.parametrize(("table", "answer", "width"), [
    ("Table of savings", {"workload", "group", "saved"}, 1280),
    ("Table of savings", {"workload", "group", "saved"}, 390),
    ("Table of groups", {"group", "answer", "fused us", "unfused us", "speedup"}, 1280),
])
def test_answer_columns_are_visible_without_scrolling(
    data: ReportData, opened: Open, table: str, answer: set[str], width: int
) -> None:
    groups = [replace(group, config={f"a_rather_long_name_{at}": 4096 for at in range(12)})
              for group in samples.SWIGLU_PLAN.groups]
    plans = {key: replace(plan, groups=tuple(groups)) if plan == samples.SWIGLU_PLAN else plan
             for key, plan in data.plans.items()}
    seen = opened(html_report(replace(data, plans=plans)), width).evaluate("""(name) => {
        const box = document.querySelector(`[aria-label='${name}']`), edge = box.getBoundingClientRect().right;
        return [...box.querySelectorAll("th")].filter((one) => one.getBoundingClientRect().right <= edge)
            .map((one) => one.textContent);
    }""", table)
    assert answer <= set(seen)


def test_arrows_cross_no_box_as_they_are_rendered(data: ReportData, opened: Open) -> None:
    page = opened(html_report(data))
    open_all(page)
    found = page.evaluate("""() => [...document.querySelectorAll("svg.partition")].map((drawing) => {
        const boxes = [...drawing.querySelectorAll("rect.cluster")].map((one) => one.getBBox());
        const paths = [...drawing.querySelectorAll("path.edge")], slack = 0.5;
        let asked = 0, crossed = 0;
        for (const path of paths) {
            const length = path.getTotalLength();
            for (let at = 0; at <= length; at += 1) {
                const { x, y } = path.getPointAtLength(at);
                asked += 1;
                crossed += boxes.some((box) => box.x + slack < x && x < box.x + box.width - slack
                    && box.y + slack < y && y < box.y + box.height - slack);
            }
        }
        const apart = boxes.every((a, i) => boxes.every((b, j) => i === j || a.x + a.width <= b.x
            || b.x + b.width <= a.x || a.y + a.height <= b.y || b.y + b.height <= a.y));
        return { boxes: boxes.length, edges: paths.length, asked, crossed, apart };
    })""")
    web = next(one for one in found if one["boxes"] == 10)
    assert web["edges"] == len(WEB.edges) and web["asked"] > 50 * web["edges"]
    assert all(one["crossed"] == 0 and one["apart"] for one in found)


def test_without_scripts_everything_is_there(data: ReportData, opened: Open) -> None:
    page = html_report(data)
    plain, scripted = opened(page, scripts=False), opened(page)
    assert plain.locator("details").count() > 0 and plain.locator("details:not([open])").count() == 0
    open_all(scripted)
    for part in ("td", "li", "svg", "svg title"):
        assert plain.locator(part).count() == scripted.locator(part).count() > 0
    for words in ("add+rms_norm 32x2048 bfloat16", "op4+op6"):
        assert plain.get_by_text(words).first.is_visible()
    assert plain.locator("input, button").count() == 0  # nothing that would not work


def test_the_page_asks_the_network_for_nothing(data: ReportData, chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(html_report(data), encoding="utf-8")
    page, asked = chromium.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri(), timeout=PATIENCE)
    page.close()
    assert asked == [path.as_uri()]


def test_names_in_plots_cover_neither_each_other_nor_the_edge(shipped: str, opened: Open) -> None:
    found = opened(shipped).evaluate("""() =>
        [...document.querySelectorAll("svg.plot")].map((plot) => ({
            box: (({ width, height }) => [0, 0, width, height])(plot.viewBox.baseVal),
            marks: [...plot.querySelectorAll(".mark")].filter((one) => !one.closest(".key-of")).length,
            titles: [...plot.querySelectorAll(".mark title")].filter((one) => one.textContent).length,
            texts: [...plot.querySelectorAll("text")].map((one) => {
                const at = one.getBoundingClientRect(), whole = plot.getBoundingClientRect();
                return at.left >= whole.left && at.right <= whole.right && at.bottom <= whole.bottom;
            }),
            names: [...plot.querySelectorAll("text.name")].map((one) => {
                const at = one.getBBox();
                return [at.x, at.y + 2, at.x + at.width, at.y + at.height - 2];
            }),
        }))""")
    assert len(found) == 3 and sum(len(one["names"]) for one in found) >= 18
    for one in found:
        assert one["marks"] == one["titles"] > 0 and all(one["texts"])
        for at, (x0, y0, x1, y1) in enumerate(one["names"]):
            assert x0 >= 0 and x1 <= one["box"][2] and y0 >= 0 and y1 <= one["box"][3]
            for u0, v0, u1, v1 in one["names"][:at]:
                assert x1 <= u0 or u1 <= x0 or y1 <= v0 or v1 <= y0


def test_points_are_told_by_keys_and_by_a_tap(data: ReportData, opened: Open) -> None:
    page = opened(html_report(data))
    plot, slider = page.locator("svg.plot").first, page.get_by_label("Step through").first
    titles = plot.locator(".mark title").all_text_contents()
    slider.focus()
    page.keyboard.press("ArrowRight")
    told = page.locator(".stepper output").first
    assert told.text_content() == titles[1] == slider.get_attribute("aria-valuetext")
    plot.locator(".mark:has(title)").last.click(force=True)
    assert told.text_content() == titles[-1]


def test_a_tap_on_a_box_tells_what_it_is(data: ReportData, opened: Open) -> None:
    page = opened(html_report(data), 390)
    region = page.locator(".region").first
    region.locator("svg g").first.click()
    assert region.locator(".told").is_visible()
    assert region.locator(".told").text_content() == region.locator("svg g title").first.text_content()


def test_tables_are_sorted_and_searched(data: ReportData, opened: Open) -> None:
    page = opened(html_report(data))
    open_all(page)
    box = page.get_by_role("group", name="Table of groups")

    def names() -> list[str]:
        found: list[str] = box.locator("tbody tr:not([hidden]) td:first-child").all_text_contents()
        return found

    before, head = names(), box.get_by_role("button", name="unfused us")
    head.click()
    falling, said = names(), box.locator("th[aria-sort]").get_attribute("aria-sort")
    head.click()
    by_time = [samples.SWIGLU.label, samples.NORM.label, samples.ROPE.label]  # 120, 90 and 50 us
    assert falling == by_time and names() == by_time[::-1] and sorted(before) == sorted(by_time)
    assert said == "descending"
    page.get_by_label("Find in table of groups").fill("RMS_norm")
    assert names() == [samples.NORM.label]


def test_savings_are_sorted_by_time_whatever_its_unit(data: ReportData, opened: Open) -> None:
    page = opened(html_report(replace(data, steps={})))  # both workloads: none was timed
    box = page.get_by_role("group", name="Table of savings")
    cells = box.locator("tbody td:nth-child(3)")
    assert cells.all_text_contents() == ["2.24 ms", "2.24 ms", "1.28 ms", "1.28 ms"]  # 32 x 70 us, 16 x 80 us
    box.get_by_role("button", name="saved").click()
    box.get_by_role("button", name="saved").click()
    assert cells.all_text_contents() == ["1.28 ms", "1.28 ms", "2.24 ms", "2.24 ms"]


def test_bars_are_as_long_as_the_times(data: ReportData) -> None:
    one = next(one for one in steps(data) if one.name == "decode b1")
    unfused, planned = bars(one)
    assert sum(piece.share for piece in unfused) == pytest.approx(100.0)
    assert sum(piece.share for piece in planned) == pytest.approx(100 * 2600 / 6000)
    assert planned[-1].part == "launches and gaps"


def test_a_step_that_takes_less_than_its_parts_is_drawn_as_long_as_it_takes(data: ReportData) -> None:
    one = next(one for one in steps(data) if one.name == "decode b1")
    quick = replace(one, planned_us=500.0)
    pieces = bars(quick)[1]
    assert sum(piece.share for piece in pieces) == pytest.approx(100 * 500 / 6000)
    assert "launches and gaps" not in {piece.part for piece in pieces}
    times = {piece.part: piece.time_us for piece in pieces}
    assert times["fused groups"] == one.parts["fused groups"][1]  # what was measured, whatever is drawn


def test_labels_are_escaped(data: ReportData) -> None:
    evil = GroupChoice((0, 1), "cpp", "", '"><script>alert(1)</script>', {}, 1.0, 0.5, 1.0)
    plans = {key: replace(plan, groups=(evil,)) if plan == samples.SWIGLU_PLAN else plan
             for key, plan in data.plans.items()}
    assert "<script>alert" not in html_report(replace(data, plans=plans))


def test_a_steps_trace_is_a_file_to_download(data: ReportData, opened: Open) -> None:
    page = opened(html_report(data))
    with page.expect_download() as waited:
        page.get_by_label("trace of decode b1").click()
    assert waited.value.suggested_filename == "decode-b1.trace.json.gz"
    found = json.loads(gzip.decompress(Path(waited.value.path()).read_bytes()))
    planned = [one["dur"] for one in found["traceEvents"] if one["ph"] == "X" and one["tid"] == 2]
    assert sum(planned) == pytest.approx(16 * 40.0 + 32 * 20.0 + 16 * 55.5)
