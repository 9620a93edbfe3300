"""Tunes that time nothing: a call takes as long as the ATen ops it makes, a search tries one configuration, and few
groups of a region are looked at.
"""

from __future__ import annotations

from typing import Any

import pytest
from inline_executor import InlineExecutor
from torch.utils._python_dispatch import TorchDispatchMode

from fuseplan.costmodel.devices import ByDevice
from fuseplan.costmodel.probe import probe
from fuseplan.planner.groups.candidates import enumerate_candidates
from fuseplan.search import policy
from fuseplan.search.timing.timers import CpuTimer, Operands, Run, Sampler
from fuseplan.search.tune import tuner

#: Hardly any search.
QUICK = tuner.Budget(trials=1, steep_trials=1, seconds=0.1, screen_s=0.002, decide_s=0.01, finalists=1)
#: Ops of a group and groups of a region: the most that are looked at.
GROUPS = (40, 8)


def look_at_few_groups(patch: pytest.MonkeyPatch) -> None:
    """From now on planning takes a tenth of its time; a region's single ops and its largest groups remain."""
    patch.setattr(enumerate_candidates, "__defaults__", GROUPS)


def counted(self: CpuTimer, run: Run, operands: Operands) -> Sampler:
    """In the place of a timer: a microsecond, and five for each op that ATen runs."""
    ops = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal ops
            ops += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        run(*operands[0])
    return lambda: 1.0 + 5.0 * ops


def count_instead_of_timing(patch: pytest.MonkeyPatch) -> None:
    """From now on tunes count, in this process."""
    look_at_few_groups(patch)
    patch.setattr(tuner, "make_pool", lambda _: InlineExecutor())
    patch.setattr(tuner.Budget, "on", lambda *_: QUICK)
    patch.setattr(policy, "MEASURED_LIMIT", ByDevice(1, 1))
    patch.setattr(policy, "MOST_OPS_OF_A_STEP", 0)  # TorchInductor would compile for seconds
    patch.setattr(CpuTimer, "prepare", counted)
    patch.setattr(CpuTimer, "steady", lambda _: True)
    patch.setattr(CpuTimer, "disturbances", lambda _: 0)
    patch.setattr(probe, "machine_load", lambda: probe.MachineLoad(0.0, 2))
