"""PyTorch's attention, one back end at a time: each is a library call that a plan may choose.

Its op is called directly: ``torch.nn.attention.sdpa_kernel`` would switch the whole process. So what
``aten/src/ATen/native/transformers/attention.cpp`` does before is done here: heads are padded to a multiple of 8 for
flash, boolean masks become numbers, masks get the efficient kernel's strides, and keys are repeated where not shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

from fuseplan.costmodel.devices import is_cpu, is_gpu
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.execute import bind_call
from fuseplan.planner.graph.layouts import laid_out
from fuseplan.planner.libraries.library_call import Call, LibraryCall, OpGroup
from fuseplan.planner.rewrites.attention_backends import BACKENDS, STEP, Attention, fake_call
from fuseplan.planner.rewrites.attention_call import masked_number

_aten = torch.ops.aten
_OP = "aten.scaled_dot_product_attention.default"

_Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class AttentionCall(LibraryCall):
    """Attention by one of ``BACKENDS``."""

    backend: str

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"sdpa.{self.backend}"

    def plan(self, group: OpGroup) -> Callable[[], Call]:
        if self.backend in ("efficient", "cudnn") and not is_gpu(group.device_type):
            raise RefusedError("it runs on CUDA devices only")
        call = parsed(group)
        if self.backend == "flash" and is_cpu(group.device_type):  # sdp_utils_cpp.cpp
            raise RefusedError("on CPUs it is what ATen's op calls")
        if reason := BACKENDS[self.backend](call):
            raise RefusedError(reason)
        return lambda: self._built(group, call)

    def _built(self, group: OpGroup, call: Attention) -> Call:
        attend, numbers = _BUILDERS[self.backend](call), _numbers(call, self.backend)
        names = bind_call(group.node, group.node.inputs)[0][:4]  # query, key, value and mask
        first, second, third, *last = (group.inputs.index(name) for name in names if name is not None)
        masked_by, result = last[0] if last else None, group.specs[group.outputs[0]]
        shape, strides = result.shape, result.strides

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            mask = None if masked_by is None else numbers(inputs[masked_by])
            found = attend(inputs[first], inputs[second], inputs[third], mask)
            return found if found.stride() == strides else laid_out(found, shape, strides)

        return run


def parsed(group: OpGroup) -> Attention:
    """The call that a group is; RefusedError where it is none that a back end could run."""
    if group.node.op != _OP:
        raise RefusedError("it is no call of attention")
    args, kwargs = bind_call(group.node, group.node.inputs)
    query, key, value = (group.specs[name] for name in args[:3])
    mask = None if args[3] is None else group.specs[args[3]]
    dropout, causal, scale = args[4], bool(args[5]), kwargs.get("scale")
    if dropout != 0.0:
        raise RefusedError("dropout draws random numbers")
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise RefusedError("kernels multiply what is masked by a scale that is not positive")
    call = Attention(query, key, value, mask, causal, scale, bool(kwargs.get("enable_gqa")), group.device_type)
    if reason := call.why_not_plain():
        raise RefusedError(reason)
    return call


def _numbers(call: Attention, backend: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes of the mask of a call what a back end reads."""
    if call.mask is None:
        return lambda mask: mask
    shape, strides = call.mask.shape, call.mask.strides
    # Rows start at multiples that the efficient kernel can read.
    step = STEP if backend == "efficient" else 1
    if call.mask.dtype == "bool":
        hidden = masked_number(fake_call(call)) if is_gpu(call.device_type) else -math.inf
        room, dtype = (*shape[:-1], -(-shape[-1] // step) * step), torch_dtype(call.query.dtype)

        def read(mask: torch.Tensor) -> torch.Tensor:
            return mask.new_full(room, hidden, dtype=dtype)[..., : shape[-1]].masked_fill_(mask, 0.0)

    elif step == 1 or (strides[-1] == 1 and not any(stride % step for stride in strides[:-1])):

        def read(mask: torch.Tensor) -> torch.Tensor:
            return mask

    else:

        def read(mask: torch.Tensor) -> torch.Tensor:
            return pad(mask, (0, step - shape[-1] % step))[..., : shape[-1]]

    if backend == "math":
        return read
    batch, heads, positions, length = call.sizes
    if backend == "cudnn":
        heads = shape[-3] if len(shape) > 2 else 1
    return lambda mask: read(mask).expand(batch, heads, positions, length)


def _build_flash(call: Attention) -> _Attend:
    width, causal = call.query.shape[3], call.causal
    flash, scale = _aten._scaled_dot_product_flash_attention.default, call.scale or width**-0.5

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return flash(query, key, value, 0.0, causal, False, scale=scale)[0]

    def attend_padded(query: Any, key: Any, value: Any, mask: Any) -> Any:
        query, key, value = (pad(one, (0, -width % STEP)) for one in (query, key, value))
        return attend(query, key, value, mask)[..., :width]

    return attend if width % STEP == 0 else attend_padded


def _build_efficient(call: Attention) -> _Attend:
    efficient, times = _aten._scaled_dot_product_efficient_attention.default, call.group
    causal, scale = call.causal, call.scale

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        if times != 1:
            key, value = (one.repeat_interleave(times, 1) for one in (key, value))
        return efficient(query, key, value, mask, False, 0.0, causal, scale=scale)[0]

    return attend


def _build_cudnn(call: Attention) -> _Attend:
    cudnn, causal, scale = _aten._scaled_dot_product_cudnn_attention.default, call.causal, call.scale
    return lambda query, key, value, mask: cudnn(
        query, key, value, mask, False, 0.0, causal, False, scale=scale)[0]


def _build_math(call: Attention) -> _Attend:
    by_ops, causal, scale = _aten._scaled_dot_product_attention_math.default, call.causal, call.scale
    shared = call.shared
    return lambda query, key, value, mask: by_ops(
        query, key, value, mask, 0.0, causal, None, scale=scale, enable_gqa=shared)[0]


_BUILDERS: dict[str, Callable[[Attention], _Attend]] = {
    "flash": _build_flash, "efficient": _build_efficient, "cudnn": _build_cudnn, "math": _build_math,
}

ATTENTION_CALLS = tuple(map(AttentionCall, BACKENDS))
