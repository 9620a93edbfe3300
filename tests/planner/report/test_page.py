"""The HTML report in a browser: nothing overflows, what it draws is what it says, tables sort and are searched."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import report_samples as samples

from fuseplan.planner.reports.frames import ReportData, load_report
from fuseplan.planner.reports.html_page import html_report
from fuseplan.planner.reports.step_words import bars
from fuseplan.planner.reports.steps import steps
from fuseplan.planner.tuning.whole_step import StepTimes, step_key
from fuseplan.search.store.record import GroupChoice

DECODE = [(16, samples.SWIGLU_PLAN), (32, samples.NORM_PLAN), (16, samples.ROPE_PLAN)]


@pytest.fixture
def data(tmp_path: Path) -> ReportData:
    with samples.sample_database(tmp_path / "tuning.db") as database:
        database.put_capture(f"step/{step_key(DECODE)}", asdict(StepTimes(6000.0, 2600.0, 0.01, 1300.0)))
        return load_report(database, samples.DEVICE, samples.SPEC, "llama")


def in_browser(
    page: str, script: str, folder: Path, width: int, dark: bool = False, when: str = ""
) -> dict[str, object]:
    """What ``script``, the body of a function, returns at a window's width: at once, or ``when`` it is called."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no Chromium on PATH ({', '.join(names)})")
    tell = f"() => {{ document.getElementById('told').textContent = JSON.stringify((() => {{ {script} }})()); }}"
    told = f"<pre id='told'></pre><script>{f'{when} {tell}' if when else f'({tell})()'}</script></body>"
    inner = folder / "inner.html"
    at = page.rindex("</body>")
    inner.write_text(page[:at] + told + page[at + len("</body>"):], encoding="utf-8")
    mode = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", *mode, f"--user-data-dir={folder / 'profile'}",
         f"--window-size={width},900", "--dump-dom", inner.as_uri()],
        capture_output=True, text=True, timeout=600, check=True,
    )
    found = re.search(r"<pre id=\"told\">(.*?)</pre>", done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:]
    answer = json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert isinstance(answer, dict)
    return answer


def test_the_page_fits_a_phone(data: ReportData, tmp_path: Path) -> None:
    """In a frame, for a window of headless Chromium is no narrower than 500."""
    frame = (f'<body><iframe id="frame" width="390" height="800" style="border:0" '
             f'srcdoc="{html.escape(html_report(data))}"></iframe></body>')
    found = in_browser(frame, """
        const page = document.getElementById("frame").contentDocument, root = page.documentElement;
        return {width: root.scrollWidth, plots: [...page.querySelectorAll("svg.plot")]
            .map((one) => one.getBoundingClientRect().width), title: page.title,
            fused: getComputedStyle(page.querySelector(".saved .amount")).backgroundColor};
    """, tmp_path, 1280, when="document.getElementById('frame').onload =")
    assert found["width"] <= 390  # type: ignore[operator]
    assert len(found["plots"]) == 3 and max(found["plots"]) <= 390  # type: ignore[arg-type, call-overload]
    assert (found["title"], found["fused"]) == ("Fusion report: llama", "rgb(11, 122, 138)")


@pytest.mark.parametrize("width", [1440, 1280, 500])  # headless Chromium's windows are no narrower
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overflows_and_the_answer_is_on_the_first_screen(
    data: ReportData, tmp_path: Path, width: int, dark: bool
) -> None:
    found = in_browser(html_report(data), """
        const first = document.querySelector(".step"), box = first.getBoundingClientRect();
        return {page: document.documentElement.scrollWidth, window: innerWidth, top: box.top, text: first.textContent,
                widths: [...first.querySelectorAll(".lane")].map((lane) => {
                    const stack = lane.querySelector(".stack"), pieces = [...stack.querySelectorAll("i:not(.floor)")];
                    return pieces.reduce((sum, one) => sum + one.getBoundingClientRect().width, 0)
                        / stack.getBoundingClientRect().width;
                })};
    """, tmp_path, width, dark)
    assert found["page"] <= found["window"]  # type: ignore[operator]
    assert found["top"] < 500  # type: ignore[operator]
    for words in ("2.60 ms", "6.00 ms", "measured end to end", "add+rms_norm", "1.30 ms"):
        assert words in found["text"]  # type: ignore[operator]
    assert found["widths"] == pytest.approx([1.0, 2600 / 6000], abs=0.01)


def test_answer_columns_are_visible_without_scrolling(data: ReportData, tmp_path: Path) -> None:
    groups = [replace(group, config={f"a_rather_long_name_{at}": 4096 for at in range(12)})
              for group in samples.SWIGLU_PLAN.groups]
    plans = {key: replace(plan, groups=tuple(groups)) if plan == samples.SWIGLU_PLAN else plan
             for key, plan in data.plans.items()}
    found = in_browser(html_report(replace(data, plans=plans)), """
        const box = document.querySelector("[aria-label='Table of groups']"), edge = box.getBoundingClientRect().right;
        const heads = [...box.querySelectorAll("th")];
        return {seen: heads.filter((one) => one.getBoundingClientRect().right <= edge).map((one) => one.textContent)};
    """, tmp_path, 1280)
    assert {"group", "answer", "fused us", "unfused us", "speedup"} <= set(found["seen"])  # type: ignore[call-overload]


def test_tables_are_sorted_and_searched(data: ReportData, tmp_path: Path) -> None:
    found = in_browser(html_report(data), """
        const box = document.querySelector("[aria-label='Table of groups']");
        const names = () => [...box.querySelectorAll("tbody tr")].filter((row) => !row.hidden)
            .map((row) => row.cells[0].textContent);
        const head = [...box.querySelectorAll("th")].find((one) => one.textContent === "unfused us");
        const before = names();
        head.querySelector("button").click();
        const falling = names(), said = head.getAttribute("aria-sort");
        head.querySelector("button").click();
        const rising = names(), input = document.querySelector(".find input");
        input.value = "RMS_norm"; input.dispatchEvent(new Event("input"));
        return {before, falling, said, rising, found: names(), label: input.parentElement.textContent};
    """, tmp_path, 1280)
    by_time = [samples.SWIGLU.label, samples.NORM.label, samples.ROPE.label]  # 120, 90 and 50 us
    assert found["falling"] == by_time and found["rising"] == by_time[::-1]
    assert sorted(found["before"]) == sorted(by_time)  # type: ignore[call-overload]
    assert found["said"] == "descending" and found["found"] == [samples.NORM.label]
    assert str(found["label"]).startswith("Find in table of groups")


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
