"""Making a plan executable: each fused group becomes one call in the traced FX graph; everything else stays ATen.

A group that cannot be placed, lowered or built is left as the ATen ops it was, and counted with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import fx

from fuseplan.kernels.gpu.direct import launcher_problem
from fuseplan.kernels.ir.backend import Target, config_key
from fuseplan.kernels.ir.gathers import may_fail
from fuseplan.kernels.ir.in_place import ReuseOptions, WritesInPlace
from fuseplan.kernels.ir.ir import Buffer, KernelIR
from fuseplan.kernels.native.allowance import in_threads
from fuseplan.kernels.native.overlap import Operand, guarded
from fuseplan.planner.capture.traced import Traced
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.errors import RefusedError, failure_reason
from fuseplan.planner.groups.compute_graph import compute_graph_of, lower_group
from fuseplan.planner.implementations.aten import run_chain, run_op, run_unfused
from fuseplan.planner.implementations.direct_calls import GroupCall, bind_calls, fill_namespace
from fuseplan.planner.implementations.subject import Fused, op_group
from fuseplan.planner.implementations.view_chains import collapse_views
from fuseplan.planner.lowering.lower import Lowered
from fuseplan.planner.module_paths import Paths, place
from fuseplan.planner.runtime.buffer_donation import plan_reuse
from fuseplan.planner.runtime.fallback import Calling, CallPlan, FirstCall, GroupPlan
from fuseplan.planner.runtime.logs import show_graph, show_kernels, warn_once
from fuseplan.planner.runtime.placement import fused_graph
from fuseplan.planner.runtime.ranges import add_ranges, ask_for_profilers, range_name
from fuseplan.search.errors import OWN_FAULTS

#: How a kernel is called, and the inputs that its outputs could take.
_Kernel: TypeAlias = tuple[Calling, ReuseOptions]


def executable(
    traced: Traced, plans: Sequence[GroupPlan], target: Target, tally: Tally, numerics: str = "fp32",
    debug: bool = False, in_place: bool = True, donated: Collection[int] = (), parameters: Collection[int] = (),
    calls: Sequence[CallPlan] = ()
) -> Callable[..., Any]:
    """A function with the signature and results of ``traced.module`` that runs ``plans`` as kernels.

    Never raises for a group. The first call of each kernel is guarded (:class:`FirstCall`); later calls are direct.
    With ``debug`` the code is shown, and in its first call how far each kernel is from the ATen ops.

    With ``in_place``, outputs of a kernel take the memory of inputs that nothing needs after it, from its second call
    on, where the back end can do that. ``donated`` and ``parameters`` are positions of arguments: those that the caller
    gives away, whose memory may be taken so, too, and those that are parameters. A library's call runs each of
    ``calls``.
    """
    built = list(_kernel_calls(traced, plans, target, tally, numerics, in_place, debug))
    if built and target.is_gpu and (problem := launcher_problem()) is not None:
        tally.note(f"kernels go through Triton's launcher: {problem}")
    built += _library_calls(traced, calls, target, tally, len(built))
    first_calls = {one.group: one for one in built}
    graph, refused = fused_graph(traced, list(first_calls))
    for group, reason in refused:
        first_calls[group].plan.leave_out(reason, tally)
    reused = plan_reuse(graph, traced, donated)
    collapse_views(graph, traced.module.graph, parameters)
    bind_calls(graph, traced.module.graph)
    ask_for_profilers(graph)
    module = fx.GraphModule(traced.module, graph, class_name="Fused")
    forward: Callable[..., Any] = module.forward
    namespace: dict[str, Any] = module.forward.__globals__
    fill_namespace(namespace)
    ranges: dict[str, str] = {}
    places = _places(one.plan for one in built)
    for name, slot in list(namespace.items()):
        if isinstance(slot, GroupCall):
            first_calls[slot].bind(namespace, name, reused.get(slot, {}))
            plan = first_calls[slot].plan
            library = plan.library.name if isinstance(plan, CallPlan) else ""
            ranges[name] = range_name(plan.label or slot.name, library, places.get(plan.label, ""))
    add_ranges(module, ranges)
    show_kernels([
        (one.plan.label or one.group.name, partial(one.plan.backend.source, one.ir, one.plan.config))
        for one in built if one.ir is not None and isinstance(one.plan, GroupPlan)
    ])
    show_graph(module.code, debug)
    return forward


#: Why a graph, or a call of it, runs unfused.
SHARED_MEMORY = "inputs share memory that the graph writes to; allocate them apart, as with x.clone()"


def guarded_call(
    call: Callable[..., Any], unfused: Callable[..., Any], traced: Traced, tally: Tally
) -> Callable[..., Any]:
    """``call``, which runs ``traced`` fused; ``unfused`` in calls in which inputs share memory that it writes to.

    A trace orders reads and writes of the memory of each input alone. A graph that writes to no input is not checked.
    """
    written, read = list[Operand](), list[Operand]()
    for value, position in traced.placeholders.items():
        node = traced.node_of[value]
        if node.users:
            (written if position in traced.written else read).append(Operand.of(position, node.meta["val"]))

    def met() -> None:
        tally.refuse(f"in a call, {SHARED_MEMORY}")
        warn_once(SHARED_MEMORY, "a call of graph %s runs unfused: %s", tally.compile_id, SHARED_MEMORY)

    return guarded(call, unfused, met, written, read) if written and len(written) + len(read) > 1 else call


def _places(plans: Iterable[GroupPlan | CallPlan]) -> dict[str, str]:
    """Where in the model the groups of each label are: one name for all layers."""
    found: dict[str, list[Paths]] = {}
    for plan in plans:
        found.setdefault(plan.label, []).append(plan.paths)
    return {label: place(paths) for label, paths in found.items()}


def _kernel_calls(
    traced: Traced, plans: Sequence[GroupPlan], target: Target, tally: Tally, numerics: str, in_place: bool, debug: bool
) -> Iterator[FirstCall]:
    """The groups that can be kernels here."""
    wanted: list[tuple[GroupPlan, Lowered]] = []
    for plan in plans:
        try:
            lowered = _lowered(traced, plan, target, numerics)
            wanted.append((_expressible(plan, lowered.ir, target), lowered))
        except Exception as error:  # a group must never take the model down, whatever fails
            plan.leave_out(failure_reason(error), tally)
    number = 0
    for (plan, lowered), made in zip(wanted, _make_kernels(wanted, target, in_place), strict=True):
        if isinstance(made, Exception):
            plan.leave_out(failure_reason(made), tally)
            continue
        ir, (calling, options) = lowered.ir, made
        name = _name(number, plan.label)
        group = GroupCall(name, plan.ops, lowered.inputs, lowered.outputs, ir.symbols, ir.outputs, options)
        unfused = partial(run_unfused, traced, lowered, target.device_type)
        fails = plan.backend.raises_outside and may_fail(ir)
        outside = partial(run_chain, traced.graph, lowered, target.device_type) if fails else None
        yield FirstCall(plan, group, calling, unfused, tally, ir, debug, outside)
        number += 1


def _lowered(traced: Traced, plan: GroupPlan, target: Target, numerics: str) -> Lowered:
    """The group's kernel.

    Raises:
        NotLowerable, RefusedError: It cannot be one here.
    """
    lowered = lower_group(traced.graph, plan.ops, numerics)
    for value in (*lowered.inputs, *lowered.outputs):
        node = traced.node_of.get(value)
        fake = node.meta.get("val") if node is not None else None
        # A CPU scalar tensor in a CUDA graph stays with its ATen op.
        if isinstance(fake, torch.Tensor) and fake.device.type != target.device_type:
            raise RefusedError(f"the group reads a {fake.device.type} tensor; the kernel runs on {target.device_type}")
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


def _make_kernels(
    wanted: Sequence[tuple[GroupPlan, Lowered]], target: Target, in_place: bool
) -> list[_Kernel | Exception]:
    """Each kernel, or why it cannot be built; equal ones, of repeated layers, are built once."""

    def build(group: tuple[GroupPlan, Lowered]) -> _Kernel | Exception:
        plan, ir = group[0], group[1].ir
        backend, config = plan.backend, plan.config
        try:
            if in_place and isinstance(backend, WritesInPlace) and (options := backend.reuse_options(ir, config)):
                call = partial(backend.call, backend.load(ir, config, target), ir, target)
                calling = cache(lambda reuse: call(dict(reuse)))
                calling(())  # what fails here costs this group alone
                return calling, options
            return partial(_always, backend.fused_callable(ir, config, target)), {}
        except Exception as error:
            OWN_FAULTS.tolerate(error)
            return error

    keys = [(plan.backend.name, lowered.ir.fingerprint(), config_key(plan.config)) for plan, lowered in wanted]
    distinct = dict(zip(keys, wanted, strict=True))
    # A C++ compiler is a process of its own, so threads compile in parallel; GPU compilers hold this process's lock.
    workers = min(len(distinct), target.cores) if not target.is_gpu else 1
    made = dict(zip(distinct, in_threads(build, distinct.values(), workers), strict=True))
    return [made[key] for key in keys]


def _library_calls(
    traced: Traced, plans: Sequence[CallPlan], target: Target, tally: Tally, number: int
) -> Iterator[FirstCall]:
    """The library calls that can be made, numbered from ``number`` on; ATen's op runs what cannot."""
    flow = compute_graph_of(traced.graph)
    for plan in plans:
        try:
            op = op_group(traced.graph, plan.ops, flow.outputs_of(plan.ops), target.device_type)
            if not all(traced.graph.specs[value].is_static for value in (*op.inputs, *op.outputs)):
                raise RefusedError("sizes are dynamic")
            if (reason := plan.library.refuse(op)) is not None:
                raise RefusedError(reason)
            call = plan.library.build(op)
        except Exception as error:
            plan.leave_out(failure_reason(error), tally)
            continue
        outputs = [(value, op.specs[value]) for value in op.outputs]
        buffers = [Buffer(value, spec.dtype, spec.shape, spec.strides, is_output=True) for value, spec in outputs]
        name = _name(number, f"{plan.library.name} {plan.label}")
        group = GroupCall(name, plan.ops, op.inputs, op.outputs, buffers=buffers)
        yield FirstCall(plan, group, partial(_always, call), partial(run_op, op), tally)
        number += 1


def _always(call: Fused, reuse: object) -> Fused:
    return call


def _name(number: int, label: str) -> str:
    """Of a call in generated code."""
    words = "".join(letter if letter.isalnum() else "_" for letter in label.split(" ")[0])
    return f"fused_{number}_{words}".rstrip("_")
