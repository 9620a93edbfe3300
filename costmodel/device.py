"""What was measured on a device: the only source of numbers for the cost model.

No datasheet constant appears here or anywhere in this package: a :class:`DeviceSpec` comes from
:func:`fuseplan.costmodel.probe.probe.probe`, or from JSON that one wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from fuseplan.costmodel.curve import BandwidthCurve, BandwidthPoint
from fuseplan.costmodel.identity import DeviceIdentity, current_identity, current_versions
from fuseplan.costmodel.work import FLOP_UNITS

__all__ = [
    "MODES", "SCHEMA_VERSION", "BandwidthCurve", "BandwidthPoint", "Calibration", "DeviceIdentity", "DeviceSpec",
    "DeviceSpecError", "Latency", "LinearFit", "Mode", "Peak", "current_identity", "current_versions",
]

SCHEMA_VERSION = 1

#: How a kernel is started: an ATen call, our own launcher called directly, a node of a CUDA graph, such a node whose
#: launch overlaps the end of the kernel before it (programmatic dependent launch), or one that overlaps all of it: each
#: of the two lets the next start at once.
Mode: TypeAlias = Literal["eager", "kernel", "graph", "overlapped", "early"]
#: Those that have a latency of their own; ``"early"`` has the best one of ``"overlapped"``, which was measured so.
MODES: tuple[Mode, ...] = ("eager", "kernel", "graph", "overlapped")


class DeviceSpecError(ValueError):
    """A stored device spec cannot be used, or does not hold what was asked for; the message says what to do."""


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
    """``time = t0 + bytes / bandwidth`` fitted over ``points`` sizes.

    ``gbps`` is None where the times do not grow with the size; ``residual`` is the median of
    ``|fitted / measured - 1|``.
    """

    t0_us: float
    gbps: float | None
    residual: float
    points: int


@dataclass(frozen=True)
class Calibration:
    """Factors that turn the roofline's terms into measured times, for one kernel back end on one device.

    Attributes:
        launch_scale: Multiplies the launch latency, hence adds a constant to every kernel.
        memory_scale: Multiplies the time to move the bytes.
        compute_scale: Multiplies the time of the arithmetic.
        samples: Measured kernels behind the fit.
        error: Median ``|predicted / measured - 1|`` on those kernels.
        held_out_error: The same on kernels left out of the fit (cross-validation); the number to quote. None
            where there are too few samples to leave any out.
        latency_scale: Multiplies the time that a kernel's dependent instructions wait (CUDA only).
        write_scale: Multiplies the time to write the results at memory bandwidth (CUDA only).
        held_out_p90: 90th percentile of the errors behind ``held_out_error``.
        held_out_spearman: Rank correlation of predicted and measured times of the kernels left out.
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


@dataclass(frozen=True)
class DeviceSpec:
    """Measured numbers of one device.

    Attributes:
        identity: Which device.
        bandwidth: Bandwidth over footprints, using the whole device.
        launch: Latency by mode; CPUs have no ``"graph"``, and ``"overlapped"`` is there where it was measured.
        peaks: Measured peak by flop unit; a unit this device cannot run is absent.
        noise: A/A noise: the median relative change between two measurements of the same thing.
        measured_at: ISO 8601 time of the measurement, UTC.
        versions: Software versions at that time.
        thread_bandwidth: Bandwidth of a single thread (CPUs with more than one).
        fits: Linear fits behind the latencies (``launch:<pattern>``, ``eager``) and the last level (``memory``).
        calibrations: By kernel back end name.
        problems: What made the measurement doubtful, in words; empty when nothing did.
        view_us: Host time of an ATen call that makes a view; 0 where it was not measured (older specs).
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

    def __post_init__(self) -> None:
        if modes := set(self.launch) - set(MODES):
            raise ValueError(f"DeviceSpec.launch has unknown modes {sorted(modes)}; known: {MODES}")
        if units := set(self.peaks) - set(FLOP_UNITS):
            raise ValueError(f"DeviceSpec.peaks has unknown units {sorted(units)}; known: {FLOP_UNITS}")

    def latency(self, mode: Mode) -> Latency:
        """Launch latency of ``mode``; :class:`DeviceSpecError` where this device has no such mode.

        Where overlapped launches were not measured (older devices, older specs) they cost what graph nodes do.
        """
        if mode == "early" and "overlapped" in self.launch:
            overlapped = self.launch["overlapped"]
            return replace(overlapped, us=overlapped.best_us)
        if mode in ("overlapped", "early") and mode not in self.launch:
            mode = "graph"
        if mode not in self.launch:
            raise DeviceSpecError(
                f"{self.identity.name} has no launch mode {mode!r}; it has: {', '.join(sorted(self.launch))}"
            )
        return self.launch[mode]

    def peak(self, unit: str) -> Peak:
        """Measured peak of a flop unit; :class:`DeviceSpecError` where it was not measured."""
        if unit not in self.peaks:
            raise DeviceSpecError(
                f"{self.identity.name} has no measured peak for {unit!r}; it has: {', '.join(sorted(self.peaks))}. "
                "Run `plan probe` again if the device can execute it"
            )
        return self.peaks[unit]

    @property
    def eager_us(self) -> float:
        return self.latency("eager").us

    @property
    def kernel_us(self) -> float:
        return self.latency("kernel").us

    @property
    def graph_us(self) -> float | None:
        """None where there are no CUDA graphs."""
        return self.launch["graph"].us if "graph" in self.launch else None

    def with_calibration(self, backend: str, calibration: Calibration) -> DeviceSpec:
        return replace(self, calibrations={**self.calibrations, backend: calibration})

    def to_json(self) -> str:
        """One JSON object; :meth:`from_json` gives an equal spec back."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, sort_keys=True, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> DeviceSpec:
        """The spec that :meth:`to_json` wrote.

        Raises:
            DeviceSpecError: ``text`` is not a device spec of this schema version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise DeviceSpecError(f"not a device spec: {error}; run `plan probe` to measure this device") from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise DeviceSpecError(
                f"device spec has schema version {version}, this fuseplan reads {SCHEMA_VERSION}; run `plan probe`"
            )
        try:
            return _from_dict(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DeviceSpecError(f"device spec is damaged ({error!r}); run `plan probe` again") from error


def _from_dict(data: dict[str, Any]) -> DeviceSpec:
    single = data["thread_bandwidth"]
    return DeviceSpec(
        identity=DeviceIdentity(**data["identity"]),
        bandwidth=_curve(data["bandwidth"]),
        launch={mode: Latency(**latency) for mode, latency in data["launch"].items()},
        peaks={unit: Peak(**peak) for unit, peak in data["peaks"].items()},
        noise=float(data["noise"]),
        measured_at=str(data["measured_at"]),
        versions=dict(data["versions"]),
        thread_bandwidth=None if single is None else _curve(single),
        fits={name: LinearFit(**fit) for name, fit in data["fits"].items()},
        calibrations={name: Calibration(**calibration) for name, calibration in data["calibrations"].items()},
        problems=tuple(data["problems"]),
        view_us=float(data.get("view_us", 0.0)),
    )


def _curve(data: dict[str, Any]) -> BandwidthCurve:
    return BandwidthCurve(tuple(BandwidthPoint(**point) for point in data["points"]))
