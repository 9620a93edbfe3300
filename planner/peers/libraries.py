"""Libraries of hand-written kernels as peers: their kernels by pattern, in the layouts that they want.

Liger-Kernel's forward functions are called without their autograd wrappers, which inference engines do not pay for.
https://github.com/linkedin/Liger-Kernel

FlashInfer compiles its kernels when they are first called. Without a CUDA compiler that fails, and the row says so.
https://github.com/flashinfer-ai/flashinfer
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fuseplan.planner.peers.contestant import Case, Contestant, PeerOp, library_function, tensors_of

#: What the patterns have.
_RMS_EPSILON, _LAYER_NORM_EPSILON = 1e-6, 1e-5
_GATED, _NORMED, _ADDED = ("gate", "up"), ("x", "weight"), ("residual", "x", "weight")
_ROTARY = ("q", "k", "cos", "sin")

# -- Liger-Kernel ---------------------------------------------------------------------------------------------


def _forward(module: str, name: str, **fixed: Any) -> Callable[..., Any]:
    """A forward function with those of the ``fixed`` arguments that this version of the library knows."""
    found = library_function("liger_kernel.ops", module, name)
    known = inspect.signature(found).parameters
    arguments = {key: value for key, value in fixed.items() if key in known}
    return lambda *tensors: found(*tensors, **arguments)


def _picked(*positions: int) -> Callable[[Any, Sequence[torch.Tensor]], list[torch.Tensor]]:
    """The outputs among what a forward function returns for its backward."""
    return lambda result, operands: [result[position] for position in positions]


def _called(output: int, module: str, name: str, **fixed: Any) -> Callable[[Case], Contestant]:
    """A function that takes the pattern's inputs in their order and returns its ``output``."""
    return lambda case: Contestant(_forward(module, name, **fixed), outputs=_picked(output))


def _add_rms_norm(case: Case, **model: Any) -> Contestant:
    forward = _forward("fused_add_rms_norm", "fused_add_rms_norm_forward", **model)
    return Contestant(lambda residual, x, weight: forward(x, residual, weight), outputs=_picked(1, 0))


def _rope(case: Case) -> Contestant:
    forward = _forward("rope", "rope_forward")
    return Contestant(
        lambda q, k, cos, sin: forward(q.transpose(1, 2), k.transpose(1, 2), cos, sin),
        lambda q, k, cos, sin: (q.clone(), k.clone(), cos, sin), _picked(0, 1), "writes q and k in place",
    )


#: How the RMSNorm of each model differs.
_LLAMA: Mapping[str, Any] = {"eps": _RMS_EPSILON, "offset": 0.0, "casting_mode": "llama"}
_GEMMA: Mapping[str, Any] = {"eps": _RMS_EPSILON, "offset": 1.0, "casting_mode": "gemma"}
LIGER_OPS: Mapping[str, PeerOp] = {
    "swiglu": PeerOp(_GATED, _called(2, "swiglu", "swiglu_forward")),
    "geglu_tanh": PeerOp(_GATED, _called(2, "geglu", "geglu_forward")),
    "rms_norm": PeerOp(_NORMED, _called(0, "rms_norm", "rms_norm_forward", row_mode=None, **_LLAMA)),
    "rms_norm_gemma": PeerOp(_NORMED, _called(0, "rms_norm", "rms_norm_forward", row_mode=None, **_GEMMA)),
    "add_rms_norm": PeerOp(_ADDED, partial(_add_rms_norm, **_LLAMA)),
    "add_rms_norm_gemma": PeerOp(_ADDED, partial(_add_rms_norm, **_GEMMA)),
    "layer_norm": PeerOp(
        ("x", "weight", "bias"), _called(0, "layer_norm", "layer_norm_forward", eps=_LAYER_NORM_EPSILON)
    ),
    "softmax": PeerOp(("x",), _called(0, "softmax", "_softmax_forward")),
    "rope": PeerOp(_ROTARY, _rope),
}


# -- FlashInfer -----------------------------------------------------------------------------------------------

