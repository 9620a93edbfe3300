"""Calibration while a tune goes on: every prediction uses what was measured before it, never after."""

from __future__ import annotations

from fuseplan.costmodel.calibrate import Sample, calibrate
from fuseplan.costmodel.device import DeviceSpec

#: Samples of the first fit; later ones happen each time the samples have doubled.
_FIRST_FIT = 8


class RunningCalibration:
    """A device ``spec`` whose calibrations follow the measurements of the running tune.

    A stored calibration that rests on more of them stays: of a model that was tuned before, a tune measures little.
    """

    def __init__(self, spec: DeviceSpec | None) -> None:
        self.spec = spec
        self._samples: dict[str, dict[str, Sample]] = {}
        self._fitted = {name: one.samples for name, one in (spec.calibrations if spec is not None else {}).items()}
        self._grown: set[str] = set()

    def add(self, name: str, choice: str, sample: Sample) -> None:
        """Take in one measured kernel of the back end ``name``; a ``choice`` that regions share counts once."""
        if sample.work.launches and sample.measured_us > 0:
            self._samples.setdefault(name, {})[choice] = sample
            self._grown.add(name)

    def update(self, final: bool = False) -> None:
        """Fit again where there are enough new samples; ``final`` fits whatever has grown since."""
        if self.spec is None:
            return
        for name in sorted(self._grown):
            samples, fitted = self._samples[name], self._fitted.get(name, 0)
            if len(samples) >= max(_FIRST_FIT, fitted if final else 2 * fitted):
                self.spec = self.spec.with_calibration(name, calibrate(list(samples.values()), self.spec))
                self._fitted[name] = len(samples)
                self._grown.discard(name)
