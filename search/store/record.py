"""What is stored: the answers of a tune (one group) and of a plan (one region), with their evidence.

Every record is a frozen dataclass of plain data. "Do not fuse" is an answer like any other: ``TuningRecord.fuse`` is
False and the measured times say why.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Annotated, ClassVar, TypeAlias

from fuseplan.costmodel.devices import is_gpu
from fuseplan.costmodel.work import Work
from fuseplan.search.errors import brief
from fuseplan.search.store import limits

#: Version of every stored structure below and of the database's tables. Another version is refused, never guessed at.
SCHEMA_VERSION = 2

#: Seconds by which the clocks of two hosts may differ.
_CLOCKS_S = 300.0
#: Name of the implementation that every op has.
ATEN = "aten"
#: Name of the implementation that has TorchInductor compile several ops.
INDUCTOR = "inductor"
#: A configuration by parameter name.
_Config: TypeAlias = Mapping[limits.Word, limits.ParameterValue | limits.Word]


def now() -> str:
    """Current time, ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def seconds(created: object) -> float:
    """Seconds since 1970 of an ISO 8601 time, taken for UTC where it does not say; minus infinity where it is none."""
    try:
        found = datetime.fromisoformat(str(created))
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return -math.inf


def is_ahead(created: object, now_s: float) -> bool:
    """Whether a time lies in the future, by more than clocks of two hosts may differ."""
    return seconds(created) > now_s + _CLOCKS_S


@dataclass(frozen=True)
class RecordKey:
    """Identity of a record; exact, nothing is ever matched approximately.

    ``workload`` is the canonical hash of the group or region with shapes, dtypes and strides; ``device`` names the
    device with its SM or core count, cache and memory sizes.
    """

    workload: limits.Key
    device: limits.Key
    regime: limits.RegimeName = "eager"
    numerics: limits.NumericsName = "fp32"


@dataclass(frozen=True)
class Versions:
    """Software that produced a record; empty where it plays no part. A mismatch makes a record stale, not wrong."""

    fuseplan: limits.Word
    torch: limits.Word
    triton: limits.Word = ""
    driver: limits.Word = ""

    @staticmethod
    def current(device_type: str) -> Versions:
        """The versions in this process. A CPU's records do not depend on Triton or a GPU driver."""
        of_gpu = (package_version("triton"), _driver_version()) if is_gpu(device_type) else ()
        return Versions(package_version("fuseplan"), package_version("torch"), *of_gpu)

    def mismatch(self, other: Versions) -> tuple[str, ...]:
        """Names of the fields that differ, for messages."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))


@functools.cache
def package_version(package: str) -> str:
    """The installed version; "" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _driver_version() -> str:
    """The GPU driver's version by NVIDIA's management library, which touches no device; "" where there is none."""
    text = ctypes.create_string_buffer(96)
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            library.nvmlSystemGetDriverVersion(text, len(text))
            library.nvmlShutdown()
    return text.value.decode()


@dataclass(frozen=True)
class Measurement:
    """A time, as found.

    Attributes:
        spread_us: Interquartile range.
        samples: Timed samples (each the mean of one or more calls).
        rounds: Interleaved rounds they come from; 0 for a screening that was not interleaved.
        noise: Relative A/A noise of their run; 0 where it was not measured.
    """

    median_us: limits.Measured
    spread_us: limits.Amount
    samples: limits.Count
    rounds: limits.Count
    regime: limits.RegimeName
    noise: limits.Amount = 0.0


@dataclass(frozen=True)
class Evidence:
    """How a record came about.

    ``seed`` is that of the search and of the inputs. ``clocks_mhz`` were seen after measuring; empty where they cannot
    be read. ``run`` names the tune that measured anew what was stored; it is "" of any other. ``created`` is by the
    clock of whoever measured, which may be wrong: no verdict rests on it.
    """

    created: limits.Time
    versions: Versions
    seed: limits.Seed
    elapsed_s: limits.Amount
    clocks_mhz: Mapping[str, limits.Amount] = field(default_factory=dict)
    reason: str = ""
    run: limits.Word = ""


@dataclass(frozen=True)
class Trial:
    """One finished attempt at one configuration; what a killed tune resumes from.

    Attributes:
        median_us: Screening time in the regime; None when it failed, and then ``reason`` says why.
        error: Normwise relative error against float64; None when it failed before it could be checked.
        device_us: Screening time of the device alone, where the regime's includes the host.
        run: As that of :class:`Evidence`.
    """

    key: RecordKey
    backend: limits.Word
    config: _Config
    median_us: limits.Measured | None = None
    reason: str = ""
    error: limits.Error | None = None
    created: limits.Time = ""
    device_us: limits.Amount | None = None
    run: limits.Word = ""
    RETIRED: ClassVar = frozenset({"duplicate_of"})
    #: How the reason of one begins that failed before it was a kernel.
    UNCOMPILED: ClassVar[str] = "does not compile"

    @property
    def uncompiled(self) -> bool:
        return self.reason.startswith(self.UNCOMPILED)


@dataclass(frozen=True)
class Finalist:
    """A contestant of the decisive, interleaved run: ``"unfused"``, which has neither back end nor configuration,
    ``"default"`` or ``"challenger 1"``. ``gain`` is the median paired one over the unfused chain (0.5: half its time).
    """

    name: limits.Label
    backend: limits.Word
    config: _Config
    time: Measurement
    gain: limits.Signed


