"""What a call costs the host: our fused group beside Triton's own launcher and one eager ATen op."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import numpy as np
import pandas as pd
import torch

from fuseplan.costmodel.devices import is_gpu
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.planner.bench.patterns import plan_case
from fuseplan.planner.bench.rows import failure
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.errors import PlanError
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.implementations.tunable_group import group_subject
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.contestant import Case, trace_cell
from fuseplan.planner.peers.peers import fused
from fuseplan.planner.runtime.lookup import look_up
from fuseplan.planner.tuning.session import Session
from fuseplan.search import policy
from fuseplan.search.timing.contest import no_collection

#: Names of what is called.
GROUP, PLAN, TRITON, ADD = "fused group", "whole plan", "triton launcher", "aten add"
#: What an eager launch of a fused group may cost.
BAR_US = 4.0
#: What is held against it, by whether outputs are allocated in the call: the launch, as Triton's launcher is timed, and
#: what a model's call costs.
_JUDGED = {"given": "launching a fused group", "allocated": "calling it, outputs and all,"}
#: Calls of one sample: far from filling a launch queue.
_CALLS = 200
_LOOKUPS = 9

Call = Callable[[], object]
#: Subject (a cell), what is called, and whether outputs are ``"allocated"`` in the call or ``"given"``.
Name = tuple[str, str, str]


@dataclass(frozen=True)
class LaunchRow:
    """Host time of one kind of call (:data:`Name`).

    ``host_us`` are microseconds until the call returns, None when it failed (``note`` says why); the device is not
    waited for.
    """

    subject: str
    what: str
    outputs: str
    host_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    note: str = ""


@dataclass(frozen=True)
class LookupRow:
    """Look-ups while one graph is compiled.

    ``database_us`` are microseconds per region in the database, ``planning_us`` those with everything else that finding
    a plan takes: regions, hashes, groups.
    """

    subject: str
    regions: int
    database_us: float
    planning_us: float


def bench_lookup(session: Session, cell: Cell) -> LookupRow:
    """Time finding the plan of one cell, as a compilation does; the median of a few."""
    traced = trace_cell(cell, session.target.device_type)[0].graph
    database, planning = [], []
    for _ in range(_LOOKUPS):
        tally = Tally(cell.key)
        # A compilation starts with a new graph, of which no regions are remembered.
        graph = copy.copy(traced)
        look_up(session, graph, "unfused", tally)
        seen = tally.snapshot()
        regions = max(1, seen.regions)
        planning.append(seen.lookup_s * 1e6 / regions)
        plan = session.planner().plan_graph(graph, on_failure=lambda region, error: None)  # only looking up is timed
        database.append(plan.lookup_us / regions)
    return LookupRow(cell.key, regions, statistics.median(database), statistics.median(planning))


def bench_launch(session: Session, cells: Sequence[Cell], seconds: float) -> list[LaunchRow]:
    """Time the calls of each cell's largest fused group and of what it is compared with, all in interleaved rounds.

    Nothing else should be running, since what runs beside a call slows it. ``seconds`` are for each cell. A cell whose
    plan fuses nothing is a :class:`PlanError`.
    """
    calls: dict[Name, Call] = {}
    failed: list[LaunchRow] = []
    with torch.no_grad():
        for cell in cells:
            case, _ = plan_case(session, cell)
            if not case.groups:
                raise PlanError(f"the plan of {cell.key} fuses nothing, so there is no launch to time")
            for what, outputs, make in _callables(case):
                name = (cell.key, what, outputs)
                try:
                    call = make()
                    call()
                except Exception as error:  # a launcher that does not work here must not end the bench
                    failed.append(LaunchRow(*name, note=failure(error)))
                else:
                    calls[name] = call
        return [*_timed(calls, seconds * len(cells), session.target.device_type), *failed]


def _callables(case: Case) -> Iterator[tuple[str, str, Callable[[], Call]]]:
    """Each kind of call, and what makes it."""
    group = max(case.groups, key=lambda one: len(one.ops))
    device = case.target.device_type
    subject = group_subject(case.traced.graph, group.ops, case.cell.key, case.numerics, device)
    inputs, outputs = subject.make_inputs(0, device), subject.allocate_outputs(device)
    kernel, backend = (subject.ir, group.config, case.target), group.implementation.backends[0]
    yield GROUP, "allocated", lambda: partial(backend.fused_callable(*kernel), *inputs)
    yield GROUP, "given", lambda: partial(backend.load(*kernel), *inputs, *outputs)
    yield PLAN, "allocated", lambda: partial(fused(case, case.groups).run, *case.inputs)
    if is_gpu(device):
        yield TRITON, "given", lambda: _triton_launcher(case, group, subject.ir, [*inputs, *outputs])
    x, y = torch.zeros(2, 8, dtype=getattr(torch, case.cell.dtype), device=device)
    yield ADD, "allocated", lambda: lambda: torch.add(x, x)
    yield ADD, "given", lambda: lambda: torch.add(x, x, out=y)


def _triton_launcher(case: Case, group: PlannedGroup, ir: KernelIR, arguments: Sequence[torch.Tensor]) -> Call:
    """The same kernel through ``kernel[grid](...)``: what a hand-written Triton kernel pays per call."""
    from fuseplan.kernels.gpu.tile import programs
    from fuseplan.kernels.ir.kernel_name import kernel_name
    from fuseplan.kernels.triton.backend import TritonBackend

    own = group.implementation.backends[0]
    backend = own if isinstance(own, TritonBackend) else TritonBackend()
    config = group.config if backend is own else backend.default_config(ir, case.target)
    kernel = getattr(backend.store.load(backend.source(ir, config)), kernel_name(ir))
    options = {"num_warps": int(config["num_warps"]), "num_stages": int(config.get("num_stages", 1))}
    grid = (programs(ir, config, {}),)
    return lambda: kernel[grid](*arguments, **options)


def _timed(calls: Mapping[Name, Call], seconds: float, device: str) -> list[LaunchRow]:
    """A row of every kind of call, timed in interleaved rounds."""
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    with no_collection():
        end, rounds = time.perf_counter() + seconds, 0
        while rounds < policy.MIN_ROUNDS or time.perf_counter() < end:
            rounds += 1
            for name, call in calls.items():
                samples[name].append(_sample_us(call, device))
    return [LaunchRow(*name, *np.quantile(own, (0.5, 0.2, 0.8)).tolist()) for name, own in samples.items()]


def _sample_us(call: Call, device: str) -> float:
    if is_gpu(device):
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in repeat(None, _CALLS):
        call()
    return (time.perf_counter() - start) * 1e6 / _CALLS


def launch_verdict(calls: pd.DataFrame, lookups: pd.DataFrame) -> list[str]:
    """Sentences that answer the bars: host time of a fused group, and of look-ups at compile."""
    lines = []
    for subject, part in calls[calls["host_us"].notna()].groupby("subject", sort=False):
        times = {(row["what"], row["outputs"]): row["host_us"] for row in part.to_dict("records")}
        said = ", ".join(f"{what} ({outputs} outputs) {value:.2f} us" for (what, outputs), value in times.items())
        bars = [
            f"{words} is {'under' if times[GROUP, outputs] < BAR_US else 'over'} {BAR_US:g} us"
            for outputs, words in _JUDGED.items() if (GROUP, outputs) in times
        ]
        lines.append("; ".join([f"{subject}: host time of a call: {said}", *bars]))
    return [
        *lines,
        *(f"{row['subject']}: look-up at compile {row['database_us']:.0f} us a region in the database, "
          f"{row['planning_us']:.0f} us with finding and hashing it" for row in lookups.to_dict("records")),
        *(f"{row['what']} ({row['outputs']} outputs), {row['subject']}: {row['note']}"
          for row in calls[calls["note"].astype(bool)].to_dict("records")),
    ]
