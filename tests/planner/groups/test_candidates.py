"""Candidates against brute force on random graphs; refusals, limits and truncation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
import torch
from graph_oracle import Oracle, anything, make
from graphs import Builder
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_graphs import random_graph
from synthetic_decoders import transformer_graph

from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import (
    Enumeration,
    convex_runs,
    enumerate_candidates,
    enumerate_parts,
    group_key,
)
from fuseplan.planner.groups.compute_graph import compute_graph_of, lower_group
from fuseplan.planner.groups.convex import Dependencies, bits
from fuseplan.planner.groups.regions import find_regions, unique_regions
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.lowering.lower import NotLowerable
from fuseplan.planner.ops.table import kind_of

#: More groups than the largest of these graphs has subsets.
ALL = 2**15


def enumerated(graph: DataflowGraph, region: Region, *limits: int, **named: int) -> Enumeration:
    return enumerate_candidates(graph, region, anything, *limits, **named)


def sets(found: Enumeration) -> set[frozenset[str]]:
    return {frozenset(candidate.ops) for candidate in found.candidates}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 15), st.integers(0, 3))
@example(seed=122, size=13, order=0)  # has more than 600
def test_candidates_are_exactly_the_legal_groups(seed: int, size: int, order: int) -> None:
    graph = random_graph(seed, size, order=order)
    oracle = Oracle(graph)
    for region in find_regions(graph):
        found = enumerated(graph, region, max_candidates=ALL)
        assert found.truncated is None
        assert len(sets(found)) == len(found.candidates), "no duplicates"
        assert sets(found) == oracle.groups(region.ops)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 15), st.integers(0, 3))
def test_runs_of_a_region_cover_it_in_few_legal_groups_that_can_run_in_turn(seed: int, size: int, order: int) -> None:
    graph = random_graph(seed, size, order=order)
    oracle = Oracle(graph)
    for region in find_regions(graph):
        names = [name for name in region.ops if kind_of(graph.op(name), graph.specs) != "view"]
        runs = [set(run.ops) for run in convex_runs(graph, region)]
        assert sorted(name for run in runs for name in run) == sorted(names)
        assert oracle.runnable(runs)
        assert (len(runs) == 1) is oracle.runnable([set(names)])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(6, 14), st.integers(1, 4))
def test_size_limit_is_complete_below_it(seed: int, size: int, max_ops: int) -> None:
    graph = random_graph(seed, size, opaque=0.1)
    oracle = Oracle(graph)
    for region in find_regions(graph):
        found = enumerated(graph, region, max_ops, ALL)
        assert sets(found) == oracle.groups(region.ops, max_ops)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(8, 14), st.integers(1, 25))
def test_truncated_enumerations_are_legal_and_cover_everything(seed: int, size: int, limit: int) -> None:
    graph = random_graph(seed, size, opaque=0.1)
    oracle = Oracle(graph)
    for region in find_regions(graph):
        all_groups = oracle.groups(region.ops)
        found = enumerated(graph, region, max_candidates=limit)
        assert sets(found) <= all_groups
        assert {frozenset({name}) for group in all_groups for name in group} <= sets(found)
        assert (found.truncated is None) == (sets(found) == all_groups) or len(all_groups) > limit


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 14))
def test_inputs_and_outputs(seed: int, size: int) -> None:
    graph = random_graph(seed, size)
    oracle = Oracle(graph)
    for region in find_regions(graph):
        for candidate in enumerated(graph, region).candidates:
            read = {s for name in candidate.ops for s in oracle.reads[name]}
            assert set(candidate.inputs) == read - set(candidate.ops)
            assert set(candidate.outputs) == oracle.outputs(candidate.ops)


def test_canonical_order() -> None:
    graph = make(
        ("a", "mul.Tensor", ("x", "y")), ("m", "exp.default", ("a",)), ("b", "mul.Tensor", ("z", "y")),
        outputs=("m", "b"),
    )
    (region,) = find_regions(graph)
    assert sets(enumerated(graph, region)) == {frozenset(ops) for ops in ("a", "b", "m", "am", "ab", "abm")}
    rank = {name: at for at, name in enumerate(region.ops)}
    for candidate in enumerated(graph, region).candidates:
        assert sorted(candidate.ops, key=rank.__getitem__) == list(candidate.ops)


def test_refusals_name_what_stands_between() -> None:
    graph = make(
        ("a", "exp.default", ("x",)), ("b", "neg.default", ("a",)), ("c", "mul.Tensor", ("a", "b")),
        outputs=("c",),
    )
    (region,) = find_regions(graph)
    (refusal,) = enumerated(graph, region).refusals
    assert set(refusal.ops) == {"a", "c"}
    assert refusal.reason == "path through aten.neg.default (b), which a group with both must hold too"


def test_refusals_name_the_extern_op_on_the_path() -> None:
    graph = make(
        ("u", "exp.default", ("x",)), ("v", "neg.default", ("u",)), ("mm", "rrelu.default", ("u", "w")),
        ("s", "add.Tensor", ("v", "mm")), ("t", "mul.Tensor", ("s", "u")), outputs=("t",),
    )
    (region,) = find_regions(graph)
    reasons = {frozenset(refusal.ops): refusal.reason for refusal in enumerated(graph, region).refusals}
    assert reasons[frozenset("ut")] == "path through aten.rrelu.default (mm)"


def test_illegal_groups_are_refused_with_the_given_reason() -> None:
    graph = make(("a", "exp.default", ("x",)), ("b", "neg.default", ("a",)), outputs=("b",))
    (region,) = find_regions(graph)
    found = enumerate_candidates(graph, region, lambda ops: "two is too many" if len(ops) == 2 else None)
    assert sets(found) == {frozenset("a"), frozenset("b")}
    assert [(set(r.ops), r.reason) for r in found.refusals] == [({"a", "b"}, "two is too many")]


def test_truncation_keeps_both_halves_whole_and_says_what_is_left_out() -> None:
    """Two equal chains that share an input: too many pairs of parts, but the whole halves stay together."""
    rows: list[tuple[str, str, tuple[str, ...]]] = []
    for side in "qk":
        rows.append((f"{side}0", "mul.Tensor", (side, "cos")))
        rows += [(f"{side}{n}", "exp.default", (f"{side}{n - 1}",)) for n in range(1, 8)]
    graph = make(*rows, outputs=("q7", "k7"))
    (region,) = find_regions(graph)
    assert len(enumerated(graph, region).candidates) == 8 * 8 + 2 * 36  # prefix pairs, and runs of each chain
    found = enumerated(graph, region, max_candidates=100)
    assert found.truncated is not None
    assert "more than 100 groups" in found.truncated
    halves = [frozenset(f"{side}{n}" for n in range(8)) for side in "qk"]
    assert {*halves, frozenset.union(*halves)} <= set(sets(found))
    assert enumerated(graph, region, max_ops=3).truncated == (
        "groups of more than 3 ops were not enumerated"
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(6, 14), st.integers(1, 5), st.integers(1, 10))
def test_truncation_leaves_no_op_without_its_legal_groups(seed: int, size: int, largest: int, limit: int) -> None:
    """Where only small groups are legal, all that the truncation would have kept may be too large."""
    graph = random_graph(seed, size, opaque=0.1)
    for region in find_regions(graph):
        found = enumerate_candidates(
            graph, region, lambda ops: None if len(ops) <= largest else "too large",
            max_candidates=limit,
        )
        groups = sets(found)
        if found.truncated is None:
            continue
        legal = {group for group in Oracle(graph).groups(region.ops) if len(group) <= largest}
        assert groups <= legal
        # Some of them cover all ops without overlapping, and no two of these could be one legal group.
        assert any(maximal_cover(cover, legal) for cover in covers(frozenset(region_ops(graph, region)), groups))


def region_ops(graph: DataflowGraph, region: Region) -> list[str]:
    return [name for name in region.ops if kind_of(graph.op(name), graph.specs) == "compute"]


def covers(ops: frozenset[str], groups: set[frozenset[str]]) -> Iterator[list[frozenset[str]]]:
    """Every way to cover ops by disjoint groups."""
    if not ops:
        yield []
        return
    first = min(ops)
    for group in groups:
        if first in group and group <= ops:
            yield from ([group, *others] for others in covers(ops - group, groups))


def maximal_cover(cover: list[frozenset[str]], legal: set[frozenset[str]]) -> bool:
    return not any(one | other in legal for one, other in combinations(cover, 2))


def test_parts_cover_a_group_by_legal_groups() -> None:
    chain = [("a", "exp.default", ("x",)), ("b", "neg.default", ("a",)), ("c", "tanh.default", ("b",))]
    graph = make(*chain, ("d", "abs.default", ("c",)), outputs=("d",))
    (region,) = find_regions(graph)

    def legal(ops: Sequence[str]) -> str | None:
        return "b and c stay apart" if {"b", "c"} <= set(ops) else None

    def parts(*groups: str) -> list[str]:
        found = enumerate_parts(graph, region, groups, legal)
        return ["".join(sorted(candidate.ops)) for candidate in found.candidates if len(candidate.ops) > 1]

    assert parts("abcd") == ["ab", "cd"]
    assert parts("ab", "bcd") == ["ab", "cd"]
    assert parts("bc") == []


def test_legality_of_a_book_is_the_lowering() -> None:
    """Row sums of x and of its transpose fold rows of different lengths: together they are no kernel."""
    b = Builder(x=torch.randn(4, 8))
    rows = b("aten.sum.dim_IntList", "x", dim=(-1,), keepdim=True)
    cols = b("aten.sum.dim_IntList", b("aten.transpose.int", "x", dim0=0, dim1=1), dim=(-1,), keepdim=True)
    crossed = b("aten.mul.Tensor", b("aten.transpose.int", rows, dim0=0, dim1=1), cols)
    graph = b.graph(crossed)
    (region,) = find_regions(graph)
    found = enumerate_candidates(graph, region, GroupTable(graph, "fp32", "cpu").legal)
    for candidate in found.candidates:
        lower_group(graph, candidate.ops)
    refused = [refusal for refusal in found.refusals if set(refusal.ops) == {rows, cols, crossed}]
    assert len(refused) == 1
    with pytest.raises(NotLowerable) as raised:
        lower_group(graph, [rows, cols, crossed])
    assert refused[0].reason == str(raised.value)


def test_transfer_and_group_form_agree_between_repeats() -> None:
    graph = transformer_graph(2000)
    repeated = max(unique_regions(find_regions(graph)).values(), key=lambda found: (len(found), len(found[0].ops)))
    first, other = repeated[0], repeated[1]
    here = enumerated(graph, first)
    there = enumerated(graph, other)
    assert here.moved(graph, first, other).candidates == there.candidates
    for a, b in zip(here.candidates[-5:], there.candidates[-5:], strict=True):
        assert group_key(graph, a.ops, a.outputs) == group_key(graph, b.ops, b.outputs)


def test_transfer_refuses_other_regions() -> None:
    graph = make(("a", "exp.default", ("x",)), ("mm", "rrelu.default", ("a", "w")), ("b", "neg.default", ("mm",)),
                 outputs=("b",))
    first, second = find_regions(graph)
    with pytest.raises(ValueError, match="regions differ"):
        enumerated(graph, first).moved(graph, first, second)


def test_a_wide_region_stays_within_the_limits() -> None:
    """One value with 60 readers: 2 ** 60 sibling groups."""
    rows = [(f"a{n}", "exp.default" if n % 2 else "neg.default", ("x",)) for n in range(60)]
    graph = make(*rows, outputs=tuple(f"a{n}" for n in range(60)))
    (region,) = find_regions(graph)
    found = enumerated(graph, region, max_ops=16, max_candidates=300)
    assert len(found.candidates) <= 300 + 60 + 4
    assert max(len(candidate.ops) for candidate in found.candidates) == 16
    assert enumerated(graph, region, 16, 300) == found


def test_bits_and_masks() -> None:
    rng = random.Random(0)
    for _ in range(50):
        chosen = sorted(rng.sample(range(200), rng.randint(0, 20)))
        assert list(bits(sum(1 << bit for bit in chosen))) == chosen


def test_dependencies_list_every_edge() -> None:
    graph = make(
        ("a", "exp.default", ("x",)), ("mm", "rrelu.default", ("a", "w")), ("b", "add.Tensor", ("a", "mm")),
        outputs=("b",),
    )
    flow = compute_graph_of(graph)
    dependencies = Dependencies.of(flow, [0, 2])
    assert dependencies.reads == (0, 0b01)
    assert dependencies.detours == (0, 0b01)
    assert dependencies.detours_from == (0b10, 0)
    assert not dependencies.is_convex(0b11)
    assert dependencies.edges() == ((0, 1),)
