"""What was measured on a device: the only source of numbers for the cost model.

No datasheet constant appears here or anywhere in this package: a :class:`DeviceSpec` comes from
:func:`fuseplan.costmodel.probe.probe.probe`, or from the JSON of one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeAlias, TypeVar

from fuseplan.costmodel.curve import BandwidthCurve
from fuseplan.costmodel.identity import DeviceIdentity
from fuseplan.costmodel.work import FLOP_UNITS

_T = TypeVar("_T")
SCHEMA_VERSION = 1
#: Units of matmuls that every device has in some form.
_MATMULS = ("fp32_matmul", "bf16_matmul", "fp16_matmul")

#: How a kernel is started: by an ATen call, by our launcher, as a node of a CUDA graph, as one whose launch overlaps
#: the end of the kernel before it (programmatic dependent launch) or, where both let the next start at once, all of it.
Mode: TypeAlias = Literal["eager", "kernel", "graph", "overlapped", "early"]
#: Those that have a latency of their own; ``"early"`` has the best one of ``"overlapped"``, which was measured so.
MODES: tuple[Mode, ...] = ("eager", "kernel", "graph", "overlapped")


class DeviceSpecError(ValueError):
    """A device spec does not hold what was asked for; the message says what to do."""


@dataclass(frozen=True)
class Latency:
    """Time one launch costs when its kernel does nothing. ``source`` says what was launched."""

    us: float
    best_us: float
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.best_us <= self.us < math.inf:
            raise ValueError(f"{self}: 0 <= best_us <= us < inf is required")


@dataclass(frozen=True)
class Peak:
    """Operations per second of one flop unit: ``per_s`` typical, ``best_per_s`` the most ever seen."""

    per_s: float
    best_per_s: float

    def __post_init__(self) -> None:
        if not 0 < self.per_s <= self.best_per_s < math.inf:
            raise ValueError(f"{self}: 0 < per_s <= best_per_s < inf is required")


@dataclass(frozen=True)
class LinearFit:
    """``time = t0 + bytes / bandwidth``, fitted over ``points`` sizes; ``residual`` is the median of
    ``|fitted / measured - 1|``, and ``gbps`` is None where times do not grow with the size.
    """

    t0_us: float
    gbps: float | None
    residual: float
    points: int


@dataclass(frozen=True)
class CallTimes:
    """Time of one ATen op on a CPU, its operands in a cache: ``points`` of elements, increasing, and microseconds."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points or any(a[0] >= b[0] for a, b in pairwise(self.points)):
            raise ValueError("CallTimes needs at least one point, with elements strictly increasing")
        if not all(0 <= elements < math.inf and 0 < us < math.inf for elements, us in self.points):
            raise ValueError(f"{self}: elements >= 0 and us > 0 are required")

    @property
    def call_us(self) -> float:
        """Of the fewest elements: what the call itself takes."""
        return self.points[0][1]

    def us(self, elements: float) -> float:
        """Linear between points, and as between the last two beyond them."""
        pairs = list(pairwise(self.points))
        if elements <= self.points[0][0] or not pairs:
            return self.call_us
        (a, a_us), (b, b_us) = next((pair for pair in pairs if elements <= pair[1][0]), pairs[-1])
        return a_us + max(0.0, b_us - a_us) * (elements - a) / (b - a)


@dataclass(frozen=True)
class FamilyScale:
    """Factors of one name beside its :class:`Calibration`'s; ``busy_scale``: of moving, arithmetic and waiting."""

    launch_scale: float = 1.0
    busy_scale: float = 1.0
    samples: int = 0


@dataclass(frozen=True)
class Calibration:
    """Factors that turn the roofline's terms into measured times, for one kernel back end on one device.

    Attributes:
        samples: Measured kernels behind the fit.
        error: Median ``|predicted / measured - 1|`` on those kernels.
        held_out_error: The same on held-out kernels (cross-validation); the number to quote, with its 90th
            percentile and rank correlation. None where there are too few samples to leave any out.
        latency_scale: Of the time that a kernel's dependent instructions wait (CUDA only).
        write_scale: Of the time to write the results at memory bandwidth (CUDA only).
        families: What calls differ in, by name (:attr:`~fuseplan.costmodel.work.Work.call`) or the beginning of names.
    """

    launch_scale: float = 1.0
    memory_scale: float = 1.0
    compute_scale: float = 1.0
    samples: int = 0
    error: float | None = None
    held_out_error: float | None = None
    latency_scale: float = 1.0
    write_scale: float = 1.0
    held_out_p90: float | None = None
    held_out_spearman: float | None = None
    families: Mapping[str, FamilyScale] = field(default_factory=dict)

    def factors(self, call: str) -> tuple[float, ...]:
        """Factors for launch, memory, compute, latency, write: of the longest known beginning of a name, or of all."""
        family = longest_known(self.families, call) or FamilyScale()
        busy = (self.memory_scale, self.compute_scale, self.latency_scale, self.write_scale)
        return (self.launch_scale * family.launch_scale, *(scale * family.busy_scale for scale in busy))


