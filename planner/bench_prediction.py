"""What the cost model says of a cell of the pattern bench, before anything of it is measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from fuseplan.costmodel.accuracy import MeasuredPair, accuracy_frame, spearman
from fuseplan.costmodel.device import DeviceSpec, Mode
from fuseplan.costmodel.roofline import predict
from fuseplan.kernels.backend import Config
from fuseplan.planner.bench import OURS
from fuseplan.planner.graph import DataflowGraph
from fuseplan.planner.learning import UNFUSED
from fuseplan.planner.lower import Lowered
from fuseplan.planner.pricing import hot_inputs, kernel_work, launch_mode, op_work

#: A rank correlation of fewer cells than this says little.
_FEWEST = 5


@dataclass(frozen=True)
class PlannedKernel:
    """One fused group of a plan: its kernel, and who runs it how."""

    lowered: Lowered
    backend: str
    config: Config


def predicted_us(
    graph: DataflowGraph, kernels: Sequence[PlannedKernel], unfused: Iterable[str], spec: DeviceSpec | None, regime: str
) -> float | None:
    """Microseconds that the model predicts for a plan, launch after launch; None where the device was not probed.

    Args:
        graph: A static graph.
        kernels: The plan's fused groups.
        unfused: Names of the compute ops outside them.
        spec: The device as probed and calibrated.
        regime: ``"eager"`` or ``"graph"``.
    """
    if spec is None:
        return None
    total = sum(
        predict(
            kernel_work(one.lowered.ir, hot_inputs(graph, one.lowered.inputs)), spec,
            launch_mode(one.config, regime), backend=one.backend,
        ).time_us
        for one in kernels
    )
    alone: Mode = "graph" if regime == "graph" else "eager"
    return total + sum(predict(op_work(graph, name), spec, alone, backend=UNFUSED).time_us for name in unfused)


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
