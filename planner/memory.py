"""Peak memory of a partition: the most intermediate bytes that live at once while its groups run in order."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.planner.candidates import Candidate
from fuseplan.planner.graph import DataflowGraph


def peak_bytes(graph: DataflowGraph, groups: Sequence[Candidate], escaping: Sequence[str]) -> int:
    """Largest number of bytes of produced values alive at once.

    Args:
        graph: The graph.
        groups: The partition in running order; each allocates its outputs before it runs.
        escaping: Values that stay alive to the end (the region's outputs).
    """
    last_use: dict[str, int] = {}
    for step, group in enumerate(groups):
        for value in group.inputs:
            last_use[value] = step
    kept = set(escaping)
    alive: dict[str, int] = {}
    peak = 0
    for step, group in enumerate(groups):
        alive.update({value: graph.specs[value].nbytes(graph.symbols) for value in group.outputs})
        peak = max(peak, sum(alive.values()))
        alive = {value: size for value, size in alive.items() if value in kept or last_use.get(value, -1) > step}
    return peak
