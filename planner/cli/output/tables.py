"""A table in a terminal of some width: which columns are shown, and what of their texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fuseplan.planner.reports.document import Table, cell_text

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


def fitted(table: Table, width: int) -> Fitted:
    """The table in at most ``width`` characters a row, as far as its ``keep`` allows: numbers are never cut.

    Columns without any value are not shown. ``spare`` columns are left out first, then others from the right. Of others
    than ``keep`` texts are cut to 16 characters before that.
    """
    from rich.cells import cell_len

    texts = [[cell_text(row[at], table.digits, ",") for row in table.rows] for at in range(len(table.columns))]
    numeric = [table.numeric(at) for at in range(len(table.columns))]
    natural = [max(map(cell_len, [name, *cells])) for name, cells in zip(table.columns, texts, strict=True)]
    keep = _kept(table)
    least = [wide if number else min(wide, _WIDEST if name in keep else max(_LEAST, cell_len(name)))
             for name, wide, number in zip(table.columns, natural, numeric, strict=True)]
    shown = [at for at, cells in enumerate(texts) if any(cells) or not table.rows]
    chosen = _columns(table, shown, least, width)
    room = width - _GAP * (len(chosen) - 1)
    widths = _widths({at: natural[at] for at in chosen}, {at: least[at] for at in chosen}, numeric, room)

    def line(cells: Callable[[int], str]) -> str:
        parts = []
        for at, wide in widths.items():
            text = shortened(cells(at), wide, cell_len)
            pad = " " * (wide - cell_len(text))
            parts.append(pad + text if numeric[at] else text + pad)
        return (" " * _GAP).join(parts).rstrip()

    lines = tuple(line(lambda at, row=row: texts[at][row]) for row in range(len(table.rows)))  # type: ignore[misc]
    left_out = tuple(table.columns[at] for at in shown if at not in widths)
    return Fitted(line(lambda at: table.columns[at]), lines, left_out)


def _kept(table: Table) -> set[str]:
    return set(table.keep) or set(table.columns[:1] + table.columns[-1:])


def _columns(table: Table, shown: Sequence[int], least: Sequence[int], width: int) -> list[int]:
    """Positions of those of the columns ``shown`` that fit, each at its least width."""
    names, keep = list(table.columns), _kept(table)
    others = [name for name in reversed(names) if name not in table.spare and name not in keep]
    chosen = list(shown)
    for name in [*table.spare, *others]:
        if sum(least[at] for at in chosen) + _GAP * (len(chosen) - 1) <= width:
            break
        chosen = [at for at in chosen if names[at] != name]
    return chosen


def _widths(natural: dict[int, int], least: dict[int, int], numeric: Sequence[bool], room: int) -> dict[int, int]:
    """Characters of each column: of texts, the longest give way first."""
    widths = {at: wide if numeric[at] else min(_WIDEST, wide) for at, wide in natural.items()}
    for floor in (least, dict.fromkeys(least, _NARROWEST)):
        while sum(widths.values()) > room:
            wider = [at for at, wide in widths.items() if not numeric[at] and wide > floor[at]]
            if not wider:
                break
            widths[max(wider, key=lambda at: widths[at])] -= 1
    for at in widths:  # what is left goes to the texts that were cut
        widths[at] += 0 if numeric[at] else max(0, min(natural[at] - widths[at], room - sum(widths.values())))
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
    return f"{len(columns)} {'column' if len(columns) == 1 else 'columns'} left out (--format csv, or a wider window)"
