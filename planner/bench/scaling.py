"""How planning scales with the size of a graph: the table behind ``plan bench planner``."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pandas as pd

from fuseplan.planner.bench.synthetic import transformer_graph
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import (
    Candidate,
    Enumeration,
    Legal,
    enumerate_candidates,
    transfer,
    transfer_all,
)
from fuseplan.planner.groups.regions import find_regions, region_parts, unique_regions
from fuseplan.planner.implementations.aten_op import AtenOp
from fuseplan.planner.implementations.choices import Choice, Implementations, region_problem
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.group_book import GroupBook
from fuseplan.planner.partition.guided_loop import predicted_partition

#: A nominal device for pricing groups, so that the table does not depend on a probe: what is timed is the planner.
_LAUNCH_S = 2e-6
_BYTES_PER_S = 1e12


def plan_scaling(sizes: Sequence[int] = (1_000, 10_000, 100_000), legal: Legal | None = None) -> pd.DataFrame:
    """Build, hash and plan synthetic decoders of these numbers of ops; ``legal`` is by default whether a group lowers.

    Returns:
        One row a size: what was found, the seconds of each step, their total, and ``us_per_op``.
    """
    return pd.DataFrame([_plan_once(size, legal) for size in sizes])


def _plan_once(size: int, legal: Legal | None) -> dict[str, float | int]:
    laps = [time.perf_counter()]
    graph = transformer_graph(size)
    laps.append(time.perf_counter())
    regions = find_regions(graph)
    unique = unique_regions(regions)
    laps.append(time.perf_counter())
    book = GroupBook(graph, "fp32", "cpu")
    parts = {key: region_parts(graph, found[0]) for key, found in unique.items()}
    first: dict[str, tuple[Region, Enumeration]] = {}
    enumerations: dict[Region, Enumeration] = {}
    for part in (part for of_one in parts.values() for part in of_one):
        if part.key not in first:
            first[part.key] = part, enumerate_candidates(graph, part, legal or book.legal)
        planned, shared = first[part.key]
        enumerations[part] = transfer_all(graph, shared, planned, part)
    laps.append(time.perf_counter())
    groups: list[Candidate] = []
    covers: dict[str, tuple[Region, list[Candidate]]] = {}
    ways = Implementations(AtenOp(), GeneratedKernel())
    for key, found in unique.items():
        for part in parts[key]:
            if part.key not in covers:
                problem = region_problem(graph, part, enumerations[part], ways)
                result = predicted_partition(problem, lambda choice: traffic_s(graph, choice))
                kernels = [priced.choice.group for priced in result.chosen if priced.choice.implementation.searches]
                covers[part.key] = part, kernels
            planned, kernels = covers[part.key]
            fused = [transfer(graph, group, planned, part) for group in kernels]
            groups += [transfer(graph, group, found[0], region) for region in found for group in fused]
    laps.append(time.perf_counter())
    steps = dict(zip(("build_s", "regions_s", "enumerate_s", "cover_s"), np.diff(laps).tolist(), strict=True))
    total_s = sum(steps.values())
    return {
        "ops": len(graph),
        "regions": len(regions),
        "unique_regions": len(unique),
        "candidates": sum(len(found.candidates) for found in enumerations.values()),
        "groups": len(groups),
        **steps,
        "total_s": total_s,
        "us_per_op": total_s / len(graph) * 1e6,
    }


def traffic_s(graph: DataflowGraph, choice: Choice) -> float:
    """One launch plus the bytes of a group's inputs and outputs, on the nominal device."""
    values = (*choice.group.inputs, *choice.group.outputs)
    return _LAUNCH_S + sum(graph.specs[value].nbytes(graph.symbols) for value in values) / _BYTES_PER_S
