"""Who is told what a long job is doing: the terminal's bars, a notebook's, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fuseplan.planner.graph.dataflow import Region
    from fuseplan.search.tune.tuner import ProgressEvent


class TuneEvents(Protocol):
    """Told about each step of a tune."""

    def on_graph(self, regions: Sequence[Region], undecided: Sequence[Region]) -> None:
        """A workload's graph is there, with these regions, of which so many distinct ones have no stored plan."""

    def on_region(self, workload: str, label: str, number: int, total: int) -> None:
        """A region of a workload is looked up or tuned next."""

    def on_trial(self, event: ProgressEvent) -> None:
        """A group's tune took a step."""


class Progress(Protocol):
    """Told what a job is doing. To see it, give an object with these methods."""

    def status(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        """A stage begins, and ends with the context; what the context gives is called with words meanwhile."""

    def tuning(self) -> AbstractContextManager[TuneEvents]:
        """A tune begins, and ends with the context."""

    def note(self, text: str) -> None:
        """Something to know that is no error."""

    def warn(self, text: str) -> None:
        """Something that makes answers doubtful."""


class _Nobody:
    def on_graph(self, regions: Sequence[Region], undecided: Sequence[Region]) -> None: ...

    def on_region(self, workload: str, label: str, number: int, total: int) -> None: ...

    def on_trial(self, event: ProgressEvent) -> None: ...

    def status(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        return nullcontext(lambda text: None)

    def tuning(self) -> AbstractContextManager[TuneEvents]:
        return nullcontext(self)

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


#: Says nothing.
SILENT: Progress = _Nobody()
