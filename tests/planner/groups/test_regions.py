"""Regions against their definition on random graphs, and on the shapes that models have."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from graph_oracle import Oracle, make
from graphs import Builder
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph
from synthetic_decoders import transformer_graph

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Ref, TensorSpec
from fuseplan.planner.groups import regions
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import find_boundaries, find_regions, unique_regions
from fuseplan.planner.ops.table import kind_of


def compute_sets(graph: DataflowGraph) -> set[frozenset[str]]:
    """The compute ops of each region, however far apart siblings are."""
    with mock.patch.multiple(regions, SIBLING_LEVELS=99, SIBLING_WINDOW=99):
        return {
            frozenset(name for name in region.ops if kind_of(graph.op(name), graph.specs) == "compute")
            for region in find_regions(graph)
        }


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 18), st.integers(0, 3))
def test_regions_match_their_definition(seed: int, size: int, order: int) -> None:
    graph = random_graph(seed, size, order=order)
    assert compute_sets(graph) == Oracle(graph).regions()


def test_residual_stream_does_not_join_layers() -> None:
    graph = make(
        ("add1", "add.Tensor", ("x", "y")),
        ("norm1", "exp.default", ("add1",)),
        ("mm1", "rrelu.default", ("norm1", "w")),
        ("add2", "add.Tensor", ("add1", "mm1")),
        ("norm2", "exp.default", ("add2",)),
        outputs=("norm2",),
    )
    assert compute_sets(graph) == {frozenset({"add1", "norm1"}), frozenset({"add2", "norm2"})}
    (boundary,) = find_boundaries(graph)
    assert (boundary.before, boundary.after) == ("add1", "add2")
    assert boundary.reason == "a path runs through aten.rrelu.default (mm1)"


def test_edge_into_a_deeper_op_without_a_path_around_is_contractible() -> None:
    graph = make(
        ("mm", "rrelu.default", ("x", "w")),
        ("side", "exp.default", ("y",)),
        ("sum", "add.Tensor", ("side", "mm")),
        outputs=("sum",),
    )
    assert compute_sets(graph) == {frozenset({"side", "sum"})}


def test_siblings_of_one_layer_share_a_region_and_layers_do_not() -> None:
    rows: list[tuple[str, str, tuple[str, ...]]] = []
    hidden = "x"
    for layer in range(3):
        q, k, mm = f"q{layer}", f"k{layer}", f"mm{layer}"
        rows += [(f"u{layer}", "view", ("cos",)), (f"a{layer}", "rrelu.default", (hidden, "wq")),
                 (f"b{layer}", "rrelu.default", (hidden, "wk")), (q, "mul.Tensor", (f"a{layer}", f"u{layer}")),
                 (k, "mul.Tensor", (f"b{layer}", f"u{layer}")), (mm, "rrelu.default", (q, k))]
        hidden = mm
    rows = [(name, "view.default" if op == "view" else op, operands) for name, op, operands in rows]
    graph = make(*rows, outputs=(hidden,))
    assert compute_sets(graph) == {frozenset({f"q{layer}", f"k{layer}"}) for layer in range(3)}
    found = find_regions(graph)
    assert [len(region.ops) for region in found] == [3, 3, 3], "the view is in each region that reads through it"
    assert len(unique_regions(found)) == 1


def test_an_ordering_edge_separates() -> None:
    rows = (("a", "exp.default", ("x",)), ("b", "neg.default", ("a",)))
    assert compute_sets(make(*rows, outputs=("b",))) == {frozenset({"a", "b"})}
    fenced = make(*rows, outputs=("b",), order=(("a", "b"),))
    assert compute_sets(fenced) == {frozenset({"a", "b"})}, "a data edge that is also ordered is a data edge"
    siblings = (("a", "exp.default", ("x",)), ("b", "neg.default", ("x",)))
    graph = make(*siblings, outputs=("a", "b"), order=(("a", "b"),))
    assert compute_sets(graph) == {frozenset({"a"}), frozenset({"b"})}


def test_ordering_boundary_names_the_write() -> None:
    graph = make(
        ("a", "exp.default", ("x",)), ("c", "neg.default", ("y",)), ("b", "add.Tensor", ("a", "c")),
        outputs=("b",), order=(("a", "c"),),
    )
    (boundary,) = find_boundaries(graph)
    assert "ordering edge" in boundary.reason
    assert "aten.neg.default (c)" in boundary.reason


@pytest.mark.parametrize("viewed", [False, True])
def test_a_lookup_is_apart_from_what_computes_its_table(viewed: bool) -> None:
    b = Builder(x=torch.randn(5, 7), at=torch.tensor([4, 0, 2]))
    table = b("aten.exp.default", "x")
    rows = b("aten.add.Tensor", b("aten.neg.default", "at"), other=4)
    seen = b("aten.slice.Tensor", table, dim=1, end=3) if viewed else table
    picked = b("aten.index.Tensor", seen, rows, indices=(Ref(1),))
    graph = b.graph(b("aten.tanh.default", picked))
    found = [{graph.op(name).op.split(".")[1] for name in region.ops} - {"slice"} for region in find_regions(graph)]
    assert found == [{"exp"}, {"neg", "add", "index", "tanh"}]
    assert {boundary.reason for boundary in find_boundaries(graph)} == {
        f"aten.index.Tensor ({picked}) looks up a table that has to exist before"
    }


def test_dead_ops_and_views_for_externs_are_in_no_region() -> None:
    graph = make(
        ("a", "exp.default", ("x",)), ("dead", "neg.default", ("a",)), ("v", "view.default", ("a",)),
        ("mm", "rrelu.default", ("v", "w")), outputs=("mm",),
    )
    (region,) = find_regions(graph)
    assert region.ops == ("a",)
    assert region.inputs == ("x",)
    assert region.outputs == ("a",)


def test_region_lists_sources_behind_views() -> None:
    graph = make(
        ("v", "view.default", ("x",)), ("a", "add.Tensor", ("v", "y")), ("w", "view.default", ("a",)),
        ("b", "exp.default", ("w",)), ("out", "view.default", ("b",)), outputs=("out",),
    )
    (region,) = find_regions(graph)
    assert set(region.ops) == {"v", "a", "w", "b"}
    assert set(region.inputs) == {"x", "y"}
    assert region.outputs == ("b",)


@pytest.mark.parametrize(("size", "pieces"), [(7, [4, 3]), (8, [4, 4]), (9, [4, 4, 1])])
def test_large_regions_are_cut(size: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(f"a{n}", "exp.default", (f"a{n - 1}" if n else "x",)) for n in range(size)]
    graph = make(*rows, outputs=(f"a{size - 1}",))
    monkeypatch.setattr(regions, "MAX_ISLAND", 4)
    assert [len(region.ops) for region in find_regions(graph)] == pieces
    assert len(find_boundaries(graph)) == len(pieces) - 1


def test_paths_outside_a_region_are_part_of_its_key() -> None:
    """Equal ops, but in one region a matmul between two siblings forbids to fuse them."""
    def siblings(between: bool) -> str:
        rows = (
            ("a", "exp.default", ("x",)), ("b", "neg.default", ("x",)),
            ("mm", "rrelu.default", ("a" if between else "y", "w")), ("mm2", "rrelu.default", ("a", "w")),
            ("c", "add.Tensor", ("b", "mm")), ("d", "add.Tensor", ("a", "z")), ("e", "mul.Tensor", ("z", "c")),
        )
        graph = make(*rows, outputs=("d", "e", "mm2"))
        region = next(r for r in find_regions(graph) if "a" in r.ops)
        assert {"a", "b", "c", "d", "e"} == set(region.ops)
        return region.key

    assert siblings(True) != siblings(False)


def test_decoder_layers_repeat() -> None:
    """The synthetic decoder has a four-layer period and one odd layer in eight."""
    graph = transformer_graph(6000)
    every = find_regions(graph)
    groups = unique_regions(every)
    assert sum(len(found) for found in groups.values()) == len(every)
    assert len(groups) < len(every) / 5
    for key, found in groups.items():
        shapes = {tuple(graph.op(name).op for name in region.ops) for region in found}
        assert len(shapes) == 1, key


def test_regions_are_a_list_of_the_callers_own() -> None:
    graph = make(("a", "exp.default", ("x",)), ("b", "add.Tensor", ("a", "y")), outputs=("b",))
    found = find_regions(graph)
    found.clear()
    (region,) = find_regions(graph)
    assert set(region.ops) == {"a", "b"}


def test_flow_is_remembered_and_rejects_disorder() -> None:
    graph = random_graph(3, 12)
    assert compute_graph_of(graph) is compute_graph_of(graph)
    spec = TensorSpec.contiguous((4, 8), "float32")
    nodes = [OpNode("aten.exp.default", ("x",), ("a",)), OpNode("aten.neg.default", ("x",), ("b",))]
    backwards = DataflowGraph(nodes, {"x": spec, "a": spec, "b": spec}, ("x",), ("a", "b"), order=(("b", "a"),))
    with pytest.raises(ValueError, match="op a depends on b, which comes later"):
        compute_graph_of(backwards)
