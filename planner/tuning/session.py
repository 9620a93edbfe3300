"""What every command works with: the database, this device as it was probed, and the back ends that can run on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fuseplan.costmodel.calibrate import Sample, calibrate
from fuseplan.costmodel.device import DeviceSpec
from fuseplan.costmodel.devices import is_cpu, local_kind
from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe.probe import probe
from fuseplan.kernels.ir.backend import Backend, Target, misfit
from fuseplan.kernels.ir.index import Index
from fuseplan.kernels.ir.ir import Buffer, KernelIR, Load, Segment, Store
from fuseplan.kernels.registry import backends_for, local_target
from fuseplan.planner.cost.running_calibration import RunningCalibration
from fuseplan.planner.errors import CompilerMissingError, DeviceError
from fuseplan.planner.tuning.planner import Planner, PlanSettings
from fuseplan.planner.work.group_work import launch_mode
from fuseplan.search.errors import RecordError
from fuseplan.search.store.database import Database, OpenMode, reservations
from fuseplan.search.store.layered import LayeredDatabase, shipped_files
from fuseplan.search.store.record import Versions
from fuseplan.search.store.rows import device_spec
from fuseplan.search.tune.study import Studies
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.tune.tuner import Budget, ProgressEvent, Tuner
from fuseplan.search.workers.worker import WorkerPool

if TYPE_CHECKING:
    import torch

#: Seconds up to which a probe with doubtful numbers is repeated: after a longer one nobody would wait for another.
REPEATED_S = 15.0
ProbeProgress = Callable[[float, str], None]


@dataclass(frozen=True)
class Session:
    """One device, one database.

    Attributes:
        device: Identity key of the device.
        spec: What was measured on it; None until it is probed. Opened for reading, the spec that ships with the
            package for such a device stands in.
        target: What kernels are compiled for.
        backends: Its kernel back ends, whether or not they can run here.
        settings: What plans are made for.
        shipped: Whether the records that come with the package count as stored.
        run: Name of a tune that measures anew what it has not written itself; "" for one that takes what is stored.
        studies: Where each search is kept as an Optuna study, beside the database.
    """

    database: Database
    device: str
    spec: DeviceSpec | None
    target: Target
    backends: tuple[Backend, ...]
    settings: PlanSettings
    shipped: bool = True
    run: str = ""
    studies: Studies | None = None

    @property
    def store(self) -> LayeredDatabase:
        """The user's records over those that ship with the package."""
        return LayeredDatabase(self.database, shipped_files(self.device) if self.shipped else (), run=self.run)

    def unusable(self) -> str | None:
        """Why no kernel can be built here by any back end, None where one can."""
        reasons = {backend.name: backend.unavailable() for backend in self.backends}
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) if all(reasons.values()) else None

    def planning_for(self, settings: PlanSettings) -> Session:
        """The same device and database, for other plans; TorchInductor is asked for what this session asks it."""
        in_graph = self.target.is_gpu and settings.regime == "graph"
        settings = replace(settings, inductor=self.settings.inductor)
        return replace(self, settings=settings, target=replace(self.target, in_graph=in_graph))

    def with_spec(self, spec: DeviceSpec) -> Session:
        """The same session with a newly measured device, stored."""
        self.database.put_device(self.device, json.loads(spec.to_json()))
        return replace(self, spec=spec)

    def with_stored_spec(self) -> Session | None:
        """The same session with the device as it is stored now; None where it is not."""
        spec = stored_spec(self.database, self.device)
        return None if spec is None else replace(self, spec=spec)

    def probed(self, progress: ProbeProgress | None = None) -> Session:
        """Measure the device quickly and store what was found."""
        return self.with_spec(self.measure_device(progress=progress))

    def measure_device(self, quick: bool = True, progress: ProbeProgress | None = None) -> DeviceSpec:
        """What a probe finds: the less doubtful of two, unless the first was clear, or so slow that the machine is
        busy.
        """
        call, began = tiny_kernel(self.backends, self.target), time.monotonic()
        first = probe(self.target.device_type, quick, progress, call)
        if not first.problems or time.monotonic() - began > REPEATED_S:
            return first
        second = probe(self.target.device_type, quick, progress, call)
        return min(first, second, key=lambda spec: (len(spec.problems), spec.noise))

    def planner(self, tuner: Tuner | None = None, learner: RunningCalibration | None = None) -> Planner:
        """A planner over :attr:`store`."""
        return Planner(
            self.store, self.spec, self.device, self.target, self.backends, self.settings, tuner, learner)

    def dispatcher(self) -> Planner:
        """A planner that measures nothing, and takes plans of other software versions: they are better than a guess."""
        planner = self.planner()
        planner.stored.any_version = True
        return planner

    def tuner(
        self, budget: Budget, seed: int = 0, progress: Callable[[ProgressEvent], None] | None = None,
        account: TimeAccount | None = None, executor: WorkerPool | None = None,
    ) -> Tuner:
        """A tuner for this device; close it when done. CompilerMissingError where no kernel back end can be used.

        ``executor`` is where its jobs run, left open; by default worker processes of its own.
        """
        if (reason := self.unusable()) is not None:
            raise CompilerMissingError(reason)
        usable = [backend for backend in self.backends if backend.unavailable() is None]
        return Tuner(
            self.database, self.target, usable, self.device, budget, seed, self.settings.regime,
            self.settings.numerics, executor, progress=progress, account=account, run=self.run,
            studies=self.studies,
        )

    def recalibrated(self) -> Session:
        """The device with its back ends' calibrations fitted to their records, where these are more than a tune's
        kernels.
        """
        if self.spec is None:
            return self
        spec = self.spec
        versions = Versions.current(self.target.device_type)
        for backend in self.backends:
            # Each record's best kernel, where it could have been built by this back end.
            samples = [
                Sample(record.work, launch_mode(record.config, record.key.regime), record.fused.median_us,
                       family=record.label.split(" ")[0])
                for record in self.database.records()
                if record.key.device == self.device and not reservations(record, versions)
                and record.fused is not None and record.backend == backend.name and record.work.launches
                and not misfit(record.config, backend.parameters, complete=False)
            ]
            known = spec.calibrations.get(backend.name)
            if samples and (known is None or known.samples < len(samples)):
                spec = spec.with_calibration(backend.name, calibrate(samples, spec))
        return self.with_spec(spec)


