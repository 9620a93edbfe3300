"""How planning scales with the size of a graph: the table behind ``plan bench planner``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from fuseplan.planner.bench.synthetic import transformer_graph
from fuseplan.planner.groups.regions import find_regions, unique_regions
from fuseplan.planner.tuning.planner import Planner


def plan_scaling(planner: Callable[[], Planner], sizes: Sequence[int] = (1_000, 10_000, 100_000)) -> pd.DataFrame:
    """Build synthetic decoders of these numbers of ops, find their regions and plan them, each with a new ``planner``.

    Returns:
        One row a size: what was found, the seconds of each step, their total, and ``us_per_op``.
    """
    return pd.DataFrame([_plan_once(planner(), size) for size in sizes])


def _plan_once(planner: Planner, size: int) -> dict[str, float | int]:
    laps = [time.perf_counter()]
    graph = transformer_graph(size)
    laps.append(time.perf_counter())
    regions = find_regions(graph)
    laps.append(time.perf_counter())
    plan = planner.plan_graph(graph)
    laps.append(time.perf_counter())
    steps = dict(zip(("build_s", "regions_s", "plan_s"), np.diff(laps).tolist(), strict=True))
    total_s = sum(steps.values())
    return {
        "ops": len(graph),
        "regions": len(regions),
        "unique_regions": len(unique_regions(regions)),
        "choices": sum(one.record.enumerated for one in plan.unique()),
        "groups": sum(choice.is_kernel for one in plan.regions for choice in one.record.groups),
        **steps,
        "total_s": total_s,
        "us_per_op": total_s / len(graph) * 1e6,
    }
