"""What the cost model says of a cell of the pattern bench, before anything of it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pandas as pd

from fuseplan.costmodel.accuracy import MeasuredPair, accuracy_frame, spearman
from fuseplan.costmodel.device import DeviceSpec, Mode
from fuseplan.costmodel.roofline import predict
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Config
from fuseplan.planner.cost.prices import shared_cache
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.regions import find_regions, region_parts
from fuseplan.planner.implementations.group_book import GroupBook
from fuseplan.planner.implementations.implementations import UNFUSED
from fuseplan.planner.lowering.lower import Lowered, lower
from fuseplan.planner.peers.contestant import OURS
from fuseplan.planner.work.group_work import hot_inputs, kernel_work, launch_mode, op_work

#: A rank correlation of fewer cells than this says little.
_FEWEST = 5


@dataclass(frozen=True)
class PlannedKernel:
    """One fused group of a plan: its kernel, and who runs it how."""

    lowered: Lowered
    backend: str
    config: Config


def predicted_us(
    graph: DataflowGraph, kernels: Sequence[PlannedKernel], unfused: Iterable[str], spec: DeviceSpec | None,
    regime: str, numerics: str = "fp32",
) -> float | None:
    """Microseconds that the model predicts for a plan, launch after launch, with what kernels cost each other.

    None where the device was not probed (``spec``). The graph is static; ``unfused`` are the compute ops outside the
    plan's fused groups ``kernels``.
    """
    if spec is None:
        return None
    delay_us, total_us = _delays(graph, spec, numerics), 0.0
    for one in kernels:
        work = kernel_work(one.lowered.ir, hot_inputs(graph, one.lowered.inputs))
        mode = launch_mode(one.config, regime)
        total_us += predict(work, spec, mode, backend=one.backend).time_us + delay_us(one.lowered, work, mode)
    alone: Mode = "graph" if regime == "graph" else "eager"
    for name in unfused:
        work = op_work(graph, name)
        lowered = lower(graph, (name,), numerics, graph.op(name).outputs)
        total_us += predict(work, spec, alone, backend=UNFUSED).time_us + delay_us(lowered, work, alone)
    return total_us


_Delay: TypeAlias = Callable[[Lowered, Work, Mode], float]


def _delays(graph: DataflowGraph, spec: DeviceSpec, numerics: str) -> _Delay:
    """What a kernel of a plan pays for the others in the cache (:mod:`fuseplan.planner.cost.shared_cache`)."""
    if spec.identity.device_type != "cuda":
        return lambda lowered, work, mode: 0.0
    book = GroupBook(graph, numerics, "cuda")
    parts = (part for region in find_regions(graph) for part in region_parts(graph, region))
    regions = [(frozenset(part.ops), shared_cache(book, part)) for part in parts]

    def delay_us(lowered: Lowered, work: Work, mode: Mode) -> float:
        maker = graph.producer(lowered.outputs[0])
        return next(around.delay_us(work, spec, mode, lowered) for ops, around in regions if maker in ops)

    return delay_us


def prediction_verdict(frame: pd.DataFrame) -> list[str]:
    """A sentence for each mode in which ours was both predicted and timed."""
    ours = frame[(frame["contestant"] == OURS) & frame["predicted_us"].notna() & frame["median_us"].notna()]
    lines = []
    for mode, part in ours.groupby("mode", sort=False):
        pairs = accuracy_frame(
            MeasuredPair(row["key"], OURS, row["predicted_us"], row["median_us"]) for row in part.to_dict("records")
        )
        error = pairs["relative_error"]
        words = f"median error {error.median():.1%}, nine of ten within {error.quantile(0.9):.1%}"
        if len(pairs) >= _FEWEST:
            words += f", rank correlation {spearman(list(pairs['predicted_us']), list(pairs['measured_us'])):.3f}"
        lines.append(
            f"{mode}: the cost model, as calibrated before this run, on its plans' times: {words} ({len(pairs)} cells)"
        )
    return lines