def open_session(
    device_type: str, database: str | Path | None = None, settings: PlanSettings | None = None,
    mode: OpenMode = "write", patient: bool = True, tell: Callable[[str], None] | None = None,
) -> Session:
    """Open the database and recognise the device; nothing is measured.

    The device is ``"cpu"``, ``"cuda"``, or ``"auto"`` (CUDA where there is one). ``database`` is a file or SQLAlchemy
    URL, None for the user's default file; one in mode ``"read"`` never raises. Who writes and is ``patient`` waits for
    a server that goes away later. ``tell`` takes warnings.

    Raises:
        DeviceError: There is no such device here.
        DatabaseError: The database cannot be opened for writing.
    """
    if device_type == "auto":
        device_type = local_kind()
    try:
        target = local_target(device_type)
        identity = current_identity(device_type)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(str(error)) from None
    if is_cpu(device_type):  # the identity knows the caches; kernels know no machine
        target = replace(target, l2_bytes=identity.l2_bytes)
    opened = Database(database, mode, Versions.current(device_type), patient, tell)
    return session_on(identity.key(), target, opened, settings)


def session_on(device: str, target: Target, database: Database, settings: PlanSettings | None = None) -> Session:
    """The session of an open database and a device, which may be another machine's: ``target`` was found there."""
    settings = settings if settings is not None else PlanSettings()
    known = LayeredDatabase(database, shipped_files(device)) if database.mode == "read" else database
    return Session(
        database=database,
        device=device,
        spec=stored_spec(known, device),
        target=target,
        backends=backends_for(target.device_type),
        settings=settings,
    ).planning_for(settings)


def stored_spec(database: Database | LayeredDatabase, device: str) -> DeviceSpec | None:
    """The stored device spec; None when there is none that this version can read."""
    found = database.get_device(device)
    if found is None:
        return None
    try:
        return device_spec(found)
    except RecordError:
        return None


def tiny_kernel(backends: tuple[Backend, ...], target: Target) -> Callable[[], object] | None:
    """A call of a kernel that copies one number, by the first back end that works: what a launch of ours costs."""
    import torch

    at, target = Index(0), replace(target, in_graph=False)  # one answer for all regimes of a device
    ir = KernelIR(
        (Buffer("x", "float32", (1,), (1,)), Buffer("y", "float32", (1,), (1,), is_output=True)),
        (Segment((), 1, (Load("float32", 0, at),), (Store(1, at, 0),)),),
    )
    for backend in backends:
        if backend.unavailable() is None and backend.refuse(ir, target) is None:
            call = backend.fused_callable(ir, backend.default_config(ir, target), target)
            operand: torch.Tensor = torch.zeros(1, device=target.device_type)
            return lambda: call(operand)
    return None
