"""Attention of one query position by our own kernel: a library call like PyTorch's back ends, chosen by measurement."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from fuseplan.kernels.gpu.launch import interpreter_is_on
from fuseplan.kernels.gpu.scratch import Counters
from fuseplan.kernels.gpu.tile import next_power_of_2
from fuseplan.kernels.ir.dtypes import torch_dtype
from fuseplan.planner.graph.execute import bind_call
from fuseplan.planner.libraries.attention_calls import parsed
from fuseplan.planner.libraries.library_call import Call, OpGroup
from fuseplan.planner.rewrites.attention_backends import Attention, whole_numbers

#: Shared memory for blocks of keys and values that are on their way.
_SHARED_BYTES = 200 * 2**10
_WIDTHS = (16, 32, 64, 128, 256)
#: Elements of a head in float32 at most: more do not fit the registers.
_MOST_WIDE = 128


@dataclass(frozen=True)
class SplitAttention:
    """Keys split among programs, as many as fill the device; a
    :class:`~fuseplan.planner.libraries.library_call.LibraryCall`.
    """

    name: str = "attention.split"
    #: Keys of a block, programs for each multiprocessor, warps of a program, and blocks on their way at most.
    rows: int = 64
    waves: int = 1
    warps: int = 2
    stages: int = 4

    def refuse(self, group: OpGroup) -> str | None:
        if group.device_type != "cuda" and not interpreter_is_on():
            return "it runs on CUDA devices only"
        call = parsed(group)
        if isinstance(call, str):
            return call
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        return _refused(call)

    def build(self, group: OpGroup) -> Call:
        """The call; ValueError where the group is none that it takes."""
        call = parsed(group)
        if isinstance(call, str) or _refused(call):
            raise ValueError(f"{self.name} cannot run {group.outputs}: {call}")
        from fuseplan.kernels.triton.decode_attention import TILE_HEADS, attend

        names = bind_call(group.node, group.node.inputs)[0][:4]
        first, second, third, *last = (group.inputs.index(name) for name in names if name is not None)
        batch, heads, _, length = call.sizes
        shared, width = (int(call.key.shape[dim]) for dim in (1, 3))
        lanes = max(TILE_HEADS, next_power_of_2(heads // shared))
        spec = group.specs[group.outputs[0]]
        shape, strides = whole_numbers(spec.shape), whole_numbers(spec.strides)
        dtype = torch_dtype(spec.dtype)
        kind = 0 if call.mask is None else 1 if call.mask.dtype == "bool" else 2
        masked = _mask_strides(call)
        sizes = [whole_numbers(one.strides)[:dims] for one, dims in ((call.query, 2), (call.key, 3), (call.value, 3))]
        flat = [stride for own in sizes for stride in own]
        scale = call.scale if call.scale is not None else width**-0.5
        pairs, splits = batch * shared, self._splits(batch * shared, length)
        block_bytes = 2 * self.rows * width * dtype.itemsize
        # What tensor cores do not multiply takes more threads.
        warps = 4 * self.warps if dtype == torch.float32 else self.warps
        stages = 1 + max(1, min(self.stages - 1, _SHARED_BYTES // block_bytes))
        counters = Counters(pairs)
        overlapped = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            query = inputs[first]
            out = torch.empty_strided(shape, strides, dtype=dtype, device=query.device)
            count = pairs * splits * (heads // shared)
            work = torch.empty(count * (width + 2), dtype=torch.float32, device=query.device)
            partial, sums = work[: count * width], work[count * width :]
            attend[(pairs, splits)](
                query, inputs[second], inputs[third], inputs[last[0]] if last else query, partial, sums,
                counters.of(query), out, length, scale, *flat, *masked, strides[0], strides[1],
                group=heads // shared, lanes=lanes, width=width, rows=self.rows, splits=splits, key_heads=shared,
                mask_kind=kind, mask_heads=masked[1] != 0, wide=query.dtype == torch.float32 or interpreter_is_on(),
                num_warps=warps, stages=stages, overlapped=overlapped,
                **({"launch_pdl": True} if overlapped else {}),
            )
            return out

        return run

    def _splits(self, pairs: int, length: int) -> int:
        """Splits that fill the device, of at least one block each: a power of two."""
        cores = torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 4
        wanted = max(1, self.waves * cores // pairs)
        blocks = -(-length // self.rows)
        return next_power_of_2(min(wanted, blocks) // 2 + 1)


def _refused(call: Attention) -> str | None:
    _, heads, positions, length = call.sizes
    if positions != 1:
        return "there are several query positions"
    if call.causal and length > 1:
        return "it is causal: only the first key is seen"
    width, shared = int(call.key.shape[3]), int(call.key.shape[1])
    if width not in _WIDTHS or int(call.value.shape[3]) != width:
        return f"heads are not of {', '.join(map(str, _WIDTHS))} elements"
    if call.query.dtype == "float64" or (call.query.dtype == "float32" and width > _MOST_WIDE):
        return f"it does not compute heads of {width} elements in {call.query.dtype}"
    if any(whole_numbers(one.strides)[3] != 1 for one in (call.query, call.key, call.value)):
        return "elements of a head are not next to each other"
    if heads % shared:
        return "heads do not share keys evenly"
    return None


def _mask_strides(call: Attention) -> tuple[int, int, int]:
    """Strides of the mask along batch, heads and keys, 0 where it is broadcast."""
    if call.mask is None:
        return 0, 0, 0
    pairs = list(zip(whole_numbers(call.mask.shape), whole_numbers(call.mask.strides), strict=True))
    own = [0 if extent == 1 else stride for extent, stride in pairs]
    batch, heads, _, keys = [0] * (4 - len(own)) + own
    return batch, heads, keys


DECODE_CALLS = (SplitAttention(),)
