"""What dispatch shows of itself, in the way of PyTorch's own components: log artifacts and structured traces.

``TORCH_LOGS="fuseplan_plans"`` shows each graph's plan, ``TORCH_LOGS="fuseplan_kernels"`` the source of its kernels.
PyTorch takes an unknown name for a module's, so there are empty modules of these two names. ``TORCH_LOGS="fuseplan"``
and ``"+fuseplan"`` set the level of everything else. With ``TORCH_TRACE`` set both are written to its log, where
tlparse finds them. The option ``debug`` shows plans without any set-up of logging.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch._logging._internal import trace_structured

from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.places import region_paths
from fuseplan.planner.module_paths import group_place, located
from fuseplan.planner.tuning.plans import RegionPlan
from fuseplan.search.store.record import GroupChoice

PLANS, KERNELS = "fuseplan_plans", "fuseplan_kernels"
logger = logging.getLogger(__name__)
_DEBUG = logging.getLogger("fuseplan.debug")


def debug_logger() -> logging.Logger:
    """A logger that shows what ``debug`` asks for: on standard error where nobody has set up logging."""
    if not _DEBUG.isEnabledFor(logging.INFO):
        _DEBUG.setLevel(logging.INFO)
    if not _DEBUG.hasHandlers():
        _DEBUG.addHandler(logging.StreamHandler())
    return _DEBUG


#: Keys of what this process has said once: it compiles many graphs.
SAID: set[Hashable] = set()


def is_news(key: Hashable) -> bool:
    """Whether this is the first time that anybody asks for a ``key`` in this process."""
    known = key in SAID
    SAID.add(key)
    return not known


def warn_once(key: str, message: str, *args: object) -> None:
    """A warning, the first time that something with this ``key`` happens in this process."""
    if is_news(key):
        logger.warning(f"{message} (said once)", *args)


def show_plans(
    regions: Sequence[RegionPlan], tally: Tally, debug: bool = False, graph: DataflowGraph | None = None
) -> None:
    """The plans of one compiled graph, each once, with places in ``graph``, and what does not run as planned."""
    occurrences: dict[str, list[RegionPlan]] = {}
    for plan in regions:
        occurrences.setdefault(plan.region.key, []).append(plan)
    distinct = [plans[0] for plans in occurrences.values()]
    counts = {key: len(plans) for key, plans in occurrences.items()}

    def place(plan: RegionPlan, choice: GroupChoice) -> str:
        if graph is None:
            return ""
        return group_place(region_paths(graph, [one.region for one in occurrences[plan.region.key]]), choice.ops)

    def text() -> str:
        found = tally.snapshot()
        lines = [*describe(distinct, counts=counts, place=place)]
        lines += [f"not done: {count} x {reason}" for reason, count in (*found.fallbacks.items(), *found.notes.items())]
        return "\n".join([f"plan of graph {tally.compile_id}:", *(lines or ["nothing to fuse"])])

    def data() -> str:
        found = tally.snapshot()
        records = [
            {"source": plan.source, "times": counts[plan.region.key], **asdict(plan.record),
             "places": [place(plan, choice) for choice in plan.record.groups]} for plan in distinct
        ]
        told = {"regions": records, "fallbacks": dict(found.fallbacks), "notes": dict(found.notes)}
        return json.dumps(told, indent=1)

    _show(PLANS, text, debug)
    _trace(PLANS, "json", data)


def show_kernels(kernels: Sequence[tuple[str, Callable[[], str]]]) -> None:
    """The source of each distinct kernel of one compiled graph; ``kernels`` are labels and sources."""
    def text() -> str:
        distinct = {source(): label for label, source in reversed(kernels)}
        return "\n".join(f"kernel of {label}:\n{source}" for source, label in reversed(distinct.items()))

    if kernels:
        _show(KERNELS, text)
        _trace(KERNELS, "string", text)


def show_graph(code: str, debug: bool = False) -> None:
    """The code of one compiled graph, in which each group is a call."""
    if debug:
        debug_logger().info("fused graph:\n%s", code)
    else:
        logger.debug("fused graph:\n%s", code)
    _trace("fuseplan_graph", "string", lambda: code)


def describe(
    plans: Iterable[RegionPlan], instead: Callable[[RegionPlan, GroupChoice], str] = lambda plan, choice: "",
    counts: Mapping[str, int] | None = None, place: Callable[[RegionPlan, GroupChoice], str] = lambda plan, choice: "",
) -> Iterable[str]:
    """Lines for people: every region, its groups with their configuration and times, what was not chosen, and why.

    Regions of one op with one way to run it are left out.
    ``instead`` says how a group runs where the plan is not followed, ``counts`` how often a region occurs, by its key,
    and ``place`` where in the model a group is.
    """
    for plan in plans:
        record = plan.record
        if record.enumerated == 1:
            continue
        often = (counts or {}).get(plan.region.key, 1)
        times = f" ({often} times)" if often > 1 else ""
        yield f"region {record.label}{times}: plan from {plan.source}; {record.evidence.reason}"
        for choice in record.groups:
            how = "unfused" if choice.is_plain else f"fused by {choice.implementation} {dict(choice.config)}"
            told = {"predicted": choice.predicted_us, "measured": choice.measured_us}
            spent = "".join(f"; {name} {time_us:.1f} us" for name, time_us in told.items() if time_us)
            yield f"  {located(choice.label, place(plan, choice))}: {instead(plan, choice) or how}{spent}"
        yield from (f"  not chosen: {other.label}: {other.reason}" for other in record.rejected)


def _show(artifact: str, text: Callable[[], str], debug: bool = False) -> None:
    """Log where the artifact was asked for by name: a level for all of fuseplan, or of the root, asks for none."""
    named = logging.getLogger(artifact)
    if named.level and named.isEnabledFor(logging.INFO):
        named.info("%s", text())
    elif debug:
        debug_logger().info("%s", text())


def _trace(name: str, encoding: str, payload: Callable[[], Any]) -> None:
    """An artifact of the structured trace; nothing is computed where there is none."""
    compiling = torch._guards.CompileContext.current_compile_id() is not None
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload,
        expect_trace_id=compiling,
    )
