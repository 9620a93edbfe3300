"""Values that several layers read and calls make in different ways: the layers are planned apart from them."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from graphs import Builder
from reference_backend import ReferenceBackend
from scripted_tuner import TARGET

from fuseplan.planner.cost.prices import part_shares
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import find_regions, region_parts, split_common
from fuseplan.planner.implementations.choices import implementations_for
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.tuning.planner import Planner
from fuseplan.planner.work.extract import find_region, region_data, region_graph
from fuseplan.search.store.database import Database

WAYS = [*product(("tokens", "embeddings"), ("places", "counted"), ("mask", "causal"))]


def model(*ways: str, layers: int = 3) -> DataflowGraph:
    """Tokens or their embeddings, rotary tables of places that are given or counted, a mask that is given or made."""
    given = {"tokens": torch.arange(4), "embeddings": torch.randn(4, 8), "places": torch.arange(4),
             "mask": torch.ones(4, 4, dtype=torch.bool)}
    b = Builder(**{way: given[way] for way in ways if way in given}, table=torch.randn(5, 8), w=torch.randn(8, 8),
                inverse=torch.rand(8))
    hidden = "embeddings" if "embeddings" in ways else b("aten.embedding.default", "table", "tokens", padding_idx=-1)
    places = "places" if "places" in ways else b("aten.arange.default", end=4, dtype=None)
    mask = "mask" if "mask" in ways else b("aten.le.Tensor", b("aten.arange.default", end=4, dtype=None), b(
        "aten.unsqueeze.default", b("aten.arange.default", end=4, dtype=None), dim=1))
    angles = b("aten.mul.Tensor", b("aten.unsqueeze.default", places, dim=1), "inverse")
    cos, sin = b("aten.cos.default", angles), b("aten.sin.default", angles)
    for _ in range(layers):
        normed = b("aten.tanh.default", hidden)
        q, k, v = (b("aten.neg.default", b("aten.linear.default", normed, "w", bias=None)) for _ in range(3))
        q, k = (b("aten.add.Tensor", b("aten.mul.Tensor", one, cos), sin) for one in (q, k))
        q, k, v = (b("aten.view.default", one, size=(1, 1, 4, 8)) for one in (q, k, v))
        attended = b("aten.scaled_dot_product_attention.default", q, k, v, mask, dropout_p=0.0, is_causal=False,
                     scale=None, enable_gqa=False)
        flat = b("aten.view.default", attended, size=(4, 8))
        hidden = b("aten.add.Tensor", hidden, b("aten.linear.default", flat, "w", bias=None))
    return b.graph(hidden)


@pytest.mark.parametrize("ways", WAYS)
def test_pieces_hold_every_op_once_and_are_found_alone(ways: tuple[str, ...]) -> None:
    graph = model(*ways)
    flow = compute_graph_of(graph)
    first, *others = find_regions(graph)
    *made, layer = split_common(graph, first)
    assert len(made) == 1 + ("tokens" in ways) + ("causal" in ways)  # tables, embedded tokens, a mask
    names = [Counter(name for name in one.ops if flow.is_member(flow.position[name])) for one in (first, *made, layer)]
    assert names[0] == sum(names[1:], Counter())
    parts = Counter(name for part in region_parts(graph, layer) for name in part.ops)
    assert parts.keys() == set(layer.ops) and len(region_parts(graph, layer)) > 4
    for piece in (*made, layer):
        assert region_graph(region_data(graph, piece), piece.key)[1].key == piece.key
        assert find_region(graph, piece.key) == piece
    assert all(split_common(graph, region) == (region,) for region in (*others, *made, layer))
    assert find_regions(graph) == [first, *others]


def test_layers_are_the_same_whatever_makes_what_they_read() -> None:
    regions = {ways: find_regions(model(*ways)) for ways in WAYS}
    pieces = {ways: split_common(model(*ways), find_regions(model(*ways))[0]) for ways in WAYS}
    assert len({found[0].key for found in regions.values()}) == len(WAYS)
    assert len({found[-1].key for found in pieces.values()}) == 1
    assert len({piece.key for found in pieces.values() for piece in found}) == 1 + 2 + 1 + 1


def test_parts_of_pieces_have_their_shares_of_the_time() -> None:
    """One that has none is searched like the longest."""
    table = GroupTable(graph := model("tokens", "counted", "causal"), "fp32", "cpu")
    shares = part_shares(table, implementations_for("eager", (), TARGET).aten)
    *made, layer = split_common(graph, find_regions(graph)[0])
    found = [sum(shares[part.key] for part in region_parts(graph, piece)) for piece in (*made, layer)]
    assert all(0 < one < found[-1] for one in found[:-1])
    regions = [part.key for region in find_regions(graph) for part in region_parts(graph, region)]
    assert sum(shares[key] for key in dict.fromkeys(regions)) == pytest.approx(1)


def test_what_one_layer_reads_stays_with_it() -> None:
    graph = model("tokens", "counted", "causal", layers=1)
    embedded, _ = split_common(graph, find_regions(graph)[0])
    assert [graph.op(name).op for name in embedded.ops] == ["aten.embedding.default"]  # what comes behind reads it, too


def test_plans_of_pieces_serve_calls_in_all_combinations_and_a_whole_plan_goes_first(tmp_path: Path) -> None:
    with Database(tmp_path / "tuning.db") as database:
        planner = Planner(database, None, "dev", TARGET, (ReferenceBackend(),))

        def store(graph: DataflowGraph, split: bool) -> None:
            for plan in planner.plan_graph(graph, regions=planner.look_up_regions(graph, split)[0]).unique():
                database.put_plan(plan.record)

        store(whole := model("tokens", "counted", "causal"), False)
        other = model("embeddings", "places", "mask")
        assert planner.look_up_regions(other)[0] == find_regions(other)  # no layer by itself has a plan yet
        store(model("tokens", "places", "causal"), True)
        store(model("embeddings", "counted", "mask"), True)
        for ways in WAYS:
            graph = model(*ways)
            regions, stored = planner.look_up_regions(graph)
            assert {one.key for one in regions} <= stored.keys() and len(find_regions(graph)) == 4
            assert {one.source for one in planner.plan_graph(graph).regions} == {"database"}
        for split in (False, True):  # as an earlier version stored it
            assert planner.look_up_regions(whole, split)[0] == find_regions(whole)
