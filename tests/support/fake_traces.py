"""Traces of functions on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Function = Callable[..., Any]


def traced(function: Function, *inputs: torch.Tensor, symbolic: bool = False) -> fx.GraphModule:
    if symbolic:
        return make_fx(function, pre_dispatch=True, tracing_mode="symbolic")(*inputs)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        return make_fx(function, pre_dispatch=True)(*[mode.from_tensor(one, static_shapes=True) for one in inputs])
