"""A region's partition as an inline SVG drawing: groups as boxes from top to bottom, and what reads what between them.

Boxes lie in ranks, each below those that it reads. An arrow past a rank has a lane there, so none crosses a box
(Sugiyama, Tagawa and Toda, "Methods for Visual Understanding of Hierarchical System Structures", 1981).
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import NamedTuple

import networkx as nx
from jinja2 import Environment, PackageLoader, StrictUndefined

from fuseplan.planner.reports.accuracy import compute_edges
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.errors import counted
from fuseplan.search.store.record import ATEN, PlanRecord

#: How many colours of groups the page defines (CSS classes ``group0`` to ``group7``).
COLOURS = 8
_WIDTH, _LANE, _GAP, _SPACE, _MARGIN = 216.0, 12.0, 14.0, 36.0, 4.0
_PAD, _LINE, _HEAD = 10.0, 16.0, 20.0
#: Boxes in a rank, and letters in a line of a box.
_A_RANK, _LETTERS = 2, 30


class Box(NamedTuple):
    """A group's place: its upper left corner and its extent."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


class Arrow(NamedTuple):
    """A way from a group to one that reads it: points that are joined by lines along ranks, by curves between them."""

    before: int
    after: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Drawing:
    """Where everything lies: boxes by number of the group, arrows, and the extent of all."""

    boxes: Mapping[int, Box]
    arrows: tuple[Arrow, ...]
    width: float
    height: float


@cache
def templates() -> Environment:
    """The report's templates; what they are given is escaped."""
    loader = PackageLoader("fuseplan.planner.reports")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters["counted"] = counted
    return found


def group_name(number: int) -> str:
    """Letters for groups: A to Z, then A1, B1 and so on."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def group_class(plan: PlanRecord, number: int) -> str:
    """CSS class of a group's colour; what ATen runs stays grey."""
    fused = [at for at, group in enumerate(plan.groups) if not group.is_plain]
    return f"group{fused.index(number) % COLOURS}" if number in fused else "plain"


def partition_svg(region: RegionSummary, plan: PlanRecord, facts: Sequence[str] = ()) -> str:
    """An ``<svg>`` element that shows which ops run together; ``facts`` say more of each group as tooltips."""
    names = [" · ".join(region.ops[op].split(".")[0] for op in group.ops) for group in plan.groups]
    lines = [textwrap.wrap(text, _LETTERS) or [""] for text in names]
    drawing = place([_HEAD + _PAD + _LINE * (len(own) + 1) for own in lines], reads(region, plan))
    return templates().get_template("partition.svg.j2").render(
        drawing=drawing, plan=plan, pad=_PAD, line=_LINE, head=_HEAD,
        groups=[
            (drawing.boxes[at], group_name(at), group_class(plan, at), group, lines[at],
             region.shapes[group.ops[-1]], facts[at] if facts else "")
            for at, group in enumerate(plan.groups)
        ],
        paths=[path(arrow.points) for arrow in drawing.arrows], aten=ATEN,
    )


def reads(region: RegionSummary, plan: PlanRecord) -> list[tuple[int, int]]:
    """Which group reads what another one makes, views looked through; each pair once.

    A value that several groups compute comes from the reader itself, else from the first of them.
    """
    numbered = list(enumerate(plan.groups))
    makers = {op: number for number, group in reversed(numbered) for op in group.ops}
    edges = list(compute_edges(region))
    return list(dict.fromkeys(
        (makers[before], number) for number, group in numbered
        for before in sorted({a for a, b in edges if b in group.ops} - set(group.ops)) if before in makers))


def place(heights: Sequence[float], edges: Iterable[tuple[int, int]]) -> Drawing:
    """Boxes of these heights in ranks, and arrows for the edges that lead down.

    Of groups that read each other (where both compute an op for themselves) one is below; no arrow leads up.
    """
    edges = list(edges)
    ranks = _ranks(len(heights), edges)
    rank = {at: one for one, own in enumerate(ranks) for at in own}
    down = [(a, b) for a, b in edges if rank[a] < rank[b]]
    parents: dict[int, list[int]] = {}
    for a, b in down:
        parents.setdefault(b, []).append(a)
    spots: dict[tuple[int, int], Box] = {}  # of a group by rank: its box there, or its lane past that rank
    last: dict[int, Box] = {}
    bottoms: list[float] = []
    y, right = _MARGIN, 0.0
    for one, own in enumerate(ranks):
        # All that read a value share its lane.
        passing = {a for a, b in down if rank[a] < one < rank[b]}
        wished = {at: fmean(last[above].middle for above in parents[at]) if at in parents else float(at) for at in own}
        wished |= {at: last[at].middle for at in passing}
        x, bottom = _MARGIN, y + max(heights[at] for at in own)
        for at in sorted(wished, key=lambda item: (wished[item], item)):
            last[at] = Box(x, y, _LANE, bottom - y) if at in passing else Box(x, y, _WIDTH, heights[at])
            spots[at, one] = last[at]
            x += last[at].width + _GAP
        right = max(right, x - _GAP)
        bottoms.append(bottom)
        y = bottom + _SPACE
    boxes = {at: spots[at, one] for at, one in rank.items()}
    arrows = []
    for a, b in down:
        source, target, ends = boxes[a], boxes[b], sorted(parents[b])
        points = [(source.middle, source.y + source.height), (source.middle, bottoms[rank[a]])]
        for lane in (spots[a, one] for one in range(rank[a] + 1, rank[b])):
            points += [(lane.middle, lane.y), (lane.middle, lane.y + lane.height)]
        share = (ends.index(a) + 1) / (len(ends) + 1)  # each arrow has an end of its own on the target's upper edge
        arrows.append(Arrow(a, b, (*points, (target.x + target.width * share, target.y))))
    return Drawing(boxes, tuple(arrows), right + _MARGIN, y - _SPACE + _MARGIN)


def _ranks(count: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The boxes of each rank: each box below all that it reads, in the first rank there that has room."""
    graph: nx.DiGraph[int] = nx.DiGraph(edges)
    graph.add_nodes_from(range(count))
    circle = nx.condensation(graph).graph["mapping"]
    graph.remove_edges_from([(a, b) for a, b in edges if circle[a] == circle[b] and a > b])
    ranks: defaultdict[int, list[int]] = defaultdict(list)
    for item in nx.lexicographical_topological_sort(graph):
        at = 1 + max((at for at, own in ranks.items() if not graph.pred[item].keys().isdisjoint(own)), default=-1)
        while len(ranks[at]) == _A_RANK:
            at += 1
        ranks[at].append(item)
    return [ranks[at] for at in sorted(ranks)]


def path(points: Sequence[tuple[float, float]]) -> str:
    """SVG's path: a line along a rank and a curve to the next one, in turn."""
    (x0, y0), *rest = points
    found = [f"M{x0:.1f} {y0:.1f}"]
    for at, (x, y) in enumerate(rest):
        if at % 2 == 0:
            found.append(f"L{x:.1f} {y:.1f}")
        else:
            bend = (y - y0) / 2
            found.append(f"C{x0:.1f} {y0 + bend:.1f} {x:.1f} {y - bend:.1f} {x:.1f} {y:.1f}")
        x0, y0 = x, y
    return "".join(found)
