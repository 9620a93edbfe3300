"""Making a plan executable: each fused group becomes one call in the traced FX graph; everything else stays ATen.

The traced graph is copied in a topological order of the graph in which every group is contracted to one node. Data
dependencies, the ordering edges of mutations and the relative order of side effects are all kept, so a group is
placed after its last input and before its first reader whatever the order of the trace was. A group that cannot be
placed, lowered or built is left as the ATen ops it was, and counted with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from fuseplan.kernels.gpu.direct import launcher_problem
from fuseplan.kernels.ir.backend import CompiledKernel, Target, config_key
from fuseplan.kernels.ir.in_place import Reuse, ReuseOptions, WritesInPlace
from fuseplan.kernels.ir.ir import Buffer, KernelIR
from fuseplan.planner.capture.traced import Traced
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.errors import RefusedError, failure_reason
from fuseplan.planner.groups.compute_graph import compute_graph_of, lower_group
from fuseplan.planner.implementations.aten import run_unfused
from fuseplan.planner.implementations.direct_calls import bind_calls, fill_namespace
from fuseplan.planner.implementations.subject import Fused, op_group
from fuseplan.planner.implementations.view_chains import collapse_views
from fuseplan.planner.libraries.library_call import OpGroup
from fuseplan.planner.lowering.lower import Lowered
from fuseplan.planner.runtime.buffer_donation import plan_reuse
from fuseplan.planner.runtime.fallback import BuiltCall, BuiltGroup, CallPlan, FirstCall, FirstLibraryCall, GroupPlan
from fuseplan.planner.runtime.placement import Placement, fused_graph

logger = logging.getLogger("fuseplan")


@dataclass(frozen=True)
class _Wanted:
    """A group that can be a kernel."""

    plan: GroupPlan
    lowered: Lowered
    in_place: bool

    @property
    def reuse_options(self) -> ReuseOptions:
        """Inputs that its kernel could write its outputs over, if nothing needs them."""
        backend = self.plan.backend
        if not self.in_place or not isinstance(backend, WritesInPlace):
            return {}
        return backend.reuse_options(self.lowered.ir, self.plan.config)

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for equal kernels: repeated layers ask for the same one."""
        return self.plan.backend.name, self.lowered.ir.fingerprint(), config_key(self.plan.config)


def executable(
    traced: Traced, plans: Sequence[GroupPlan], target: Target, tally: Tally, numerics: str = "fp32",
    debug: bool = False, in_place: bool = True, donated: Collection[int] = (), parameters: Collection[int] = (),
    calls: Sequence[CallPlan] = ()
) -> Callable[..., Any]:
    """A function with the signature and results of ``traced.module`` that runs ``plans`` as kernels.

    Never raises for a group: one that cannot be built or placed runs unfused and is counted in ``tally``. The first
    call of each kernel is guarded (a failure puts the group's ATen ops in its place for good); later calls are direct.
    With ``debug`` the first call also logs how far the kernel is from the ATen ops.

    With ``in_place``, outputs of a kernel take the memory of inputs that nothing needs after it, from its second call
    on, where the back end can do that. ``donated`` and ``parameters`` are positions of arguments: those that the caller
    gives away, whose memory may be taken so, too, and those that are parameters. ``calls`` are ops that a library's
    call runs.
    """
    built = _build_all(traced, plans, target, tally, numerics, in_place)
    libraries = _build_calls(traced, calls, target, tally)
    if built and target.device_type == "cuda" and (problem := launcher_problem()) is not None:
        tally.note(f"kernels go through Triton's launcher: {problem}")
    module, placed, called, reused = _place(traced, built, libraries, tally, donated, parameters)
    tally.count("library_calls", len(called))
    tally.count("in_place", sum(map(len, reused.values())))
    overwriting = _overwriting(placed, reused, target)
    forward: Callable[..., Any] = module.forward
    namespace: dict[str, Any] = module.forward.__globals__
    fill_namespace(namespace)
    for name, slot in list(namespace.items()):
        if isinstance(slot, _Slot) and slot in placed:
            group = placed[slot]
            tally.fused(group.plan.source)
            unfused = partial(run_unfused, traced, group.lowered, target.device_type)
            namespace[name] = FirstCall(group, unfused, namespace, name, tally, debug, overwriting.get(slot))
        elif isinstance(slot, _Slot) and slot in called:
            namespace[name] = FirstLibraryCall(called[slot], namespace, name, tally)
    if debug:
        logger.info("fused graph:\n%s", module.code)
    return forward


# -- building ---------------------------------------------------------------------------------------------


def _build_all(
    traced: Traced, plans: Sequence[GroupPlan], target: Target, tally: Tally, numerics: str, in_place: bool
) -> list[BuiltGroup]:
    def drop(plan: GroupPlan, error: Exception) -> None:
        reason = failure_reason(error)
        tally.fall_back(reason)
        logger.info("group %s runs unfused: %s", plan.label or plan.ops[0], reason)

    wanted: list[_Wanted] = []
    for plan in plans:
        try:
            lowered = _lowered(traced, plan, target, numerics)
            wanted.append(_Wanted(_expressible(plan, lowered.ir, target), lowered, in_place))
        except Exception as error:  # a group must never take the model down, whatever fails
            drop(plan, error)
    kernels = _kernels(wanted, target)
    built: list[BuiltGroup] = []
    for group in wanted:
        kernel = kernels[group.key]
        if isinstance(kernel, Exception):
            drop(group.plan, kernel)
        else:
            built.append(BuiltGroup(group.plan, group.lowered, *kernel, group.reuse_options))
    return built


