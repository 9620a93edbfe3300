"""Tunes over scripted times and a real database: regions of pointwise ops between matmuls that are ATen's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from graphs import Builder
from reference_backend import ReferenceBackend
from scripted_tuner import TARGET, ScriptedTuner, compute_nodes

from fuseplan.costmodel.device import DeviceSpec
from fuseplan.kernels.ir.backend import Target
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.implementations.tunable_group import TunableGroup
from fuseplan.planner.tuning.planner import Planner, PlanSettings
from fuseplan.planner.tuning.tune import Batch, TuneResult, tune
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import Trial, TuningRecord, Versions

OPS = ("exp", "tanh", "neg", "sigmoid", "sin", "cos", "abs", "relu", "sqrt", "erf")


def graph_of(*regions: tuple[tuple[str, ...], ...]) -> DataflowGraph:
    """Regions one after another: islands of pointwise ops with a matmul between each two."""
    b = Builder(x=torch.randn(5, 8), w=torch.randn(8, 8))
    value = "x"
    for number, islands in enumerate(regions):
        value = b("aten.rrelu.default", value) if number else value
        for at, island in enumerate(islands):
            value = b("aten.linear.default", value, "w", bias=None) if at else value
            for op in island:
                value = b(f"aten.{op}.default", value)
    return b.graph(value)


class Waits(ScriptedTuner):
    """Asks ``at_work`` before each group that it tunes."""

    at_work: Callable[[], object] = staticmethod(lambda: None)

    def tune(self, subject: TunableGroup, neighbours: Any = (), minor: bool = False) -> TuningRecord:
        self.at_work()
        return super().tune(subject, neighbours, minor)

    def time_again(self, kernels: Sequence[object]) -> list[Trial]:
        """Nothing ships."""
        assert not kernels
        return []

    def close(self) -> None:
        self.leases.close()


@dataclass(frozen=True)
class Session:
    """What a tune needs of a session, over scripted times."""

    database: Database
    scripted: Waits
    spec: DeviceSpec | None = None
    target: Target = TARGET
    settings: PlanSettings = field(default_factory=PlanSettings)
    device: str = "dev"

    @property
    def store(self) -> Database:
        return self.database

    def tuner(self, *_: object) -> Any:
        return contextlib.closing(self.scripted)

    def planner(self, tuner: Any, learner: Any = None) -> Planner:
        return Planner(self.database, None, "dev", TARGET, (ReferenceBackend(),), self.settings, self.scripted)  # type: ignore[arg-type]

    def recalibrated(self) -> Session:
        return self


def session_on(where: Path | str, at_work: Callable[[], object] = lambda: None) -> Session:
    database = Database(where, "write", Versions.current("cpu"))
    times = {1: 7.0, 2: 4.0, 3: 14.0}
    tuner = Waits(database, lambda subject: times.get(len(compute_nodes(subject)), 20.0))
    tuner.at_work = at_work  # type: ignore[method-assign]
    return Session(database, tuner)


def tuned(session: Session, *graphs: DataflowGraph) -> TuneResult:
    named = Batch([(f"w{number}", graph) for number, graph in enumerate(graphs)])
    return tune(session, named)  # type: ignore[arg-type]


def covers(result: TuneResult) -> list[list[list[tuple[str, ...]]]]:
    """The ops of each group of each region of each workload."""
    return [[[plan.group_ops(group) for group in plan.record.groups] for plan in one.plan.regions]
            for one in result.plans]
