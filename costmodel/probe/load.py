"""How busy the machine is with other work, and what that does to a probe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from fuseplan.costmodel.device import DeviceSpec

#: Processes for each core, in the mean of a minute, from which on times are doubtful. One of them may be ours.
_BUSY = 1.25
#: Noise of a whole probe from which on its numbers are doubtful.
_NOISY = 0.1
#: By what share a probe may fall behind an earlier one; quiet probes of one machine agree better than that.
_LOSS = 0.2


@dataclass(frozen=True)
class MachineLoad:
    """The system's load average of the last minute (processes that run or want to), and its cores."""

    average: float
    cores: int

    @property
    def busy(self) -> bool:
        """True when other work takes processor time from what is measured."""
        return self.average > _BUSY * self.cores

    def __str__(self) -> str:
        return f"a load average of {self.average:.1f} on {self.cores} cores"


IDLE = MachineLoad(0.0, 1)


def machine_load() -> MachineLoad:
    """The load now; zero where the system does not tell."""
    try:
        average = os.getloadavg()[0]
    except (OSError, AttributeError):
        average = 0.0
    return MachineLoad(average, os.cpu_count() or 1)


def doubts(noise: float, load: MachineLoad) -> Iterator[str]:
    """What speaks against a probe's numbers, in words: its relative A/A noise, and the load when it began."""
    if load.busy:
        yield f"the machine was busy ({load}), and every number may be too low"
    if noise >= 1:
        yield "most of what was timed twice differed by its whole time, or there was time for one sample only"
    elif noise > _NOISY:
        yield f"two measurements of the same thing differed by {noise:.0%} in the median"


def losses(new: DeviceSpec, old: DeviceSpec) -> list[str]:
    """The numbers of ``new`` that are worse than those of ``old`` by more than probes of one machine differ."""
    size = min(spec.bandwidth.points[-1].footprint_bytes for spec in (new, old))
    pairs = [(f"peak {unit}", new.peaks[unit].per_s / 1e9, old.peaks[unit].per_s / 1e9, "Gop/s")
             for unit in old.peaks if unit in new.peaks]
    pairs.append(("memory bandwidth", new.bandwidth.gbps(size), old.bandwidth.gbps(size), "GB/s"))
    found = [f"{name} {now:.3g} {unit}, stored {before:.3g}" for name, now, before, unit in pairs
             if now < (1 - _LOSS) * before]
    found += [
        f"launch, {mode} {new.launch[mode].us:.3g} us, stored {latency.us:.3g}" for mode, latency in old.launch.items()
        if mode in new.launch and latency.us < (1 - _LOSS) * new.launch[mode].us
    ]
    return found
