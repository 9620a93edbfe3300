"""Plans for dynamic sizes: groups that are kernels at the sizes seen, and not where these are symbols."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reference_backend import ReferenceBackend

from fuseplan.kernels.ir.index import symbol
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec, bind_graph
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.lowering.lower import NotLowerable
from fuseplan.planner.runtime.dynamic_sizes import with_configs
from fuseplan.planner.runtime.lookup import GraphLookup, look_up
from fuseplan.planner.tuning import session as sessions
from fuseplan.planner.tuning.session import open_session


@pytest.fixture
def graph() -> DataflowGraph:
    """Folds all of a tensor, which a kernel does where that is known to be short."""
    n = symbol("n")
    full, rest = TensorSpec.contiguous((n, 4, 3), "float32"), TensorSpec.contiguous((), "float32")
    nodes = [
        OpNode("aten.exp.default", ("x",), ("exp",), {}),
        OpNode("aten.neg.default", ("exp",), ("neg",), {}),
        OpNode("aten.sum.dim_IntList", ("neg",), ("sum",), {"dim": (0, 1, 2), "keepdim": False, "dtype": None}),
        OpNode("aten.tanh.default", ("sum",), ("tanh",), {}),
        OpNode("aten.abs.default", ("tanh",), ("abs",), {}),
    ]
    specs = {"x": full, "exp": full, "neg": full, "sum": rest, "tanh": rest, "abs": rest}
    return DataflowGraph(nodes, specs, ("x",), ("abs",), symbols={"n": 1})


@pytest.fixture
def resolved(graph: DataflowGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sessions, "backends_for", lambda device_type: (ReferenceBackend(),))

    def run(on_miss: Any) -> GraphLookup:
        return look_up(open_session("cpu", tmp_path / "t.db", mode="read"), graph, on_miss, Tally())

    return run


def test_a_group_for_the_sizes_seen_is_split_where_it_is_no_kernel(graph: DataflowGraph, resolved: Any) -> None:
    everything = ["exp", "neg", "sum", "tanh", "abs"]
    lower_group(bind_graph(graph), everything)
    with pytest.raises(NotLowerable):
        lower_group(graph, everything)
    groups = {frozenset(group.ops) for group in resolved("model").groups}
    assert {frozenset({"exp", "neg"}), frozenset({"tanh", "abs"})} <= groups
    assert not any("sum" in group for group in groups)


def test_groups_that_stay_keep_their_configuration(resolved: Any) -> None:
    (plan,) = resolved("model").plans
    first, *others = plan.record.groups
    tuned = replace(plan, record=replace(plan.record, groups=(replace(first, config={"tuned": 1}),)))
    assert with_configs(plan, tuned).record.groups == (replace(first, config={"tuned": 1}), *others)


def test_a_failure_leaves_the_plan_for_the_sizes_seen(resolved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: GroupTable, ops: Any) -> str | None:
        if not self.graph.symbols:
            return legal(self, ops)
        raise ValueError("cannot convert expression to int")

    legal = GroupTable.legal
    monkeypatch.setattr(GroupTable, "legal", fails)
    assert {len(group.ops) for group in resolved("model").groups} == {5}


def test_nothing_is_planned_anew_where_nothing_is_to_be_planned(resolved: Any) -> None:
    found = resolved("unfused")
    assert (found.plans, found.groups) == ([], ())
