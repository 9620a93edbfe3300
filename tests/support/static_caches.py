"""Caches as a model's ``forward`` takes them, whatever its version of transformers calls that argument."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from fuseplan.planner.models.build import cache_name


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword argument that gives ``cache`` to ``model``."""
    name = cache_name(inspect.signature(model.forward).parameters)
    assert name is not None, type(model)
    return {name: cache}
