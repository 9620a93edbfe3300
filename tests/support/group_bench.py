"""Each fused group of a model's plan by itself, beside eager and TorchInductor's code of the same ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseplan.costmodel.devices import is_gpu, kind_of_key
from fuseplan.planner.api.request import Asked
from fuseplan.planner.bench.rows import BenchRow, Race
from fuseplan.planner.cli.output.options import current
from fuseplan.planner.errors import PlanError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.implementations.tunable_group import TunableGroup, group_subject
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.partition.plan_record import located_label
from fuseplan.planner.peers.contestant import EAGER, MAX_AUTOTUNE, OURS, tensors_of
from fuseplan.planner.peers.peers import inductor_callable
from fuseplan.planner.tuning.planner import GraphPlan
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.tune import RegionFailure
from fuseplan.search.store.record import GroupChoice
from fuseplan.search.timing.operands import cache_bytes, rotating_operands
from fuseplan.search.timing.timers import Run, timer_for
from fuseplan.search.timing.verify import errors
from fuseplan.search.workers.jobs import free_bytes


@dataclass(frozen=True)
class BenchGroup:
    """A fused group of a plan, ready to be timed."""

    workload: str
    choice: GroupChoice
    subject: TunableGroup


def fused_groups(session: Session, planned: Sequence[tuple[str, DataflowGraph, GraphPlan]]) -> list[BenchGroup]:
    """The distinct fused groups of the plans; ``workload`` is the first one that has the group."""
    found: dict[str, BenchGroup] = {}
    for workload, graph, plan in planned:
        for region in plan.unique():
            for choice in region.record.groups:
                if not choice.is_kernel or choice.workload in found:
                    continue
                subject = group_subject(
                    graph, region.group_ops(choice), choice.workload, session.settings.numerics,
                    session.target.device_type,
                )
                found[choice.workload] = BenchGroup(workload, choice, subject)
    return list(found.values())


def bench_group(
    session: Session, group: BenchGroup, peers: Sequence[str], modes: Sequence[str], seconds: float
) -> list[BenchRow]:
    """Rows of one group in every mode. A contestant that fails gets a row that says why."""
    device, subject = session.target.device_type, group.subject
    race = Race(BenchRow, workload=group.workload, subject=group.choice.label, key=group.choice.workload)
    with torch.no_grad():
        inputs = subject.make_inputs(0, device)
        references = subject.reference(*inputs)
        limit = free_bytes(device) // 4
        operands = rotating_operands(inputs, subject.hot_inputs, cache_bytes(session.target.l2_bytes), limit)

        def make(name: str) -> tuple[Run, dict[str, Any]]:
            run = _contestant(session, group, name, inputs)
            own = tensors_of(run(*inputs))
            worst = max(errors(one.cpu(), exact.cpu())[0] for one, exact in zip(own, references, strict=True))
            return run, {"error": worst}

        race.enter((OURS, *peers), make)
        return [row for mode in modes for row in race.rows(timer_for(device, mode), operands, seconds)]


def _contestant(session: Session, group: BenchGroup, name: str, inputs: Sequence[torch.Tensor]) -> Run:
    subject = group.subject
    if name == OURS:
        backend = next(backend for backend in session.backends if backend.name == group.choice.implementation)
        return backend.fused_callable(subject.ir, group.choice.config, session.target)
    return subject.eager if name == EAGER else inductor_callable(subject.chain, inputs, name == MAX_AUTOTUNE)


def measure_groups(
    session: Session, source: ModelSource, workloads: tuple[Workload, ...], peers: Sequence[str], seconds: float
) -> list[BenchRow]:
    """Rows of the fused groups of a model's plans, as launched and, on a GPU, in a CUDA graph."""
    modes = ("eager", "graph") if is_gpu(session.target.device_type) else ("eager",)
    graphs = Asked(source.label, kind_of_key(session.device), source, workloads).graphs(current())
    planned = []
    for name, graph in graphs:
        def failed(region: Region, error: Exception, name: str = name, graph: DataflowGraph = graph) -> None:
            current().warn(str(RegionFailure(name, located_label(graph, region), error)))

        planned.append((name, graph, session.planner().plan_graph(graph, on_failure=failed)))
    untuned = {one.region.key for _, _, plan in planned for one in plan.regions if one.source == "model"}
    if untuned:
        current().warn(f"{len(untuned)} regions have no tuned plan and run as the cost model says; tune first")
    groups = fused_groups(session, planned)
    if not groups:
        raise PlanError("the plan fuses nothing, so there is no group to measure; run `plan tune` first")
    return [row for group in groups for row in bench_group(session, group, peers, modes, seconds)]
