"""Fits a :class:`Calibration`: what the roofline gets systematically wrong for one kernel back end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fuseplan.costmodel.device import Calibration, DeviceSpec, Mode
from fuseplan.costmodel.roofline import calibrated, lower_bound, roofline_terms
from fuseplan.costmodel.work import Work

#: Fewer samples than this cannot tell three factors from noise: the calibration stays the identity.
MIN_SAMPLES = 4
_FOLDS = 5
#: A factor outside [1/20, 20] would mean that the roofline's term is the wrong one.
_LIMIT = float(np.log(20.0))
#: Residuals beyond 10 % count linearly, so that a few odd kernels do not bend the fit.
_OUTLIER = 0.1
#: Weight of staying at 1: decides only factors that no sample depends on.
_PRIOR = 0.03


@dataclass(frozen=True)
class Sample:
    """One measured kernel: its work, how it was launched and fed, and its time."""

    work: Work
    mode: Mode
    measured_us: float
    cold_bytes: float = 0.0
    threads: int | None = None


def calibrate(samples: Sequence[Sample], spec: DeviceSpec) -> Calibration:
    """Launch, memory and compute factors by robust regression on ``log(predicted / measured)``.

    ``held_out_error`` comes from cross-validation (every fifth sample left out in turn; one at a time below ten
    samples), so it is the error to expect on a kernel that was not measured; ``error`` is not.

    Raises:
        ValueError: A sample's time is not positive.
    """
    if any(not sample.measured_us > 0 for sample in samples):
        raise ValueError("calibrate: every sample needs measured_us > 0")
    if len(samples) < MIN_SAMPLES:
        errors = [_error(sample, spec, Calibration()) for sample in samples]
        return Calibration(samples=len(samples), error=_median(errors))
    calibration = _fit(samples, spec)
    folds = _FOLDS if len(samples) >= 2 * _FOLDS else len(samples)
    held_out: list[float] = []
    for fold in range(folds):
        kept = [sample for number, sample in enumerate(samples) if number % folds != fold]
        fitted = _fit(kept, spec)
        held_out += [_error(sample, spec, fitted) for sample in samples[fold::folds]]
    return Calibration(
        calibration.launch_scale,
        calibration.memory_scale,
        calibration.compute_scale,
        samples=len(samples),
        error=_median([_error(sample, spec, calibration) for sample in samples]),
        held_out_error=_median(held_out),
    )


def _fit(samples: Sequence[Sample], spec: DeviceSpec) -> Calibration:
    from scipy.optimize import least_squares  # slow to import, and only a tune calibrates

    terms = [
        roofline_terms(sample.work, spec, sample.mode, cold_bytes=sample.cold_bytes, threads=sample.threads)
        for sample in samples
    ]
    log_measured = np.log([sample.measured_us for sample in samples])

    def residuals(log_scales: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        times = [max(calibrated(term, _scales(log_scales)).time_us, 1e-9) for term in terms]
        return np.concatenate([np.log(times) - log_measured, _PRIOR * log_scales])

    solution = least_squares(residuals, np.zeros(3), bounds=(-_LIMIT, _LIMIT), loss="soft_l1", f_scale=_OUTLIER)
    return _scales(solution.x)


def _scales(log_scales: npt.NDArray[np.float64]) -> Calibration:
    launch, memory, compute = (float(scale) for scale in np.exp(log_scales))
    return Calibration(launch, memory, compute)


def _error(sample: Sample, spec: DeviceSpec, calibration: Calibration) -> float:
    terms = roofline_terms(sample.work, spec, sample.mode, cold_bytes=sample.cold_bytes, threads=sample.threads)
    floor_us = lower_bound(sample.work, spec, sample.mode, cold_bytes=sample.cold_bytes, threads=sample.threads)
    return abs(max(calibrated(terms, calibration).time_us, floor_us) / sample.measured_us - 1.0)


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
