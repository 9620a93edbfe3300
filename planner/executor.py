"""Making a plan executable: each fused group becomes one call in the traced FX graph; everything else stays ATen.

The traced graph is copied in a topological order of the graph in which every group is contracted to one node. Data
dependencies, the ordering edges of mutations and the relative order of side effects are all kept, so a group is
placed after its last input and before its first reader whatever the order of the trace was. A group that cannot be
placed, lowered or built is left as the ATen ops it was, and counted with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fuseplan.kernels.backend import Target, config_key
from fuseplan.kernels.gpu_direct import launcher_problem
from fuseplan.planner.fallback import (
    BuiltGroup,
    FirstCall,
    Fused,
    GroupPlan,
    RefusedError,
    UnfusedChain,
    failure_reason,
)
from fuseplan.planner.flow import flow_of
from fuseplan.planner.lower import Lowered, lower
from fuseplan.planner.placement import Placement, Traced, fused_graph
from fuseplan.planner.tally import Tally

logger = logging.getLogger("fuseplan")


@dataclass(frozen=True)
class _Wanted:
    """A group that can be a kernel."""

    plan: GroupPlan
    lowered: Lowered

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for equal kernels: repeated layers ask for the same one."""
        return self.plan.backend.name, self.lowered.ir.fingerprint(), config_key(self.plan.config)


def executable(
    traced: Traced,
    plans: Sequence[GroupPlan],
    target: Target,
    tally: Tally,
    numerics: str = "fp32",
    debug: bool = False,
) -> Callable[..., Any]:
    """A function with the signature and results of ``traced.module`` that runs ``plans`` as kernels.

    Never raises for a group: one that cannot be built or placed runs unfused and is counted in ``tally``. The first
    call of each kernel is guarded (a failure puts the group's ATen ops in its place for good); later calls are direct.
    With ``debug`` the first call also logs how far the kernel is from the ATen ops.
    """
    built = _build_all(traced, plans, target, tally, numerics)
    if built and target.device_type == "cuda" and (problem := launcher_problem()) is not None:
        tally.note(f"kernels go through Triton's launcher: {problem}")
    module, placed = _place(traced, built, tally)
    forward: Callable[..., Any] = module.forward
    namespace: dict[str, Any] = module.forward.__globals__
    for name, slot in list(namespace.items()):
        if isinstance(slot, _Slot) and slot in placed:
            group = placed[slot]
            tally.fused(group.plan.source)
            chain = UnfusedChain(traced.graph, group.plan.ops, group.lowered)
            namespace[name] = FirstCall(group, chain, namespace, name, tally, debug)
    if debug:
        logger.info("fused graph:\n%s", module.code)
    return forward


# -- building ---------------------------------------------------------------------------------------------


def _build_all(
    traced: Traced, plans: Sequence[GroupPlan], target: Target, tally: Tally, numerics: str
) -> list[BuiltGroup]:
    def drop(plan: GroupPlan, error: Exception) -> None:
        reason = failure_reason(error)
        tally.fall_back(reason)
        logger.info("group %s runs unfused: %s", plan.label or plan.ops[0], reason)

    wanted: list[_Wanted] = []
    for plan in plans:
        try:
            wanted.append(_Wanted(plan, _lowered(traced, plan, target, numerics)))
        except Exception as error:  # a group must never take the model down, whatever fails
            drop(plan, error)
    kernels = _kernels(wanted, target)
    built: list[BuiltGroup] = []
    for group in wanted:
        kernel = kernels[group.key]
        if isinstance(kernel, Exception):
            drop(group.plan, kernel)
        else:
            built.append(BuiltGroup(group.plan, group.lowered, kernel))
    return built


def _kernels(wanted: Sequence[_Wanted], target: Target) -> dict[tuple[str, str, str], Fused | Exception]:
    """Each distinct kernel, or why it cannot be built."""

    def build(group: _Wanted) -> Fused | Exception:
        try:
            return group.plan.backend.fused_callable(group.lowered.ir, group.plan.config, target)
        except Exception as error:
            return error

    distinct = {group.key: group for group in wanted}
    # A C++ compiler is a process of its own, so threads compile in parallel; GPU compilers hold this process's lock.
    workers = min(len(distinct), target.cores) if target.device_type == "cpu" else 1
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        return dict(zip(distinct, pool.map(build, distinct.values()), strict=True))


def _lowered(traced: Traced, plan: GroupPlan, target: Target, numerics: str) -> Lowered:
    """The group's kernel, if it can be one here.

    Raises:
        NotLowerable, RefusedError: It cannot.
    """
    flow = flow_of(traced.graph)
    lowered = lower(traced.graph, plan.ops, numerics, flow.needed_outside(flow.position[name] for name in plan.ops))
    _check_devices(traced, lowered, target)
    if any(extent == 0 for buffer in lowered.ir.outputs for extent in buffer.shape):
        raise RefusedError("a result of the group is empty")
    if refusal := plan.backend.refuse(lowered.ir, target):
        raise RefusedError(f"{plan.backend.name}: {refusal}")
    return lowered


def _check_devices(traced: Traced, lowered: Lowered, target: Target) -> None:
    """A kernel reads memory of one device (a CPU scalar tensor in a CUDA graph stays with its ATen op)."""
    for value in (*lowered.inputs, *lowered.outputs):
        node = traced.node_of.get(value)
        fake = node.meta.get("val") if node is not None else None
        if isinstance(fake, torch.Tensor) and fake.device.type != target.device_type:
            raise RefusedError(f"the group reads a {fake.device.type} tensor; the kernel runs on {target.device_type}")


# -- placing ----------------------------------------------------------------------------------------------


class _Slot:
    """Stands for a fused callable in the FX graph until code is generated; FX asks a target for its name."""

    def __init__(self, number: int, label: str) -> None:
        words = "".join(letter if letter.isalnum() else "_" for letter in label.split(" ")[0])
        self.__name__ = f"fused_{number}_{words}".rstrip("_")
        self.__qualname__ = self.__name__
        self.__module__ = "fuseplan"

    def __call__(self, *args: Any) -> Any:
        raise AssertionError(f"{self.__name__} was never filled")


def _place(
    traced: Traced, built: Sequence[BuiltGroup], tally: Tally
) -> tuple[fx.GraphModule, dict[Callable[..., Any], BuiltGroup]]:
    slots: dict[Callable[..., Any], BuiltGroup] = {
        _Slot(number, group.plan.label): group for number, group in enumerate(built)
    }
    placements = [
        Placement(slot, group.plan.ops, group.lowered.inputs, group.lowered.outputs, group.lowered.ir.symbols)
        for slot, group in slots.items()
    ]
    graph, refused = fused_graph(traced, placements)
    for placement, reason in refused:
        group = slots.pop(placement.call)
        tally.fall_back(reason)
        logger.info("group %s runs unfused: %s", group.plan.label or group.plan.ops[0], reason)
    module = fx.GraphModule(traced.module, graph, class_name="Fused")
    return module, slots
