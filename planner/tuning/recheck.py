"""Whether shipped times hold on this machine: the first tune measures the longest of their kernels again.

They were measured on another machine with the same device, whose processor, power limit or other load may differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.implementations.tunable_group import TunableGroup, group_subject
from fuseplan.planner.tuning.planner import GraphPlan
from fuseplan.planner.tuning.session import Session
from fuseplan.search import policy
from fuseplan.search.store import codec
from fuseplan.search.store.record import RecordKey, TuningRecord
from fuseplan.search.timing.subject import Subject
from fuseplan.search.tune.tuner import Tuner

_PREFIX = "recheck"


@dataclass(frozen=True)
class Rechecked:
    """One shipped kernel, measured here at ``created`` (ISO 8601 UTC); ``failure`` says why ``measured_us`` is None."""

    key: RecordKey
    label: str
    stored_us: float
    measured_us: float | None
    failure: str = ""
    created: str = ""


def recheck(session: Session, kernels: Sequence[tuple[Subject, TuningRecord]], tuner: Tuner) -> tuple[Rechecked, ...]:
    """Measure shipped kernels again; what was measured before is not repeated."""
    known = {one.key for one in rechecked(session, kernels)}
    new = [(subject, record) for subject, record in kernels if record.key not in known]
    for (_, record), trial in zip(new, tuner.time_again(new), strict=True):
        found = Rechecked(record.key, record.label, record.best_us, trial.median_us, trial.reason, trial.created)
        name = codec.checksum(codec.dumps(record.key))
        session.database.put_capture(f"{_PREFIX}/{name}", asdict(found))
    return rechecked(session, kernels)


def rechecked(session: Session, kernels: Iterable[tuple[Subject, TuningRecord]]) -> tuple[Rechecked, ...]:
    """What is stored of these kernels."""
    known = {one.key: one for one in codec.stored(session.database, Rechecked, _PREFIX).values()}
    return tuple(known[record.key] for _, record in kernels if record.key in known)


def longest_shipped(
    session: Session, planned: Iterable[tuple[DataflowGraph, GraphPlan]]
) -> list[tuple[TunableGroup, TuningRecord]]:
    """The shipped kernels of the plans, or of parts of them, that take longest, each once."""
    store, settings = session.store, session.settings
    found: dict[str, tuple[TuningRecord, DataflowGraph, tuple[str, ...]]] = {}
    for graph, plan in planned:
        groups = ((one, group) for one in plan.unique() for group in one.record.groups if group.is_kernel)
        for region, group in groups:
            key = RecordKey(group.workload, session.device, settings.regime, settings.numerics)
            there = store.get_record(key) if group.workload not in found else None
            if there is not None and there.shipped and there.hit is not None and there.hit.fused is not None:
                found[group.workload] = there.hit, graph, region.group_ops(group)
    longest = sorted(found.values(), key=lambda one: -one[0].best_us)[:policy.RECHECK_LIMIT]
    return [
        (group_subject(graph, ops, record.key.workload, settings.numerics, session.target.device_type), record)
        for record, graph, ops in longest
    ]


def recheck_verdict(rechecked: Iterable[Rechecked]) -> str:
    """In one line: whether the shipped times hold here, and what to do where they do not; empty without any."""
    listed = list(rechecked)
    if not listed:
        return ""
    ratios = [one.measured_us / one.stored_us for one in listed if one.measured_us is not None]
    failed = [f"{one.label}: {one.failure}" for one in listed if one.measured_us is None]
    words = f"measured again {len(listed)} of the kernels that come with fuseplan"
    advice = "`plan tune --no-shipped` measures everything on this machine"
    if failed:
        return f"{words}: {len(failed)} failed here ({failed[0]}); {advice}"
    middle = statistics.median(ratios)
    words += f": {middle:.2f}x their stored times ({min(ratios):.2f}x to {max(ratios):.2f}x)"
    if 1 / policy.RECHECK_TOLERANCE <= middle <= policy.RECHECK_TOLERANCE:
        return f"{words}; the stored times hold here"
    return f"{words}; the stored times do not hold here: {advice}"