@dataclass(frozen=True)
class Rejection:
    """A configuration that was tried and lost its place before timing, and why."""

    backend: limits.Word
    config: _Config
    reason: str


@dataclass(frozen=True)
class TuningRecord:
    """The answer for one fusion group.

    Attributes:
        fuse: Whether the best kernel beats the unfused chain by more than the threshold.
        backend: Of the best kernel; empty when no kernel works.
        unfused: The unfused chain's time in the same interleaved run.
        gain: Median paired gain of the best kernel over the unfused chain (0 when there is no kernel).
        default_gain: The same over the default configuration.
        threshold: What a gain had to exceed: max(1 %, A/A noise), and less where noise is large.
        error: Normwise relative error of the best kernel against float64; ``eager_error``: of the unfused chain.
        refusals: Back ends that could not take part, with reasons.
        enumerated: Feasible configurations, over all back ends; ``compiled`` and ``measured`` count those of the runs
            that this tune resumes, too.
        resources: Compiled facts of the best kernel (registers, spill and shared bytes); absent where unknown.
        work: Of the fused kernel; empty where unknown.
        undecided: Noise hid the answer: it is measured again by the next tune, and no look-up serves it.
    """

    key: RecordKey
    label: limits.Label
    fuse: bool
    backend: limits.Word
    config: _Config
    fused: Measurement | None
    unfused: Measurement
    gain: limits.Signed
    default_gain: limits.Signed
    threshold: limits.Amount
    error: limits.Error
    eager_error: limits.Error
    finalists: tuple[Finalist, ...]
    rejected: tuple[Rejection, ...]
    refusals: Mapping[limits.Word, str]
    enumerated: limits.Count
    compiled: limits.Count
    measured: limits.Count
    resources: Mapping[limits.Word, limits.Count]
    evidence: Evidence
    work: Annotated[Work, limits.possible_work] = field(default_factory=Work)
    undecided: bool = False

    def flaw(self) -> str:
        """Why the fields contradict one another; "" when they do not."""
        if self.measured > self.enumerated:
            return "measured more configurations than there are"
        if not self.fuse:
            return ""
        return "fuses undecided" if self.undecided else "" if self.fused and self.backend else "fuses without a kernel"

    @property
    def best_us(self) -> float:
        """The time of what should be run: the kernel where fusing pays, else the unfused chain."""
        return self.fused.median_us if self.fuse and self.fused is not None else self.unfused.median_us


@dataclass(frozen=True)
class GroupChoice:
    """One group of a plan's partition.

    Attributes:
        ops: Canonical positions in the region.
        implementation: What runs the group: ``"aten"``, a kernel back end, or a library call.
        workload: Key of the group's tuning record; empty, as ``config``, where there is nothing to search.
        lower_bound_us: What no kernel can beat.
        measured_us: What was measured, by itself; None when the choice rests on the model.
    """

    ops: limits.Positions
    implementation: limits.Word
    workload: limits.OptionalKey = ""
    label: limits.Label = ""
    config: _Config = field(default_factory=dict)
    predicted_us: limits.Amount = 0.0
    lower_bound_us: limits.Amount = 0.0
    measured_us: limits.Amount | None = None
    #: Times that older versions added; they are not read.
    RETIRED: ClassVar = frozenset({"delay_us"})

    def flaw(self) -> str:
        """Why the fields contradict one another; "" when they do not."""
        if not self.ops:
            return "runs no op"
        return "is run by nothing" if not self.implementation else ""

    @property
    def is_plain(self) -> bool:
        """Whether ATen's own op runs it."""
        return self.implementation == ATEN

    @property
    def is_kernel(self) -> bool:
        """Whether a generated kernel runs it."""
        return not self.is_plain and bool(self.workload)


@dataclass(frozen=True)
class Alternative:
    """A candidate group that the partition does not use, and why; fields as those of :class:`GroupChoice`."""

    ops: limits.Positions
    label: limits.Label
    reason: str
    predicted_us: limits.Amount | None = None
    measured_us: limits.Amount | None = None
    implementation: limits.Word = "kernel"
    workload: limits.OptionalKey = ""
    RETIRED: ClassVar = frozenset({"delay_us"})


@dataclass(frozen=True)
class PlanRecord:
    """The chosen partition of one region: the fusion decision itself.

    Attributes:
        groups: The cover, every op exactly once.
        planned_us: Measured end to end, or the sum of its groups' times.
        unfused_us: Of the unfused alternative, measured in the same run.
        margin: ``1 - planned_us / unfused_us``.
        gap: Relative optimality gap over the candidate set; 0 is proven optimal.
        peak_bytes: Largest live intermediate memory.
        undecided: Noise hid an answer it rests on: the next tune measures it again, and no look-up serves it.
    """

    key: RecordKey
    label: limits.Label
    groups: tuple[GroupChoice, ...]
    planned_us: limits.Amount
    unfused_us: limits.Amount
    margin: limits.Signed
    predicted_us: limits.Amount
    rejected: tuple[Alternative, ...]
    enumerated: limits.Count
    measured: limits.Count
    gap: limits.Fraction
    peak_bytes: limits.Count
    unfused_peak_bytes: limits.Count
    evidence: Evidence
    undecided: bool = False

    def flaw(self) -> str:
        """Why the fields contradict one another; "" when they do not."""
        if self.measured > self.enumerated:
            return "measured more candidates than there are"
        ops = [op for group in self.groups for op in group.ops]
        return f"{brief(ops)} runs an op twice" if len(set(ops)) < len(ops) else ""
