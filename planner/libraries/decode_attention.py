"""Attention of one query position by our own kernel: a library call like PyTorch's back ends, chosen by measurement."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass

from fuseplan.costmodel.devices import is_gpu, local_kind
from fuseplan.kernels.gpu.fixed import FixedFunction
from fuseplan.kernels.gpu.launch import interpreter_is_on
from fuseplan.kernels.gpu.tile import next_power_of_2
from fuseplan.kernels.ir.backend import SM90, Target
from fuseplan.kernels.ir.ir import ITEMSIZE
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.kernels.registry import local_target
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.graph.execute import bind_call
from fuseplan.planner.libraries.attention_calls import parsed
from fuseplan.planner.libraries.library_call import Call, LibraryCall, OpGroup
from fuseplan.planner.rewrites.attention_backends import Attention

_OP = "fuseplan.decode_attention.default"
#: Shared memory for blocks of keys and values that are on their way.
_SHARED_BYTES = 200 * 2**10
_WIDTHS = (16, 32, 64, 128, 256)
#: Blocks of keys that a program has at most where twice as many programs are faster.
_FEW_BLOCKS = 4
#: Elements of a head in float32 at most: more do not fit the registers.
_MOST_WIDE = 128
#: The kernel's arguments that are strides, in elements.
_STRIDES = (
    "query_batch", "query_head", "key_batch", "key_head", "key_row", "value_batch", "value_head", "value_row",
    "mask_batch", "mask_head", "mask_row", "out_batch", "out_head",
)


@dataclass(frozen=True)
class Pages:
    """How many pages of how many keys; type, strides and wrapping of negative numbers of the table ``[batch, blocks]``.
    """

    count: int
    rows: int
    dtype: str
    strides: tuple[int, int]
    wraps: bool


@dataclass(frozen=True)
class Decode:
    """Attention of one query position as the kernel computes it; with ``pages``, keys' first stride is that of pages.
    """

    call: Attention
    pages: Pages | None = None
    cap: float | None = None


@dataclass(frozen=True)
class SplitAttention(LibraryCall):
    """Keys split among programs, as many as fill the device."""

    name: str = "attention.split"
    #: Keys of a block, programs for each multiprocessor, warps of a program, and blocks on their way at most.
    rows: int = 64
    waves: int = 1
    warps: int = 2
    stages: int = 4

    def plan(self, group: OpGroup) -> Callable[[], Call]:
        if not is_gpu(group.device_type) and not interpreter_is_on():
            raise RefusedError("it runs on CUDA devices only")
        found = decode_of(group)
        if importlib.util.find_spec("triton") is None:
            raise RefusedError("triton is not installed")
        _check(found.call)
        return lambda: self._built(group, found)

    def _built(self, group: OpGroup, found: Decode) -> Call:
        names = _operands(group)
        # An address that is not read is the query's. Behind the inputs: numbers, counters and the output.
        query, key, value, table, mask = (group.inputs.index(name or names[0]) for name in names)
        result = group.specs[group.outputs[0]]
        shape, strides = result.shape, result.strides
        target = local_target(kind) if is_gpu(kind := local_kind()) else SM90
        fixed, numbers = self.kernel(found, (strides[0], strides[1]), target)
        inputs, pairs = len(group.inputs), found.call.sizes[0] * found.call.key.shape[1]
        places = (query, key, value, mask, inputs + 2, inputs, inputs + 1, table)
        layout = shape, strides, torch_dtype(result.dtype)
        return fixed.call(places, inputs, [layout], target, (numbers, pairs))

    def kernel(self, decode: Decode, out_strides: tuple[int, int], target: Target) -> tuple[FixedFunction, int]:
        """The kernel for these sizes, and how many float32 numbers of its own it takes."""
        from fuseplan.kernels.attention.decode_attention import TILE_HEADS, attend

        call, pages = decode.call, decode.pages
        batch, heads, _, length = call.sizes
        _, shared, _, width = call.key.shape
        group, pairs = heads // shared, batch * shared
        splits = self._splits(pairs, length, target)
        dtype = call.query.dtype
        mask_batch, mask_head, _, mask_row = call.mask_strides
        wide = dtype == "float32"
        # More threads for what tensor cores do not multiply, and where each program has a multiprocessor to itself.
        alone = splits == 1 and pairs <= target.cores
        warps = self.warps * (4 if wide else 2 if alone else 1)
        # With more than the usual threads the loops with and without a look at the mask have memory of their own.
        loops = 2 if warps > self.warps and call.mask is not None else 1
        block_bytes = loops * 2 * self.rows * width * ITEMSIZE[dtype]
        stages = 1 + max(1, min(self.stages - 1, _SHARED_BYTES // block_bytes))
        overlapped = not interpreter_is_on() and target.gpu.overlaps
        strides = [*call.query.strides[:2], *call.key.strides[:3], *call.value.strides[:3],
                   mask_batch, mask_head, mask_row, *out_strides]
        constants = {
            "length": length, "scale": call.scale if call.scale is not None else width**-0.5,
            **dict(zip(_STRIDES, strides, strict=True)), "pairs": pairs, "group": group,
            "lanes": max(TILE_HEADS, next_power_of_2(group)), "width": width, "rows": self.rows, "splits": splits,
            "key_heads": shared, "mask_kind": 0 if call.mask is None else 1 if call.mask.dtype == "bool" else 2,
            "mask_heads": mask_head != 0, "wide": wide or interpreter_is_on(), "overlapped": overlapped,
            "stages": stages, "page": pages.rows if pages else 0, "pages": pages.count if pages else 0,
            "table_batch": pages.strides[0] if pages else 0, "table_block": pages.strides[1] if pages else 0,
            "cap": decode.cap or 0.0, "wraps": pages is not None and pages.wraps,
        }
        mask = dtype if call.mask is None else call.mask.dtype
        pointers = {"query": dtype, "key": dtype, "value": dtype, "mask": mask, "out": dtype, "partial": "float32",
                    "counters": "int32", "table": pages.dtype if pages else dtype}
        fixed = FixedFunction(
            attend, tuple(pointers.items()), tuple(constants.items()), pairs * splits, warps, overlapped,
            asserts=pages is not None)
        return fixed, pairs * splits * group * (width + 2) if splits > 1 else 1

    def _splits(self, pairs: int, length: int, target: Target) -> int:
        """A power of two of splits that fills the device, each of a block at least; more where each would have few."""
        wanted = max(1, self.waves * target.cores // pairs)
        blocks = -(-length // self.rows)
        splits = next_power_of_2(min(wanted, blocks) // 2 + 1)
        return 2 * splits if splits > 1 and 2 * splits <= blocks <= _FEW_BLOCKS * splits else splits


def decode_of(group: OpGroup) -> Decode:
    """What the kernel is to compute for a group; RefusedError where that is nothing of its own."""
    if group.node.op != _OP:
        return Decode(parsed(group))
    *names, listed, masked = _operands(group)
    (query, key, value), mask = (group.specs[name] for name in names), group.specs[masked] if masked else None
    kwargs = bind_call(group.node, group.node.inputs)[1]
    scale, cap = kwargs.get("scale"), kwargs.get("cap")
    if not all(one is None or 0 < one < math.inf for one in (scale, cap)):
        raise RefusedError("its scale or cap is not positive")
    pages = None
    if listed is not None:
        table = group.specs[listed]
        if table.dtype not in ("int32", "int64") or key.shape != value.shape or len(key.shape) != 4:
            raise RefusedError("its pages are not listed by integers, or differ in shape")
        (batch, blocks), strides = table.shape, table.strides
        count, _, rows, _ = key.shape
        pages = Pages(count, rows, table.dtype, (strides[0], strides[1]), bool(kwargs.get("wraps", True)))
        # As they would lie if all of a sequence's pages followed one another; only the first stride is that of pages.
        shape = batch, key.shape[1], blocks * rows, key.shape[3]
        key, value = (TensorSpec(shape, one.dtype, one.strides) for one in (key, value))
    call = Attention(query, key, value, mask, False, scale, True, group.device_type)
    if reason := call.why_not_plain():
        raise RefusedError(reason)
    return Decode(call, pages, cap)


def _operands(group: OpGroup) -> tuple[str, str, str, str | None, str | None]:
    """Names of query, keys, values, block table and mask."""
    args = bind_call(group.node, group.node.inputs)[0]
    query, key, value, table, mask = args if group.node.op == _OP else (*args[:3], None, args[3])
    return query, key, value, table, mask


def _check(call: Attention) -> None:
    """Raises RefusedError for what the kernel cannot compute."""
    _, heads, positions, length = call.sizes
    if positions != 1:
        raise RefusedError("there are several query positions")
    if call.causal and length > 1:
        raise RefusedError("it is causal: only the first key is seen")
    _, shared, _, width = call.key.shape
    if width not in _WIDTHS or call.value.shape[3] != width:
        raise RefusedError(f"heads are not of {', '.join(map(str, _WIDTHS))} elements")
    if call.query.dtype == "float64" or (call.query.dtype == "float32" and width > _MOST_WIDE):
        raise RefusedError(f"it does not compute heads of {width} elements in {call.query.dtype}")
    if any(one.strides[3] != 1 for one in (call.query, call.key, call.value)):
        raise RefusedError("elements of a head are not next to each other")
    if heads % shared:
        raise RefusedError("heads do not share keys evenly")
