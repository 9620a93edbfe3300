"""A matmul of few rows on a CPU by our own kernel: a call like those of libraries, chosen by measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.costmodel.devices import is_cpu
from fuseplan.kernels.cpp.matmul import MAX_ROWS, FewRows
from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.native.build import required_compiler
from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.libraries.library_call import Call, OpGroup
from fuseplan.planner.libraries.matmul_calls import LINEAR, Matmul, is_contiguous, read_matmul


@dataclass(frozen=True)
class FewRowsMatmul:
    """Each row of the weights read once (:class:`~fuseplan.planner.libraries.library_call.LibraryCall`)."""

    name: str = "matmul.rows"

    def refuse(self, group: OpGroup) -> str | None:
        found = _kernel(group)
        if isinstance(found, str):
            return found
        try:
            required_compiler()
        except BuildError as error:
            return str(error)
        return None

    def build(self, group: OpGroup) -> Call:
        """The call; ValueError where the group is none that it takes."""
        found = _kernel(group)
        if isinstance(found, str):
            raise ValueError(f"{self.name} cannot run {group.outputs}: {found}")
        kernel, at = found
        call = kernel.build()

        def run(*inputs: object) -> object:
            return call(*(inputs[number] for number in at))

        return run


def _kernel(group: OpGroup) -> tuple[FewRows, Sequence[int]] | str:
    """The kernel, and the numbers of its operands among the group's inputs; or why there is none."""
    found = read_matmul(group)
    if isinstance(found, str):
        return found
    if not is_cpu(found.device_type):
        return "it runs on CPUs only"
    rows = math.prod(map(int, found.left.shape[:-1]))
    if rows > MAX_ROWS:
        return f"it has more than {MAX_ROWS} rows"
    weights = _rows_of_weights(found)
    result = group.specs[group.outputs[0]]
    given = [group.specs[group.inputs[number]] for number in found.at if number is not None]
    if weights is None or not all(is_contiguous(one) for one in (found.left, result, *given[2:])):
        return "what it multiplies does not lie row by row"
    cols, inner, stride = weights
    kernel = FewRows(rows, cols, inner, stride, found.left.dtype, len(given) > 2, tuple(map(int, result.shape)))
    return kernel, [number for number in found.at if number is not None]


def _rows_of_weights(found: Matmul) -> tuple[int, int, int] | None:
    """``(cols, inner, stride)`` of weights whose rows each lie in one piece."""
    spec: TensorSpec = found.right
    if len(spec.shape) != 2:
        return None
    (first, second), (outer, step) = (tuple(map(int, sizes)) for sizes in (spec.shape, spec.strides))
    cols, inner, stride, step = (first, second, outer, step) if found.op == LINEAR else (second, first, step, outer)
    return (cols, inner, stride) if step == 1 and stride >= inner else None
