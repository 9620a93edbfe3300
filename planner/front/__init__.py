"""fuseplan: what it is used for, imported when first used. It is installed as ``fuseplan/__init__.py``.

>>> import fuseplan
>>> fuseplan.stats().groups_fused
0
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuseplan.planner import explain, misses, report, reset_stats, stats, tune

    __version__: str

if (_here := Path(__file__).parent).name == "front":  # an editable install: links to the packages, and nothing else
    __path__.append(str(_here.parents[1] / ".typecheck" / "fuseplan"))

__all__ = ["__version__", "explain", "misses", "report", "reset_stats", "stats", "tune"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("fuseplan")
    if name in ("costmodel", "kernels", "planner", "search"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.planner"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
