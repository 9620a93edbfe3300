"""How long a job in a worker may go without a sign before it counts as hanging: every such limit, and its reason.

A job gives a sign after each call that it has timed or checked (:mod:`fuseplan.search.timing.signs`), and its limit
begins again. So rounds and contestants need no allowance here: a limit covers one call, and grows with what that does.
"""

from __future__ import annotations

from collections.abc import Iterable

from fuseplan.costmodel.roofline import nominal_us
from fuseplan.costmodel.work import Work

#: Seconds for all that is no call: a worker that imports PyTorch, the first use of a GPU's libraries, inputs made of
#: random numbers. Each takes up to ten seconds on a busy machine.
JOB_LIMIT_S = 60.0
#: Seconds that a C++ compiler may compute for one kernel: :mod:`fuseplan.kernels.native.build` ends it then.
COMPILE_S = 120.0
#: How many times longer than on the nominal device a call may take: ATen's matmuls of integers, and of halves on a
#: processor without instructions for them, take up to this, and the float64 reference some times its op.
_SLOWEST = 100.0


def call_limit_s(least_s: float, works: Iterable[Work], device_type: str) -> float:
    """The limit of a job that calls kernels or ops of these ``works`` again and again: ``least_s``, and for one call of
    all of them.
    """
    return least_s + _SLOWEST * 1e-6 * sum(nominal_us(work, device_type, fused=False) for work in works)


def too_long(works: Iterable[Work], limit_s: float) -> str:
    """What a message about a job that timed out adds: how much one call does, and what allows more."""
    known = list(works)
    nbytes, flops = sum(work.dram_bytes for work in known), sum(work.total_flops for work in known)
    size = f"{nbytes / 1e6:.3g} MB and {flops / 1e9:.3g} Gflop a call"
    return f" ({size}); `plan tune --job-limit {2 * limit_s:.0f}` waits longer"
