"""The planner's public names, imported when first used: ``import fuseplan.planner`` loads nothing heavy.

>>> from fuseplan.planner import FusionScheduler
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuseplan.planner.api.explain import explain
    from fuseplan.planner.api.misses import misses
    from fuseplan.planner.api.report import report
    from fuseplan.planner.api.tune import tune
    from fuseplan.planner.dispatch_stats import CompileStats, Stats, reset_stats, stats
    from fuseplan.planner.errors import FuseplanError
    from fuseplan.planner.patterns.table import pattern
    from fuseplan.planner.runtime.options import DispatchOptions
    from fuseplan.planner.runtime.scheduler import FusionConfig, FusionScheduler, OpNode, SubGraph

__all__ = [
    "CompileStats",
    "DispatchOptions",
    "FuseplanError",
    "FusionConfig",
    "FusionScheduler",
    "OpNode",
    "Stats",
    "SubGraph",
    "explain",
    "misses",
    "pattern",
    "report",
    "reset_stats",
    "stats",
    "tune",
]

_MODULES = {
    "CompileStats": "dispatch_stats",
    "DispatchOptions": "runtime.options",
    "FuseplanError": "errors",
    "FusionConfig": "runtime.scheduler",
    "FusionScheduler": "runtime.scheduler",
    "OpNode": "runtime.scheduler",
    "Stats": "dispatch_stats",
    "SubGraph": "runtime.scheduler",
    "explain": "api.explain",
    "misses": "api.misses",
    "pattern": "patterns.table",
    "report": "api.report",
    "reset_stats": "dispatch_stats",
    "stats": "dispatch_stats",
    "tune": "api.tune",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
