"""The planner's public names, imported when first used: ``import fuseplan.planner`` loads nothing heavy.

>>> import fuseplan.planner
>>> fuseplan.planner.stats().groups_fused
0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuseplan.planner.errors import FuseplanError
    from fuseplan.planner.options import DispatchOptions
    from fuseplan.planner.patterns import pattern
    from fuseplan.planner.scheduler import FusionConfig, FusionScheduler, OpNode, SubGraph
    from fuseplan.planner.tally import CompileStats, Stats, reset_stats, stats

__all__ = [
    "CompileStats",
    "DispatchOptions",
    "FuseplanError",
    "FusionConfig",
    "FusionScheduler",
    "OpNode",
    "Stats",
    "SubGraph",
    "pattern",
    "reset_stats",
    "stats",
]

_MODULES = {
    "CompileStats": "tally",
    "DispatchOptions": "options",
    "FuseplanError": "errors",
    "FusionConfig": "scheduler",
    "FusionScheduler": "scheduler",
    "OpNode": "scheduler",
    "Stats": "tally",
    "SubGraph": "scheduler",
    "pattern": "patterns",
    "reset_stats": "tally",
    "stats": "tally",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
