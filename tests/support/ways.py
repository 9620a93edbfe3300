"""ATen's ops and generated kernels, as the choices of problems that no device is needed for."""

from __future__ import annotations

from reference_backend import ReferenceBackend

from fuseplan.planner.implementations.aten import AtenOp
from fuseplan.planner.implementations.choices import Implementations
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.inductor import InductorCode

WAYS = Implementations(AtenOp(), GeneratedKernel((ReferenceBackend(),)), InductorCode())
