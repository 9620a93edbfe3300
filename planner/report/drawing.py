"""A region's partition as an inline SVG drawing: ops as boxes, groups as coloured clusters, top to bottom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import networkx as nx
from jinja2 import Environment, PackageLoader, StrictUndefined

from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import PlanRecord

#: How many cluster colours the page defines (CSS classes ``group0`` to ``group7``).
COLOURS = 8
_CHIP_W, _CHIP_H, _GAP, _PAD, _HEAD, _SPACE, _MARGIN = 84, 24, 14, 10, 20, 34, 4
#: Chips and clusters side by side.
_A_ROW = 4


class _Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float


@cache
def templates() -> Environment:
    """The report's templates; what they are given is escaped."""
    loader = PackageLoader("fuseplan.planner.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def group_name(number: int) -> str:
    """Letters for groups: A to Z, then A1, B1 and so on."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def group_class(plan: PlanRecord, number: int) -> str:
    """CSS class of a group's colour; unfused and library groups stay grey."""
    fused = [at for at, group in enumerate(plan.groups) if not group.is_plain]
    return f"group{fused.index(number) % COLOURS}" if number in fused else "plain"


def partition_svg(region: RegionSummary, plan: PlanRecord) -> str:
    """An ``<svg>`` element that shows which op runs in which group; an op that is computed twice has two chips."""
    members = _members(region, [group.ops for group in plan.groups])
    edges: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for before, after in region.edges:
        makers = [number for number, ops in enumerate(members) if before in ops]
        for reader in (number for number, ops in enumerate(members) if after in ops):
            # A value that is computed in the reader's own cluster comes from there.
            edges += [((maker, before), (reader, after)) for maker in ([reader] if reader in makers else makers[:1])]
    inside, sizes = [], {}
    for number, ops in enumerate(members):
        own = [(a[1], b[1]) for a, b in edges if a[0] == b[0] == number]
        chips = _placed(dict.fromkeys(ops, (_CHIP_W, _CHIP_H)), own, _GAP)
        width, height = _extent(chips.values())
        inside.append(chips)
        sizes[number] = (max(width, _CHIP_W) + 2 * _PAD, height + _HEAD + 2 * _PAD)
    outer = _placed(sizes, [(a[0], b[0]) for a, b in edges if a[0] != b[0]], _SPACE, _MARGIN)
    placed = {
        (number, op): box._replace(x=box.x + outer[number].x + _PAD, y=box.y + outer[number].y + _PAD + _HEAD)
        for number, chips in enumerate(inside) for op, box in chips.items()
    }
    names = [op.split(".")[0] for op in region.ops]
    width, height = _extent(outer.values())
    return templates().get_template("partition.svg.j2").render(
        width=width + _MARGIN, height=height + _MARGIN, pad=_PAD, names=names, plan=plan,
        clusters=[
            (box, group_name(at), group_class(plan, at), plan.groups[at], region.place_of(plan.groups[at].ops))
            for at, box in outer.items()
        ],
        edges=[(placed[a], placed[b], a[0] != b[0]) for a, b in edges],
        chips=[(box, names[op], region.kinds[op], region.ops[op], region.shapes[op])
               for (_, op), box in placed.items()],
    )


def _placed(
    sizes: Mapping[int, tuple[float, float]], edges: Iterable[tuple[int, int]], space: float, start: float = 0.0
) -> dict[int, _Box]:
    """Boxes of these widths and heights below those that they read, ``space`` apart; the first at ``start``."""
    graph = nx.DiGraph(edges)
    graph.add_nodes_from(sizes)
    # Clusters may read each other, where an op in them is computed twice: such are side by side.
    circles = nx.condensation(graph)
    found, y = {}, start
    for generation in nx.topological_generations(circles):
        level = sorted(item for number in generation for item in circles.nodes[number]["members"])
        for first in range(0, len(level), _A_ROW):
            row, x = level[first : first + _A_ROW], start
            for item in row:
                found[item] = _Box(x, y, *sizes[item])
                x += sizes[item][0] + _GAP
            y += max(sizes[item][1] for item in row) + space
    return found


def _extent(boxes: Iterable[_Box]) -> tuple[float, float]:
    """Right and bottom end of all boxes."""
    ends = [(box.x + box.width, box.y + box.height) for box in boxes]
    return max((x for x, _ in ends), default=0), max((y for _, y in ends), default=0)


def _members(region: RegionSummary, groups: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Ops of each cluster; a view is drawn with an op that reads it, which is where its address map is used."""
    members = [list(ops) for ops in groups]
    for op in reversed(range(len(region.ops))):
        if any(op in ops for ops in members):
            continue
        readers = [after for before, after in region.edges if before == op]
        makers = [before for before, after in region.edges if after == op]
        homes = (ops for neighbour in (*readers, *makers) for ops in members if neighbour in ops)
        if (home := next(homes, None)) is not None:
            home.append(op)
    return [sorted(ops) for ops in members]
