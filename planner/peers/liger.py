"""Liger-Kernel as a peer: its forward kernels by pattern, called below the autograd functions that wrap them.

A training framework pays for those wrappers, an inference engine need not. https://github.com/linkedin/Liger-Kernel
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fuseplan.planner.peers.contestant import Case, Contestant, LibraryOp, library_function

#: What the patterns have.
_RMS_EPSILON, _LAYER_NORM_EPSILON = 1e-6, 1e-5


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


def _rms_norm(offset: float, casting_mode: str) -> Callable[[Case], Contestant]:
    return _called(
        0, "rms_norm", "rms_norm_forward", eps=_RMS_EPSILON, offset=offset, casting_mode=casting_mode, row_mode=None
    )


def _add_rms_norm(offset: float, casting_mode: str) -> Callable[[Case], Contestant]:
    def build(case: Case) -> Contestant:
        forward = _forward(
            "fused_add_rms_norm", "fused_add_rms_norm_forward", eps=_RMS_EPSILON, offset=offset,
            casting_mode=casting_mode,
        )
        return Contestant(lambda residual, x, weight: forward(x, residual, weight), outputs=_picked(1, 0))

    return build


def _rope(case: Case) -> Contestant:
    forward = _forward("rope", "rope_forward")
    return Contestant(
        lambda q, k, cos, sin: forward(q.transpose(1, 2), k.transpose(1, 2), cos, sin),
        lambda q, k, cos, sin: (q.clone(), k.clone(), cos, sin), _picked(0, 1), "writes q and k in place",
        in_place=True,
    )


#: By pattern.
OPS: Mapping[str, LibraryOp] = MappingProxyType({
    "swiglu": LibraryOp(("gate", "up"), _called(2, "swiglu", "swiglu_forward")),
    "geglu_tanh": LibraryOp(("gate", "up"), _called(2, "geglu", "geglu_forward")),
    "rms_norm": LibraryOp(("x", "weight"), _rms_norm(0.0, "llama")),
    "rms_norm_gemma": LibraryOp(("x", "weight"), _rms_norm(1.0, "gemma")),
    "add_rms_norm": LibraryOp(("residual", "x", "weight"), _add_rms_norm(0.0, "llama")),
    "add_rms_norm_gemma": LibraryOp(("residual", "x", "weight"), _add_rms_norm(1.0, "gemma")),
    "layer_norm": LibraryOp(
        ("x", "weight", "bias"), _called(0, "layer_norm", "layer_norm_forward", eps=_LAYER_NORM_EPSILON)
    ),
    "softmax": LibraryOp(("x",), _called(0, "softmax", "_softmax_forward")),
    "rope": LibraryOp(("q", "k", "cos", "sin"), _rope),
})
