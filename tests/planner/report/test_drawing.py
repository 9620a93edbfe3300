"""Drawings of partitions: every group has a box of its own, every read an arrow, and no arrow crosses a box."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import report_samples as samples
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.planner.reports.drawing import Arrow, Box, partition_svg, path, place, reads
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import GroupChoice

STEPS = 40


def on_the_way(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Points of the path as SVG draws it: lines, and cubic Bezier curves."""
    words = re.findall(r"([MLC])([-\d. ]+)", path(points))
    assert [kind for kind, _ in words] == ["M", *("LC"[at % 2] for at in range(len(points) - 1))]
    here = (0.0, 0.0)
    for kind, numbers in words:
        values = [float(one) for one in numbers.split()]
        pairs = list(zip(values[::2], values[1::2], strict=True))
        corners = [here, *pairs] if kind == "C" else [here, here, pairs[-1], pairs[-1]]
        for step in range(STEPS + 1) if kind != "M" else ():
            t = step / STEPS
            weights = ((1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t * t, t**3)
            yield (sum(w * x for w, (x, _) in zip(weights, corners, strict=True)),
                   sum(w * y for w, (_, y) in zip(weights, corners, strict=True)))
        here = pairs[-1]


def inside(box: Box, point: tuple[float, float], slack: float = 0.15) -> bool:
    x, y = point
    return box.x + slack < x < box.x + box.width - slack and box.y + slack < y < box.y + box.height - slack


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[float], list[tuple[int, int]]]:
    """Heights of boxes, and edges among them in any order of numbers, without circles."""
    count = draw(st.integers(1, 14))
    order = draw(st.permutations(range(count)))
    pairs = [(order[a], order[b]) for b in range(count) for a in range(b)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30)) if pairs else []
    return draw(st.lists(st.floats(40.0, 160.0), min_size=count, max_size=count)), chosen


@given(graphs())
def test_boxes_are_apart_and_no_arrow_crosses_one(given: tuple[list[float], list[tuple[int, int]]]) -> None:
    heights, edges = given
    drawing = place(heights, edges)
    boxes = drawing.boxes
    assert sorted(boxes) == list(range(len(heights)))
    assert sorted((one.before, one.after) for one in drawing.arrows) == sorted(edges)
    for a, one in boxes.items():
        assert one.height == heights[a] and one.x >= 0 and one.y >= 0
        assert one.x + one.width <= drawing.width and one.y + one.height <= drawing.height
        for b, other in boxes.items():
            apart = (one.x + one.width <= other.x or other.x + other.width <= one.x
                     or one.y + one.height <= other.y or other.y + other.height <= one.y)
            assert a == b or apart
    for arrow in drawing.arrows:
        assert boxes[arrow.before].y + boxes[arrow.before].height < boxes[arrow.after].y
        for point in on_the_way(arrow.points):
            assert not any(inside(box, point) for box in boxes.values()), (arrow, point)
            assert 0 <= point[0] <= drawing.width


@given(graphs())
def test_arrows_begin_and_end_at_their_boxes(given: tuple[list[float], list[tuple[int, int]]]) -> None:
    drawing = place(*given)
    ends = []
    for arrow in drawing.arrows:
        before, after = drawing.boxes[arrow.before], drawing.boxes[arrow.after]
        assert arrow.points[0] == pytest.approx((before.x + before.width / 2, before.y + before.height))
        x, y = arrow.points[-1]
        assert after.x < x < after.x + after.width and y == after.y
        ends.append((x, y))
    assert len(set(ends)) == len(ends)  # each has a place of its own


def test_groups_that_read_each_other_are_drawn() -> None:
    drawing = place([50.0, 50.0, 50.0], [(0, 1), (1, 0), (1, 2)])
    assert len(drawing.boxes) == 3
    assert {(0, 1), (1, 2)} == {(one.before, one.after) for one in drawing.arrows}


def region(ops: int, edges: tuple[tuple[int, int], ...], views: tuple[int, ...] = ()) -> RegionSummary:
    kinds = tuple("view" if at in views else "compute" for at in range(ops))
    return RegionSummary("4" * 64, 1, tuple(f"op{at}.default" for at in range(ops)), kinds, edges, ("8 float32",) * ops)


def group(*ops: int) -> GroupChoice:
    return GroupChoice(ops, "cpp", "k" * 64, "some ops", {}, 1.0, 0.5, 1.0)


def test_views_are_looked_through() -> None:
    chain = region(5, ((0, 1), (1, 2), (2, 3), (0, 4)), views=(1, 2))
    plan = replace(samples.SWIGLU_PLAN, groups=(group(0), group(3), group(4)))
    assert sorted(reads(chain, plan)) == [(0, 1), (0, 2)]


def test_what_a_group_computes_for_itself_it_reads_from_nobody() -> None:
    twice = region(4, ((0, 1), (0, 2), (1, 3), (2, 3)))
    plan = replace(samples.SWIGLU_PLAN, groups=(group(0, 1), group(0, 2), group(3)))
    assert sorted(reads(twice, plan)) == [(0, 2), (1, 2)]


@given(st.integers(2, 9), st.data())
def test_reads_are_those_of_the_contracted_graph(count: int, data: st.DataObject) -> None:
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = tuple(data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=14)))
    home = [data.draw(st.integers(0, min(at, 3))) for at in range(count)]
    groups = [group(*(at for at in range(count) if home[at] == number)) for number in sorted(set(home))]
    number = {at: place for place, one in enumerate(groups) for at in one.ops}
    wanted = {(number[a], number[b]) for a, b in edges if number[a] != number[b]}
    found = reads(region(count, edges), replace(samples.SWIGLU_PLAN, groups=tuple(groups)))
    assert set(found) == wanted and len(found) == len(wanted)


def test_the_picture_names_every_op_and_escapes_what_it_is_given() -> None:
    plan = replace(samples.NORM_PLAN, groups=(replace(samples.NORM_PLAN.groups[0], label="<norm>"),))
    drawing = partition_svg(samples.REGIONS[1], plan, ["1 < 2"])
    for op in ("add", "pow", "mean", "mul"):
        assert op in drawing
    assert "&lt;norm&gt;" in drawing and "1 &lt; 2" in drawing and "<norm>" not in drawing
    assert drawing.count('class="cluster"') == 1 and "<path" not in drawing


def test_an_op_that_is_computed_twice_is_in_both_boxes() -> None:
    groups = (replace(samples.NORM_PLAN.groups[0], ops=(0, 1, 2)), replace(samples.NORM_PLAN.groups[0], ops=(0, 3)))
    drawing = partition_svg(samples.REGIONS[1], replace(samples.NORM_PLAN, groups=groups))
    boxes = drawing.split('class="cluster"')[1:]
    assert len(boxes) == 2 and all("add" in box for box in boxes)
    assert 'class="group0"' in drawing and 'class="group1"' in drawing and drawing.count("<path") == 1


def test_a_straight_arrow_is_a_line_and_a_curve() -> None:
    assert path(Arrow(0, 1, ((1.0, 2.0), (1.0, 3.0), (5.0, 9.0))).points) == (
        "M1.0 2.0L1.0 3.0C1.0 6.0 5.0 6.0 5.0 9.0")
