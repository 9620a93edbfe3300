"""Tuning the cells of a bench, with one set of worker processes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from fuseplan.planner.cost.running_calibration import RunningCalibration
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.inputs import trace_cell
from fuseplan.planner.tuning import summary
from fuseplan.planner.tuning.lookahead import Lookahead
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.tune import RegionFailure, noting
from fuseplan.search.tune.tuner import Budget, Tuner


class CellTuner:
    """Plans and tunes what is not stored; a context manager. No process is started before something is missing.

    The session is open for writing, and its device probed.

    Attributes:
        failures: Regions that could not be planned; their workload is the cell's key.
    """

    def __init__(self, session: Session, budget: Budget, seed: int = 0) -> None:
        self.failures: list[RegionFailure] = []
        self._session = session
        self._budget = budget
        self._seed = seed
        self._learner = RunningCalibration(session.spec)
        self._tuner: Tuner | None = None
        self._lookahead: Lookahead | None = None
        self._graphs: dict[Cell, DataflowGraph] = {}

    def __enter__(self) -> CellTuner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tuner is None:
            return
        if self._lookahead is not None:
            self._lookahead.__exit__(kind, error, trace)
        self._tuner.close()
        if error is None:
            self._learner.update(final=True)
            replace(self._session, spec=self._learner.spec).recalibrated()

    def tune(self, cell: Cell) -> bool:
        """Store a plan for the cell; True when something had to be measured for it.

        Raises:
            CompilerMissingError: No kernel back end can be used here.
            MachineFailureError: The machine fails what a tune needs.
            DatabaseError: The database cannot be written.
        """
        graph = self._graph(cell)
        known = self._session.planner()
        if not known.undecided(graph):
            return False
        planner = self._session.planner(self._started(), learner=self._learner)
        plan = planner.plan_graph(graph, self._lookahead, noting(self.failures, cell.key, graph))
        pairs = [(one.region, one.record) for one in plan.regions]
        if pairs:
            name, size = f"pattern {cell.pattern}", f"{cell.size} {cell.dtype}"
            summary.store_summary(self._session.database, summary.summarise(name, size, graph, pairs))
        return True

    def look_ahead(self, cells: Iterable[Cell]) -> None:
        """Have the kernels of cells that will be tuned compiled meanwhile; on CPUs nothing happens.

        A cell that cannot be traced is left for :meth:`tune` to complain about.
        """
        if self._session.target.device_type == "cpu":
            return
        for cell in cells:
            with suppress(Exception):
                graph = self._graph(cell)
                missing = self._session.planner().undecided_parts(graph)
                if not missing:
                    continue
                planner = self._session.planner(self._started())
                if self._lookahead is None:
                    self._lookahead = planner.lookahead()
                    assert self._lookahead is not None
                    self._lookahead.__enter__()
                self._lookahead.send(graph, missing)

    def _graph(self, cell: Cell) -> DataflowGraph:
        if cell not in self._graphs:
            self._graphs[cell] = trace_cell(cell, self._session.target.device_type)[0].graph
        return self._graphs[cell]

    def _started(self) -> Tuner:
        if self._tuner is None:
            self._tuner = self._session.tuner(self._budget, self._seed)
        return self._tuner