_HALF = ("float16", "bfloat16")
_op = partial(library_function, "flashinfer")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Rows x columns."""
    return tensor.reshape(-1, tensor.shape[-1])


def _of_rows(
    module: str, name: str, prepare: Callable[..., tuple[torch.Tensor, ...]], *more: float,
    outputs: Callable[[Any, Sequence[torch.Tensor]], Sequence[torch.Tensor]] = tensors_of, note: str = "",
) -> Callable[[Case], Contestant]:
    """A function of rows, which takes ``more`` arguments after its operands. Outputs have the first input's shape."""
    def build(case: Case) -> Contestant:
        function = _op(module, name)
        return Contestant(
            lambda *operands: function(*operands, *more), prepare,
            lambda result, operands: [one.view(case.inputs[0].shape) for one in outputs(result, operands)], note)

    return build


def _act_and_mul(name: str) -> Callable[[Case], Contestant]:
    return _of_rows("activation", name, lambda gate, up: (torch.cat([gate, up], -1),),
                    note="reads gate and up from one tensor")


def _flat_rms_norm(name: str) -> Callable[[Case], Contestant]:
    return _of_rows("norm", name, lambda x, weight: (_flat(x), weight), _RMS_EPSILON)


def _flat_add_rms_norm(name: str) -> Callable[[Case], Contestant]:
    return _of_rows(
        "norm", name, lambda residual, x, weight: (_flat(x).clone(), _flat(residual).clone(), weight), _RMS_EPSILON,
        outputs=lambda result, operands: [operands[1], operands[0]], note="writes x and residual in place")


def _softmax(case: Case) -> Contestant:
    """Of rows over a temperature each, or over 1."""
    twice = "" if case.cell.dtype == "float32" else f", twice the bytes of {case.cell.dtype}"
    return _of_rows(
        "sampling", "softmax", lambda x, *temperature: (_flat(x).float(), *(one.reshape(-1) for one in temperature)),
        note=f"reads and writes float32{twice}")(case)


def _token_rope(case: Case, is_neox: bool = True) -> Contestant:
    rope = _op("rope", "apply_rope_with_cos_sin_cache")
    dim, width = case.inputs[0].shape[-1], case.inputs[2].shape[-1]
    angles = width // 2 if is_neox else width

    def prepare(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows are tokens; the table is float32, and has each angle once."""
        tokens = q.shape[0] * q.shape[1]
        tables = [_flat(table)[:, :angles].float() for table in (cos, sin)]
        positions = torch.arange(tokens, device=q.device, dtype=torch.int64)
        return positions, q.reshape(tokens, -1), k.reshape(tokens, -1), torch.cat(tables, -1).contiguous()

    def outputs(result: Any, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [one.view(own.shape).transpose(1, 2) for one, own in zip(result, case.inputs[:2], strict=True)]

    return Contestant(
        lambda positions, q, k, table: rope(positions, q, k, dim, table, is_neox), prepare, outputs,
        "reads a float32 table of angles",
    )


FLASHINFER_OPS: Mapping[str, PeerOp] = {
    "swiglu": PeerOp(_GATED, _act_and_mul("silu_and_mul"), _HALF),
    "geglu": PeerOp(_GATED, _act_and_mul("gelu_and_mul"), _HALF),
    "geglu_tanh": PeerOp(_GATED, _act_and_mul("gelu_tanh_and_mul"), _HALF),
    "rms_norm": PeerOp(_NORMED, _flat_rms_norm("rmsnorm"), _HALF),
    "rms_norm_gemma": PeerOp(_NORMED, _flat_rms_norm("gemma_rmsnorm"), _HALF),
    "add_rms_norm": PeerOp(_ADDED, _flat_add_rms_norm("fused_add_rmsnorm"), _HALF),
    "add_rms_norm_gemma": PeerOp(_ADDED, _flat_add_rms_norm("gemma_fused_add_rmsnorm"), _HALF),
    "layer_norm": PeerOp(("x", "weight", "bias"), _of_rows(
        "norm", "layernorm", lambda x, weight, bias: (_flat(x), weight.float(), bias.float()), _LAYER_NORM_EPSILON,
        note="reads weight and bias in float32"), ("bfloat16",)),
    "softmax": PeerOp(("x",), _softmax),
    "sampling_softmax": PeerOp(("logits", "temperature"), _softmax),
    "rope": PeerOp(_ROTARY, _token_rope, _HALF),
    "rope_partial": PeerOp(_ROTARY, _token_rope, _HALF),
    "rope_interleaved": PeerOp(_ROTARY, partial(_token_rope, is_neox=False), _HALF),
    "rope_partial_interleaved": PeerOp(_ROTARY, partial(_token_rope, is_neox=False), _HALF),
}
