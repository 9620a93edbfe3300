"""The ways to run a region's ops: what a partition picks from."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import Candidate, Enumeration, region_candidates, region_dependencies
from fuseplan.planner.groups.compute_graph import Classify


@dataclass(frozen=True)
class Choice:
    """One way to run the ops of ``group``: as one kernel, or (a single op only) unfused, as the ATen op it is."""

    group: Candidate
    fused: bool


@dataclass(frozen=True)
class RegionProblem:
    """A region's compute ops (canonical order) and every way to run them.

    ``choices`` holds the unfused ops first, then the fused groups from small to large: among equally good choices
    the earlier is preferred. ``edges`` are the dependencies between ops, by their numbers.
    """

    ops: tuple[str, ...]
    choices: tuple[Choice, ...]
    edges: tuple[tuple[int, int], ...]


def region_problem(
    graph: DataflowGraph, region: Region, enumeration: Enumeration, classify: Classify | None = None
) -> RegionProblem:
    """The region with its enumerated candidates, and each op unfused."""
    dependencies = region_dependencies(graph, region, classify)
    singles = region_candidates(graph, region, [1 << bit for bit in range(len(dependencies))], classify)
    choices = (
        *(Choice(single, fused=False) for single in singles),
        *(Choice(candidate, fused=True) for candidate in enumeration.candidates),
    )
    return RegionProblem(tuple(single.ops[0] for single in singles), choices, dependencies.edges())
