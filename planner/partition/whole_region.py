"""The last word on a region: its plan against plain ATen, matmuls and attention and all, in one interleaved run.

Parts are decided one by one, each by itself. What their plans cost together is only known when they run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fuseplan.planner.cost.prices import MeasuredPrices
from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.groups.candidates import region_dependencies
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.implementations.choices import Choice
from fuseplan.planner.implementations.group_book import GroupBook
from fuseplan.planner.partition.guided_loop import Priced
from fuseplan.planner.partition.plan_record import DecidedPart
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner

_PLAIN, _PLAN = "plain", "plan"
#: Seconds that a plain region may take to be run again and again.
_LONGEST_S = 0.2


@dataclass(frozen=True)
class Verdict:
    """The parts to use, and in words how the region did."""

    parts: tuple[DecidedPart, ...]
    words: str = ""


def beats_plain(book: GroupBook, region: Region, parts: Sequence[DecidedPart], tuner: Tuner) -> Verdict:
    """The parts' plans, or plain ATen where the region is faster without them."""
    parts = tuple(parts)
    chosen = [priced.choice for part in parts for priced in part.result.chosen]
    prices = {priced.choice: part.prices for part in parts for priced in part.result.chosen}
    plain_s = sum(part.result.unfused_s for part in parts)
    if len(parts) == 1 or all(prices[one].is_plain(one) for one in chosen) or plain_s > _LONGEST_S:
        return Verdict(parts)
    contest = _contest(book, region, parts, chosen, tuner)
    if contest is None:
        return Verdict(parts, "; the region's run beside plain ATen failed")
    gain = contest.gain(_PLAN, _PLAIN)
    if gain >= 0.0:
        return Verdict(parts, f"; the whole region gains {gain:.1%} on plain ATen")
    words = f"; the whole region loses {-gain:.1%} to plain ATen, which runs it"
    return Verdict(tuple(map(_plain_part, parts)), words)


def _contest(
    book: GroupBook, region: Region, parts: Sequence[DecidedPart], chosen: Sequence[Choice], tuner: Tuner
) -> Contest | None:
    flow = compute_graph_of(book.graph)
    members = region_dependencies(book.graph, region).members
    plain = [one for part in parts for one in _plain_choices(part)]

    def last_result(choice: Choice) -> int:
        return max(flow.position[op] for op in map(book.graph.producer, choice.group.outputs) if op is not None)

    names = {choice: f"part {number}" for number, choice in enumerate(dict.fromkeys([*plain, *chosen]))}
    sides = {
        side: [names[choice] for choice in sorted(choices, key=last_result)]
        for side, choices in ((_PLAIN, plain), (_PLAN, chosen))
    }
    prices = {choice: part.prices for part in parts for choice in (*_plain_choices(part), *_chosen(part))}

    def as_part(choice: Choice) -> Part:
        own = prices[choice]
        assert isinstance(own, MeasuredPrices)
        return choice.implementation.part(book, choice.group, own.record(choice))

    return tuner.play_off(
        {name: as_part(choice) for choice, name in names.items()}, sides, flow.needed_outside(members)
    )


def _chosen(part: DecidedPart) -> list[Choice]:
    return [priced.choice for priced in part.result.chosen]


def _plain_choices(part: DecidedPart) -> list[Choice]:
    """Every op of a part as ATen's: all of them were measured."""
    return [priced.choice for priced in _plain_priced(part)]


def _plain_priced(part: DecidedPart) -> list[Priced]:
    known = (*part.result.chosen, *part.result.rejected)
    return [priced for priced in known if part.prices.is_plain(priced.choice)]


def _plain_part(part: DecidedPart) -> DecidedPart:
    chosen = tuple(_plain_priced(part))
    kept = {priced.choice for priced in chosen}
    lost = [one for one in (*part.result.chosen, *part.result.rejected) if one.choice not in kept]
    cost_s = sum(one.cost_s for one in chosen)
    result = replace(
        part.result, chosen=chosen, cost_s=cost_s, bound_s=min(part.result.bound_s, cost_s),
        rejected=tuple(sorted(lost, key=lambda one: one.cost_s)),
    )
    return replace(part, result=result)
