"""The terms of the roofline, how they make a time, and how a calibration scales them."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.costmodel.device import Calibration


@dataclass(frozen=True)
class Terms:
    """The terms of the roofline, before they are combined.

    Attributes:
        launch_us: Launch latency that nothing hides.
        host_us: Launch latency on the host, in parallel with the device.
        latency_us: Dependent instructions that nothing hides.
        write_us: Writing the results, beside ``memory_us``.
        serial_us: Dependent instructions, beside ``memory_us`` and ``compute_us``.
        parts: ``(memory_us, write_us)`` of the parts of a kernel that follow one another; empty where there is one.
        overlap: Whether moving and arithmetic go on at the same time.
    """

    launch_us: float
    host_us: float
    memory_us: float
    compute_us: float
    latency_us: float = 0.0
    write_us: float = 0.0
    serial_us: float = 0.0
    parts: tuple[tuple[float, float], ...] = ()
    overlap: bool = True

    @property
    def moves(self) -> tuple[tuple[float, float], ...]:
        """``parts``, or the one part that the kernel is."""
        return self.parts or ((self.memory_us, self.write_us),)

    @property
    def moving_us(self) -> float:
        """Moving and writing, part after part."""
        return sum(max(memory_us, write_us) for memory_us, write_us in self.moves)

    @property
    def busy_us(self) -> float:
        """The longest of what goes on at the same time."""
        if not self.overlap:
            return self.moving_us + self.compute_us
        return max(self.moving_us, self.compute_us, self.serial_us)

    @property
    def time_us(self) -> float:
        return max(self.host_us, self.launch_us + self.latency_us + self.busy_us)


def calibrated(terms: Terms, calibration: Calibration) -> Terms:
    """The terms multiplied by a calibration's factors."""
    return Terms(
        terms.launch_us * calibration.launch_scale,
        terms.host_us * calibration.launch_scale,
        terms.memory_us * calibration.memory_scale,
        terms.compute_us * calibration.compute_scale,
        terms.latency_us * calibration.latency_scale,
        terms.write_us * calibration.write_scale,
        terms.serial_us * calibration.latency_scale,
        tuple(
            (memory_us * calibration.memory_scale, write_us * calibration.write_scale)
            for memory_us, write_us in terms.parts
        ),
        terms.overlap,
    )


def transfer_us(nbytes: float, gbps: float) -> float:
    """Microseconds of moving so many bytes."""
    return nbytes / gbps * 1e-3
