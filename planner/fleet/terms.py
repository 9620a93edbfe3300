"""What travels to the workers and back: regions, what they are tuned for, and what came of it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fuseplan.costmodel.probe.probe import MachineLoad
from fuseplan.kernels.ir.backend import Config, Target
from fuseplan.planner.api.request import HowToTune
from fuseplan.planner.errors import ConfigError, FuseplanError, PlanError, failure_reason
from fuseplan.planner.tuning.plans import PlanSettings
from fuseplan.planner.tuning.session import Session
from fuseplan.search.store.limits import Key, Label
from fuseplan.search.store.record import Versions
from fuseplan.search.tune.resources import Alike
from fuseplan.search.tune.study import Studies

#: How the names of our resources begin: ``fuseplan <device key>`` is a device, for one measurement at a time.
_PREFIX = "fuseplan"
#: As many regions as anybody likes may be prepared at once.
PLENTY = 1000
#: About how long an op of a region takes to be prepared.
_PREPARING_S = 0.03


#: See :attr:`~fuseplan.search.tune.tuner.Tuner.rankings`.
Rankings: TypeAlias = Mapping[Alike, Sequence[Config]]


def needs_dask() -> None:
    """Raise :class:`ConfigError` where the extra is not installed."""
    try:
        import distributed  # noqa: F401
    except ImportError:
        raise ConfigError("a fleet needs Dask; install it with: pip install 'fuseplan[fleet]'") from None


def measuring(device: str) -> str:
    """The resource that a measurement on a device asks for; a worker has one of it."""
    return f"{_PREFIX} {device}"


def preparing(device: str) -> str:
    """The resource of what prepares a measurement on a device of this key; a worker has :data:`PLENTY` of it."""
    return f"{_PREFIX} beside {device}"


def capturing(kind: str) -> str:
    """The resource of a capture for devices of this type; a worker has as many as it captures at once."""
    return f"{_PREFIX} capture {kind}"


def unit(name: str) -> str:
    """The resource that names a worker's GPU or host among all of a device's key; workers that share one have it in
    common.
    """
    return f"{_PREFIX} unit {name}"


def device_of(resource: str) -> str | None:
    """The device's key, of a :func:`measuring` resource; None of any other."""
    words = resource.split(" ")
    return words[1] if len(words) == 2 and words[0] == _PREFIX else None


@dataclass(frozen=True)
class Terms:
    """What regions are tuned for, and how.

    Attributes:
        run: Name of the tune: workers keep what they made for it until it ends.
        kind: Type of the devices.
        db: The database as all workers reach it; it may hold a password.
        settings: What plans are made for.
    """

    run: str
    kind: str
    db: str = field(repr=False)
    settings: PlanSettings
    how: HowToTune

    def session(self, session: Session, studies: Studies | None = None) -> Session:
        """A session as it is searched with."""
        return self.how.of(session, studies, self.run)


@dataclass(frozen=True)
class RegionTask:
    """A region to be tuned, by itself.

    Attributes:
        key: Its workload key.
        label: What it computes, and where it is, for people.
        data: Its graph (:func:`~fuseplan.planner.work.extract.region_data`).
        shares: Of the model's time, by the key of each of its parts.
        ops: Its compute ops and matmuls, those that are searched: what the time of its tune grows with.
        waits: Whether it waits for another tuner that is at work on it.
    """

    key: str
    label: str
    data: Mapping[str, Any] = field(repr=False)
    shares: Mapping[str, float] = field(repr=False)
    ops: float
    waits: bool = False


@dataclass(frozen=True)
class Prepared:
    """A region is being prepared in one worker, which takes the longer the more ops it has."""

    ops: float

    def __sizeof__(self) -> int:
        """Bytes whose transfer would take as long as preparing it (Dask assumes 100 MB/s): so is it weighed whether to
        measure it elsewhere, where it would have to be prepared anew.
        """
        return int(self.ops * _PREPARING_S * 1e8)


@dataclass(frozen=True)
class RegionOutcome:
    """What came of a region: that its plan is in the database, or why it has none.

    Neither where another tuner is at work on it.

    Attributes:
        stored: Whether its plan is in the database; ``tuned`` where this worker has measured it now.
        decided: Keys of its parts that were measured for it.
        rankings: What its worker has learnt of kernels that are alike, for the others.
    """

    stored: bool = False
    tuned: bool = False
    decided: tuple[str, ...] = ()
    failure: Exception | None = None
    elapsed_s: float = 0.0
    rankings: Rankings = field(default_factory=dict, repr=False)

    @property
    def taken(self) -> bool:
        return not self.stored and self.failure is None


@dataclass(frozen=True)
class Captured:
    """A workload's graphs as text (:func:`~fuseplan.planner.capture.cache.graphs_of_text`), or why there are none."""

    text: str
    failure: FuseplanError | None
    elapsed_s: float


@dataclass(frozen=True)
class WorkerDevice:
    """A worker's device: its identity key, what kernels are compiled for, and how busy its machine was."""

    device: Key
    target: Target
    versions: Versions
    host: Label
    load: MachineLoad
    sees_database: bool


def carried(error: Exception) -> Exception:
    """The error, if it says the same after a journey; else one that does."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # whatever a class makes of its own arguments
        pass
    return PlanError(failure_reason(error))
