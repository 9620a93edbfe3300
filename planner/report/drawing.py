"""A region's partition as an inline SVG drawing: ops as boxes, groups as coloured clusters, top to bottom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import pairwise

from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import PlanRecord

#: How many cluster colours the page defines (CSS classes ``group0`` to ``group7``).
COLOURS = 8
_CHIP_W, _CHIP_H, _GAP, _PAD, _HEAD, _SPACE = 84, 24, 14, 10, 20, 34
_CHIPS_A_ROW, _CLUSTERS_A_ROW = 4, 4
#: Width that a letter of a cluster's heading is given.
_LETTER = 6.4

#: An op drawn in a cluster: an op that is computed twice has two chips.
_Chip = tuple[int, int]


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float
    height: float

    def moved(self, dx: float, dy: float) -> _Box:
        return _Box(self.x + dx, self.y + dy, self.width, self.height)


def group_name(number: int) -> str:
    """Letters for groups: A to Z, then A1, B1 and so on.

    >>> group_name(0), group_name(27)
    ('A', 'B1')
    """
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def group_class(plan: PlanRecord, number: int) -> str:
    """CSS class of a group's colour; unfused and library groups stay grey."""
    fused = [at for at, group in enumerate(plan.groups) if not group.is_plain]
    return f"group{fused.index(number) % COLOURS}" if number in fused else "plain"


def partition_svg(region: RegionSummary, plan: PlanRecord) -> str:
    """An ``<svg>`` element that shows which op runs in which group."""
    return _Drawing(region, plan).svg()


class _Drawing:
    def __init__(self, region: RegionSummary, plan: PlanRecord) -> None:
        self.region = region
        self.plan = plan
        self.members = _members(region, [group.ops for group in plan.groups])

    @cached_property
    def edges(self) -> list[tuple[_Chip, _Chip]]:
        """Data flow between chips; a value that is computed in the reader's own cluster comes from there."""
        found = []
        for before, after in self.region.edges:
            makers = [cluster for cluster, ops in enumerate(self.members) if before in ops]
            for reader in (cluster for cluster, ops in enumerate(self.members) if after in ops):
                near = [reader] if reader in makers else makers[:1]
                found += [((maker, before), (reader, after)) for maker in near]
        return found

    @cached_property
    def chips(self) -> dict[_Chip, _Box]:
        """Chips by place inside their cluster's box."""
        placed: dict[_Chip, _Box] = {}
        for cluster, ops in enumerate(self.members):
            inner = [(a[1], b[1]) for a, b in self.edges if a[0] == b[0] == cluster]
            y = _PAD + _HEAD
            for row in _rows(_ranks(ops, inner), _CHIPS_A_ROW):
                for column, op in enumerate(row):
                    placed[cluster, op] = _Box(_PAD + column * (_CHIP_W + _GAP), y, _CHIP_W, _CHIP_H)
                y += _CHIP_H + _GAP
        return placed

    @cached_property
    def clusters(self) -> list[_Box]:
        """Boxes of the clusters on the page."""
        sizes = []
        for cluster in range(len(self.members)):
            boxes = [box for (owner, _), box in self.chips.items() if owner == cluster]
            right = max((box.x + box.width for box in boxes), default=_CHIP_W)
            bottom = max((box.y + box.height for box in boxes), default=_HEAD)
            sizes.append((right + _PAD, bottom + _PAD))
        outer = {(a[0], b[0]) for a, b in self.edges if a[0] != b[0]}
        placed = [_Box(0, 0, 0, 0)] * len(sizes)
        y = 4.0
        for row in _rows(_ranks(range(len(sizes)), sorted(outer)), _CLUSTERS_A_ROW):
            x = 4.0
            for cluster in row:
                placed[cluster] = _Box(x, y, *sizes[cluster])
                x += sizes[cluster][0] + _GAP
            y += max(sizes[cluster][1] for cluster in row) + _SPACE
        return placed

    def place(self, chip: _Chip) -> _Box:
        cluster = self.clusters[chip[0]]
        return self.chips[chip].moved(cluster.x, cluster.y)

    def svg(self) -> str:
        width = max((box.x + box.width for box in self.clusters), default=0) + 4
        height = max((box.y + box.height for box in self.clusters), default=0) + 4
        words = escape(self._words())
        return (
            f'<svg class="partition" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'role="img" aria-label="{words}"><title>{words}</title>'
            + "".join(self._cluster(number) for number in range(len(self.members)))
            + "".join(self._edge(before, after) for before, after in self.edges)
            + "".join(self._chip(chip) for chip in self.chips)
            + "</svg>"
        )

    def _words(self) -> str:
        parts = [
            f"{group_name(number)} ({group.implementation}): "
            + ", ".join(_short(self.region.ops[op]) for op in group.ops)
            for number, group in enumerate(self.plan.groups)
        ]
        return f"Partition of {self.plan.label} into {len(parts)} groups. " + "; ".join(parts)

    def _cluster(self, number: int) -> str:
        box, group = self.clusters[number], self.plan.groups[number]
        time_us = group.measured_us if group.measured_us is not None else group.predicted_us
        time = f"{time_us:,.0f} us" if time_us >= 100 else f"{time_us:.3g} us"
        text = f"{group_name(number)} · {group.implementation} · {time}"
        room = box.width - 2 * _PAD
        if _LETTER * len(text) > room:
            text = f"{group_name(number)} · {time}"
        width = min(room, _LETTER * len(text))
        return (
            f'<g class="{group_class(self.plan, number)}"><rect class="cluster" x="{box.x:.1f}" y="{box.y:.1f}" '
            f'width="{box.width:.1f}" height="{box.height:.1f}" rx="8"/>'
            f'<text class="head" x="{box.x + _PAD:.1f}" y="{box.y + 19:.1f}" '
            f'textLength="{width:.0f}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text></g>'
        )

    def _chip(self, chip: _Chip) -> str:
        box, op = self.place(chip), chip[1]
        name = _short(self.region.ops[op])
        shown = escape(name if len(name) <= 12 else name[:11] + "…")
        words = escape(f"{self.region.ops[op]} {self.region.shapes[op]}")
        return (
            f'<g class="{self.region.kinds[op]}"><title>{words}</title><rect class="op" x="{box.x:.1f}" '
            f'y="{box.y:.1f}" width="{box.width}" height="{box.height}" rx="5"/><text x="{box.x + box.width / 2:.1f}" '
            f'y="{box.y + 16:.1f}" text-anchor="middle">{shown}</text></g>'
        )

    def _edge(self, before: _Chip, after: _Chip) -> str:
        a, b = self.place(before), self.place(after)
        x0, y0, x1, y1 = a.x + a.width / 2, a.y + a.height, b.x + b.width / 2, b.y
        bend = max(12.0, min(60.0, abs(y1 - y0) / 2))
        across = " across" if before[0] != after[0] else ""
        return (
            f'<path class="edge{across}" d="M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} '
            f'{x1:.1f} {y1:.1f}"/>'
        )