def _build_calls(traced: Traced, plans: Sequence[CallPlan], target: Target, tally: Tally) -> list[BuiltCall]:
    """The library calls that can be made; ATen's op runs what cannot."""
    flow = compute_graph_of(traced.graph)
    built = []
    for plan in plans:
        try:
            group = op_group(traced.graph, plan.ops, flow.outputs_of(plan.ops), target.device_type)
            if not all(traced.graph.specs[value].is_static for value in (*group.inputs, *group.outputs)):
                raise RefusedError("sizes are dynamic")
            if (reason := plan.library.refuse(group)) is not None:
                raise RefusedError(reason)
            built.append(BuiltCall(plan, group, plan.library.build(group)))
        except Exception as error:
            tally.note(f"{plan.library.name} is not called: {failure_reason(error)}")
    return built


#: A callable that allocates outputs; and the kernel, where some could lie in inputs.
_Built: TypeAlias = tuple[Fused, CompiledKernel | None]


def _kernels(wanted: Sequence[_Wanted], target: Target) -> dict[tuple[str, str, str], _Built | Exception]:
    """Each distinct kernel, or why it cannot be built."""

    def build(group: _Wanted) -> _Built | Exception:
        backend, ir, config = group.plan.backend, group.lowered.ir, group.plan.config
        try:
            if not group.reuse_options:
                return backend.fused_callable(ir, config, target), None
            assert isinstance(backend, WritesInPlace)
            kernel = backend.load(ir, config, target)
            return backend.call(kernel, ir, target, {}), kernel
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
    lowered = lower_group(traced.graph, plan.ops, numerics)
    _check_devices(traced, lowered, target)
    if any(extent == 0 for buffer in lowered.ir.outputs for extent in buffer.shape):
        raise RefusedError("a result of the group is empty")
    return lowered


def _expressible(plan: GroupPlan, ir: KernelIR, target: Target) -> GroupPlan:
    """The plan, on another back end where its own cannot express the kernel.

    Raises:
        RefusedError: None can.
    """
    refusal = plan.backend.refuse(ir, target)
    if refusal is None:
        return plan
    for other in plan.others:
        if other.refuse(ir, target) is None:
            return replace(plan, backend=other, config=other.default_config(ir, target))
    raise RefusedError(f"{plan.backend.name}: {refusal}")


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


_Slots: TypeAlias = dict[Callable[..., Any], BuiltGroup]
_Calls: TypeAlias = dict[Callable[..., Any], BuiltCall]
_Reuses: TypeAlias = dict[Callable[..., Any], Reuse]


def _place(
    traced: Traced, built: Sequence[BuiltGroup], libraries: Sequence[BuiltCall], tally: Tally,
    donated: Collection[int], parameters: Collection[int],
) -> tuple[fx.GraphModule, _Slots, _Calls, _Reuses]:
    slots: _Slots = {_Slot(number, group.plan.label): group for number, group in enumerate(built)}
    calls: _Calls = {
        _Slot(number, f"{one.plan.library.name} {one.plan.label}"): one
        for number, one in enumerate(libraries, len(built))
    }
    placements = [
        *(
            Placement(slot, group.plan.ops, group.lowered.inputs, group.lowered.outputs, group.lowered.ir.symbols)
            for slot, group in slots.items()
        ),
        *(Placement(slot, one.plan.ops, one.group.inputs, one.group.outputs) for slot, one in calls.items()),
    ]
    graph, refused = fused_graph(traced, placements)
    for placement, reason in refused:
        if calls.pop(placement.call, None) is not None:
            tally.note(f"a library call is not made: {reason}")
            continue
        group = slots.pop(placement.call)
        tally.fall_back(reason)
        logger.info("group %s runs unfused: %s", group.plan.label or group.plan.ops[0], reason)
    options: dict[Callable[..., Any], ReuseOptions] = {slot: group.reuse_options for slot, group in slots.items()}
    overwritten = {slot: group.lowered.ir.overwritten for slot, group in slots.items()}
    reused = plan_reuse(graph, traced, options | {slot: {} for slot in calls}, donated, overwritten)
    allocated = {slot: group.lowered.ir.outputs for slot, group in slots.items()}
    allocated |= {slot: _buffers(one.group) for slot, one in calls.items()}
    collapse_views(graph, traced.module.graph, allocated, parameters)
    bind_calls(graph, traced.module.graph)
    module = fx.GraphModule(traced.module, graph, class_name="Fused")
    return module, slots, calls, reused


def _buffers(group: OpGroup) -> tuple[Buffer, ...]:
    """What a library's call allocates."""
    specs = ((value, group.specs[value]) for value in group.outputs)
    return tuple(Buffer(value, spec.dtype, spec.shape, spec.strides, is_output=True) for value, spec in specs)


def _overwriting(placed: _Slots, reused: _Reuses, target: Target) -> dict[Callable[..., Any], Fused]:
    """For each slot that reuses memory, the call that does; equal kernels with equal reuse share one."""
    made: dict[tuple[int, tuple[tuple[int, int], ...]], Fused] = {}
    found: dict[Callable[..., Any], Fused] = {}
    for slot, reuse in reused.items():
        group = placed[slot]
        backend = group.plan.backend
        assert isinstance(backend, WritesInPlace) and group.kernel is not None
        key = id(group.kernel), tuple(reuse.items())
        if key not in made:
            made[key] = backend.call(group.kernel, group.lowered.ir, target, reuse)
        found[slot] = made[key]
    return found
