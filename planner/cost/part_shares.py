"""How much of a graph's time the parts of its regions take: what a search for the best kernel there can gain."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from fuseplan.costmodel.device import DeviceSpec
from fuseplan.planner.cost.prices import ModelPrices
from fuseplan.planner.groups.candidates import single_candidates
from fuseplan.planner.groups.regions import find_regions, region_parts, unique_regions
from fuseplan.planner.implementations.choices import Choice
from fuseplan.planner.implementations.group_book import GroupBook
from fuseplan.planner.implementations.implementations import Implementation


def part_shares(book: GroupBook, spec: DeviceSpec | None, aten: Implementation) -> Mapping[str, float]:
    """By the key of each part of a region: its share of the graph's predicted time, all occurrences together.

    Times are those of ATen's ops on the device ``spec``; without one all ops take the same.
    """
    prices, seconds = ModelPrices(book, spec), defaultdict[str, float](float)
    for occurrences in unique_regions(find_regions(book.graph)).values():
        for part in region_parts(book.graph, occurrences[0]):
            singles = single_candidates(book.graph, part)
            once_s = math.fsum(prices.predict_s(Choice(one, aten)) for one in singles)
            seconds[part.key] += len(occurrences) * once_s
    total_s = math.fsum(seconds.values())
    return {key: part_s / total_s for key, part_s in seconds.items()} if total_s > 0 else {}
