"""Where groups of a graph are in the model, for people: see :mod:`fuseplan.planner.module_paths`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.module_paths import RepeatedPaths, patterns, place
from fuseplan.planner.ops.table import kind_of


def place_of(graph: DataflowGraph, ops: Iterable[str]) -> str:
    """A group's place in the model (``model.layers.0: input_layernorm -> self_attn.q_proj, k_proj``); "" if unknown."""
    return place([paths_of(graph, ops)])


def paths_of(graph: DataflowGraph, ops: Iterable[str]) -> tuple[str, ...]:
    """Paths of the modules of some ops in capture order; views count only where there is nothing else."""
    ordered = sorted(ops, key=graph.position)
    work = [name for name in ordered if not _is_view(graph, name)]
    return tuple(dict.fromkeys(path for name in work or ordered for path in graph.paths.get(name, ())))


def region_paths(graph: DataflowGraph, occurrences: Sequence[Region]) -> tuple[RepeatedPaths, ...]:
    """Where the ops of a region are in all its occurrences, which have equal ops at equal positions."""
    alike: dict[tuple[int, ...], list[list[str]]] = {}
    for region in occurrences:
        order = sorted(range(len(region.ops)), key=lambda at: graph.position(occurrences[0].ops[at]))
        found = [
            (at, path) for at in order if not _is_view(graph, region.ops[at])
            for path in graph.paths.get(region.ops[at], ())
        ]
        alike.setdefault(tuple(at for at, _ in found), []).append([path for _, path in found])
    return tuple(
        RepeatedPaths(times, tuple(zip(ops, paths, strict=True)))
        for ops, group in alike.items() for times, paths in patterns(group)
    )


def _is_view(graph: DataflowGraph, name: str) -> bool:
    return kind_of(graph.op(name), graph.specs) == "view"
