"""``topk`` and ``sort`` of short rows, as of a token's experts, by our own GPU kernel: one launch, where ATen has
three.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass

from fuseplan.costmodel.devices import is_gpu, local_kind
from fuseplan.kernels.gpu.fixed import FixedFunction
from fuseplan.kernels.gpu.launch import interpreter_is_on
from fuseplan.kernels.gpu.tile import next_power_of_2
from fuseplan.kernels.ir.backend import SM90, OutputLayout
from fuseplan.kernels.ir.index import row_major_strides
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.kernels.registry import local_target
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.libraries.library_call import Call, LibraryCall, OpGroup
from fuseplan.planner.libraries.matmul_calls import is_contiguous
from fuseplan.planner.ops.positions import normalise_dim
from fuseplan.planner.ops.table import op_of

#: Elements of a row at most, and comparisons: each is compared with every other, and ATen's ops need fewer.
MOST_COLUMNS, MOST_COMPARED = 512, 2**24


@dataclass(frozen=True)
class ShortRows(LibraryCall):
    """Each element's place by counting those before it. Equal ones keep their order."""

    name: str = "order.ranks"
    by_rule: bool = True

    def plan(self, group: OpGroup) -> Callable[[], Call]:
        if op_of(group.node.op).family != "order":
            raise RefusedError("it puts elements in order")
        if not is_gpu(group.device_type) and not interpreter_is_on():
            raise RefusedError("it runs on CUDA devices only")
        if importlib.util.find_spec("triton") is None:
            raise RefusedError("triton is not installed")
        fixed = _kernel(group)
        return lambda: _built(group, fixed)


def _kernel(group: OpGroup) -> FixedFunction:
    """The kernel for a group's sizes; RefusedError where it is none of short rows."""
    from fuseplan.kernels.selection.ranks import put_in_order

    node, source = group.node, group.specs[group.inputs[0]]
    shape, rank = source.shape, len(source.shape)
    if not rank or normalise_dim(node.attrs.get("dim", -1), rank) != rank - 1:
        raise RefusedError("it orders another dimension than the last")
    columns, count = shape[-1], math.prod(shape[:-1])
    if not 1 < columns <= MOST_COLUMNS or not count:
        raise RefusedError(f"a row has {columns} elements, and it orders 2 to {MOST_COLUMNS}")
    if count * columns**2 > MOST_COMPARED:
        raise RefusedError(f"{count} rows of {columns} elements take it longer than ATen's launches")
    if source.dtype in ("bool", "float8_e4m3fn"):
        raise RefusedError(f"of dtype {source.dtype}")
    kept = int(node.attrs.get("k", columns))
    if not kept:
        raise RefusedError("it keeps no element")
    if not all(is_contiguous(group.specs[name]) for name in group.outputs):
        raise RefusedError("its results do not lie row by row")
    descending = bool(node.attrs.get("largest", True) if "k" in node.attrs else node.attrs.get("descending", False))
    lanes = max(32, next_power_of_2(columns))
    constants = {
        "columns": columns, "lanes": lanes, "row_stride": _row_stride(source),
        "column_stride": source.strides[-1], "kept": kept, "descending": descending,
        "gives_values": node.outputs[0] in group.outputs, "gives_places": node.outputs[1] in group.outputs,
    }
    pointers = ("source", source.dtype), ("values", source.dtype), ("places", "int64")
    return FixedFunction(put_in_order, pointers, tuple(constants.items()), count, max(1, min(8, lanes // 16)))


def _built(group: OpGroup, fixed: FixedFunction) -> Call:
    specs = [group.specs[name] for name in group.outputs]
    layouts: list[OutputLayout] = [
        (one.shape, one.strides, torch_dtype(one.dtype)) for one in specs]
    # An address that is not written is the source's.
    places = [1 + group.outputs.index(name) if name in group.outputs else 0 for name in group.node.outputs]
    target = local_target(kind) if is_gpu(kind := local_kind()) else SM90
    return fixed.call((0, *places), 1, layouts, target)


def _row_stride(spec: TensorSpec) -> int:
    """How far rows lie apart; RefusedError where that differs from row to row."""
    shape, strides = spec.shape, spec.strides
    outer = [(extent, stride) for extent, stride in zip(shape[:-1], strides[:-1], strict=True) if extent != 1]
    if not outer:
        return 0
    step = outer[-1][1]
    expected = [one * step for one in row_major_strides([extent for extent, _ in outer])]
    if [stride for _, stride in outer] != expected:
        raise RefusedError("its rows are not evenly apart")
    return int(step)
