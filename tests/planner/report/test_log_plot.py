"""Plots: every point is in one mark that names it, marks lie where the axes say, and names lie beside their points."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.planner.reports.log_plot import NAMED, Curve, LogPlot, Point

AXES = ("across", "up")
values = st.floats(1e-4, 1e6)


@st.composite
def points(draw: st.DrawFn) -> list[Point]:
    count = draw(st.integers(1, 40))
    return [
        Point(draw(values), draw(values), f"name {at}", f"words {at}.", draw(st.sampled_from(["fused", "unfused"])),
              draw(st.floats(0.0, 9.0)))
        for at in range(count)
    ]


def marks(svg: str) -> list[tuple[float, float, str]]:
    """Where each mark is, and its title."""
    circles = re.findall(r'<circle class="mark \w+" cx="([\d.]+)" cy="([\d.]+)".*?>\s*<title>(.*?)</title>', svg, re.S)
    diamonds = re.findall(r'<path class="mark fused" d="M([\d.]+) ([\d.]+)l5.*?>\s*<title>(.*?)</title>', svg, re.S)
    return [*((float(x), float(y), words) for x, y, words in circles),
            *((float(x), float(y) + 5, words) for x, y, words in diamonds)]


@given(points())
def test_every_point_is_named_by_one_mark_or_counted_there(given: list[Point]) -> None:
    found = marks(LogPlot("", AXES, given).svg())
    named = [words for _, _, title in found for words in re.findall(r"words \d+\.", title)]
    counted = sum(int(more) for _, _, title in found for more in re.findall(r"and (\d+) more", title))
    assert len(named) == len(set(named)) and len(named) + counted == len(given)
    assert all(0 <= x <= 480 and 0 <= y <= 360 for x, y, _ in found)


@given(st.lists(st.tuples(values, values), min_size=2, max_size=9, unique=True))
def test_what_is_larger_lies_farther_to_the_right_and_higher(pairs: list[tuple[float, float]]) -> None:
    found = {words: (x, y) for x, y, title in marks(
        LogPlot("", AXES, [Point(x, y, "", f"{x!r} {y!r}") for x, y in pairs]).svg()) for words in title.split("\n")}
    placed = [(*map(float, words.split()), *at) for words, at in found.items() if "more" not in words]
    for (x, y, across, up), (u, v, other, higher) in pairwise(sorted(placed)):
        assert across <= other + 12  # points of one cell share a mark
        assert x <= u and ((y <= v) == (up >= higher) or abs(up - higher) <= 12)


@given(points())
def test_those_that_matter_most_are_written_and_none_twice(given: list[Point]) -> None:
    plot = LogPlot("", AXES, given)
    most = plot.most()
    weights = sorted((one.weight for one in given if one.weight > 0), reverse=True)[:NAMED]
    assert [one.weight for one in most] == weights
    written = re.findall(r'class="name"[^>]*>(name \d+)<', plot.svg())
    assert len(written) == len(set(written)) and set(written) <= {one.name for one in most}
    if len(given) < 12:
        assert len(written) == len(most)


def test_ticks_are_round_and_lie_where_they_say() -> None:
    svg = LogPlot("", AXES, [Point(1.0, 1.0, "", "a"), Point(1000.0, 100.0, "", "b")]).svg()
    ticks = {float(text.replace(",", "")): float(x) for x, text in re.findall(
        r'<text x="([\d.]+)" y="333.0" text-anchor="middle">([\d.,]+)</text>', svg)}
    assert {1.0, 10.0, 100.0, 1000.0} <= ticks.keys()
    steps = [after - before for before, after in pairwise(ticks[10.0**at] for at in range(4))]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2)
    at = {title: x for x, _, title in marks(svg)}
    assert (at["a"], at["b"]) == (pytest.approx(ticks[1.0], abs=0.1), pytest.approx(ticks[1000.0], abs=0.1))


def test_the_diagonal_has_the_same_extent_on_both_axes() -> None:
    svg = LogPlot("", AXES, [Point(1.0, 10.0, "", "a"), Point(100.0, 1.0, "", "b")], band=1.25).svg()
    (line,) = re.findall(r'class="diagonal" points="([^"]*)"', svg)
    (x0, y0), (x1, y1) = (map(float, pair.split(",")) for pair in line.split())
    on = {title: (x, y) for x, y, title in marks(svg)}
    x, y = on["a"]
    # Ten times as high as it is far to the right: a decade above the diagonal.
    below = y0 + (x - x0) / (x1 - x0) * (y1 - y0)
    assert (below - y) / (y0 - y1) == pytest.approx(1 / math.log10(100 * max(1.15, 100**0.05) ** 2), abs=0.01)


def test_what_it_is_given_is_escaped() -> None:
    point = Point(1.0, 1.0, "<name>", "<words>", weight=1.0)
    svg = LogPlot('"><script>', AXES, [point], [Curve([(1.0, 1.0), (2.0, 2.0)], "<curve>", "roof")]).svg()
    assert "<script>" not in svg and "<name>" not in svg and "<words>" not in svg and "<curve>" not in svg
