"""Functions with every region fused, as the executor makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from in_place_backend import InPlaceBackend
from step_programs import CPU, NothingStored
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuseplan.planner.capture.normalise import normalise
from fuseplan.planner.capture.trace import decompositions
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.runtime.executor import executable
from fuseplan.planner.tuning.planner import Planner


def compiled(
    function: Callable[..., Any], inputs: list[torch.Tensor], kernels: InPlaceBackend | None, tally: Tally, **how: Any
) -> Callable[..., Any]:
    """The function with every region fused as the launch count says; without ``kernels``, by ATen's ops."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs]
        module = make_fx(function, pre_dispatch=True, decomposition_table=decompositions())(*fakes)
    traced = normalise(module)
    if kernels is None:
        return executable(traced, [], CPU, tally, **how)
    planner = Planner(NothingStored(), None, "test", CPU, (kernels,))
    plans = [
        PlannedGroup(plan.group_ops(choice), GeneratedKernel((kernels,), CPU), choice.config)
        for plan in planner.plan_graph(traced.graph).regions
        for choice in plan.record.groups
        if choice.is_kernel
    ]
    return executable(traced, plans, CPU, tally, **how)
