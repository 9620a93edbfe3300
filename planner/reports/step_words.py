"""Steps in words and as bars: how much faster one is, which groups made it, and what is left to gain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fuseplan.costmodel.devices import is_cpu, kind_of_key
from fuseplan.planner.reports.frames import ReportData
from fuseplan.planner.reports.steps import BETWEEN, Saved, Step, ratio, steps
from fuseplan.search import policy
from fuseplan.search.errors import counted

#: Groups that are named: of all workloads, and of one.
_SHOWN, _SHOWN_OF_ONE = 5, 3
#: Share of a gain that needs no explanation.
_LITTLE = 0.1
#: Microseconds in each unit.
_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}


def step_lines(data: ReportData, shown: int = _SHOWN, every: bool = False) -> Iterator[str]:
    """In words: each workload's step, and then the groups that save most of one, one for each place in the model.

    Where some steps were timed as a whole, the others are only counted unless ``every`` one is wanted.
    """
    found = steps(data)
    told = found if every else [one for one in found if one.times is not None] or found
    yield from map(step_words, told)
    if rest := len(found) - len(told):
        more = counted(rest, "more workload was not timed as a whole step",
                       "more workloads were not timed as whole steps")
        yield f"    {more}; `plan report steps` lists {'it' if rest == 1 else 'them'}"
    best: dict[str, tuple[Step, Saved]] = {}
    for one in told:
        for saved in one.saved:
            where = saved.place or saved.label
            known = best.get(where)
            if saved.saved_us > 0 and (known is None or known[1].saved_us < saved.saved_us):
                best[where] = one, saved
    ordered = sorted(best.values(), key=lambda pair: -pair[1].saved_us)
    for one, saved in ordered[:shown]:
        each = f"{saved.uses} x ({time_text(saved.unfused_us)} -> {time_text(saved.planned_us)})"
        doubt = f"; {words}" if (words := saved.doubt(one.unfused_us)) else ""
        yield f"    saves {time_text(saved.saved_us)} of {one.name}, {each}: {saved.name}{doubt}"
    if len(ordered) > shown:
        rest = len(ordered) - shown
        others = counted(rest, "other group saves", "other groups save")
        yield f"    {others} less; `plan report steps` lists {'it' if rest == 1 else 'them'}"


def step_words(one: Step) -> str:
    """``decode 1 @ 1024: 1.52 -> 0.91 ms a step (1.67x; torch.compile 1.04 ms); floor 0.66 ms``."""
    unit = _unit(max(one.unfused_us, one.planned_us))
    times = f"{_in(one.unfused_us, unit)} -> {_in(one.best_us, unit)} {unit} a step"
    faster = ratio(one.unfused_us, one.best_us)
    gain = f"{faster:.2f}x{_range(one)}" if faster is not None else ""
    beside = "; ".join(filter(None, (gain, _beside(one, unit))))
    words = f"{one.name}: {times} ({beside})" if beside else f"{one.name}: {times}"
    if one.times is None:
        return f"{words}; the sum of its regions, a whole step was not timed{_left_out(one)}"
    floor = f"; floor {_in(one.floor_us, unit)} {unit}" if one.floor_us is not None else ""
    below = f" (the step is {one.doubt})" if one.doubt else ""
    elsewhere = "" if one.timed_here else "; timed on another machine"
    return f"{words}{floor}{below}{_doubt(one)}{_memory(one)}{elsewhere}{_left_out(one)}"


def _range(one: Step) -> str:
    """The range of what the plan gained in its rounds; "" where that is not known."""
    if one.times is None or one.gains is None:
        return ""
    low, high = one.gains
    steady = "" if high <= (1 + policy.STEADY_SPREAD) * low else "unsteady: "
    return f", {steady}{low:.2f} to {high:.2f} in {counted(one.times.rounds, 'round')}"


def _beside(one: Step, unit: str) -> str:
    """What a step takes by TorchInductor's code or, where that is what runs, by the plan; "" where it was not timed."""
    if one.times is None or one.times.inductor_us is None:
        return ""
    alone = "" if one.times.alone is None else f", in a CUDA graph {one.times.alone:.2f}x as long as the plan"
    if one.times.by_inductor:
        return f"by torch.compile's own code{alone}; the plan takes {_in(one.planned_us, unit)} {unit}"
    mode = f" {one.times.inductor_mode}" if one.times.inductor_mode != "default" else ""
    return f"torch.compile{mode} {_in(one.times.inductor_us, unit)} {unit}{alone}"


def _memory(one: Step) -> str:
    """How fast memory was read between the rounds, which all times follow; "" where that was not measured."""
    if one.times is None or one.times.read_low is None or one.times.read_high is None:
        return ""
    low, high = f"{one.times.read_low:.0f}", f"{one.times.read_high:.0f}"
    return f"; memory was read at {low if low == high else f'{low} to {high}'} GB/s"


