"""The planner's public names, imported when first used: ``import fuseplan.planner`` loads nothing heavy.

>>> from fuseplan.planner import FusionScheduler
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuseplan.planner.api.explain import explain as explain
    from fuseplan.planner.api.misses import misses as misses
    from fuseplan.planner.api.report import report as report
    from fuseplan.planner.api.tune import tune as tune
    from fuseplan.planner.dispatch_stats import CompileStats as CompileStats
    from fuseplan.planner.dispatch_stats import Stats as Stats
    from fuseplan.planner.dispatch_stats import reset_stats as reset_stats
    from fuseplan.planner.dispatch_stats import stats as stats
    from fuseplan.planner.errors import FuseplanError as FuseplanError
    from fuseplan.planner.patterns.table import pattern as pattern
    from fuseplan.planner.runtime.options import DispatchOptions as DispatchOptions
    from fuseplan.planner.runtime.scheduler import FusionConfig as FusionConfig
    from fuseplan.planner.runtime.scheduler import FusionScheduler as FusionScheduler
    from fuseplan.planner.runtime.scheduler import OpNode as OpNode
    from fuseplan.planner.runtime.scheduler import SubGraph as SubGraph

#: The module of each public name.
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
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
