"""Progress of a tune on the terminal: which group, which trial, the best time so far, and the time left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fuseplan.planner.cli.common import console

if TYPE_CHECKING:
    from fuseplan.planner.graph.dataflow import DataflowGraph, Region
    from fuseplan.search.tune.tuner import ProgressEvent


class TuneProgress(Progress):
    """A bar over the regions that have to be tuned, as their graphs come, and a line below it."""

    line = ""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("regions"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=console(stderr=True), transient=True,
        )
        self._seen: set[str] = set()
        #: For each distinct region of each graph, in planning order: whether it has to be tuned.
        self._pending: list[bool] = []
        self._started = 0
        self._bar = self.add_task("tuning", total=1)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(f"  {self.line}", overflow="ellipsis", no_wrap=True)

    def on_graph(self, graph: DataflowGraph, undecided: Sequence[Region]) -> None:
        """A workload's graph was captured."""
        from fuseplan.planner.groups.regions import find_regions, unique_regions

        keys = list(unique_regions(find_regions(graph)))
        missing = {region.key for region in undecided} - self._seen
        self._pending += [key in missing for key in keys]
        self._seen.update(keys)
        self.update(self._bar, total=max(1, sum(self._pending)))

    def on_region(self, workload: str, label: str, number: int, total: int) -> None:
        """A region of a workload is looked up or tuned next."""
        done = sum(self._pending[: self._started])
        self._started += 1
        self.line = label
        self.update(self._bar, completed=done, description=workload)

    def on_trial(self, event: ProgressEvent) -> None:
        """A group's tune took a step."""
        best = f", best {event.best_us:.1f} us" if event.best_us < float("inf") else ""
        self.line = f"{event.label}: {event.phase}, trial {event.trial} of {event.of}{best}"
