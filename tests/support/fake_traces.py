"""Traces of functions on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fuseplan.planner.capture.trace import decompositions

Function = Callable[..., Any]


def traced(function: Function, *inputs: torch.Tensor, symbolic: bool = False) -> fx.GraphModule:
    """With the ops that are traced as others, as in a back end."""
    tracing: dict[str, Any] = {"pre_dispatch": True, "decomposition_table": decompositions()}
    if symbolic:
        return make_fx(function, tracing_mode="symbolic", **tracing)(*inputs)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        return make_fx(function, **tracing)(*[mode.from_tensor(one, static_shapes=True) for one in inputs])
