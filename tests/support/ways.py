"""ATen's ops and generated kernels, as the choices of problems that no device is needed for."""

from __future__ import annotations

from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import Candidate, region_candidates, region_dependencies
from fuseplan.planner.implementations.aten_op import AtenOp
from fuseplan.planner.implementations.choices import Implementations
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel

WAYS = Implementations(AtenOp(), GeneratedKernel())


def singles(graph: DataflowGraph, region: Region) -> list[Candidate]:
    """Every compute op of a region by itself."""
    count = len(region_dependencies(graph, region))
    return region_candidates(graph, region, [1 << bit for bit in range(count)])
