"""One cell of the pattern bench made concrete: our plan for it and what that moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fuseplan.kernels.ir.backend import config_key
from fuseplan.kernels.native.overlap import span_bytes
from fuseplan.planner.dispatch_stats import CompileStats, Tally
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.implementations.tunable_group import reference_results
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.contestant import Case, make_case
from fuseplan.planner.runtime.lookup import look_up
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.work.group_work import kernel_work
from fuseplan.search.timing.measure import CACHE_MULTIPLE, rotating_operands
from fuseplan.search.timing.timers import Operands

#: Weights so small that it takes more copies than this to fill a cache are in a cache in every model too.
_MAX_SETS = 32


def plan_case(session: Session, cell: Cell) -> tuple[Case, CompileStats]:
    """The case with the plan that dispatch would find for it, and what finding it was like."""
    case = make_case(cell, session.target, session.backends, session.settings.numerics)
    tally = Tally(f"bench {cell.key}")
    groups = look_up(session, case.traced.graph, "model", tally).groups
    kernels = tuple(group for group in groups if group.implementation.backends)
    return replace(case, groups=kernels), tally.snapshot()


def plan_facts(case: Case) -> dict[str, Any]:
    """What a case's plan moves and launches, as fields of the bench's rows.

    ``bytes`` have to be moved: the plan's, where all of it is one kernel, else every input and output once.
    ``registers`` are those of a thread of each fused group, where the back end knows them.
    """
    graph = case.traced.graph
    kernels = [case.kernel(group.ops).ir for group in case.groups]
    unfused = unfused_ops(graph, case.groups)
    registers = [
        group.implementation.backends[0].prepare(ir, group.config, case.target).registers
        for group, ir in zip(case.groups, kernels, strict=True)
    ]
    whole = len(kernels) == 1 and not unfused
    return {
        "bytes": kernel_work(kernels[0]).dram_bytes if whole else float(
            sum(graph.specs[name].nbytes() for name in {*graph.inputs, *graph.outputs})
        ),
        "kernels": len(kernels) + len(unfused),
        "config": "; ".join(
            f"{group.implementation.backends[0].name} {config_key(group.config)}" for group in case.groups
        ),
        "registers": "; ".join(str(count) for count in registers if count is not None),
    }


def unfused_ops(graph: DataflowGraph, groups: Sequence[PlannedGroup]) -> list[str]:
    """The ops, besides views, that no group has."""
    fused = {op for group in groups for op in group.ops}
    return [node.name for node in graph if kind_of(node, graph.specs) != "view" and node.name not in fused]


def plan_note(case: Case, seen: CompileStats) -> str:
    """Misses and fallbacks, so that they cannot pass for a result of the plan."""
    words = [] if case.groups else ["the plan fuses nothing"]
    words += [f"{seen.misses} regions by the cost model, not tuned"] if seen.misses else []
    words += [f"{count} fell back: {reason}" for reason, count in seen.fallbacks.items()]
    return "; ".join(words)


def reference_outputs(case: Case) -> list[torch.Tensor]:
    """The pattern's outputs in float64."""
    graph = case.traced.graph
    return reference_results(tuple(graph), graph.inputs, graph.outputs, case.inputs, case.target.device_type)


def operand_sets(case: Case, llc_bytes: int, limit_bytes: int) -> Operands:
    """Operand sets to use in turn, so that activations are where their producer left them and weights are not."""
    cold_bytes = sum(span_bytes(tensor) for tensor, hot in zip(case.inputs, case.hot, strict=True) if not hot)
    if cold_bytes * _MAX_SETS < CACHE_MULTIPLE * llc_bytes:
        return [case.inputs]
    return rotating_operands(case.inputs, case.hot, llc_bytes, limit_bytes)
