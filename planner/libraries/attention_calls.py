"""PyTorch's attention, one back end at a time: each is a library call that a plan may choose.

``scaled_dot_product_attention`` takes the first back end of a fixed order that can run a call. Here the op of one back
end is called directly. A switch such as ``torch.nn.attention.sdpa_kernel`` would be the whole process's.

What the composite op does before it calls a back end (``aten/src/ATen/native/transformers/attention.cpp``) is done
here, too: heads are padded to a multiple of 8 for flash, boolean masks become numbers, masks get the strides that the
efficient kernel wants, and keys are repeated for back ends that cannot share them. The rules for what is refused are
in :mod:`~fuseplan.planner.rewrites.attention_backends`.

With one query position, the query heads that share keys are as good as positions of one head:
``[batch, kv * group, 1, width]`` is read as ``[batch, kv, group, width]``. That is the ``folded`` form of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

from fuseplan.kernels.ir.dtypes import torch_dtype
from fuseplan.planner.graph.execute import bind_call
from fuseplan.planner.graph.layouts import laid_out
from fuseplan.planner.libraries.library_call import Call, OpGroup
from fuseplan.planner.rewrites.attention_backends import (
    BACKENDS,
    STEP,
    Attention,
    fake_call,
    folded,
    is_whole_step,
    whole_numbers,
    why_not_foldable,
    why_not_plain,
)
from fuseplan.planner.rewrites.attention_call import masked_number

__all__ = ["ATTENTION_CALLS", "AttentionCall"]

_aten = torch.ops.aten
_OP = "aten.scaled_dot_product_attention.default"

_Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """Attention by one back end of PyTorch (implements
    :class:`~fuseplan.planner.libraries.library_call.LibraryCall`).

    The back end is ``"flash"``, ``"efficient"``, ``"cudnn"`` or ``"math"``. ``folded``: query heads of a group are
    positions of one head.
    """

    backend: str
    folded: bool = False

    @property
    def name(self) -> str:
        return f"sdpa.{self.backend}" + (".folded" if self.folded else "")

    def refuse(self, group: OpGroup) -> str | None:
        if self.backend in ("efficient", "cudnn") and group.device_type != "cuda":
            return "it runs on CUDA devices only"
        call = _parsed(group)
        if isinstance(call, str):
            return call
        if self.folded:
            reason = why_not_foldable(call)
            if reason is not None:
                return reason
            call = folded(call)
        return BACKENDS[self.backend](call)

    def build(self, group: OpGroup) -> Call:
        """The call.

        Raises:
            ValueError: The group is none that it takes.
        """
        whole = _parsed(group)
        if isinstance(whole, str):
            raise ValueError(f"{self.name} cannot run {group.outputs}: {whole}")
        call = folded(whole) if self.folded else whole
        attend = _BUILDERS[self.backend](call, _numbers(whole, aligned=self.backend == "efficient"))
        names = bind_call(group.node, group.node.inputs)[0][:4]  # query, key, value and mask
        first, second, third, *last = (group.inputs.index(name) for name in names if name is not None)
        masked_by, (result,) = last[0] if last else None, group.outputs
        shape, strides = (whole_numbers(sizes) for sizes in (group.specs[result].shape, group.specs[result].strides))
        positions = whole_numbers(call.query.shape)

        def attend_folded(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
            return attend(query.reshape(positions), key, value, mask).reshape(shape)

        compute = attend_folded if self.folded else attend

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            mask = None if masked_by is None else inputs[masked_by]
            found = compute(inputs[first], inputs[second], inputs[third], mask)
            return found if found.stride() == strides else laid_out(found, shape, strides)

        return run


# -- reading a group --------------------------------------------------------------------------------------


def _parsed(group: OpGroup) -> Attention | str:
    """The call that a group is, or why it is none that a back end could run."""
    if group.node.op != _OP:
        return "it is no call of attention"
    specs = [group.specs[name] for name in (*group.inputs, *group.outputs)]
    if not all(spec.is_static for spec in specs):
        return "its sizes are not static"
    args, kwargs = bind_call(group.node, group.node.inputs)
    query, key, value = (group.specs[name] for name in args[:3])
    mask = None if args[3] is None else group.specs[args[3]]
    dropout, causal, scale = args[4], bool(args[5]), kwargs.get("scale")
    if dropout != 0.0:
        return "dropout draws random numbers"
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        return "kernels multiply what is masked by a scale that is not positive"
    call = Attention(query, key, value, mask, causal, scale, bool(kwargs.get("enable_gqa")), group.device_type)
    return why_not_plain(call) or call


# -- calls ------------------------------------------------------------------------------------------------

#: Makes of a mask what a back end reads.
_Mask: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def _numbers(call: Attention, aligned: bool) -> _Mask:
    """How a mask becomes numbers; with ``aligned`` its rows start at multiples that the efficient kernel can read."""
    if call.mask is None:
        return lambda mask: mask
    shape, strides, step = whole_numbers(call.mask.shape), whole_numbers(call.mask.strides), STEP if aligned else 1
    if call.mask.dtype == "bool":
        hidden = masked_number(fake_call(call)) if call.device_type == "cuda" else -math.inf
        room, dtype = (*shape[:-1], -(-shape[-1] // step) * step), torch_dtype(call.query.dtype)
        return lambda mask: mask.new_full(room, hidden, dtype=dtype)[..., : shape[-1]].masked_fill_(mask, 0.0)
    if not aligned or (strides[-1] == 1 and not any(stride % step for stride in strides[:-1])):
        return lambda mask: mask
    return lambda mask: pad(mask, (0, step - shape[-1] % step))[..., : shape[-1]]


def _build_flash(call: Attention, numbers: _Mask) -> _Attend:
    width, causal, scores = int(call.query.shape[3]), call.causal, call.sizes
    if call.device_type == "cpu":
        on_cpu, given = _aten._scaled_dot_product_flash_attention_for_cpu.default, call.scale

        def attend_on_cpu(query: Any, key: Any, value: Any, mask: Any) -> Any:
            seen = None if mask is None else numbers(mask).expand(scores)
            return on_cpu(query, key, value, 0.0, causal, attn_mask=seen, scale=given)[0]

        return attend_on_cpu
    flash, scale = _aten._scaled_dot_product_flash_attention.default, call.scale or width**-0.5

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return flash(query, key, value, 0.0, causal, False, scale=scale)[0]

    def attend_padded(query: Any, key: Any, value: Any, mask: Any) -> Any:
        query, key, value = (pad(one, (0, -width % STEP)) for one in (query, key, value))
        return attend(query, key, value, mask)[..., :width]

    return attend if is_whole_step(width) else attend_padded


def _build_efficient(call: Attention, numbers: _Mask) -> _Attend:
    efficient, times, causal, scale = (
        _aten._scaled_dot_product_efficient_attention.default, call.group, call.causal, call.scale)
    scores = call.sizes

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        if times != 1:
            key, value = (one.repeat_interleave(times, 1) for one in (key, value))
        seen = None if mask is None else numbers(mask).expand(scores)
        return efficient(query, key, value, seen, False, 0.0, causal, scale=scale)[0]

    return attend


def _build_cudnn(call: Attention, numbers: _Mask) -> _Attend:
    cudnn, causal, scale = _aten._scaled_dot_product_cudnn_attention.default, call.causal, call.scale
    batch, _, positions, length = call.sizes
    heads = int(call.mask.shape[-3]) if call.mask is not None and len(call.mask.shape) > 2 else 1

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        seen = None if mask is None else numbers(mask).expand(batch, heads, positions, length)
        return cudnn(query, key, value, seen, False, 0.0, causal, False, scale=scale)[0]

    return attend


def _build_math(call: Attention, numbers: _Mask) -> _Attend:
    by_ops, causal, scale, shared = (
        _aten._scaled_dot_product_attention_math.default, call.causal, call.scale, call.shared)

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        seen = None if mask is None else numbers(mask)
        return by_ops(query, key, value, seen, 0.0, causal, None, scale=scale, enable_gqa=shared)[0]

    return attend


_BUILDERS: dict[str, Callable[[Attention, _Mask], _Attend]] = {
    "flash": _build_flash, "efficient": _build_efficient, "cudnn": _build_cudnn, "math": _build_math,
}

#: Every call, each also with the heads of a group as positions.
ATTENTION_CALLS = tuple(AttentionCall(backend, is_folded) for is_folded in (False, True) for backend in BACKENDS)
