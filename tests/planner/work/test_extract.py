"""Regions by themselves: cut out of random graphs, written down, read, and run beside the whole graph."""

from __future__ import annotations

import json

import pytest
import torch
from graph_runs import run_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph

from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.graph.serialize import graph_from_json, graph_to_json
from fuseplan.planner.groups.regions import find_regions, region_parts
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.work.extract import extract

pytestmark = pytest.mark.uncovered


def everything(graph: DataflowGraph) -> DataflowGraph:
    """The graph with every value for an output."""
    made = [value for node in graph for value in node.outputs]
    return DataflowGraph(graph, graph.specs, graph.inputs, made, order=graph.orders())


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 24), st.integers(0, 3))
def test_a_region_by_itself_has_its_key_and_computes_the_same(seed: int, size: int, order: int) -> None:
    graph = random_graph(seed, size, order=order)
    torch.manual_seed(seed)
    inputs = {name: torch.randn(graph.specs[name].shape) for name in graph.inputs}
    whole = everything(graph)
    values = {**inputs, **dict(zip(whole.outputs, run_graph(whole, inputs), strict=True))}
    for region in find_regions(graph):
        for part in {region, *region_parts(graph, region)}:
            alone = graph_from_json(json.loads(json.dumps(graph_to_json(extract(graph, part)))))
            assert [one.key for one in find_regions(alone)] == [part.key]
            (again,) = find_regions(alone)
            assert set(again.ops) == set(part.ops) and set(alone.inputs) == set(part.inputs)
            outside = {node.name: lambda: [torch.zeros(())] for node in alone if node.name not in part.ops}
            results = run_graph(alone, {name: values[name] for name in alone.inputs}, opaque=outside)
            for name, result in zip(alone.outputs, results, strict=True):
                torch.testing.assert_close(result, values[name], rtol=0, atol=0, equal_nan=True)


def legal_groups(graph: DataflowGraph, part: Region) -> set[frozenset[str]]:
    found = GroupTable(graph, "fp32", "cpu").enumerated(part)
    return {frozenset(one.ops) for one in found.candidates}


def test_what_lies_around_a_region_forbids_the_same_groups_without_it() -> None:
    stand_ins = 0
    for seed in range(60):
        graph = random_graph(seed, 16, order=3)
        for region in find_regions(graph):
            alone = extract(graph, region)
            stand_ins += len(alone) - len(region.ops)
            assert legal_groups(alone, find_regions(alone)[0]) == legal_groups(graph, region)
    assert stand_ins, "no path left a region and came back"
