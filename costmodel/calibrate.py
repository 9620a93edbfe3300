"""Fits a :class:`Calibration`: what the roofline gets systematically wrong for one kernel back end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from fuseplan.costmodel.device import Calibration, DeviceSpec, FamilyScale, Mode, beginnings, longest_known
from fuseplan.costmodel.roofline import lower_bound, roofline_terms
from fuseplan.costmodel.work import Work

_Array = npt.NDArray[np.float64]

#: Fewer samples than this cannot tell the factors from noise: the calibration stays the identity.
MIN_SAMPLES = 4
_FOLDS = 5
#: A factor outside [1/20, 20] would mean that the roofline's term is the wrong one.
_LIMIT = float(np.log(20.0))
#: Residuals beyond 10 % count linearly, so that a few odd kernels do not bend the fit.
_OUTLIER = 0.1
#: Factors, in the order in which the solver sees them: launch, memory, compute, latency, write.
_FACTORS = 5
#: Weight of each staying at 1, against that of one sample: decides only factors that no sample depends on. On GPUs
#: it is larger: many short kernels, which hardly tell the factors apart, must not trade one for another.
_PRIOR, _GPU_PRIORS = (0.03,) * _FACTORS, (0.2, 1.0, 0.2, 0.2, 0.2)
#: The same for a name: one sample moves its factors half of the way from those of all.
_NAME_PRIOR = 1.0
#: On GPUs the measured bandwidth weighs as much as one of so many samples: where there are many shapes there are many
#: kernels of a few kinds, which wait for something else too.
_SAMPLES_A_VOICE, _BANDWIDTH = 20, 1


@dataclass(frozen=True)
class Sample:
    """One measured kernel: its work, how it was launched and fed, and its time.

    ``family`` is what it computes, whatever the shape (``add+mul``): a fit leaves all of it out together, so that its
    held-out error is that of a kernel unlike all measured ones. Empty: unlike any other.
    """

    work: Work
    mode: Mode
    measured_us: float
    family: str = ""


def calibrate(samples: Sequence[Sample], spec: DeviceSpec) -> Calibration:
    """The factors by robust regression on ``log(predicted / measured)``.

    The held-out figures come from cross-validation: families are dealt to five folds (samples, where all are of one
    family; one at a time below ten), and each fold is predicted by a fit to the others. So they tell what to expect of
    a kernel that was not measured; ``error`` does not. ValueError where a sample's time is not positive.
    """
    from fuseplan.costmodel.accuracy import spearman  # imports pandas

    if any(not sample.measured_us > 0 for sample in samples):
        raise ValueError("calibrate: every sample needs measured_us > 0")
    table = FitTable.of(samples, spec)
    everything = np.arange(len(samples))
    if len(samples) < MIN_SAMPLES:
        return Calibration(samples=len(samples), error=_median(table.errors(table.predict(np.ones(_FACTORS), {}))))
    factors = table.fit()
    families = table.families(factors, table.calls)
    held_out = np.empty(len(samples))
    for fold in _folds(samples):
        held_out[fold] = table.rows(fold).predict_from(table.rows(np.setdiff1d(everything, fold)))
    errors = table.errors(held_out)
    correlation = spearman(list(held_out), list(table.measured_us))
    launch, memory, compute, latency, write = map(float, factors)
    return Calibration(
        launch, memory, compute, latency_scale=latency, write_scale=write,
        samples=len(samples),
        error=_median(table.errors(table.predict(factors, families))),
        held_out_error=_median(errors),
        held_out_p90=float(np.quantile(errors, 0.9)),
        held_out_spearman=None if np.isnan(correlation) else correlation,
        families=families,
    )


def _folds(samples: Sequence[Sample]) -> list[npt.NDArray[np.intp]]:
    """Positions of the samples of each fold; families stay together, the largest are dealt first."""
    families = [sample.family or f"#{number}" for number, sample in enumerate(samples)]
    if len(set(families)) == 1:
        families = [str(number) for number in range(len(samples))]
    sizes = Counter(families)
    count = _FOLDS if len(sizes) >= 2 * _FOLDS else len(sizes)
    filled = [0] * count
    fold_of: dict[str, int] = {}
    for family, size in sizes.most_common():
        fold_of[family] = filled.index(min(filled))
        filled[fold_of[family]] += size
    owner = np.array([fold_of[family] for family in families])
    return [np.flatnonzero(owner == fold) for fold in range(count)]


@dataclass(frozen=True)
class FitTable:
    """The terms of samples, bounds and times.

    ``terms`` has a row for each sample: launch, host, memory, compute, latency, write, serial, overlap.
    """

    terms: _Array
    floor_us: _Array
    measured_us: _Array
    calls: npt.NDArray[np.str_]
    on_gpu: bool

    @staticmethod
    def of(samples: Sequence[Sample], spec: DeviceSpec) -> FitTable:
        terms = [roofline_terms(one.work, spec, one.mode) for one in samples]
        rows = [
            (one.launch_us, one.host_us, one.memory_us, one.compute_us, one.latency_us, one.write_us, one.serial_us,
             one.overlap) for one in terms
        ]
        return FitTable(
            np.array(rows, dtype=np.float64).reshape(-1, 8),
            np.array([lower_bound(one.work, spec, one.mode) for one in samples]),
            np.array([one.measured_us for one in samples], dtype=np.float64),
            np.array([one.work.call for one in samples], dtype=np.str_), spec.identity.is_gpu,
        )

    def rows(self, chosen: npt.NDArray[np.intp]) -> FitTable:
        """The chosen samples alone."""
        arrays = ("terms", "floor_us", "measured_us", "calls")
        return replace(self, **{name: getattr(self, name)[chosen] for name in arrays})

    def fit(self) -> _Array:
        """The factors that suit the samples best."""
        priors: _Array = np.array(_GPU_PRIORS if self.on_gpu else _PRIOR)
        if self.on_gpu:
            priors[_BANDWIDTH] = max(priors[_BANDWIDTH], len(self.calls) / _SAMPLES_A_VOICE)
        return self._solve(lambda factors: factors, np.zeros(_FACTORS), priors)

    def _solve(self, factors_of: Callable[[_Array], _Array], start: _Array, priors: _Array | float) -> _Array:
        """The numbers whose factors suit the samples best; ``priors`` pull their logarithms to ``start``."""
        from scipy.optimize import least_squares  # slow to import, and only a tune calibrates

        log_measured = np.log(self.measured_us)

        def residuals(logs: _Array) -> _Array:
            times = np.maximum(_times(self.terms, factors_of(np.exp(logs))), 1e-9)
            return np.concatenate([np.log(times) - log_measured, priors * (logs - start)])

        bounds = (start - _LIMIT, start + _LIMIT)
        solution = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=_OUTLIER)
        return np.asarray(np.exp(solution.x), dtype=np.float64)

    def families(self, factors: _Array, calls: Iterable[str]) -> dict[str, FamilyScale]:
        """How the samples of each beginning of ``calls`` differ from those of the name it continues, short names first.

        A name that no other continues differently is left out.
        """
        found: dict[str, FamilyScale] = {}
        sizes = {"": len(self.calls)}
        for name in sorted({name for call in calls for name in beginnings(call)}, key=lambda one: (len(one), one)):
            own = np.array([at for at, call in enumerate(self.calls) if name in beginnings(call)], dtype=np.intp)
            parent = next(iter(beginnings(name)[1:]), "")
            sizes[name] = len(own)
            if 0 < len(own) < sizes.get(parent, 0):
                # Both factors are pulled to those of the shorter name.
                known = longest_known(found, parent) or FamilyScale()
                start = np.log([known.launch_scale, known.busy_scale])
                launch, busy = self.rows(own)._solve(partial(_with_family, factors), start, _NAME_PRIOR)
                found[name] = FamilyScale(float(launch), float(busy), len(own))
        return found

    def predict_from(self, others: FitTable) -> _Array:
        """Predicted times by a fit to other samples."""
        factors = others.fit()
        return self.predict(factors, others.families(factors, self.calls))

    def predict(self, factors: _Array, families: Mapping[str, FamilyScale]) -> _Array:
        """Predicted times."""
        known = [longest_known(families, call) or FamilyScale() for call in self.calls]
        pairs = np.array([(one.launch_scale, one.busy_scale) for one in known]).reshape(-1, 2)
        return np.maximum(_times(self.terms, _with_family(factors[:, None], pairs.T)), self.floor_us)

    def errors(self, predicted_us: _Array) -> _Array:
        """Relative errors of predicted times."""
        return np.abs(predicted_us / self.measured_us - 1.0)


def _with_family(factors: _Array, family: _Array) -> _Array:
    """Factors multiplied by those of a family: the launch by its first, the others by its second."""
    launch, busy = family
    return np.stack([factors[0] * launch, *(factors[number] * busy for number in range(1, _FACTORS))])


def _times(terms: _Array, factors: _Array) -> _Array:
    """``calibrated(terms, factors).time_us`` of many kernels at once; ``factors`` have a column for each, or one."""
    launch_us, host_us, memory_us, compute_us, latency_us, write_us, serial_us, overlap = terms.T
    launch, memory, compute, latency, write = factors
    moving_us = np.maximum(memory * memory_us, write * write_us)
    busy_us = np.maximum.reduce([moving_us, compute * compute_us, latency * serial_us])
    busy_us = np.where(overlap > 0, busy_us, moving_us + compute * compute_us)
    return np.asarray(np.maximum(launch * host_us, launch * launch_us + latency * latency_us + busy_us))


def _median(values: _Array) -> float | None:
    return float(np.median(values)) if len(values) else None
