"""What every tune does: how hard it searches, a measured device, the tune itself, and what is doubtful about it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace

from fuseplan.costmodel.device import DeviceSpec
from fuseplan.costmodel.probe.probe import MachineLoad
from fuseplan.planner.api.progress import SILENT, Progress
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.tuning import summary
from fuseplan.planner.tuning import tune as offline
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.tune import TuneResult, WorkloadPlan
from fuseplan.search.errors import NothingCompilesError
from fuseplan.search.store.leases import Leases
from fuseplan.search.store.record import RecordKey
from fuseplan.search.tune.study import Studies
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.tune.tuner import Budget
from fuseplan.search.workers.worker import WorkerPool


@dataclass(frozen=True)
class HowToTune:
    """How hard to search, and what is taken from earlier searches.

    Attributes:
        trials: Configurations tried per group, over all back ends; None: 12 on CPUs, 8 on CUDA.
        seconds: Search time per group.
        job_limit: Seconds without a sign after which a job counts as hanging, beside what its calls should take; None:
            60.
        seed: That of the search and of the inputs.
        shipped: Whether the records that come with fuseplan for this device count as stored.
        again: Measure anew what is stored or shipped.
        study: Where each search is kept as an Optuna study, too: a SQLAlchemy URL or the path of a journal file.
    """

    trials: int | None = None
    seconds: float = 6.0
    seed: int = 0
    shipped: bool = True
    again: bool = False
    study: str | None = None
    job_limit: float | None = None

    def budget(self, device_type: str) -> Budget:
        """What a group may cost on a device."""
        return Budget.on(device_type, self.trials, self.seconds, self.job_limit)

    def studies(self) -> Studies | None:
        """Where studies are kept; :class:`StudyError` where that cannot be."""
        return None if self.study is None else Studies(self.study)

    def of(self, session: Session, studies: Studies | None) -> Session:
        """The session as it is searched with."""
        return replace(session, shipped=self.shipped, run=uuid.uuid4().hex if self.again else "", studies=studies)


def doubts(spec: DeviceSpec) -> list[str]:
    """What makes a probe's numbers doubtful."""
    return [f"this probe is doubtful: {problem}; run `plan probe` when it is idle" for problem in spec.problems]


def ready(session: Session, account: TimeAccount | None = None, progress: Progress = SILENT) -> Session:
    """The session with a measured device: the stored one, else probed now, by one tuner for all on this database."""
    if session.spec is None:
        account = account if account is not None else TimeAccount()
        with (
            account.spend("probing"), progress.status("probing this device once") as say,
            closing(Leases(session.database)) as leases,
        ):
            session = leases.once(
                RecordKey("probe", session.device), session.with_stored_spec,
                lambda: session.probed(lambda share, step: say(f"probing this device once: {step}, {share:.0%}")))
    assert session.spec is not None
    for doubt in doubts(session.spec):
        progress.warn(doubt)
    return session


def run(
    session: Session, name: str, graphs: Iterable[tuple[str, DataflowGraph]], budget: Budget, seed: int = 0,
    account: TimeAccount | None = None, executor: WorkerPool | None = None,
    times_step: Callable[[str], bool] | None = None, progress: Progress = SILENT,
) -> TuneResult:
    """Tune, and keep a summary of each workload for the reports.

    Whole steps are timed of the workloads that ``times_step`` says yes to.
    """
    with progress.tuning() as events:
        return offline.tune(
            session, graphs, budget, seed, events.on_region, events.on_trial, account, executor, events.on_graph,
            times_step, on_plan=lambda planned: keep_summary(session, name, planned.workload, planned),
        )


def keep_summary(session: Session, model: str, workload: str, planned: WorkloadPlan) -> None:
    """Store what reports say of a planned workload, under the names of its model and of itself."""
    pairs = [(one.region, one.record) for one in planned.plan.regions]
    if pairs:
        summary.store_summary(session.database, summary.summarise(model, workload, planned.graph, pairs))


def complaints(result: TuneResult, load: MachineLoad) -> tuple[tuple[str, ...], str]:
    """What was not decided, or doubtfully; and why nothing was, where that is more than a region or some noise."""
    found = [*map(str, result.failures), *result.untimed]
    if result.measured and load.busy:
        found.append(f"the machine was busy ({load}), so times are noisy; a tune with the option again measures anew")
    if hidden := sum(plan.record.undecided for _, plan in result.distinct()):
        found.append(
            f"noise hides the answer in {hidden} regions: until a tune on a quieter machine they are "
            "planned by the cost model"
        )
    why = ""
    if any(isinstance(failure.error, NothingCompilesError) for failure in result.failures):
        why = "nothing compiles here"
    elif result.failures and not result.distinct():
        why = "no region could be planned"
    return tuple(found), f"{why}; nothing of that is stored, and the same command tries again" if why else ""


def outcome(result: TuneResult) -> str:
    """What was measured, in one sentence."""
    distinct = result.distinct()
    measured = sum(region.source == "tuned" for _, region in distinct)
    shipped = sum(region.shipped for _, region in distinct)
    stored = len(distinct) - measured - shipped
    if not measured:
        came = "came from the database"
        if shipped:
            came = f"come with fuseplan ({shipped}) or from the database ({stored})"
        return f"nothing was measured: all {len(distinct)} distinct regions {came} ({result.elapsed_s:.1f} s)"
    known = f"{stored} regions were stored already" + (f", {shipped} come with fuseplan" if shipped else "")
    return (
        f"measured {result.measured} of {result.enumerated} candidates in {measured} regions "
        f"({known}); tuning took {result.elapsed_s:.1f} s"
    )