def _short(op: str) -> str:
    return op.split(".")[0]


def _members(region: RegionSummary, groups: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Ops of each cluster; a view is drawn with an op that reads it, which is where its address map is used."""
    members = [list(ops) for ops in groups]
    for op in reversed(range(len(region.ops))):
        if any(op in ops for ops in members):
            continue
        readers = [after for before, after in region.edges if before == op]
        home = next((ops for reader in readers for ops in members if reader in ops), None)
        if home is None:
            makers = [before for before, after in region.edges if after == op]
            home = next((ops for maker in makers for ops in members if maker in ops), None)
        if home is not None:
            home.append(op)
    return [sorted(ops) for ops in members]


def _ranks(items: Iterable[int], edges: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Longest path from a source, in a few sweeps: should there be a cycle, ranks stay finite."""
    edges = list(edges)
    ranks = dict.fromkeys(items, 0)
    for _ in ranks:
        changed = False
        for before, after in edges:
            wanted = min(ranks[before] + 1, len(ranks))
            if ranks[after] < wanted:
                ranks[after], changed = wanted, True
        if not changed:
            break
    return ranks


def _rows(ranks: Mapping[int, int], width: int) -> list[list[int]]:
    """Items of equal rank side by side, at most ``width`` of them."""
    levels: dict[int, list[int]] = {}
    for item, rank in ranks.items():
        levels.setdefault(rank, []).append(item)
    rows = []
    for rank in sorted(levels):
        cuts = [*range(0, len(levels[rank]), width), len(levels[rank])]
        rows += [levels[rank][start:stop] for start, stop in pairwise(cuts)]
    return rows
