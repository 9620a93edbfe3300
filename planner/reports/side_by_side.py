"""Plans of one model side by side: ops fused into each matmul and attention by rows, and what else was measured."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TypeAlias

import networkx as nx

from fuseplan.planner.reports.frames import how_it_runs, time_of
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import ATEN, GroupChoice, PlanRecord

#: A workload by name with a region of it and the plan of that.
PlannedRegion: TypeAlias = tuple[str, RegionSummary, PlanRecord]
#: What tells a matmul or attention of a region apart, whatever its rows: how many lie before it, op and columns.
_Place: TypeAlias = tuple[int, str, int]

_CASTS = frozenset({"to", "_to_copy"})


@dataclass(frozen=True)
class Row:
    """A matmul or attention (or several that read one value and have as many columns) in one workload.

    Attributes:
        op: Its name and number of columns; ``(2)`` for the second such op of a layer.
        rows: Of its result; of attention those of one head.
        runs, time_us: What runs it and what else that computes; the time of both.
        otherwise: What else was measured.
    """

    op: str
    rows: int
    workload: str
    runs: str
    time_us: float
    otherwise: str


def side_by_side(planned: Iterable[PlannedRegion]) -> list[Row]:
    """By op and rows: matmuls and attention that several workloads have in their costliest regions."""
    costliest: dict[str, PlannedRegion] = {}
    for one in planned:
        costliest[one[0]] = max(costliest.get(one[0], one), one, key=lambda it: it[1].occurrences * it[2].unfused_us)
    found = defaultdict[_Place, list[Row]](list)
    for workload, region, plan in costliest.values():
        for place, positions in _places(region).items():
            found[place].append(_row(positions, workload, region, plan))
    seen = Counter[str]()
    listed: list[Row] = []
    for place in sorted(place for place, rows in found.items() if len(rows) > 1):
        name = f"{place[1]} to {place[2]}"
        seen[name] += 1
        name += f" ({seen[name]})" if seen[name] > 1 else ""
        rows = [replace(row, op=name) for row in found[place]]
        listed += sorted(rows, key=lambda row: (row.rows, row.workload))
    return listed


def in_words(rows: Sequence[Row]) -> Iterator[str]:
    """Lines: numbers of rows that are run alike share one. What else was measured is said where that turns."""
    for op, same_op in groupby(rows, key=lambda row: row.op):
        yield f"  {op}"
        ranges = [list(alike) for _, alike in groupby(same_op, key=lambda row: row.runs)]
        for number, alike in enumerate(ranges):
            first, last = alike[0], alike[-1]
            span = f"{first.rows}" if first.rows == last.rows else f"{first.rows} to {last.rows}"
            times = ", ".join(f"{row.time_us:.2f}" for row in alike)
            yield f"    {span} {'row' if span == '1' else 'rows'}: {first.runs} ({times} us)"
            turns = [*([first] if number else []), *([last] if number < len(ranges) - 1 else [])]
            for row in dict.fromkeys(one for one in turns if one.otherwise):
                yield f"      {row.workload}: {row.otherwise}"
        between = [f"{before[-1].rows} and {after[0].rows} rows" for before, after in pairwise(ranges)]
        if between:
            yield f"    turns between {', and between '.join(between)}"


def _places(region: RegionSummary) -> Mapping[_Place, list[int]]:
    """The positions of a region's matmuls and attention; those of one place together, such as K and V."""
    graph: nx.DiGraph[int] = nx.DiGraph(region.edges)
    graph.add_nodes_from(range(len(region.ops)))
    before: dict[int, int] = {}
    found: dict[_Place, list[int]] = {}
    for at in nx.topological_sort(graph):
        before[at] = max((before[one] + (region.kinds[one] == "anchor") for one in graph.predecessors(at)), default=0)
        if region.kinds[at] == "anchor":
            place = before[at], _short(region.ops[at]), _extents(region, at)[-1]
            found.setdefault(place, []).append(at)
    return found


def _row(positions: Sequence[int], workload: str, region: RegionSummary, plan: PlanRecord) -> Row:
    group_of = {at: group for group in plan.groups for at in group.ops}
    groups = {group.ops: group for group in map(group_of.__getitem__, positions)}.values()
    runs = "; ".join(dict.fromkeys(_runs(region, group) for group in groups))
    *rows, _ = _extents(region, positions[0])
    count = math.prod(rows[::2] if "attention" in region.ops[positions[0]] else rows)
    time_us = math.fsum(map(time_of, groups))
    return Row("", count, workload, runs, time_us, _otherwise(region, plan, positions))


def _runs(region: RegionSummary, group: GroupChoice) -> str:
    held = _held(region, group.ops)
    return f"{how_it_runs(group)}, {held}" if held else f"by itself, {how_it_runs(group)}"


def _held(region: RegionSummary, ops: Iterable[int]) -> str:
    """The kinds of ops of a group; "" for one op alone. Views and casts are no work of their own."""
    own = [at for at in ops if region.kinds[at] != "view"]
    return "+".join(sorted({_short(region.ops[at]) for at in own} - _CASTS)) if len(own) > 1 else ""


def _otherwise(region: RegionSummary, plan: PlanRecord, positions: Sequence[int]) -> str:
    """The best measured larger group of ops that are by themselves, else the best way to run them by themselves."""
    group_of = {position: group for group in plan.groups for position in group.ops}
    alone = not _held(region, group_of[positions[0]].ops)
    matmul = "attention" not in region.ops[positions[0]]
    timed = [(one.measured_us, one) for one in plan.rejected if one.measured_us is not None]
    larger = [pair for pair in timed if positions[0] in pair[1].ops and _held(region, pair[1].ops)]
    if alone and larger:
        time_us, best = min(larger, key=lambda pair: pair[0])
        apart = {group.ops: group for group in map(group_of.__getitem__, best.ops)}
        covered = {position for ops in apart for position in ops} == set(best.ops)
        apart_us = f", apart {math.fsum(map(time_of, apart.values())):.2f} us" if covered else ""
        return f"as one kernel, {_held(region, best.ops)}, {time_us:.2f} us{apart_us}"
    single = [(time_us, one) for time_us, one in timed if not _held(region, one.ops)]
    each = [min((pair for pair in single if at in pair[1].ops), key=lambda pair: pair[0], default=None)
            for at in positions]
    known = [pair for pair in each if pair is not None]
    if len(known) < len(positions):
        return "no kernel with more was measured" if alone and matmul else ""
    by = dict.fromkeys("ATen" if one.implementation == ATEN else one.implementation for _, one in known)
    total_us = math.fsum(time_us for time_us, _ in known)
    return f"by {'itself' if len(known) == 1 else 'themselves'} {total_us:.2f} us, {', '.join(by)}"


def _short(op: str) -> str:
    return op.split(".")[0]


def _extents(region: RegionSummary, at: int) -> list[int]:
    return [int(extent) for extent in re.findall(r"\d+", region.shapes[at].split(" ")[0])]
