"""ATen's ops and generated kernels, as the choices of problems that no device is needed for."""

from __future__ import annotations

from fuseplan.planner.implementations.implementations import AtenOp, GeneratedKernel, Implementations

WAYS = Implementations(AtenOp(), GeneratedKernel())
