"""What a rejected group would have cost, against all covers counted one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import networkx as nx
import pytest
import report_samples as samples
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.planner.reports.accuracy import rejected_groups
from fuseplan.planner.tuning.summary import RegionSummary
from fuseplan.search.store.record import ATEN, Alternative, GroupChoice, PlanRecord

Timed = GroupChoice | Alternative


def covers(options: Sequence[Timed], left: frozenset[int]) -> Iterator[list[Timed]]:
    """Every way to run each op once."""
    if not left:
        yield []
        return
    for one in options:
        if min(left) in one.ops and left >= set(one.ops):
            yield from ([one, *rest] for rest in covers(options, left - set(one.ops)))


def can_run(cover: Sequence[Timed], edges: Sequence[tuple[int, int]]) -> bool:
    """Whether no group waits for itself by way of others."""
    home = {op: at for at, one in enumerate(cover) for op in one.ops}
    return nx.is_directed_acyclic_graph(nx.DiGraph((home[a], home[b]) for a, b in edges if home[a] != home[b]))


@st.composite
def plans(draw: st.DrawFn) -> tuple[RegionSummary, PlanRecord]:
    """A region with a view in it, run op by op by ATen, and groups that were rejected, some without a time."""
    count = draw(st.integers(2, 6))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = tuple(draw(st.lists(st.sampled_from(pairs), unique=True, max_size=8)))
    times = st.floats(0.5, 50.0)
    groups = tuple(GroupChoice((at,), ATEN, "", f"op{at}", {}, 1.0, 0.5, draw(times)) for at in range(count))
    sets = draw(st.lists(st.frozensets(st.integers(0, count - 1), min_size=2), unique=True, min_size=1, max_size=5))
    rejected = tuple(
        Alternative(tuple(sorted(ops)), f"group {at}", "lost", 1.0, draw(st.one_of(times, st.none())), "cpp")
        for at, ops in enumerate(sets)
    )
    region = RegionSummary("5" * 64, 1, ("op.default",) * count, ("compute",) * count, edges, ("8 float32",) * count)
    return region, replace(samples.SWIGLU_PLAN, groups=groups, rejected=rejected)


@given(plans())
def test_the_best_cover_with_a_group_is_the_best_of_all_covers_with_it(given: tuple[RegionSummary, PlanRecord]) -> None:
    region, plan = given
    ops = frozenset(range(len(region.ops)))
    options: list[Timed] = [*plan.groups, *(one for one in plan.rejected if one.measured_us is not None)]
    possible = [one for one in covers(options, ops) if can_run(one, region.edges)]
    found = rejected_groups(plan, region, most=len(plan.rejected))
    assert sorted(one.group.label for one in found) == sorted(one.label for one in plan.rejected)
    for one in found:
        costs = [math.fsum((part.measured_us or 0.0) for part in cover)
                 for cover in possible if one.group in cover]
        assert one.cover_us == (pytest.approx(min(costs)) if costs else None)
        assert one.chosen_us == pytest.approx(math.fsum(part.measured_us or 0.0 for part in plan.groups))
    beyond = [one.more_us for one in found]
    assert beyond == sorted(beyond)


def chain(*rejected: Alternative, kinds: tuple[str, ...] = ("compute",) * 4) -> tuple[RegionSummary, PlanRecord]:
    """Four ops in a row; one kernel of all of them that takes 10 us was chosen, and ATen's ops take 5 us each."""
    region = RegionSummary("6" * 64, 1, ("op.default",) * 4, kinds, ((0, 1), (1, 2), (2, 3)), ("8 float32",) * 4)
    whole = GroupChoice((0, 1, 2, 3), "cpp", "k" * 64, "all", {}, 9.0, 5.0, 10.0)
    plain = tuple(Alternative((at,), f"op{at}", "lost", 5.0, 5.0, ATEN) for at in range(4))
    return region, replace(samples.SWIGLU_PLAN, groups=(whole,), rejected=(*rejected, *plain))


def pair(a: int, b: int, measured_us: float | None, label: str = "pair") -> Alternative:
    return Alternative((a, b), label, "lost", 4.0, measured_us, "cpp")


def test_what_a_cover_has_besides_and_where_else_it_fits_is_said() -> None:
    region, plan = chain(pair(0, 1, 4.0), pair(2, 3, 4.0))
    (found,) = rejected_groups(plan, region, most=9)  # alike: their best cover has both
    assert (found.cover_us, found.more_us, found.places) == (pytest.approx(8.0), pytest.approx(-2.0), 2)
    assert [one.label for one in found.beside] == ["pair"] and found.predicted == 0


def test_a_group_that_would_wait_for_itself_has_no_cover() -> None:
    region, plan = chain(pair(0, 2, 4.0, "around"))
    (found,) = rejected_groups(plan, region, most=9)
    assert found.cover_us is None and found.more_us == math.inf


def test_a_group_whose_neighbours_were_never_timed_has_no_cover() -> None:
    region, plan = chain(pair(0, 1, 4.0))
    plan = replace(plan, rejected=plan.rejected[:3])  # ops 2 and 3 were not timed by themselves
    assert [one.cover_us for one in rejected_groups(plan, region, most=9)] == [None]


def test_the_covers_of_the_most_promising_groups_are_solved_and_the_others_listed() -> None:
    region, plan = chain(pair(0, 1, 40.0, "slow"), pair(2, 3, 4.0, "quick"), pair(1, 2, None, "broken"))
    found = {one.group.label: one.cover_us for one in rejected_groups(plan, region, most=1)}
    assert found == {"quick": pytest.approx(14.0), "slow": None, "broken": None}


def test_times_that_the_model_made_up_are_counted() -> None:
    region, plan = chain(pair(0, 1, 4.0))
    apart = tuple(GroupChoice((at,), ATEN, "", f"op{at}", {}, 3.0, 0.5, None if at == 3 else 5.0) for at in range(4))
    (found,) = rejected_groups(replace(plan, groups=apart, rejected=plan.rejected[:1]), region, most=9)
    assert (found.cover_us, found.predicted) == (pytest.approx(4.0 + 5.0 + 3.0), 1)
    assert found.beside == ()
