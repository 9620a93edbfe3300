"""``probe``: measure this device, and say how other work on the machine may have spoilt that."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch

from fuseplan.costmodel.device import DeviceSpec, Latency, LinearFit, Mode
from fuseplan.costmodel.devices import ByDevice, is_gpu
from fuseplan.costmodel.identity import DeviceIdentity, current_identity, current_versions
from fuseplan.costmodel.probe.fit import bandwidth_curve, fit_launches, fit_linear, peaks
from fuseplan.costmodel.probe.measurements import Measurements
from fuseplan.costmodel.probe.timing import ProbeListener, TimeBudget, TimedCall

#: Processes for each core, in the mean of a minute, from which on times are doubtful. One of them may be ours.
_BUSY = 1.25
#: Noise of a whole probe from which on its numbers are doubtful.
_NOISY = 0.1
#: By what share a probe may fall behind an earlier one; quiet probes of one machine agree better than that.
_LOSS = 0.2
#: The largest footprints are the ones that all threads share.
_LARGEST = 5
#: Noise alone does not push the ratio of all threads to one thread below this.
_BUSY_RATIO = 0.9
#: Seconds that a probe may take, and a quick one, of a CPU and of a GPU: about twice what they take on a quiet machine
#: whose caches are large. On GPUs they hold the compilation of a few kernels.
_BUDGET_S = ByDevice(cpu=(180.0, 60.0), gpu=(600.0, 120.0))


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


def probe(
    device_type: str, quick: bool = True, progress: ProbeListener | None = None, kernel_call: TimedCall | None = None,
    load: Callable[[], MachineLoad] = machine_load, budget: TimeBudget | None = None,
) -> DeviceSpec:
    """Measure the processor, or the current CUDA device.

    Takes seconds (``quick``; half a minute where caches are large) to minutes, and up to 1 GiB of device memory.
    Nothing else should run on the device meanwhile; :attr:`DeviceSpec.noise` says how quiet it was. No device setting
    is changed. Once the ``budget`` is spent it ends with fewer samples and sizes, named in :attr:`DeviceSpec.problems`.
    ``kernel_call`` launches one tiny fused kernel through our own launcher, for the latency of mode ``"kernel"``; that
    is otherwise an ATen call's, with no lower bound above zero. ValueError where there is none.
    """
    identity = current_identity(device_type)
    before = load()
    budget = budget or TimeBudget.of(_BUDGET_S.on(device_type)[quick])
    budget = budget if progress is None else replace(budget, report=progress)
    if is_gpu(device_type):
        from fuseplan.costmodel.probe.cuda import measure_cuda as measure  # needs a GPU's libraries
    else:
        from fuseplan.costmodel.probe.cpu import measure_cpu as measure
    with torch.no_grad():
        measured = measure(identity, quick, kernel_call, budget)
    budget.report(1.0, "done")
    return assemble(identity, measured, before, budget.short)


def assemble(
    identity: DeviceIdentity, measured: Measurements, load: MachineLoad = IDLE, short: Sequence[str] = ()
) -> DeviceSpec:
    """The spec that follows from the raw timings, from how busy the machine was, and from what time was short for."""
    typical, _ = fit_launches(measured.streams)
    fits = {f"launch:{pattern}": fit for pattern, fit in typical.items()}
    sizes = sorted(measured.eager)
    fits["eager"] = fit_linear(sizes, [measured.eager[size].typical_us for size in sizes])
    timings = [stream.timing for stream in (*measured.streams, *measured.thread_streams)]
    timings += [*measured.eager.values(), *(rate.timing for rate in measured.rates)]
    noise = statistics.median(timing.noise for timing in timings)  # of everything that was timed twice
    problems = list(doubts(noise, load))
    if short:
        problems.insert(0, f"probe cut short ({'; '.join(short)})")
    bandwidth = bandwidth_curve(measured.streams)
    thread_bandwidth = bandwidth_curve(measured.thread_streams) if measured.thread_streams else None
    if thread_bandwidth is not None:
        points = bandwidth.points[-_LARGEST:]
        ratio = statistics.median(point.gbps / thread_bandwidth.gbps(point.footprint_bytes) for point in points)
        if ratio < _BUSY_RATIO:
            problems.append(
                f"{identity.cores} threads streamed at {ratio:.2f} times the bandwidth of one: other processes are "
                "using the processor, and every number may be too low"
            )
    return DeviceSpec(
        identity=identity,
        # A device is at least as fast as one of its threads, even where waking the others costs more than they save.
        bandwidth=bandwidth if thread_bandwidth is None else bandwidth.at_least(thread_bandwidth),
        launch=_latencies(measured, fits["eager"], min(fit.t0_us for fit in typical.values())),
        peaks=peaks(measured.rates),
        noise=noise,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=current_versions(identity.device_type),
        thread_bandwidth=thread_bandwidth,
        fits=fits,
        problems=tuple(problems),
        view_us=measured.view.typical_us if measured.view is not None else 0.0,
        calls=measured.calls,
    )


def _latencies(measured: Measurements, eager: LinearFit, stream_us: float) -> dict[Mode, Latency]:
    """``stream_us`` is the fitted launch latency of the quickest streaming kernel."""
    quickest_us = min(timing.best_us for timing in measured.eager.values())
    launch: dict[Mode, Latency] = {
        "eager": Latency(eager.t0_us, min(quickest_us, eager.t0_us), "aten.add, allocating"),
        # An ATen call may well cost more than a launcher of our own, so it bounds nothing from below.
        "kernel": Latency(eager.t0_us, 0.0, "aten.add, allocating (no launcher was given)"),
    }
    if measured.kernel is not None:
        launch["kernel"] = Latency(measured.kernel.typical_us, measured.kernel.best_us, "our own launcher")
    # A kernel that moves data takes longer to start and drain than one that does nothing.
    if (node := measured.graph_node) is not None:
        best_us = min(node.best_us, stream_us)
        launch["graph"] = Latency(stream_us, best_us, "aten elementwise kernel; best: empty kernel")
    if (node := measured.overlapped_node) is not None and measured.overlapped_kernel is not None:
        typical_us = measured.overlapped_kernel.typical_us
        best_us = min(node.best_us, typical_us)
        launch["overlapped"] = Latency(typical_us, best_us, "elementwise kernel that waits; best: empty kernel")
    return launch
