"""A table in a terminal of some width: which columns are shown, and what of their texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fuseplan.planner.reports.document import Table, cell_text
from fuseplan.search.errors import counted

#: Characters of a text column where there is room, and the fewest to which it is cut before a column is left out.
_WIDEST, _LEAST = 44, 16
#: The fewest characters of a text that nothing else can make room for.
_NARROWEST = 4
_GAP = 2


@dataclass(frozen=True)
class Fitted:
    """What of a table fits: its heading and rows as lines of text, and the columns that are left out."""

    heading: str
    lines: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Column:
    """A column with its cells as text, the width that these want, and the least before another column is left out."""

    name: str
    cells: Sequence[str]
    numeric: bool
    natural: int
    least: int


def fitted(table: Table, width: int) -> Fitted:
    """The table in at most ``width`` characters a row, as far as its ``keep`` allows: numbers are never cut.

    Columns without any value are not shown. ``spare`` columns are left out first, then others from the right. Of others
    than ``keep`` texts are cut to 16 characters before that.
    """
    from rich.cells import cell_len

    keep = {*(table.keep or (*table.columns[:1], *table.columns[-1:]))}
    shown: list[_Column] = []
    for at, name in enumerate(table.columns):
        cells, numeric = [cell_text(row[at], table.digits, ",") for row in table.rows], table.numeric(at)
        natural = max(map(cell_len, [name, *cells]))
        least = natural if numeric else min(natural, _WIDEST if name in keep else max(_LEAST, cell_len(name)))
        if any(cells) or not cells:
            shown.append(_Column(name, cells, numeric, natural, least))
    chosen = shown
    for name in (*table.spare, *(one for one in reversed(table.columns) if one not in {*table.spare, *keep})):
        if sum(one.least + _GAP for one in chosen) - _GAP <= width:
            break
        chosen = [one for one in chosen if one.name != name]
    widths = _widths(chosen, width - _GAP * (len(chosen) - 1))

    def line(cells: Iterable[str]) -> str:
        parts = []
        for one, wide, cell in zip(chosen, widths, cells, strict=True):
            text = shortened(cell, wide, cell_len)
            pad = " " * (wide - cell_len(text))
            parts.append(pad + text if one.numeric else text + pad)
        return (" " * _GAP).join(parts).rstrip()

    lines = tuple(line(one.cells[row] for one in chosen) for row in range(len(table.rows)))
    return Fitted(line(one.name for one in chosen), lines, tuple(one.name for one in shown if one not in chosen))


def _widths(columns: Sequence[_Column], room: int) -> list[int]:
    """Characters of each column: of texts, the longest give way first."""
    widths = [one.natural if one.numeric else min(_WIDEST, one.natural) for one in columns]
    texts = [at for at, one in enumerate(columns) if not one.numeric]
    for floor in ([one.least for one in columns], [_NARROWEST] * len(columns)):
        while sum(widths) > room and (wider := [at for at in texts if widths[at] > floor[at]]):
            widths[max(wider, key=widths.__getitem__)] -= 1
    for at in texts:  # what is left goes to the texts that were cut
        widths[at] += max(0, min(columns[at].natural - widths[at], room - sum(widths)))
    return widths


def shortened(text: str, width: int, measure: Callable[[str], int] = len) -> str:
    """Text in at most ``width`` characters: its start and its end, with an ellipsis between them.

    >>> shortened("silu+mul 32x8192 bfloat16", 16)
    'silu+mul…bfloat16'
    """
    if measure(text) <= width:
        return text
    tail = (width - 1) // 2
    head = width - 1 - tail
    start, end = text[:head], text[len(text) - tail:]
    while measure(start) > head:  # letters that are two characters wide
        start = start[:-1]
    while measure(end) > tail:
        end = end[1:]
    return f"{start}…{end}"


def left_out_line(columns: Sequence[str], width: int) -> str:
    """Which columns are left out and how to see them, in at most ``width`` characters where 60 are there."""
    for shown in range(len(columns), 0, -1):
        more = f" and {len(columns) - shown} more" if shown < len(columns) else ""
        line = f"left out: {', '.join(columns[:shown])}{more} (--format csv, or a wider window)"
        if len(line) <= width:
            return line
    return f"{counted(len(columns), 'column')} left out (--format csv, or a wider window)"
