"""Progress of a tune: which group, which trial, the best time so far, and on a terminal the time left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fuseplan.planner.cli.output.progress_log import ProgressLog
from fuseplan.planner.reports.step_words import time_text
from fuseplan.search.errors import counted

if TYPE_CHECKING:
    from fuseplan.planner.graph.dataflow import Region
    from fuseplan.search.tune.tuner import ProgressEvent


class TuneProgress:
    """Counts the regions that have to be tuned, as their graphs come, and says what is done now."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        #: For each distinct region, in planning order: whether it has to be tuned.
        self._pending: list[bool] = []
        self._started = 0

    def on_graph(self, regions: Sequence[Region], undecided: Sequence[Region]) -> None:
        """A workload's graph was captured."""
        keys = [key for key in dict.fromkeys(one.key for one in regions) if key not in self._seen]
        missing = {region.key for region in undecided}
        self._pending += [key in missing for key in keys]
        self._seen.update(keys)
        self.counted(sum(self._pending[: self._started]), sum(self._pending))

    def on_region(self, workload: str, label: str, number: int, total: int) -> None:
        """A region of a workload is looked up or tuned next."""
        done = sum(self._pending[: self._started])
        self._started += 1
        self.counted(done, sum(self._pending), workload)
        self.say(label)

    def on_trial(self, event: ProgressEvent) -> None:
        """A group's tune took a step, or something else begins or ends."""
        if event.phase == "step":
            self.say(f"timing the whole step of {event.label}: about {event.best_us / 1e3:.3g} ms unfused", "stage")
        elif event.phase == "step done":  # while other workloads are still to be tuned
            over = f", {event.gains[0]:.2f} to {event.gains[1]:.2f}" if event.gains is not None else ""
            self.say(f"{event.label}: {time_text(event.unfused_us)} -> {time_text(event.best_us)} a step "
                     f"({event.unfused_us / event.best_us:.2f}x{over})", "answer")
        elif event.phase == "capture":
            self.say(f"capturing {event.label}", "stage")
        elif event.phase == "play off":
            what = counted(event.of, "kernel or op", "kernels and ops")
            self.say(f"running {what} in turn, {event.label} among them")
        else:
            best = f", best {event.best_us:.1f} us" if event.best_us < float("inf") else ""
            self.say(f"{event.label}: {event.phase}, trial {event.trial} of {event.of}{best}")

    def counted(self, done: int, of: int, workload: str = "") -> None:
        """So many regions are done, and one of a workload is next."""

    def say(self, what: str, kind: Literal["trial", "stage", "answer"] = "trial") -> None:
        """What is done now: a stage may take a while, an answer stays to be read."""


class TuneBar(TuneProgress, Progress):
    """On a terminal: a bar, and a line below it."""

    def __init__(self) -> None:
        TuneProgress.__init__(self)
        self._line = ""
        Progress.__init__(
            self, TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
            TextColumn("regions"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=Console(stderr=True, highlight=False), transient=True)
        self._bar = self.add_task("tuning", total=1)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(f"  {self._line}", overflow="ellipsis", no_wrap=True)

    def counted(self, done: int, of: int, workload: str = "") -> None:
        self.update(self._bar, completed=done, total=max(1, of), description=workload or None)

    def say(self, what: str, kind: Literal["trial", "stage", "answer"] = "trial") -> None:
        if kind == "answer":
            self.console.print(what)
        else:
            self._line = what


class TuneLog(TuneProgress):
    """In a log: a line when the first region begins, and then one now and then."""

    def __init__(self, log: ProgressLog) -> None:
        super().__init__()
        self._log, self._where = log, ""

    def counted(self, done: int, of: int, workload: str = "") -> None:
        if workload and not self._where:
            self._log.phase(f"tuning {counted(of, 'region')}" if of else "looking regions up")
        self._where = f"{done} of {counted(of, 'region')}, {workload}" if workload else self._where

    def say(self, what: str, kind: Literal["trial", "stage", "answer"] = "trial") -> None:
        if kind == "trial":
            self._log.update(f"{self._where}: {what}")
        else:
            self._log.phase(what)
