"""What the kernels of a region cost each other in a GPU's cache.

A kernel that is timed, or priced, by itself finds in the cache whatever fits there beside its own data. In a model the
rest of its region runs before the same memory is used again, so two kernels of 25 MB each are no better off in a cache
of 50 MB than one of 50: priced one by one they would always look better. What is missing is what the cost model says of
moving the same bytes at the bandwidth of the region's footprint instead of the kernel's own.

On an H200 it is within 0.4 us of what two kernels take longer together than by themselves (rope of q, then of k, for 17
to 136 MB: 0 to 7.5 us, most where each fits the cache and both do not).
"""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.costmodel.device import DeviceSpec, Mode
from fuseplan.costmodel.roofline import predict
from fuseplan.costmodel.work import Work
from fuseplan.planner.flow import flow_of
from fuseplan.planner.graph import DataflowGraph, Region
from fuseplan.planner.pricing import hot_inputs
from fuseplan.planner.recipes import kind_of


class Neighbours:
    """The data that go into and come out of a region, and share the cache while it runs.

    Weights are left out (they come from memory), and so is what one op of the region makes for another: that is read
    right after it was written.
    """

    def __init__(self, graph: DataflowGraph, region: Region) -> None:
        self._graph = graph
        flow = flow_of(graph)
        members = [name for name in region.ops if kind_of(graph.op(name), graph.specs) != "view"]
        results = flow.needed_outside(flow.position[name] for name in members)
        self._made = {value for name in members for value in graph.op(name).outputs}
        self._results = frozenset(results)
        #: Bytes of the region's activations and results.
        self.footprint_bytes = self._bytes([*self._hot(region.inputs), *results])

    def delay_us(
        self, work: Work, spec: DeviceSpec, mode: Mode, inputs: Sequence[str], outputs: Sequence[str]
    ) -> float:
        """How much longer a kernel takes in the region than by itself, in microseconds; 0 on CPUs.

        Args:
            work: What the kernel does.
            spec: The device.
            mode: How it is launched.
            inputs: Names of the values it reads.
            outputs: Names of the values it makes.
        """
        beside_bytes = self.footprint_bytes - work.dram_bytes - work.gathered_bytes
        if beside_bytes <= 0 or spec.identity.device_type != "cuda":
            return 0.0
        hot = self._hot(inputs)
        outer = [value for value in hot if value not in self._made] + [one for one in outputs if one in self._results]
        share = self._bytes(outer) / max(self._bytes([*hot, *outputs]), 1.0)
        alone_us, among_us = (predict(work, spec, mode, beside_bytes=one).time_us for one in (0.0, beside_bytes))
        return share * max(0.0, among_us - alone_us)

    def _hot(self, values: Sequence[str]) -> list[str]:
        return [value for value, hot in zip(values, hot_inputs(self._graph, values), strict=True) if hot]

    def _bytes(self, values: Sequence[str]) -> float:
        return float(sum(self._graph.specs[value].nbytes(self._graph.symbols) for value in dict.fromkeys(values)))
