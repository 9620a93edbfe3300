"""Attention of few query rows on a CPU by our own kernel: a call like those of libraries, chosen by measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuseplan.kernels.attention.few_rows import MAX_ROWS, MAX_WIDTH, FewRowsAttention
from fuseplan.kernels.ir.ir import Buffer
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.graph.execute import bind_call
from fuseplan.planner.libraries.attention_calls import parsed
from fuseplan.planner.libraries.library_call import Call, LibraryCall, OpGroup, check_cpu, given
from fuseplan.planner.rewrites.attention_backends import Attention


@dataclass(frozen=True)
class RowsAttention(LibraryCall):
    """Each key and value read once, and none of a block of keys that the mask hides."""

    name: str = "attention.rows"
    by_rule: bool = True

    def surpasses(self, group: OpGroup) -> bool:
        """As measured with AVX-512 (results/amd-epyc-family-26-model-2/few-rows.md)."""
        return torch.backends.cpu.get_cpu_capability() == "AVX512" and self.refuse(group) is None

    def plan(self, group: OpGroup) -> Callable[[], Call]:
        call = parsed(group)
        check_cpu(group.device_type)
        _check(call)
        result = group.specs[group.outputs[0]]
        if result.strides[3] != 1:
            raise RefusedError("elements of a result are not next to each other")
        names = bind_call(group.node, group.node.inputs)[0][:4]  # query, key, value and mask
        at = [group.inputs.index(name) for name in names if name is not None]
        scale = call.scale if call.scale is not None else call.query.shape[3] ** -0.5
        mask = None if call.mask is None else _buffer("mask", call.mask)
        operands = (_buffer("query", call.query), _buffer("key", call.key), _buffer("value", call.value))
        kernel = FewRowsAttention(
            call.query.dtype, *operands, _buffer("out", result, is_output=True), mask, call.mask_strides, scale)
        return given(kernel.build, at)


def _buffer(name: str, spec: TensorSpec, is_output: bool = False) -> Buffer:
    return Buffer(name, spec.dtype, spec.shape, spec.strides, is_output)


def _check(call: Attention) -> None:
    """Raises RefusedError for what the kernel cannot compute."""
    _, _, positions, length = call.sizes
    if call.causal and (positions > 1 or length > 1):
        raise RefusedError("it is causal, with no mask that says so")
    if call.group * positions > MAX_ROWS:
        raise RefusedError(f"more than {MAX_ROWS} query rows read one head of keys")
    if max(call.widths) > MAX_WIDTH:
        raise RefusedError(f"heads are wider than {MAX_WIDTH}")
    if call.query.dtype not in ("float32", "bfloat16", "float16"):
        raise RefusedError(f"it does not compute in {call.query.dtype}")
    if any(one.strides[3] != 1 for one in call.operands):
        raise RefusedError("elements of a head are not next to each other")


ROWS_ATTENTION = RowsAttention()