def _doubt(one: Step) -> str:
    """That noise could be the difference, or rounds contradict each other; "" where not, and where nothing was run."""
    if one.times is not None and one.hidden:
        return f"; within the noise of {one.times.noise:.0%}"
    low, high = one.gains or (1.0, 1.0)
    return "; faster in some rounds, slower in others" if low < 1 < high else ""


def _left_out(one: Step) -> str:
    """What the times are without; "" for most models."""
    return f"; excludes {counted(one.left_out, 'unplanned op')}" if one.left_out else ""


@dataclass(frozen=True)
class Piece:
    """A part of a step's bar: ``share`` is in percent of the longer of a workload's two bars."""

    part: str
    share: float
    time_us: float


def bars(one: Step) -> tuple[list[Piece], list[Piece]]:
    """A step as two bars, unfused and as planned, on one scale; parts that together exceed the step are shortened."""
    longest = max(one.unfused_us, one.planned_us)

    def bar(whole_us: float, side: int) -> list[Piece]:
        times = {part: pair[side] for part, pair in one.parts.items()}
        total_us = math.fsum(times.values())
        scale = min(1.0, whole_us / total_us) if total_us > 0 else 1.0
        drawn = {part: time_us * scale for part, time_us in times.items()} | {BETWEEN: whole_us - total_us * scale}
        return [Piece(part, 100 * drawn_us / longest, times.get(part, drawn_us))
                for part, drawn_us in drawn.items() if longest > 0 and drawn_us > 0.002 * longest]

    return bar(one.unfused_us, 0), bar(one.planned_us, 1)


def answers(one: Step) -> list[str]:
    """Three sentences: how much faster a step is, which groups made it, and what is left to gain."""
    faster = ratio(one.unfused_us, one.best_us) or 1.0
    how = "the sum of its regions; a whole step was not timed" if one.times is None else f"measured {one.measured}"
    if not is_cpu(kind_of_key(one.workload.device)):  # launching takes most of the time of a small unfused step
        how += "; replayed from a CUDA graph" if one.workload.regime == "graph" else "; launched from Python"
    took = f"a step takes {time_text(one.best_us)}, unfused {time_text(one.unfused_us)}"
    if one.times is not None and one.times.inductor_us is not None:
        took += f"; by the plan, which torch.compile's own code beats, {time_text(one.planned_us)}" if (
            one.times.by_inductor) else f", by torch.compile {time_text(one.times.inductor_us)}"
    best = [saved for saved in one.saved if saved.saved_us > 0][:_SHOWN_OF_ONE]
    places = [saved.place.replace("; ", ", ").replace("  ", " ") or saved.label for saved in best]
    names = "; ".join(f"{time_text(saved.saved_us)} by {where}" for saved, where in zip(best, places, strict=True))
    return [f"{faster:.2f}x as fast{_range(one)}: {took} ({how}{_doubt(one)}{_memory(one)}{_left_out(one)}).",
            f"Most is saved by these: {names}.{_besides(one, best)}" if names else "No group saves time.",
            _what_is_left(one)]


def _besides(one: Step, named: Sequence[Saved]) -> str:
    """What a step that was timed gains beyond the groups that are named; "" where that is little."""
    gained_us = one.unfused_us - one.planned_us
    rest_us = gained_us - math.fsum(saved.saved_us for saved in named)
    if one.times is None or one.hidden:
        return ""
    if rest_us < -_LITTLE * abs(gained_us):
        return (f" Each was measured by itself, with its data in memory: in the step all groups together save "
                f"{time_text(max(0.0, gained_us))}.")
    if rest_us < _LITTLE * gained_us:
        return ""
    return f" The other {time_text(rest_us)} of the difference are smaller groups, launches and gaps."


def _what_is_left(one: Step) -> str:
    """Which part takes most of a planned step, and what no plan can go below."""
    found = []
    most = max(bars(one)[1], key=lambda piece: piece.share, default=None)
    if most is not None:
        share = most.share * max(one.unfused_us, one.planned_us) / (100 * one.planned_us)
        found.append(f"What is left is mostly {most.part} ({share:.0%}).")
    if one.floor_us:
        over = one.planned_us / one.floor_us
        known = f"so no plan can be more than {over:.2f} times as fast as this one" if over > 1 else (
            f"but the step is {one.doubt}" if one.doubt else "so no plan can be faster")
        found.append(f"Memory and arithmetic alone take {time_text(one.floor_us)}, {known}.")
    else:
        found.append("How fast a step could be at best is not known: none was timed.")
    return " ".join(found)


def time_text(time_us: float) -> str:
    """``912 us``, ``1.52 ms``, ``2.1 s``: three digits."""
    unit = _unit(time_us)
    return f"{_in(time_us, unit)} {unit}"


def _unit(time_us: float) -> str:
    size = abs(time_us)
    return "us" if size < 999.5 else "ms" if size < 999.5e3 else "s"


def _in(time_us: float, unit: str) -> str:
    value = time_us / _UNITS[unit]
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"
