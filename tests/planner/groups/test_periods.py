"""Regions that hold matmuls and attention: where they end, what parts they have, and that layers repeat."""

from __future__ import annotations

from collections import Counter

import networkx as nx
import pytest
import torch
from graphs import Builder

from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups import regions
from fuseplan.planner.groups.candidates import enumerate_candidates, region_dependencies
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import find_regions, region_parts, unique_regions
from fuseplan.planner.implementations.group_table import GroupTable

ATTENTION = "aten.scaled_dot_product_attention.default"


def decoder(layers: int, width: int = 8, gated: bool = False) -> DataflowGraph:
    """Layers of attention and a gated part, with residuals; ``gated`` scales attention's result before it goes on."""
    b = Builder(x=torch.randn(2, 3, width), w=torch.randn(width, width), s=torch.randn(width))

    def heads(value: str) -> str:
        return b("aten.transpose.int", b("aten.view.default", value, size=(2, 3, 2, width // 2)), dim0=1, dim1=2)

    hidden = "x"
    for _ in range(layers):
        normed = b("aten.mul.Tensor", b("aten.tanh.default", hidden), "s")
        q, k, v = (b("aten.linear.default", normed, "w", bias=None) for _ in range(3))
        turned = [b("aten.neg.default", heads(one)) for one in (q, k)]
        attended = b(ATTENTION, *turned, heads(v), dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)
        flat = b("aten.reshape.default", b("aten.transpose.int", attended, dim0=1, dim1=2), shape=(2, 3, width))
        if gated:
            flat = b("aten.mul.Tensor", flat, "s")
        hidden = b("aten.add.Tensor", hidden, b("aten.linear.default", flat, "w", bias=None))
        inner = b("aten.linear.default", b("aten.mul.Tensor", b("aten.tanh.default", hidden), "s"), "w", bias=None)
        hidden = b("aten.add.Tensor", hidden, b("aten.linear.default", b("aten.silu.default", inner), "w", bias=None))
    return b.graph(hidden)


def test_a_period_reaches_from_one_attention_to_the_next_and_repeats() -> None:
    graph = decoder(5)
    regions = find_regions(graph)
    assert len(regions) == 6  # before the first attention, four periods, and after the last attention
    assert sorted(len(found) for found in unique_regions(regions).values()) == [1, 1, 4]
    ops = [Counter(graph.op(name).op for name in region.ops) for region in regions]
    assert [one[ATTENTION] for one in ops] == [1, 1, 1, 1, 1, 0]
    assert [one["aten.linear.default"] for one in ops] == [3, 6, 6, 6, 6, 3]


def test_every_op_is_in_one_region_and_in_one_part_of_it() -> None:
    graph = decoder(3)
    flow = compute_graph_of(graph)
    members = {name for name, at in flow.position.items() if flow.is_member(at)}
    seen: Counter[str] = Counter()
    for region in find_regions(graph):
        parts = region_parts(graph, region)
        own = [name for part in parts for name in part.ops if name in members]
        assert sorted(own) == sorted(name for name in region.ops if name in members)
        seen.update(own)
        for part in parts:
            kinds = {flow.kinds[flow.position[name]] for name in part.ops} - {"view"}
            assert kinds in ({"compute"}, {"anchor"})
            assert kinds == {"compute"} or sum(name in members for name in part.ops) == 1
    assert seen == Counter(dict.fromkeys(members, 1))


def test_a_part_is_no_region_of_others() -> None:
    graph = decoder(2)
    (region, *_) = find_regions(graph)
    for part in region_parts(graph, region):
        assert region_parts(graph, part) == (part,)


@pytest.mark.parametrize("layers", [2, 7])
def test_without_an_end_the_region_is_as_large_as_its_limit(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op between attention and the projection could belong to either: nothing ends such a model's region."""
    graph = decoder(layers, gated=True)
    (whole,) = find_regions(graph)
    parts = region_parts(graph, whole)
    assert len(parts) > 6 * layers
    monkeypatch.setattr(regions, "MAX_PERIOD", 20)
    cut = find_regions(decoder(layers, gated=True))
    assert len(cut) == len(parts)
    assert len(unique_regions(cut)) <= 14  # the layers' parts repeat


def test_dependencies_of_a_period_are_those_of_the_graph() -> None:
    graph = decoder(2)
    flow = compute_graph_of(graph)
    plain = nx.DiGraph((flow.names[p], flow.names[at]) for at in range(len(flow.nodes)) for p in flow.preds[at])
    for region in find_regions(graph):
        dependencies = region_dependencies(graph, region)
        names = [flow.names[at] for at in dependencies.members]
        reached = nx.transitive_closure(nx.DiGraph(dependencies.edges()))
        for a, first in enumerate(names):
            for b, second in enumerate(names):
                if a != b:
                    assert reached.has_edge(a, b) == nx.has_path(plain, first, second), (first, second)


def test_equal_parts_have_equal_groups_whatever_region_they_are_in() -> None:
    """What a table finds in one part, under the names of another, is what is found there."""
    graph = decoder(3)
    table = GroupTable(graph, "fp32", "cpu")
    parts = [part for region in find_regions(graph) for part in region_parts(graph, region)]
    assert len({part.key for part in parts}) < len(parts)
    for part in parts:
        own = enumerate_candidates(graph, part, GroupTable(graph, "fp32", "cpu").legal)
        found = table.enumerated(part)
        assert found.candidates == own.candidates
        assert [refusal.ops for refusal in found.refusals] == [refusal.ops for refusal in own.refusals]
