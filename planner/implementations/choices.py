"""The ways to run groups on a device, and what a partition picks from: groups of a region, each with one of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx

from fuseplan.costmodel.device import Mode
from fuseplan.kernels.ir.backend import Backend, Target
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import Candidate, Enumeration, candidate, region_dependencies, single_candidates
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.implementations.aten import AtenOp
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementation import Implementation
from fuseplan.planner.implementations.inductor import InductorAsked, InductorCode
from fuseplan.planner.implementations.library_op import LibraryOp
from fuseplan.planner.libraries.library_calls import LIBRARY_CALLS
from fuseplan.search.store.record import ATEN, GroupChoice, PlanRecord

#: The plans of regions, or of the parts of one, in order.
Plans: TypeAlias = Sequence[tuple[Region, PlanRecord]]


@dataclass(frozen=True)
class Implementations:
    """The ways to run groups on a device: ``aten`` single ops, ``kernel`` what lowers, ``inductor`` whole regions."""

    aten: Implementation
    kernel: GeneratedKernel
    inductor: InductorCode
    libraries: tuple[LibraryOp, ...] = ()

    @property
    def by_rule(self) -> tuple[LibraryOp, ...]:
        """The libraries' calls that the cost model may choose by itself."""
        return tuple(one for one in self.libraries if one.call.by_rule)

    def named(self, name: str) -> Implementation:
        """The one that a record names, by a back end's name the kernel of that; KeyError where there is none."""
        known = {one.name: one for one in (self.aten, self.inductor, *self.libraries)}
        return known.get(name) or self.kernel.by(name)


def implementations_for(
    regime: str, backends: Sequence[Backend], target: Target, inductor: InductorAsked = "default"
) -> Implementations:
    """The ways to run groups on a device; ``inductor`` is what TorchInductor is asked for."""
    mode: Mode = "graph" if regime == "graph" else "eager"
    return Implementations(
        AtenOp(mode),
        GeneratedKernel(tuple(backends), target, kernel_mode(regime)),
        InductorCode(mode, compiled_for="default" if inductor == "off" else inductor),
        tuple(LibraryOp(call, call.name, mode) for call in LIBRARY_CALLS),
    )


def kernel_mode(regime: str) -> Mode:
    """How generated kernels are launched in a regime; those of a CUDA graph overlap where the device can."""
    return "overlapped" if regime == "graph" else "kernel"


@dataclass(frozen=True)
class Choice:
    """A group with one way to run it."""

    group: Candidate
    implementation: Implementation

    @property
    def is_plain(self) -> bool:
        """Whether ATen's own op runs it."""
        return self.implementation.name == ATEN


@dataclass(frozen=True)
class RegionProblem:
    """The compute ops and anchors of a region, or of a part of one (canonical order), and every way to run them.

    ``choices`` holds ATen's ops first, one for each op, then the library calls, then the kernels from small to large:
    among equally good choices the earlier is preferred. ``edges`` are dependencies between the ops' numbers. ``won``
    are numbers of choices that have beaten ATen's op in a contest: where they work, ATen's op is no choice.
    """

    ops: tuple[str, ...]
    choices: tuple[Choice, ...]
    edges: tuple[tuple[int, int], ...]
    won: frozenset[int] = frozenset()

    @property
    def plain(self) -> tuple[Choice, ...]:
        """Every op as ATen's."""
        return self.choices[: len(self.ops)]


def recorded_choices(
    graph: DataflowGraph, region: Region, record: PlanRecord, ways: Implementations
) -> dict[Choice, GroupChoice]:
    """What a plan of a region runs, with what its record says of it."""
    dependencies = region_dependencies(graph, region)
    masks = (dependencies.mask(region.ops[place] for place in one.ops) for one in record.groups)
    return {Choice(candidate(dependencies, mask), ways.named(one.implementation)): one
            for mask, one in zip(masks, record.groups, strict=True)}


def in_order(graph: DataflowGraph, choices: Iterable[Choice]) -> list[Choice]:
    """Choices of a cover as they run: after those that they read from, else by their last result, as dispatch does."""
    flow = compute_graph_of(graph)
    choices = list(choices)
    maker = {value: number for number, choice in enumerate(choices) for value in choice.group.outputs}
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(range(len(choices)))
    order.add_edges_from(
        (maker[value], number) for number, choice in enumerate(choices) for value in choice.group.inputs
        if value in maker
    )

    def last_result(number: int) -> int:
        producers = map(graph.producer, choices[number].group.outputs)
        return max(flow.position[op] for op in producers if op is not None)

    return [choices[number] for number in nx.lexicographical_topological_sort(order, last_result)]


def region_problem(table: GroupTable, region: Region, enumeration: Enumeration, ways: Implementations) -> RegionProblem:
    """The choices of a region; ``enumeration`` has the groups that can be kernels."""
    libraries = [Choice(anchor, library) for anchor in single_candidates(table.graph, region) if table.is_anchor(anchor)
                 for library in ways.libraries if library.refuse(table, anchor) is None]
    return problem_of(table.graph, region, ways, libraries, enumeration.candidates)


def problem_of(
    graph: DataflowGraph, region: Region, ways: Implementations, libraries: Sequence[Choice],
    kernels: Iterable[Candidate], won: bool = False,
) -> RegionProblem:
    """The problem of a region with these library calls, which have ``won`` or not, and these kernels."""
    singles = single_candidates(graph, region)
    plain, generated = (Choice(one, ways.aten) for one in singles), (Choice(one, ways.kernel) for one in kernels)
    winners = range(len(singles), len(singles) + len(libraries)) if won else ()
    return RegionProblem(
        tuple(single.ops[0] for single in singles), (*plain, *libraries, *generated),
        region_dependencies(graph, region).edges(), frozenset(winners))
