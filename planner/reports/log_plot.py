"""Points and curves between two logarithmic axes as an inline SVG: every point says what it is.

Points too close to be told apart share one mark. Those that matter most have their names beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fuseplan.planner.reports.drawing import templates

#: Extent in the drawing's units, and what of it the axes leave free on the left, at the top, right and bottom.
_WIDTH, _HEIGHT = 480.0, 360.0
_LEFT, _TOP, _RIGHT, _BOTTOM = 56.0, 26.0, 24.0, 42.0
#: Points of one kind that are closer than this share a mark.
_CELL = 6.0
#: Names that are written in the plot, their letters at most, and the extent of a letter.
NAMED, NAME_LETTERS = 10, 26
_LETTER, _LINE = 7.2, 13.0
#: Lines of names in a plot's height.
_ROWS = round(_HEIGHT / _LINE)
#: Points that one mark names, and ticks on an axis, at most.
_IN_A_MARK, _TICKS = 6, 8


@dataclass(frozen=True)
class Point:
    """One thing in the plot: ``name`` is short, ``words`` is all there is to say, ``tone`` is its colour and shape.

    One of ``weight`` 0 has no name written beside it.
    """

    x: float
    y: float
    name: str
    words: str
    tone: str = "fused"
    weight: float = 0.0


@dataclass(frozen=True)
class Curve:
    """Points joined by lines; ``name`` is in the key, ``tone`` its CSS class."""

    points: Sequence[tuple[float, float]]
    name: str
    tone: str


@dataclass(frozen=True)
class LogPlot:
    """What a plot shows.

    Attributes:
        words: What a screen reader says of the whole.
        axes, texts: What the axes measure, across and up, and how their ticks are written.
        kinds: The tones of points that the key names, in its order.
        band: Factor on either side of the diagonal that is shaded; 0 for no diagonal.
        ticks: The ticks across; None for round numbers.
    """

    words: str
    axes: tuple[str, str]
    points: Sequence[Point]
    curves: Sequence[Curve] = ()
    kinds: Sequence[str] = ()
    band: float = 0.0
    texts: tuple[Callable[[float], str], Callable[[float], str]] = ("{:,g}".format, "{:,g}".format)
    ticks: Sequence[float] | None = None

    def most(self) -> list[Point]:
        """The points that matter most, each name once."""
        found: dict[str, Point] = {}
        for one in sorted(self.points, key=lambda point: -point.weight):
            if one.weight > 0 and len(found) < NAMED:
                found.setdefault(one.name, one)
        return list(found.values())

    def svg(self) -> str:
        """The ``<svg>`` element."""
        pairs = [(one.x, one.y) for one in self.points] + [pair for one in self.curves for pair in one.points]
        xs, ys = ([pair[at] for pair in pairs] or [1.0, 10.0] for at in (0, 1))
        if self.band:
            xs = ys = [*xs, *ys]
        across, up = _Scale.of(xs, _LEFT, _WIDTH - _RIGHT), _Scale.of(ys, _HEIGHT - _BOTTOM, _TOP)
        marks = _marks((across(one.x), up(one.y), one) for one in self.points)
        spots = [(across(one.x), up(one.y), one) for one in self.most()]
        low, high = max(across.low, up.low), min(across.high, up.high)
        edges = ((low, 1 / self.band), (high, 1 / self.band), (high, self.band), (low, self.band)) if self.band else ()
        return templates().get_template("plot.svg.j2").render(
            plot=self, width=_WIDTH, height=_HEIGHT, left=_LEFT, top=_TOP, right=_WIDTH - _RIGHT,
            bottom=_HEIGHT - _BOTTOM, marks=marks, labels=list(_labels(spots)), key=list(self._key()),
            across=list(_apart((across(at), self.texts[0](at)) for at in self.ticks or across.ticks())),
            up=[(up(at), self.texts[1](at)) for at in up.ticks()],
            band=[(across(x), up(x * factor)) for x, factor in edges],
            diagonal=[(across(at), up(at)) for at in (low, high)],
            curves=[(one, [(across(x), up(y)) for x, y in one.points]) for one in self.curves],
        )

    def _key(self) -> Iterator[tuple[float, str, str]]:
        """Where the next entry of the key begins, its class and its words."""
        x, drawn = 8.0, {one.tone for one in self.points}
        entries = [(tone, tone) for tone in self.kinds if tone in drawn]
        for tone, words in [*entries, *((one.tone, one.name) for one in self.curves)]:
            yield x, tone, words
            x += 26 + _LETTER * len(words)


class _Scale(NamedTuple):
    """A logarithmic axis from ``low`` to ``high`` between two coordinates."""

    low: float
    high: float
    start: float
    end: float

    @staticmethod
    def of(values: Sequence[float], start: float, end: float) -> _Scale:
        """An axis with some room beyond the values."""
        low, high = min(values), max(values)
        room = max(1.15, (high / low) ** 0.05)
        return _Scale(low / room, high * room, start, end)

    def __call__(self, value: float) -> float:
        return self.start + math.log(value / self.low, self.high / self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers: 1, 2 and 5 of every decade, or as many as there is room for."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [float(f"{digit}e{power}") for power in decades for digit in digits]
            found = [one for one in found if self.low <= one <= self.high]
            if len(found) <= _TICKS:
                return found
        return found[:: -(-len(found) // _TICKS)]


def _apart(ticks: Iterable[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """The ticks whose words do not touch those of the one before."""
    end = -math.inf
    for x, text in ticks:
        half = _LETTER * len(text) / 2
        if x - half > end:
            end = x + half
            yield x, text


def _marks(placed: Iterable[tuple[float, float, Point]]) -> list[tuple[float, float, str, str]]:
    """One mark for the points of each cell and tone, at the weightiest: where, its tone, and all their words."""
    cells: dict[tuple[str, int, int], list[tuple[float, float, Point]]] = {}
    for x, y, point in placed:
        cells.setdefault((point.tone, round(x / _CELL), round(y / _CELL)), []).append((x, y, point))
    found = []
    for (tone, _, _), own in cells.items():
        own.sort(key=lambda one: -one[2].weight)
        words = list(dict.fromkeys(point.words for _, _, point in own))
        more = [f"and {len(words) - _IN_A_MARK} more here"] if len(words) > _IN_A_MARK else []
        found.append((own[0][0], own[0][1], tone, "\n".join([*words[:_IN_A_MARK], *more])))
    return sorted(found)


def _labels(spots: Sequence[tuple[float, float, Point]]) -> Iterator[dict[str, Any]]:
    """The names of points beside them: each at the nearest place where it covers neither a name nor a named point.

    Each has the left end of its base line, its text, and a line to the point where that is farther off.
    """
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in spots]
    for x, y, point in spots:
        text = point.name if len(point.name) <= NAME_LETTERS else f"{point.name[:NAME_LETTERS - 1]}…"
        width = _LETTER * len(text)
        for row in sorted(range(1 - _ROWS, _ROWS), key=abs):
            middle = y + row * _LINE
            for left in (x + 9, x - 9 - width, *((x - width / 2, x + 40, x - 40 - width) if row else ())):
                box = (left, middle - _LINE / 2, left + width, middle + _LINE / 2)
                inside = (box[0] >= _LEFT + 2 and box[2] <= _WIDTH - _RIGHT
                          and box[1] >= _TOP and box[3] <= _HEIGHT - _BOTTOM)
                if inside and not any(box[0] < other[2] and other[0] < box[2] and box[1] < other[3]
                                      and other[1] < box[3] for other in taken):
                    break
            else:
                continue
            taken.append(box)
            near = min(max(x, left), left + width)  # the name's end nearest to the point
            line = (x, y, near, middle - math.copysign(5, row)) if row else None
            yield {"x": left, "y": middle + 4, "text": text, "line": line}
            break
