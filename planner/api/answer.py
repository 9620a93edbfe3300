"""What every answer has: frames, lines as the terminal prints them, and the first screen of it for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fuseplan.planner.reports.document import Table, frame_rows
from fuseplan.planner.reports.drawing import templates
from fuseplan.planner.reports.frames import ReportData
from fuseplan.planner.reports.step_words import answers, bars, time_text
from fuseplan.planner.reports.steps import PARTS, steps
from fuseplan.search.errors import plain

#: Rows of a table, and workloads, on a first screen.
_ROWS, _WORKLOADS = 6, 4


def first_screen(
    title: str, lines: Iterable[str], data: ReportData | None, table: pd.DataFrame, columns: Sequence[str],
    code: str = "",
) -> str:
    """A fragment of HTML in the page's colours: a title, steps in words and as bars, lines, and the head of a table."""
    found = steps(data) if data is not None else []
    shown = table[[name for name in columns if name in table]].head(_ROWS)
    return templates().get_template("answer.html.j2").render(
        title=title, lines=list(lines), code=code, parts=PARTS,
        steps=[(one.name, answers(one), zip(("unfused", "planned"), bars(one), strict=True))
               for one in found[:_WORKLOADS]],
        more_steps=max(0, len(found) - _WORKLOADS), duration=time_text,
        columns=[str(name).removesuffix("_us").replace("_", " ") for name in shown.columns],
        rows=[[_cell(str(name), value) for name, value in zip(shown, row, strict=True)]
              for row in frame_rows(shown)],
        more=len(table) - len(shown))


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("_us"):
        return time_text(value).replace(" ", "\N{NO-BREAK SPACE}")
    return f"{value:,.3g}{'x' * (name == 'speedup')}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, eq=False, kw_only=True)
class TuneAnswer:
    """What came of a tune, in words.

    Attributes:
        warnings: What makes an answer doubtful or is missing, one line each.
        failure: Why it failed, where that is more than a region or some noise; "" where it did not.
    """

    warnings: tuple[str, ...] = ()
    failure: str = ""

    def tables(self) -> Iterator[Table]:
        """The answer as tables, the first one for CSV."""
        raise NotImplementedError

    def course(self) -> Iterator[str]:
        """How the tune went: what was measured, and where it is stored."""
        raise NotImplementedError

    def step_lines(self) -> Iterator[str]:
        """What whole steps take."""
        yield from ()

    def lines(self) -> Iterator[str]:
        """The answer in words, as the terminal has it below its tables."""
        yield from self.course()
        yield from self.step_lines()

    def __str__(self) -> str:
        return "\n".join(map(plain, (*self.lines(), *(f"warning: {one}" for one in self.warnings))))
