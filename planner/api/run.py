"""A tune on this device, whatever is asked for: capture, a measured device, the tune itself, and what is doubtful."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from fuseplan.costmodel.device import DeviceSpec
from fuseplan.costmodel.devices import is_gpu
from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe import probe
from fuseplan.kernels.gpu.direct import prepare_first_launch
from fuseplan.planner.api.request import TuneRequest
from fuseplan.planner.errors import CompilerMissingError
from fuseplan.planner.implementations.inductor import changed_settings
from fuseplan.planner.tuning import tune as offline
from fuseplan.planner.tuning.graph_stream import CaptureElsewhere
from fuseplan.planner.tuning.progress import SILENT, Progress
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.planner.tuning.tune import Batch, TuneResult
from fuseplan.search.errors import NothingCompilesError, counted
from fuseplan.search.store.database import check_usable
from fuseplan.search.store.leases import Leases
from fuseplan.search.store.location import left_behind
from fuseplan.search.store.record import RecordKey
from fuseplan.search.tune import tuner
from fuseplan.search.tune.time_account import TimeAccount


def doubts(spec: DeviceSpec) -> list[str]:
    """What makes a probe's numbers doubtful, when it was made and what to do, in one line; none of a good one."""
    return [f"the probe of this device, made at {spec.measured_at}, is doubtful: {'; '.join(spec.problems)}; run "
            "`plan probe` again when the machine is idle"] if spec.problems else []


def ready(session: Session, account: TimeAccount | None = None, progress: Progress = SILENT) -> Session:
    """The session with a measured device: the stored one, else probed now, by one tuner for all on this database.

    CompilerMissingError, at once, where no kernel back end can be used.
    """
    if session.spec is None:
        if (reason := session.unusable()) is not None:
            raise CompilerMissingError(reason)
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


class Wanted(Protocol):
    """What a run tunes on a device: a model, the models of a manifest, or what was missed."""

    def capture(self, stack: ExitStack, progress: Progress, account: TimeAccount) -> None:
        """Capture what needs no database; ``stack`` ends with the run."""

    def batches(self, session: Session, progress: Progress, account: TimeAccount) -> Sequence[Batch]:
        """What is planned together, in order. A FuseplanError is a mistake, told before the device is probed."""

    def answer(self, ran: Ran) -> Any:
        """What came of it, for people."""


@dataclass(frozen=True, eq=False)
class Ran:
    """What came of each batch; ``load`` is how busy the machine was when the run began."""

    results: tuple[tuple[Batch, TuneResult], ...]
    session: Session
    load: probe.MachineLoad

    def complaints(self) -> tuple[tuple[str, ...], str]:
        """Warnings of what was not decided, or is doubtful, and why the run failed; "" where it did not."""
        warnings, failures = list[str](), list[str]()
        for _, result in self.results:
            warnings += [*map(str, result.failures), *result.untimed]
            if result.measured and self.load.busy:
                warnings.append(
                    f"the machine was busy ({self.load}), so times are noisy; `plan tune --again` measures anew")
            if result.measured and result.session.settings.inductor != "off" and (changed := changed_settings()):
                warnings.append(
                    f"TorchInductor's code was timed with its defaults; this process changes {', '.join(changed)}")
            if hidden := sum(plan.record.undecided for _, plan in result.distinct()):
                warnings.append(
                    f"noise hides the answer in {counted(hidden, 'region')}: until a tune on a quieter machine the "
                    "cost model plans there")
            if any(isinstance(failure.error, NothingCompilesError) for failure in result.failures):
                failures.append("nothing compiles here")
            elif result.failures and not result.distinct():
                failures.append("no region could be planned")
        again = "nothing of that is stored, and the same command tries again"
        return tuple(dict.fromkeys(warnings)), "; ".join(f"{why}; {again}" for why in dict.fromkeys(failures))


#: What is wanted on a device, by its key, and where its graphs are captured; None for here.
MakeWanted: TypeAlias = Callable[[str, CaptureElsewhere | None], Wanted]
#: Where a run is made: here, or by a fleet, once for each device.
Runner: TypeAlias = Callable[[TuneRequest, MakeWanted, Progress, TimeAccount], list[tuple[Wanted, Ran]]]


def run_here(
    request: TuneRequest, wanted_on: MakeWanted, progress: Progress, account: TimeAccount
) -> list[tuple[Wanted, Ran]]:
    """Tune what is wanted on this device; errors are those of :func:`~fuseplan.planner.tuning.tune.tune`.

    An error loses no finished region: each is stored at once. A stored region is not measured again, so the same
    command goes on after an interruption, and two runs share their work.
    """
    kind, how = request.kind, request.how
    if is_gpu(kind):
        prepare_first_launch()
    wanted = wanted_on(current_identity(kind).key(), None)
    note, studies = left_behind() if request.db is None else "", how.studies()
    results = []
    with ExitStack() as stack:
        pool = stack.enter_context(tuner.make_pool(kind))
        check_usable(request.db)
        wanted.capture(stack, progress, account)
        session = how.of(open_session(kind, request.db), studies, uuid.uuid4().hex)
        batches = wanted.batches(session, progress, account)
        if session.spec is None and is_gpu(kind) and batches:  # hardly anything is stored: they will be needed
            pool.start()
        load = probe.machine_load()
        if batches:
            session = ready(session, account, progress)
        if note:
            progress.note(note)
        for batch in batches:
            planning = session.planning_for(batch.settings)
            result = offline.tune(planning, batch, how.budget(kind), how.seed, progress, account, pool)
            session = result.session
            results.append((batch, result))
    return [(wanted, Ran(tuple(results), session, load))]


def outcome(result: TuneResult) -> str:
    """What was measured, in one sentence."""
    distinct = result.distinct()
    measured = sum(region.source == "tuned" for _, region in distinct)
    shipped = sum(region.shipped for _, region in distinct)
    stored = len(distinct) - measured - shipped
    again = f"; {result.renewed} measured with other versions, and timed again" if result.renewed else ""
    if not measured:
        what = "searched" if result.renewed else "measured"
        came = f"come with fuseplan ({shipped}) or from the database ({stored})"
        came = came if shipped else "came from the database"
        every = "the one distinct region" if len(distinct) == 1 else f"all {len(distinct)} distinct regions"
        return f"nothing was {what}: {every} {came}{again} ({result.elapsed_s:.1f} s)"
    known = f"{counted(stored, 'region was', 'regions were')} stored already"
    known += (f", {counted(shipped, 'comes', 'come')} with fuseplan" if shipped else "") + again
    return (f"measured {result.measured} of {counted(result.enumerated, 'candidate')} in {counted(measured, 'region')} "
            f"({known}); tuning took {result.elapsed_s:.1f} s")
