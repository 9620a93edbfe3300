"""FlashInfer as a peer: its kernels by pattern, in the layouts that they want. https://github.com/flashinfer-ai/flashinfer

FlashInfer compiles its kernels when they are first called. Without a CUDA compiler that fails, and the row says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from fuseplan.planner.peers.contestant import Case, Contestant, LibraryOp, PeerError, library_function

#: What the patterns have.
_RMS_EPSILON, _LAYER_NORM_EPSILON = 1e-6, 1e-5

Builder = Callable[[Case], Contestant]
_op = partial(library_function, "flashinfer")


def _check_half(case: Case) -> None:
    if case.dtype not in ("float16", "bfloat16"):
        raise PeerError(f"flashinfer's kernels take float16 and bfloat16, not {case.dtype}")


def _act_and_mul(name: str) -> Builder:
    def build(case: Case) -> Contestant:
        _check_half(case)
        return Contestant(
            _op("activation", name), lambda gate, up: (torch.cat([gate, up], -1),),
            note="reads gate and up from one tensor",
        )

    return build


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Rows x columns."""
    return tensor.reshape(-1, tensor.shape[-1])


def _rms_norm(name: str) -> Builder:
    def build(case: Case) -> Contestant:
        _check_half(case)
        norm = _op("norm", name)
        return Contestant(
            lambda x, weight: norm(x, weight, _RMS_EPSILON), lambda x, weight: (_flat(x), weight),
            lambda result, operands: [result.view(case.inputs[0].shape)],
        )

    return build


def _add_rms_norm(name: str) -> Builder:
    def build(case: Case) -> Contestant:
        _check_half(case)
        norm = _op("norm", name)

        def outputs(result: None, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            x, residual = (tensor.view(case.inputs[0].shape) for tensor in operands[:2])
            return [residual, x]

        return Contestant(
            lambda x, residual, weight: norm(x, residual, weight, _RMS_EPSILON),
            lambda residual, x, weight: (_flat(x).clone(), _flat(residual).clone(), weight), outputs,
            "writes x and residual in place", in_place=True,
        )

    return build


def _layer_norm(case: Case) -> Contestant:
    if case.dtype != "bfloat16":
        raise PeerError(f"flashinfer's layernorm takes bfloat16, not {case.dtype}")
    norm = _op("norm", "layernorm")
    return Contestant(
        lambda x, weight, bias: norm(x, weight, bias, _LAYER_NORM_EPSILON),
        lambda x, weight, bias: (_flat(x), weight.float(), bias.float()),
        lambda result, operands: [result.view(case.inputs[0].shape)],
        "reads weight and bias in float32",
    )


def _softmax(case: Case) -> Contestant:
    """Of rows over a temperature each, or over 1."""
    softmax = _op("sampling", "softmax")
    wider = "" if case.dtype == "float32" else f", twice the bytes of {case.dtype}"

    def prepare(x: torch.Tensor, *temperature: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _flat(x).float(), *(one.reshape(-1) for one in temperature)

    return Contestant(
        softmax, prepare, lambda result, operands: [result.view(case.inputs[0].shape)],
        f"reads and writes float32{wider}",
    )


def _rope(is_neox: bool) -> Builder:
    def build(case: Case) -> Contestant:
        _check_half(case)
        rope = _op("rope", "apply_rope_with_cos_sin_cache")
        dim, width = case.inputs[0].shape[-1], case.inputs[2].shape[-1]
        angles = width // 2 if is_neox else width

        def prepare(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
            """Rows are tokens; the table is float32, and has each angle once."""
            tokens = q.shape[0] * q.shape[1]
            tables = [_flat(table)[:, :angles].float() for table in (cos, sin)]
            positions = torch.arange(tokens, device=q.device, dtype=torch.int64)
            return positions, q.reshape(tokens, -1), k.reshape(tokens, -1), torch.cat(tables, -1).contiguous()

        def run(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> Any:
            return rope(positions, q, k, dim, table, is_neox)

        def outputs(result: Any, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [one.view(own.shape).transpose(1, 2) for one, own in zip(result, case.inputs[:2], strict=True)]

        return Contestant(run, prepare, outputs, "reads a float32 table of angles")

    return build


#: By pattern.
OPS: Mapping[str, LibraryOp] = MappingProxyType({
    "swiglu": LibraryOp(("gate", "up"), _act_and_mul("silu_and_mul")),
    "geglu": LibraryOp(("gate", "up"), _act_and_mul("gelu_and_mul")),
    "geglu_tanh": LibraryOp(("gate", "up"), _act_and_mul("gelu_tanh_and_mul")),
    "rms_norm": LibraryOp(("x", "weight"), _rms_norm("rmsnorm")),
    "rms_norm_gemma": LibraryOp(("x", "weight"), _rms_norm("gemma_rmsnorm")),
    "add_rms_norm": LibraryOp(("residual", "x", "weight"), _add_rms_norm("fused_add_rmsnorm")),
    "add_rms_norm_gemma": LibraryOp(("residual", "x", "weight"), _add_rms_norm("gemma_fused_add_rmsnorm")),
    "layer_norm": LibraryOp(("x", "weight", "bias"), _layer_norm),
    "softmax": LibraryOp(("x",), _softmax),
    "sampling_softmax": LibraryOp(("logits", "temperature"), _softmax),
    "rope": LibraryOp(("q", "k", "cos", "sin"), _rope(is_neox=True)),
    "rope_partial": LibraryOp(("q", "k", "cos", "sin"), _rope(is_neox=True)),
    "rope_interleaved": LibraryOp(("q", "k", "cos", "sin"), _rope(is_neox=False)),
    "rope_partial_interleaved": LibraryOp(("q", "k", "cos", "sin"), _rope(is_neox=False)),
})
