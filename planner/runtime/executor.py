"""Making a plan executable: each fused group becomes one call in the traced FX graph; all else stays ATen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from torch import fx

from fuseplan.kernels.gpu.direct import launcher_problem
from fuseplan.kernels.ir.backend import Target
from fuseplan.kernels.native.allowance import in_threads
from fuseplan.kernels.native.overlap import Operand, guarded
from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.errors import failure_reason
from fuseplan.planner.implementations.direct_calls import bind_calls, fill_namespace
from fuseplan.planner.implementations.first_call import FirstCall
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.implementations.profiler_ranges import add_ranges, ask_for_profilers, range_name
from fuseplan.planner.module_paths import Paths, place
from fuseplan.planner.runtime.buffer_donation import Memory, keep_freed, plan_reuse
from fuseplan.planner.runtime.logs import debug_logger, show_graph, show_kernels, warn_once
from fuseplan.planner.runtime.placement import fused_graph
from fuseplan.planner.runtime.short_views import shorten_views
from fuseplan.search import policy
from fuseplan.search.errors import OWN_FAULTS
from fuseplan.search.workers.compilers import COMPILERS


def executable(
    traced: Traced, groups: Sequence[PlannedGroup], target: Target, tally: Tally, numerics: str = "fp32",
    debug: bool = False, in_place: bool = True, unguarded: Collection[int] = (),
) -> Callable[..., Any]:
    """A function with the signature and results of ``traced.module`` that runs ``groups`` by their implementations.

    A group that fails is left as ATen ops, and counted. Its first call is guarded (:class:`FirstCall`); later ones are
    direct. With ``debug`` the code is shown, and in a first call how far a kernel is from the ATen ops. With
    ``in_place``, results may take the memory of operands that nothing needs after that. ``unguarded`` are positions of
    graph inputs whose strides no guard checks.
    """
    calls = _first_calls(traced, groups, target, tally, numerics, in_place)
    kernels = [(call.name, call.source) for call in calls if call.source is not None]
    if kernels and target.is_gpu and (problem := launcher_problem()) is not None:
        tally.note(f"kernels go through Triton's launcher: {problem}")
    graph, refused = fused_graph(traced, list(calls))
    reasons = dict[object, str](refused)
    for call, group in calls.items():
        if call in reasons:
            group.implementation.leave_out(group, tally, reasons[call])
    memory = Memory(graph, traced)
    reused = plan_reuse(graph, memory)
    if not target.is_gpu:
        keep_freed(memory.peak_bytes(graph))
    shorten_views(graph, traced, memory, unguarded)
    bind_calls(graph, traced.module.graph)
    ask_for_profilers(graph)
    module = fx.GraphModule(traced.module, graph, class_name="Fused")
    forward: Callable[..., Any] = module.forward
    namespace: dict[str, Any] = module.forward.__globals__
    fill_namespace(namespace)
    ranges: dict[str, str] = {}
    places = _places(calls.values())
    for name, call in list(namespace.items()):
        if isinstance(call, FirstCall):
            group, reuse = calls[call], reused.get(call, {})
            call.debug = debug_logger() if debug and call.ir is not None else None
            call.bind(namespace, name, reuse, partial(group.implementation.give_up, group, tally))
            group.implementation.count(group, tally)
            tally.count("in_place", len(reuse))
            library = "" if call.ir is not None else group.implementation.name
            ranges[name] = range_name(group.label or call.name, library, places[group.label])
    add_ranges(module, ranges)
    show_kernels(kernels)
    show_graph(module.code, debug)
    return forward


#: Why a call runs unfused.
_SHARED_MEMORY = "inputs share memory that the graph writes to; allocate them apart, as with x.clone()"


def guarded_call(
    call: Callable[..., Any], unfused: Callable[..., Any], traced: Traced, tally: Tally
) -> Callable[..., Any]:
    """``call``, which runs ``traced`` fused; ``unfused`` where inputs of a call share memory that it writes to."""
    written, read = list[Operand](), list[Operand]()
    for value, position in traced.placeholders.items():
        node = traced.node_of[value]
        if node.users:
            (written if position in traced.written else read).append(Operand.of(position, node.meta["val"]))

    def met() -> None:
        tally.refuse(f"in a call, {_SHARED_MEMORY}")
        warn_once(_SHARED_MEMORY, "a call of graph %s runs unfused: %s", tally.compile_id, _SHARED_MEMORY)

    return guarded(call, unfused, met, written, read) if written and len(written) + len(read) > 1 else call


def _places(groups: Iterable[PlannedGroup]) -> dict[str, str]:
    """Where in the model the groups of each label are: one name for all layers."""
    found: dict[str, list[Paths]] = {}
    for group in groups:
        found.setdefault(group.label, []).append(group.paths)
    return {label: place(paths) for label, paths in found.items()}


def _first_calls(
    traced: Traced, groups: Sequence[PlannedGroup], target: Target, tally: Tally, numerics: str, in_place: bool
) -> dict[FirstCall, PlannedGroup]:
    """The calls of the groups that can be made here; equal ones, of repeated layers, are built once."""
    table = GroupTable(traced.graph, numerics, target.device_type)
    prepared: list[tuple[FirstCall, PlannedGroup]] = []
    for group in groups:
        try:
            call = group.implementation.prepare(table, traced, group)
        except Exception as error:  # a group must never take the model down, whatever fails
            group.implementation.leave_out(group, tally, failure_reason(error))
        else:
            prepared += [(call, group)] if call is not None else []

    def build(call: FirstCall) -> Any:
        try:
            return call.build(in_place)
        except Exception as error:
            OWN_FAULTS.tolerate(error)
            return error

    distinct = {call.key: call for call, _ in reversed(prepared)}
    workers = min(len(distinct), target.cores)  # a C++ compiler is a process of its own, so threads compile in parallel
    if target.is_gpu:  # other processes compile kernels from one end, this one from the other, and all else before
        workers, distinct = policy.KERNEL_THREADS, dict(
            sorted(distinct.items(), key=lambda one: one[1].compilation is not None))
        COMPILERS.compile_ahead(
            [call.compilation for call in reversed(distinct.values()) if call.compilation is not None])
    built = dict(zip(distinct, in_threads(build, distinct.values(), workers), strict=True))
    made: dict[FirstCall, PlannedGroup] = {}
    for call, group in prepared:
        result = built[call.key]
        if isinstance(result, Exception):
            group.implementation.leave_out(group, tally, failure_reason(result))
        else:
            call.calling, call.reuse_options = result
            call.number(len(made))
            made[call] = group
    return made