def beginnings(call: str) -> list[str]:
    """A dotted name and what it begins with, longest first.

    >>> beginnings("aten.mul.Tensor")
    ['aten.mul.Tensor', 'aten.mul', 'aten']
    """
    parts = call.split(".") if call else []
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def longest_known(found: Mapping[str, _T], call: str, end: str = "") -> _T | None:
    """What is found under the longest beginning of a dotted name, with an ``end``, if any is."""
    return next((found[name + end] for name in beginnings(call) if name + end in found), None)


@dataclass(frozen=True)
class DeviceSpec:
    """Measured numbers of one device.

    Attributes:
        launch: Latency by mode; CPUs have no ``"graph"``, and ``"overlapped"`` is there where it was measured.
        peaks: By flop unit; one that this device cannot run is absent.
        noise: The median relative change between two measurements of the same thing.
        measured_at: ISO 8601, UTC.
        thread_bandwidth: Of a single thread (CPUs with more than one).
        fits: Linear fits behind the latencies (``launch:<pattern>``, ``eager``); older specs have others beside these.
        problems: What made the measurement doubtful, in words.
        view_us: Host time of an ATen call that makes a view; 0 where it was not measured (older specs).
        calls: Times of common ATen ops on a CPU, by name and type (``aten.mul.Tensor.float32``); empty where they were
            not measured (CUDA, older specs).
    """

    identity: DeviceIdentity
    bandwidth: BandwidthCurve
    launch: Mapping[Mode, Latency]
    peaks: Mapping[str, Peak]
    noise: float
    measured_at: str
    versions: Mapping[str, str]
    thread_bandwidth: BandwidthCurve | None = None
    fits: Mapping[str, LinearFit] = field(default_factory=dict)
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    view_us: float = 0.0
    calls: Mapping[str, CallTimes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if modes := set(self.launch) - set(MODES):
            raise ValueError(f"DeviceSpec.launch has unknown modes {sorted(modes)}; known: {MODES}")
        if units := set(self.peaks) - set(FLOP_UNITS):
            raise ValueError(f"DeviceSpec.peaks has unknown units {sorted(units)}; known: {FLOP_UNITS}")

    def latency(self, mode: Mode) -> Latency:
        """Latency of ``mode``, of graph nodes for an unmeasured overlapped one; DeviceSpecError if it has none."""
        overlapped = self.launch.get("overlapped")
        if mode == "early" and overlapped is not None:
            return replace(overlapped, us=overlapped.best_us)
        if mode in ("overlapped", "early") and overlapped is None:
            mode = "graph"
        if mode not in self.launch:
            raise DeviceSpecError(
                f"{self.identity.name} has no launch mode {mode!r}; it has: {', '.join(sorted(self.launch))}"
            )
        return self.launch[mode]

    def peak(self, unit: str) -> Peak:
        """Measured peak of a unit, else fp32's for a matmul; :class:`DeviceSpecError` where there is neither."""
        if unit in _MATMULS and unit not in self.peaks:
            unit = "fp32"
        if unit not in self.peaks:
            raise DeviceSpecError(
                f"{self.identity.name} has no measured peak for {unit!r}; it has: {', '.join(sorted(self.peaks))}. "
                "Run `plan probe` again if the device can execute it"
            )
        return self.peaks[unit]

    def call_times(self, call: str) -> CallTimes | None:
        """Measured times of the ATen op of a name, in float32 where there are none of its type; else None."""
        return longest_known(self.calls, call) or longest_known(self.calls, call, ".float32")

    def with_calibration(self, backend: str, calibration: Calibration) -> DeviceSpec:
        return replace(self, calibrations={**self.calibrations, backend: calibration})

    def to_json(self) -> str:
        """One JSON object; the tuning database reads an equal spec from it."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, sort_keys=True, allow_nan=False)
