"""Making a plan executable: each fused group becomes one call in the traced FX graph; everything else stays ATen.

The traced graph is copied in a topological order of the graph in which every group is contracted to one node. Data
dependencies, the ordering edges of mutations and the relative order of side effects are all kept, so a group is
placed after its last input and before its first reader whatever the order of the trace was. A group that cannot be
placed, lowered or built is left as the ATen ops it was, and counted with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from fuseplan.kernels.backend import Backend, Config, Target, config_key
from fuseplan.kernels.index import evaluate
from fuseplan.kernels.ir import Buffer, KernelIR
from fuseplan.kernels.reference import torch_dtype
from fuseplan.planner.errors import FuseplanError
from fuseplan.planner.execute import run_node
from fuseplan.planner.flow import flow_of
from fuseplan.planner.graph import DataflowGraph, OpNode
from fuseplan.planner.lower import Lowered, NotLowerable, lower
from fuseplan.planner.placement import Placement, Traced, fused_graph
from fuseplan.planner.subject import group_nodes
from fuseplan.planner.tally import Source, Tally
from torch import fx

#: ``fused(*inputs, *symbol values)``: a tensor, or a tuple of tensors where the group has several outputs.
Fused: TypeAlias = Callable[..., Any]

logger = logging.getLogger("fuseplan")


@dataclass(frozen=True)
class GroupPlan:
    """A group to run as one kernel.

    Attributes:
        ops: Names of its ops in the dataflow graph.
        backend: Who compiles it.
        config: With which configuration.
        source: Where the decision came from.
        label: Short name for people.
    """

    ops: tuple[str, ...]
    backend: Backend
    config: Config
    source: Source
    label: str = ""


@dataclass(frozen=True)
class _Built:
    plan: GroupPlan
    lowered: Lowered
    call: Fused


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
    module, placed = _place(traced, built, tally)
    forward: Callable[..., Any] = module.forward
    namespace: dict[str, Any] = module.forward.__globals__
    for name, slot in list(namespace.items()):
        if isinstance(slot, _Slot) and slot in placed:
            group = placed[slot]
            tally.fused(group.plan.source)
            chain = UnfusedChain(traced.graph, group.plan.ops, group.lowered)
            namespace[name] = _FirstCall(group, chain, namespace, name, tally, debug)
    if debug:
        logger.info("fused graph:\n%s", module.code)
    return forward


# -- building ---------------------------------------------------------------------------------------------


def _build_all(
    traced: Traced, plans: Sequence[GroupPlan], target: Target, tally: Tally, numerics: str
) -> list[_Built]:
    built: list[_Built] = []
    # Repeated layers ask for the same kernel: one callable serves them all.
    cache: dict[tuple[str, str, str], Fused] = {}
    for plan in plans:
        try:
            built.append(_build(traced, plan, target, numerics, cache))
        except Exception as error:  # a group must never take the model down, whatever a back end raises
            reason = failure_reason(error)
            tally.fall_back(reason)
            logger.info("group %s runs unfused: %s", plan.label or plan.ops[0], reason)
    return built


def failure_reason(error: Exception) -> str:
    """One line for the counters."""
    if isinstance(error, NotLowerable | RefusedError | FuseplanError):
        return str(error).splitlines()[0]
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


class RefusedError(Exception):
    """A group or graph that must stay unfused; the message says why."""


def _build(
    traced: Traced, plan: GroupPlan, target: Target, numerics: str, cache: dict[tuple[str, str, str], Fused]
) -> _Built:
    flow = flow_of(traced.graph)
    lowered = lower(traced.graph, plan.ops, numerics, flow.needed_outside(flow.position[name] for name in plan.ops))
    _check_devices(traced, lowered, target)
    ir = lowered.ir
    if any(extent == 0 for buffer in ir.outputs for extent in buffer.shape):
        raise RefusedError("a result of the group is empty")
    if refusal := plan.backend.refuse(ir, target):
        raise RefusedError(f"{plan.backend.name}: {refusal}")
    key = (plan.backend.name, ir.fingerprint(), config_key(plan.config))
    if key not in cache:
        cache[key] = plan.backend.fused_callable(ir, plan.config, target)
    return _Built(plan, lowered, cache[key])


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
    traced: Traced, built: Sequence[_Built], tally: Tally
) -> tuple[fx.GraphModule, dict[Callable[..., Any], _Built]]:
    slots: dict[Callable[..., Any], _Built] = {
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


# -- the first call ---------------------------------------------------------------------------------------


class _FirstCall:
    """Runs a kernel for the first time, then takes itself out of the way.

    The kernel must get tensors laid out as it was compiled for: what a fake tensor promised and the device's ATen op
    did not keep is found here, before memory is read through wrong strides.
    """

    def __init__(
        self,
        group: _Built,
        chain: UnfusedChain,
        namespace: dict[str, Any],
        name: str,
        tally: Tally,
        debug: bool,
    ) -> None:
        self._group = group
        self._chain = chain
        self._namespace = namespace
        self._name = name
        self._tally = tally
        self._debug = debug

    def __call__(self, *args: Any) -> Any:
        group = self._group
        try:
            check_layouts(group.lowered.ir, args)
            result = group.call(*args)
        except Exception as error:
            reason = f"first call failed: {failure_reason(error)}"
            self._tally.fall_back(reason, group.plan.source)
            logger.warning("group %s runs unfused from now on: %s", group.plan.label or self._name, reason)
            self._namespace[self._name] = self._chain
            return self._chain(*args)
        self._namespace[self._name] = group.call
        if self._debug:
            difference = largest_difference(result, self._chain(*args))
            logger.info("%s differs from its ATen ops by at most %.3g", group.plan.label or self._name, difference)
        return result


def largest_difference(result: Any, expected: Any) -> float:
    """Largest absolute difference over one tensor or a tuple of tensors."""
    pairs = [(result, expected)] if isinstance(result, torch.Tensor) else list(zip(result, expected, strict=True))
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def check_layouts(ir: KernelIR, args: Sequence[Any]) -> None:
    """Raise ``RefusedError`` naming the first input that is not laid out as ``ir`` says."""
    count = len(ir.inputs)
    symbols = dict(zip(ir.symbols, args[count:], strict=True))
    for buffer, tensor in zip(ir.inputs, args[:count], strict=True):
        expected = _layout(buffer, symbols)
        dims = [dim for dim, extent in enumerate(expected[0]) if extent != 1]  # a stride over one element is free
        actual = (tuple(tensor.shape), tuple(tensor.stride()))
        same_strides = len(actual[1]) == len(expected[1]) and all(actual[1][d] == expected[1][d] for d in dims)
        if actual[0] != expected[0] or not same_strides or tensor.dtype != torch_dtype(buffer.dtype):
            raise RefusedError(f"input is {tensor.dtype} {actual}, the kernel expects {buffer.dtype} {expected}")


def _layout(buffer: Buffer, symbols: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (
        tuple(evaluate(extent, symbols) for extent in buffer.shape),
        tuple(evaluate(stride, symbols) for stride in buffer.strides),
    )


class UnfusedChain:
    """A group as the ATen ops it replaced, called like its kernel."""

    def __init__(self, graph: DataflowGraph, ops: Iterable[str], lowered: Lowered) -> None:
        self._nodes: tuple[OpNode, ...] = group_nodes(graph, ops, lowered)
        self._inputs = lowered.inputs
        self._outputs = lowered.outputs
        self._symbols = lowered.ir.symbols

    def __call__(self, *args: Any) -> Any:
        count = len(self._inputs)
        values: dict[str, torch.Tensor] = dict(zip(self._inputs, args[:count], strict=True))
        symbols = dict(zip(self._symbols, args[count:], strict=True))
        device = args[0].device if count else None
        for node in self._nodes:
            results = run_node(node, [values[name] for name in node.inputs], device, symbols)
            values.update(zip(node.outputs, results, strict=True))
        outputs = tuple(values[name] for name in self._outputs)
        return outputs[0] if len(outputs) == 1 else outputs
