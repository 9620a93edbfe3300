"""Tuning the cells of a bench one by one, with one set of worker processes, as each is about to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from fuseplan.planner import summary
from fuseplan.planner.bench_case import trace_cell
from fuseplan.planner.bench_cells import Cell
from fuseplan.planner.learning import Learner
from fuseplan.planner.regions import find_regions
from fuseplan.planner.session import Session
from fuseplan.search.tuner import Budget, ProgressEvent, Tuner


class CellTuner:
    """Plans and tunes what is not stored; a context manager. No process is started before something is missing.

    Args:
        session: Open for writing, its device probed.
        budget: What one fusion group may cost.
        seed: Seed of the search.
        progress: Told about every step of the search.
    """

    def __init__(
        self, session: Session, budget: Budget, seed: int = 0, progress: Callable[[ProgressEvent], None] | None = None
    ) -> None:
        self._session = session
        self._budget = budget
        self._seed = seed
        self._progress = progress
        self._learner = Learner(session.spec)
        self._tuner: Tuner | None = None

    def __enter__(self) -> CellTuner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tuner is None:
            return
        self._tuner.close()
        if error is None:
            self._learner.update(final=True)
            replace(self._session, spec=self._learner.spec).recalibrated()

    def tune(self, cell: Cell) -> bool:
        """Store a plan for the cell; True when something had to be measured for it.

        Raises:
            CompilerMissingError: No kernel back end can be used here.
        """
        graph = trace_cell(cell, self._session.target.device_type)[0].graph
        known = self._session.planner()
        if all(known.look_up(region.key) is not None for region in find_regions(graph)):
            return False
        if self._tuner is None:
            self._tuner = self._session.tuner(self._budget, self._seed, self._progress)
        plan = self._session.planner(self._tuner, learner=self._learner).plan_graph(graph)
        pairs = [(one.region, one.record) for one in plan.regions]
        if pairs:
            name, size = f"pattern {cell.pattern}", f"{cell.size} {cell.dtype}"
            summary.store(self._session.database, summary.summarise(name, size, graph, pairs))
        return True
