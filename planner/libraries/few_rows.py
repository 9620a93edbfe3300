"""A matmul of few rows on a CPU by our own kernel: a call like those of libraries, chosen by measurement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuseplan.costmodel.devices import is_cpu
from fuseplan.kernels.cpp.matmul import MAX_ROWS, FewRows
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.libraries.library_call import Call, LibraryCall, OpGroup, check_cpu, given
from fuseplan.planner.libraries.matmul_calls import LINEAR, Matmul, is_contiguous, read_matmul

#: Rows of activations, and bytes of weights, of a matmul that is known to gain.
_SURELY_FEW, _LARGE_BYTES = 4, 2**20


@dataclass(frozen=True)
class FewRowsMatmul(LibraryCall):
    """Each row of the weights read once."""

    name: str = "matmul.rows"
    by_rule: bool = True

    def surpasses(self, group: OpGroup) -> bool:
        """As measured for four rows and large weights with AVX-512 (results/amd-epyc-family-26-model-2/few-rows.md)."""
        is_known = is_cpu(group.device_type) and torch.backends.cpu.get_cpu_capability() == "AVX512"
        if not is_known or self.refuse(group) is not None:
            return False
        found = read_matmul(group)
        return (found.left.dtype in ("bfloat16", "float32") and math.prod(found.left.shape[:-1]) <= _SURELY_FEW
                and found.right.nbytes() >= _LARGE_BYTES)

    def plan(self, group: OpGroup) -> Callable[[], Call]:
        found = read_matmul(group)
        check_cpu(found.device_type)
        rows = math.prod(found.left.shape[:-1])
        if rows > MAX_ROWS:
            raise RefusedError(f"it has more than {MAX_ROWS} rows")
        at = [number for number in found.at if number is not None]
        weights, result = _rows_of_weights(found), group.specs[group.outputs[0]]
        bias = [group.specs[group.inputs[number]] for number in at[2:]]
        if weights is None or not all(map(is_contiguous, (found.left, result, *bias))):
            raise RefusedError("what it multiplies does not lie row by row")
        cols, inner, stride = weights
        return given(FewRows(rows, cols, inner, stride, found.left.dtype, len(at) > 2, result.shape).build, at)


def _rows_of_weights(found: Matmul) -> tuple[int, int, int] | None:
    """``(cols, inner, stride)`` of weights whose rows each lie in one piece."""
    spec: TensorSpec = found.right
    if len(spec.shape) != 2:
        return None
    (first, second), (outer, step) = spec.shape, spec.strides
    cols, inner, stride, step = (first, second, outer, step) if found.op == LINEAR else (second, first, step, outer)
    return (cols, inner, stride) if step == 1 and stride >= inner else None


FEW_ROWS = FewRowsMatmul()
