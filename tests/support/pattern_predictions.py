"""What the cost model says of the plans that the pattern bench measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from fuseplan.costmodel.accuracy import spearman
from fuseplan.costmodel.device import DeviceSpec, Mode
from fuseplan.costmodel.roofline import predict
from fuseplan.costmodel.work import Work
from fuseplan.planner.bench.patterns import plan_case, unfused_ops
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.aten import UNFUSED
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.lowering.lower import lower
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.contestant import OURS
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.work.group_work import hot_inputs, kernel_work, launch_mode, op_work

#: A rank correlation of fewer cells than this says little.
_FEWEST = 5


def with_predictions(frame: pd.DataFrame, session: Session, cells: Sequence[Cell]) -> pd.DataFrame:
    """The rows of a pattern bench with ``predicted_us``: of ours, in the mode that its plans are made for."""
    predicted = {}
    for one in cells:
        case, _ = plan_case(session, one)
        predicted[one.key] = predicted_us(
            case.traced.graph, case.groups, session.spec, session.settings.regime, case.numerics)
    ours = (frame["contestant"] == OURS) & (frame["mode"] == session.settings.regime)
    return frame.assign(predicted_us=frame["key"].map(predicted).where(ours).astype("float64"))


def predicted_us(
    graph: DataflowGraph, groups: Sequence[PlannedGroup], spec: DeviceSpec | None, regime: str, numerics: str = "fp32"
) -> float | None:
    """Microseconds that the cost model predicts for a plan of a static graph, launch after launch.

    None where the device was not probed (``spec``).
    """
    if spec is None:
        return None
    return sum(predict(work, spec, mode, backend=backend)
               for work, mode, backend in _launches(graph, groups, regime, numerics))


def _launches(
    graph: DataflowGraph, groups: Sequence[PlannedGroup], regime: str, numerics: str
) -> Iterator[tuple[Work, Mode, str]]:
    for group in groups:
        lowered = lower_group(graph, group.ops, numerics)
        work = kernel_work(lowered.ir, hot_inputs(graph, lowered.inputs))
        yield work, launch_mode(group.config, regime), group.implementation.backends[0].name
    for name in unfused_ops(graph, groups):
        lowered = lower(graph, (name,), numerics, graph.op(name).outputs)
        yield op_work(graph, name), "graph" if regime == "graph" else "eager", UNFUSED


def prediction_verdict(frame: pd.DataFrame) -> list[str]:
    """A sentence for each mode in which ours was both predicted and timed."""
    ours = frame[(frame["contestant"] == OURS) & frame["predicted_us"].notna() & frame["median_us"].notna()]
    lines = []
    for mode, part in ours.groupby("mode", sort=False):
        error = (part["predicted_us"] / part["median_us"] - 1.0).abs()
        words = f"median error {error.median():.1%}, nine of ten within {error.quantile(0.9):.1%}"
        if len(part) >= _FEWEST:
            words += f", rank correlation {spearman(list(part['predicted_us']), list(part['median_us'])):.3f}"
        lines.append(
            f"{mode}: the cost model, as calibrated before this run, on its plans' times: {words} ({len(part)} cells)"
        )
    return lines
