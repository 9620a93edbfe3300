"""The last word on a region: its plan against plain ATen and TorchInductor's code, all of it in one interleaved run.

What the plans of its parts cost together is only known when they run together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fuseplan.planner.graph.dataflow import OpNode, Region
from fuseplan.planner.groups.candidates import candidate_at, single_candidates
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import region_parts
from fuseplan.planner.implementations.choices import Choice, Implementations, Plans, in_order, recorded_choices
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.ops.table import can_stand_alone, chosen_integers
from fuseplan.search import policy
from fuseplan.search.store.record import INDUCTOR, PlanRecord
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner

_PLAIN, _PLAN = "plain", "plan"
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Verdict:
    """Who runs a region, and how it compares, in words.

    Attributes:
        keeps: Whether the plans of its parts stand; otherwise ATen runs all of it, or ``whole``, in order.
        gain: What ``whole`` gains on the plans of the parts.
        failed: Whether the run beside plain ATen failed.
    """

    keeps: bool = True
    words: str = ""
    whole: tuple[Choice, ...] = ()
    gain: float = 0.0
    failed: bool = False


def last_word(
    table: GroupTable, region: Region, parts: Plans, ways: Implementations, tuner: Tuner,
    whole: tuple[Choice, ...] = (), decided: bool = True, longest_s: float = policy.LONG_REGION_S
) -> Callable[[], Verdict]:
    """Who runs a region: the plans of its parts, plain ATen or, where these leave much to ATen, TorchInductor's code.

    They are run when the measuring process has nothing else to do; what is returned waits for it. ``whole`` is
    TorchInductor's code, where it takes part. ``decided``: the plans of its parts were decided by measurement. What
    takes more than ``longest_s`` as plain ATen is not run.
    """
    plain_s = math.fsum(record.unfused_us for _, record in parts) * 1e-6
    is_plain = all(group.is_plain for _, record in parts for group in record.groups)
    alone = decided and len(region_parts(table.graph, region)) == 1  # its plan was decided beside plain ATen
    if plain_s > longest_s or (not whole and (is_plain or alone)):
        return Verdict
    sides = {_PLAN: planned_parts(table, parts, ways)}
    if not is_plain:
        sides = {_PLAIN: plain_parts(table, (part for part, _ in parts), ways), **sides}
    if not whole:
        run = play_off(tuner.play_off_later, table, sides)
        return lambda: _verdict(run(), ())

    def beside_inductor() -> Verdict:
        for choice in whole:
            if choice.is_plain:
                continue
            screened = choice.implementation.screen(table, choice.group, tuner)
            if screened.time_us is None:
                note = f"; TorchInductor's code for it does not work: {screened.reason}"
                found = Verdict() if is_plain else _verdict(play_off(tuner.play_off, table, sides), ())
                return replace(found, words=found.words + note)
        both = {**sides, INDUCTOR: {choice: unmeasured_part(table, choice) for choice in whole}}
        return _verdict(play_off(tuner.play_off, table, both), whole)

    return beside_inductor


def unmeasured_part(table: GroupTable, choice: Choice) -> Part:
    """What a choice runs that has no configuration to search."""
    name, config, _ = choice.implementation.recorded(table, choice.group, None)
    return choice.implementation.part(table, choice.group, name, config)


def _verdict(contest: Contest | None, whole: tuple[Choice, ...]) -> Verdict:
    if contest is None:
        return Verdict(words="; the region's run beside plain ATen failed", failed=True)
    gain = contest.gain(_PLAN, _PLAIN) if _PLAIN in contest.samples else 0.0
    keeps, words = gain >= 0.0, ""
    if _PLAIN in contest.samples:
        words = (f"; the whole region gains {gain:.1%} on plain ATen, with a noise of {contest.noise:.1%}" if keeps else
                 f"; the whole region loses {-gain:.1%} to plain ATen, which runs it")
    if not whole:
        return Verdict(keeps, words)
    best = _PLAN if keeps else _PLAIN
    more = contest.gain(INDUCTOR, best)
    if more > policy.MIN_GAIN and contest.accepts(INDUCTOR, best):
        words = f"; TorchInductor's code for the whole region gains {more:.1%} on that, and runs it"
        return Verdict(False, words, whole, contest.gain(INDUCTOR, _PLAN))
    return Verdict(keeps, f"{words}; TorchInductor's code for it is no faster ({more:+.1%})")


def gain_on_parts(
    table: GroupTable, region: Region, record: PlanRecord, parts: Plans,
    ways: Implementations, tuner: Tuner
) -> float | None:
    """What a region's plan gains on its parts' in an interleaved run: 0 within noise, None where the run fails."""
    sides = {_PLAIN: planned_parts(table, parts, ways), _PLAN: planned_parts(table, [(region, record)], ways)}
    contest: Contest | None = play_off(tuner.play_off_later, table, sides)()
    if contest is None:
        return None
    return contest.gain(_PLAN, _PLAIN) if contest.accepts(_PLAN, _PLAIN) else 0.0


def plain_parts(table: GroupTable, regions: Iterable[Region], ways: Implementations) -> dict[Choice, Part]:
    """What ATen runs of regions, or of their parts."""
    singles = (one for region in regions for one in single_candidates(table.graph, region))
    return {Choice(one, ways.aten): ways.aten.part(table, one, "", {}) for one in singles}


def opaque_parts(table: GroupTable, ways: Implementations) -> dict[Choice, Part]:
    """What ATen runs of the opaque ops that it can run by themselves: they take their time in any step.

    An op is left out where others read the same integers: numbers that are chosen for it would mislead them.
    """
    graph, flow = table.graph, compute_graph_of(table.graph)

    def shares(node: OpNode) -> bool:
        sources = {one for value in chosen_integers(node, graph.specs) for one in flow.sources_of(value)}
        return any(len(flow.readers.get(one, ())) > 1 for one in sources)

    alone = (candidate_at(flow, [at]) for at, node in enumerate(flow.nodes)
             if flow.kinds[at] == "opaque" and can_stand_alone(node, graph.specs) and not shares(node))
    return {Choice(one, ways.aten): ways.aten.part(table, one, "", {}) for one in alone}


def planned_parts(table: GroupTable, parts: Plans, ways: Implementations) -> dict[Choice, Part]:
    """What the plans of regions, or of their parts, run."""
    return {
        choice: choice.implementation.part(table, choice.group, group.implementation, group.config)
        for part, record in parts
        for choice, group in recorded_choices(table.graph, part, record, ways).items()
    }


def play_off(
    run: Callable[[Mapping[str, Part], Mapping[str, Sequence[str]], Sequence[str]], _Result], table: GroupTable,
    sides: Mapping[str, Mapping[Choice, Part]],
) -> _Result:
    """The sides, covers of the same ops, as sequences in one interleaved ``run`` of a tuner."""
    # One choice may have another configuration on each side.
    parts = {(side, choice): part for side, chosen in sides.items() for choice, part in chosen.items()}
    names = {one: f"part {number}" for number, one in enumerate(parts)}
    ordered = {side: [names[side, choice] for choice in in_order(table.graph, choices)]
               for side, choices in sides.items()}
    needed = compute_graph_of(table.graph).outputs_of({op for _, choice in parts for op in choice.group.ops})
    return run({names[one]: part for one, part in parts.items()}, ordered, needed)
