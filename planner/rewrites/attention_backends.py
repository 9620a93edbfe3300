"""What each back end of PyTorch's attention can compute on a GPU, by the rules of its ``sdp_utils.cpp``.

Where there is a CUDA device PyTorch is asked as well: its architecture and what the user switched off matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from fuseplan.kernels.ir.ir import ITEMSIZE
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.graph.dataflow import TensorSpec
from fuseplan.planner.rewrites.attention_call import can_use

_HALVES = ("float16", "bfloat16")
#: Flash kernels read heads in steps of so many elements; the efficient kernel reads masks so.
STEP = 8
#: Bytes that CUDA kernels read at once: rows have to start at a multiple.
_VECTOR_BYTES = 16
#: Batches and heads are dimensions of a grid.
_MOST_BLOCKS = 65535
_WIDEST = 256


@dataclass(frozen=True)
class Attention:
    """One call of attention with static sizes.

    Attributes:
        query: ``[batch, heads, positions, width]``.
        key, value: ``[batch, kv heads, length, width]``.
        mask: Broadcast to ``[batch, heads, positions, length]``; None without one.
        shared: Groups of query heads read one key and value head (``enable_gqa``).
    """

    query: TensorSpec
    key: TensorSpec
    value: TensorSpec
    mask: TensorSpec | None
    causal: bool
    scale: float | None
    shared: bool
    device_type: str

    @property
    def operands(self) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        return self.query, self.key, self.value

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Batch, heads, query positions and keys."""
        batch, heads, positions = self.query.shape[:3]
        return batch, heads, positions, self.key.shape[2]

    @property
    def widths(self) -> tuple[int, ...]:
        """Of query, key and value."""
        return tuple(spec.shape[3] for spec in self.operands)

    @property
    def group(self) -> int:
        """Query heads to one key head."""
        return int(self.query.shape[1] // self.key.shape[1])

    @property
    def mask_strides(self) -> tuple[int, int, int, int]:
        """Of the mask along batch, heads, positions and keys, 0 where it is broadcast or there is none."""
        if self.mask is None:
            return 0, 0, 0, 0
        pairs = zip(self.mask.shape, self.mask.strides, strict=True)
        own = [0 if extent == 1 else stride for extent, stride in pairs]
        batch, heads, positions, keys = [0] * (4 - len(own)) + own
        return batch, heads, positions, keys

    def why_not_plain(self) -> str | None:
        """Why it is more than attention over four dimensions, whichever back end computes it; None when it is that."""
        if len({spec.dtype for spec in self.operands}) != 1:
            return "query, key and value have different types"
        if any(len(spec.shape) != 4 for spec in self.operands):
            return "query, key and value do not all have four dimensions"
        if self.mask is not None and self.mask.dtype not in ("bool", "float32", self.query.dtype):
            return f"a mask of {self.mask.dtype}"
        if self.mask is not None and self.causal:
            return "it is causal and has a mask"
        batch, heads, *_ = self.sizes
        if any(size == 0 for spec in self.operands for size in spec.shape):
            return "a tensor is empty"
        if self.key.shape[0] != batch or self.value.shape[0] != batch:
            return "the batch is broadcast"
        if self.key.shape[1] != self.value.shape[1]:
            return "keys and values have different numbers of heads"
        if self.key.shape[1] != heads and (not self.shared or heads % self.key.shape[1]):
            return "heads are broadcast without enable_gqa"
        if self.mask is not None and not fits_scores(self.mask.shape, self.sizes):
            return f"a mask of {list(self.mask.shape)} for scores of {list(self.sizes)}"
        return None

    def repeated(self) -> Attention:
        """The call with keys and values copied for every query head."""
        if self.group == 1:
            return self
        heads = self.query.shape[1]
        key, value = (TensorSpec.contiguous((spec.shape[0], heads, *spec.shape[2:]), spec.dtype)
                      for spec in (self.key, self.value))
        return replace(self, key=key, value=value, shared=False)


def fits_scores(mask: Sequence[int], scores: Sequence[int]) -> bool:
    """Whether a mask of a shape says something of each score, and no more is broadcast than all but the keys."""
    if not 2 <= len(mask) <= 4 or mask[-1] != scores[-1]:
        return False
    return all(own in (1, its) for own, its in zip(mask, scores[-len(mask) :], strict=True))


def _refuse_flash(call: Attention) -> str | None:
    if len(set(call.widths)) != 1:
        return "query, key and value have different widths"
    if call.mask is not None:
        return "flash attention takes no mask"
    if call.widths[0] > _WIDEST:
        return f"heads are wider than {_WIDEST}"
    if call.causal and call.query.shape[2] != call.key.shape[2]:
        return "flash attention aligns a causal mask with the last key, ATen with the first"
    # Heads of another width are copied first.
    read = call.operands if call.widths[0] % STEP == 0 else ()
    return _not_halves(call) or _strided(call, read) or _device_reason("flash", call)


def _refuse_efficient(call: Attention) -> str | None:
    if call.query.dtype not in (*_HALVES, "float32"):
        return f"the efficient kernel does not compute in {call.query.dtype}"
    if call.mask is not None and call.mask.dtype not in ("bool", call.query.dtype):
        return "the mask has another type than the query"
    step = _VECTOR_BYTES // ITEMSIZE[call.query.dtype]
    if any(width % step for width in call.widths) or call.widths[0] != call.widths[1]:
        return f"heads are not a multiple of {step} wide, or queries and keys differ"
    call = call.repeated()
    return _strided(call, call.operands) or _device_reason("efficient", call)


def _refuse_cudnn(call: Attention) -> str | None:
    if not all(width % STEP == 0 and width <= _WIDEST for width in call.widths):
        return f"heads are not a multiple of {STEP} wide, or wider than {_WIDEST}"
    if call.widths[0] != call.widths[1]:
        return "queries and keys have different widths"
    if call.key.shape[2] == 1:
        return "cuDNN takes no single key"
    if call.mask is not None and call.mask.dtype != "bool":
        if call.mask.dtype != call.query.dtype:
            return "the mask has another type than the query"
        if call.mask.strides[-1] != 1:
            return "elements of the mask do not follow one another"
    return _not_halves(call) or _strided(call, call.operands) or _device_reason("cudnn", call)


def _refuse_math(call: Attention) -> str | None:
    known = (*_HALVES, "float32", "float64")
    return None if call.query.dtype in known else f"it does not compute in {call.query.dtype}"


#: Why each back end cannot run a call; None when it can.
BACKENDS: dict[str, Callable[[Attention], str | None]] = {
    "flash": _refuse_flash, "efficient": _refuse_efficient, "cudnn": _refuse_cudnn, "math": _refuse_math,
}


def _not_halves(call: Attention) -> str | None:
    return None if call.query.dtype in _HALVES else f"it does not compute in {call.query.dtype}"


def _strided(call: Attention, read: Sequence[TensorSpec]) -> str | None:
    """Why kernels could not read some operands as they lie."""
    if any(spec.strides[3] != 1 for spec in read):
        return "elements of a head do not follow one another"
    if max(call.sizes[:2]) > _MOST_BLOCKS:
        return f"more than {_MOST_BLOCKS} sequences or heads"
    step = _VECTOR_BYTES // ITEMSIZE[call.query.dtype]
    if any(stride % step for spec in read for size, stride in zip(spec.shape, spec.strides, strict=True)
           if size != 1 and stride != 1):
        return f"heads do not start at multiples of {_VECTOR_BYTES} bytes"
    return None


def _device_reason(backend: str, call: Attention) -> str | None:
    """Why PyTorch says no on this device. Without a CUDA device nobody is asked."""
    if not torch.cuda.is_available() or can_use(backend, fake_call(call)):
        return None
    return f"PyTorch's can_use_{backend}_attention says no on this device"


@cache
def _settle_order() -> None:
    """PyTorch settles its order of preference when attention is first called: a fake call will do."""
    query = torch.empty((1, 1, 8, 64), dtype=torch.bfloat16, device="cuda")
    torch.nn.functional.scaled_dot_product_attention(query, query, query)


def fake_call(call: Attention) -> dict[str, Any]:
    """The arguments of a call by name, with tensors that have no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        if torch.cuda.is_available():
            _settle_order()
        query, key, value, mask = (
            None if spec is None else torch.empty_strided(
                spec.shape, spec.strides, dtype=torch_dtype(spec.dtype), device=call.device_type)
            for spec in (*call.operands, call.mask)
        )
    return {"query": query, "key": key, "value": value, "attn_mask": mask, "dropout_p": 0.0,
            "is_causal": call.causal, "scale": call.scale, "enable_gqa": call.shared}
