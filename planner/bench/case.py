"""One cell of the pattern bench made concrete: its graph, its inputs, our plan for it, and what that plan moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fuseplan.costmodel.device import DeviceSpec
from fuseplan.kernels.ir.backend import config_key
from fuseplan.planner.bench.prediction import PlannedKernel, predicted_us
from fuseplan.planner.capture.traced import Traced
from fuseplan.planner.dispatch_stats import CompileStats, Tally
from fuseplan.planner.implementations.subject import reference_results
from fuseplan.planner.lowering.recipes import kind_of
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.patterns.table import activations
from fuseplan.planner.peers.contestant import Case
from fuseplan.planner.runtime.resolve import resolve
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.work.group_work import kernel_work
from fuseplan.search.timing.measure import CACHE_MULTIPLE, rotating_operands, span_bytes
from fuseplan.search.timing.timers import Operands

#: Weights so small that it takes more copies than this to fill a cache are in a cache in every model too.
_MAX_SETS = 32


@dataclass(frozen=True)
class PlanFacts:
    """What is known of our plan for a cell.

    Attributes:
        bytes: What has to be moved: the plan's, where all of it is one kernel, else every input and output once.
        registers: Registers of a thread of each fused group; empty where the back end does not know.
        note: Misses and fallbacks, so that they cannot pass for a result of the plan.
        predicted_us: The cost model's time of the plan in the session's regime; None on a device that was not probed.
    """

    bytes: float
    kernels: int
    config: str = ""
    registers: str = ""
    note: str = ""
    predicted_us: float | None = None


def plan_case(
    session: Session, cell: Cell, traced: Traced, names: Sequence[str], inputs: tuple[torch.Tensor, ...]
) -> tuple[Case, PlanFacts]:
    """The case with the plan that dispatch would find for it."""
    tally = Tally(f"bench {cell.key}")
    groups = resolve(session, traced.graph, "model", tally).groups
    case = Case(
        cell.pattern, cell.shape, cell.dtype, traced, tuple(names), inputs, groups, session.target, session.backends,
        session.settings.numerics,
    )
    return case, plan_facts(case, tally.snapshot(), session.spec, session.settings.regime)


def plan_facts(case: Case, seen: CompileStats, spec: DeviceSpec | None = None, regime: str = "eager") -> PlanFacts:
    """Bytes, launches, price in a regime (by ``spec``) and compiled facts of a case's plan."""
    graph = case.traced.graph
    kernels = [PlannedKernel(case.kernel(group.ops), group.backend.name, group.config) for group in case.groups]
    computes = [node.name for node in graph if kind_of(node, graph.specs) != "view"]
    fused_ops = {op for group in case.groups for op in group.ops}
    unfused = [name for name in computes if name not in fused_ops]
    registers = [
        group.backend.prepare(one.lowered.ir, group.config, case.target).registers
        for group, one in zip(case.groups, kernels, strict=True)
    ]
    whole = len(kernels) == 1 and not unfused
    return PlanFacts(
        bytes=kernel_work(kernels[0].lowered.ir).dram_bytes if whole else float(
            sum(graph.specs[name].nbytes() for name in {*graph.inputs, *graph.outputs})
        ),
        kernels=len(kernels) + len(unfused),
        config="; ".join(f"{group.backend.name} {config_key(group.config)}" for group in case.groups),
        registers="; ".join(str(count) for count in registers if count is not None),
        note=_plan_note(seen, bool(kernels)),
        predicted_us=predicted_us(graph, kernels, unfused, spec, regime, case.numerics),
    )


def _plan_note(seen: CompileStats, fuses: bool) -> str:
    words = [] if fuses else ["the plan fuses nothing"]
    words += [f"{seen.misses} regions by the cost model, not tuned"] if seen.misses else []
    words += [f"{count} fell back: {reason}" for reason, count in seen.fallbacks.items()]
    return "; ".join(words)


def reference_outputs(case: Case) -> list[torch.Tensor]:
    """The pattern's outputs in float64."""
    graph = case.traced.graph
    return reference_results(tuple(graph), graph.inputs, graph.outputs, case.inputs, case.target.device_type)


def operand_sets(case: Case, llc_bytes: int, limit_bytes: int) -> Operands:
    """Operand sets to use in turn, so that activations are where their producer left them and weights are not."""
    fresh = activations(case.pattern, case.shape, case.dtype)
    hot = [name in fresh for name in case.names]
    cold_bytes = sum(span_bytes(tensor) for tensor, is_hot in zip(case.inputs, hot, strict=True) if not is_hot)
    if cold_bytes * _MAX_SETS < CACHE_MULTIPLE * llc_bytes:
        return [case.inputs]
    return rotating_operands(case.inputs, hot, llc_bytes, limit_bytes)
