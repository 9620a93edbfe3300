"""The plan in words: every op is accounted for, and each boundary has its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.patterns.table import pattern_graph
from fuseplan.planner.reports.explain import explain_plan
from fuseplan.planner.tuning.planner import GraphPlan, RegionPlan
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.search.store.record import Alternative, GroupChoice


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return open_session("cpu", samples.known_machine(tmp_path / "tuning.db"))


def _words(session: Session, graph: DataflowGraph, plan: GraphPlan) -> str:
    return "\n".join(explain_plan(session, "decode 1", graph, plan))


def _two_regions() -> DataflowGraph:
    """silu(x) * x before a running sum, and an add that reads both sides."""
    spec = TensorSpec.contiguous((4, 8), "float32")
    nodes = [
        OpNode("aten.silu.default", ("x",), ("a",)),
        OpNode("aten.mul.Tensor", ("a", "x"), ("b",)),
        OpNode("aten.rrelu.default", ("b",), ("c",), {}),
        OpNode("aten.add.Tensor", ("b", "c"), ("d",)),
    ]
    return DataflowGraph(nodes, dict.fromkeys("xabcd", spec), ("x",), ("d",))


def test_library_calls_and_regions_have_reasons(session: Session) -> None:
    graph = _two_regions()
    words = _words(session, graph, session.planner().plan_graph(graph))
    assert "4 ops. 0 are views (address maps, no work), 3 can run in generated kernels" in words
    assert "and 1 only ATen runs" in words
    assert "boundary: aten.rrelu.default" in words
    assert "mul and add, because a path runs through aten.rrelu.default (c)" in words
    assert "Region 1 of 2" in words and "Region 2 of 2" in words


def test_model_plan_is_called_that(session: Session) -> None:
    graph = pattern_graph("add_rms_norm", "3x128", "bfloat16")
    words = _words(session, graph, session.planner().plan_graph(graph))
    assert "not tuned yet: this is the cost model's plan" in words
    assert "A: one cpp kernel: add, to, pow, mean, add, rsqrt, mul, to, mul" in words
    assert "not measured" in words


def test_groups_are_said_to_be_where_they_are(session: Session) -> None:
    graph = _two_regions()
    assert "     in " not in _words(session, graph, session.planner().plan_graph(graph))
    graph.paths = {"a": ("mlp.act",), "b": ("mlp",), "d": ("",)}
    words = _words(session, graph, session.planner().plan_graph(graph))
    assert [line for line in words.splitlines() if line.startswith("     in ")] == [
        "     in mlp: act -> (itself)", "     in (top level)",
    ]


def _apart(session: Session, rejected: tuple[Alternative, ...]) -> str:
    """The words for silu and mul run apart."""
    graph = pattern_graph("swiglu", "3x128", "bfloat16")
    (found,) = session.planner().plan_graph(graph).regions
    groups = tuple(
        GroupChoice((at,), "aten", label=name, predicted_us=3.0, measured_us=2.0)
        for at, name in enumerate(("silu", "mul"))
    )
    record = replace(found.record, groups=groups, rejected=rejected, measured=3)
    return _words(session, graph, GraphPlan((RegionPlan(found.region, record, "database"),)))


def test_a_boundary_that_was_measured_names_both_times(session: Session) -> None:
    words = _apart(session, (Alternative((0, 1), "silu+mul", "not clearly faster than its ops unfused", 4.0, 5.5),))
    assert "between A and B: tried as one kernel: 5.50 us, apart 2.00 + 2.00 us; not clearly faster" in words
    assert "not chosen: silu+mul, 2 ops (5.50 us measured; 4.00 us predicted)" in words


def test_a_boundary_that_was_not_measured_names_the_bound(session: Session) -> None:
    words = _apart(session, ())
    assert "between A and B: as one kernel at least" in words
    assert "between A and B: legal as one kernel" in _apart(replace(session, spec=None), ())


def test_a_boundary_between_ops_with_one_in_the_middle(session: Session) -> None:
    graph = pattern_graph("rms_norm", "3x128", "float32")
    (found,) = session.planner().plan_graph(graph).regions
    compute = found.record.groups[0].ops
    groups = tuple(GroupChoice((at,), "aten", label=str(at), predicted_us=1.0) for at in compute)
    plan = GraphPlan((RegionPlan(found.region, replace(found.record, groups=groups), "model"),))
    words = _words(session, graph, plan)
    # mul(x, rsqrt(...)) reads x directly and through the statistics.
    assert "which a group with both must hold too" in words


def test_groups_that_compute_an_op_for_themselves_exchange_nothing(session: Session) -> None:
    spec = TensorSpec.contiguous((4, 8), "float32")
    nodes = [OpNode("aten.silu.default", ("x",), ("a",)), OpNode("aten.mul.Tensor", ("a", "x"), ("b",)),
             OpNode("aten.add.Tensor", ("a", "x"), ("c",))]
    graph = DataflowGraph(nodes, dict.fromkeys("xabc", spec), ("x",), ("b", "c"))
    (found,) = session.planner().plan_graph(graph).regions
    at = {graph.op(name).op: number for number, name in enumerate(found.region.ops)}
    silu, mul, add = (at[node.op] for node in nodes)

    def between(*groups: tuple[int, ...]) -> bool:
        chosen = tuple(GroupChoice(ops, "cpp", label="two ops", predicted_us=3.0) for ops in groups)
        plan = RegionPlan(found.region, replace(found.record, groups=chosen), "database")
        return "  between " in _words(session, graph, GraphPlan((plan,)))

    assert between((silu, mul), (add,))
    assert not between((silu, mul), (silu, add))


def test_long_lists_are_counted(session: Session) -> None:
    many = tuple(Alternative((0,), f"silu {number}", "slower", 1.0, 2.0) for number in range(9))
    assert "and 4 more measured groups that were not chosen" in _apart(session, many)
