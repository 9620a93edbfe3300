"""What the kernels of a region cost each other in a GPU's cache.

A kernel that is timed, or priced, by itself finds its data in the cache. In a model the rest of its region runs before,
so two kernels of 25 MB are no better off in a cache of 40 MB than one of 50. The difference is what the cost model says
of moving the same bytes at the bandwidth of the region's footprint instead of the kernel's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fuseplan.costmodel.device import DeviceSpec, Mode
from fuseplan.costmodel.roofline import predict
from fuseplan.costmodel.work import Work
from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.groups.candidates import single_candidates
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.lowering.lower import Lowered
from fuseplan.planner.work.group_work import hot_inputs, moved_bytes


class SharedCache:
    """What goes into and comes out of ``part``, a region of a static graph or a part of one, and shares the cache.

    Values that one op makes for another do not count: they are read right after they are written. Weights count, since
    they pass through the cache; they come from memory in any case, so their bytes are not delayed.
    """

    def __init__(self, table: GroupTable, part: Region) -> None:
        self._graph = table.graph
        flow, found = compute_graph_of(table.graph), dict[str, Lowered]()  # compute ops, each as a kernel of its own
        for one in single_candidates(table.graph, part):
            if table.kind(one.ops[0]) == "compute" and (kernel := table.kernel(one)) is not None:
                found[one.ops[0]] = kernel
        self._made = {value for name in found for value in table.graph.op(name).outputs}
        self._results = frozenset(flow.outputs_of(found))
        moved = moved_bytes(found.values())
        #: Bytes of all that.
        self.footprint_bytes = _sum(moved, self._outer(moved, moved))

    def delay_us(self, work: Work, spec: DeviceSpec, mode: Mode, lowered: Lowered) -> float:
        """How much longer a kernel (or that of an ATen op by itself) takes in the region than alone; 0 on CPUs."""
        beside_bytes = self.footprint_bytes - work.dram_bytes
        if beside_bytes <= 0 or not spec.identity.is_gpu:
            return 0.0
        hot = hot_inputs(self._graph, lowered.inputs)
        read = [value for value, is_hot in zip(lowered.inputs, hot, strict=True) if is_hot]
        moved = moved_bytes([lowered])
        share = _sum(moved, self._outer(read, lowered.outputs)) / max(_sum(moved, [*read, *lowered.outputs]), 1.0)
        alone_us, among_us = (predict(work, spec, mode, beside_bytes=one) for one in (0.0, beside_bytes))
        return share * max(0.0, among_us - alone_us)

    def _outer(self, read: Iterable[str], made: Iterable[str]) -> list[str]:
        """Of values that are read, those from outside; of values that are made, those for outside."""
        return [one for one in read if one not in self._made] + [one for one in made if one in self._results]


def _sum(moved: Mapping[str, float], values: Iterable[str]) -> float:
    return sum(moved.get(value, 0.0) for value in values)
