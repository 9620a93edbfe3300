"""A tune that is read as a log: a line when it begins, and one now and then."""

from __future__ import annotations

from fuseplan.planner.cli.output.progress_log import EVERY_S, ProgressLog
from fuseplan.planner.cli.progress import TuneLog
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.patterns.table import pattern_graph
from fuseplan.search.tune.resources import ProgressEvent


def test_a_tune_in_a_log() -> None:
    now, lines = [0.0], list[str]()
    progress = TuneLog(ProgressLog(lines.append, lambda: now[0]))
    graphs = [pattern_graph("swiglu", shape, "bfloat16") for shape in ("3x128", "5x128")]
    for graph in graphs:
        progress.on_graph(find_regions(graph), find_regions(graph))
    progress.on_region("first", "silu+mul 3x128", 1, 1)
    assert len(lines) == 1 and "2 regions" in lines[0]
    for trial in range(25):
        now[0] += EVERY_S / 10
        progress.on_trial(ProgressEvent("silu+mul 3x128", trial, 25, 7.25, "screen"))
    assert len(lines) == 3 and "silu+mul 3x128" in lines[-1] and "best 7.2 us" in lines[-1] and "first" in lines[-1]
    now[0] += EVERY_S
    progress.on_region("second", "silu+mul 5x128", 1, 1)
    assert len(lines) == 4 and "1 of 2 regions, second" in lines[-1]
    progress.on_trial(ProgressEvent("second", 0, 0, 168e3, "step"))  # at once: it may take a while
    assert len(lines) == 5 and "second" in lines[-1] and "168 ms" in lines[-1]
    progress.on_trial(ProgressEvent("second", 0, 0, 84e3, "step done", 168e3))
    assert lines.pop().endswith("second: 168 ms -> 84.0 ms a step (2.00x)") and len(lines) == 5
    progress.on_trial(ProgressEvent("second", 0, 0, 84e3, "step done", 168e3, (1.5, 2.25)))
    assert lines.pop().endswith("a step (2.00x, 1.50 to 2.25)") and len(lines) == 5
    now[0] += EVERY_S
    progress.on_trial(ProgressEvent("silu+mul 3x128", 0, 9, float("inf"), "play off"))
    assert len(lines) == 6 and "9 kernels" in lines[-1] and "silu+mul 3x128" in lines[-1]
