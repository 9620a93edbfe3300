"""The words of a canonical form: texts of layouts and of attribute values in which no name occurs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch

from fuseplan.kernels.ir.index import Size
from fuseplan.planner.graph.dataflow import Ref, TensorSpec

#: Spells a size; dynamic sizes are spelled differently while refining and in the final text.
SpellSize: TypeAlias = Callable[[Size], str]


@lru_cache(maxsize=65536)
def static_spec_text(spec: TensorSpec) -> str | None:
    """Canonical text of a layout without dynamic sizes; None for one with any."""
    return _format_spec(spec, str) if spec.is_static else None


def spec_text(spec: TensorSpec, spell: SpellSize) -> str:
    """Canonical text of a layout, its dynamic sizes spelled by ``spell``."""
    return static_spec_text(spec) or _format_spec(spec, spell)


def _format_spec(spec: TensorSpec, spell: SpellSize) -> str:
    return f"{spec.dtype}[{','.join(map(spell, spec.shape))}]@[{','.join(map(spell, spec.strides))}]"


def attribute_text(value: Any, spell: SpellSize = str) -> str:
    """Canonical text of an attribute value; an int and the equal float differ, a tuple and a list do not.

    Raises:
        TypeError: The type has no canonical text.
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{attribute_text(value[key], spell)}" for key in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(attribute_text(item, spell) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return "float nan" if math.isnan(value) else f"float {value!r}"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Ref):
        return f"&{value.position}"
    if isinstance(value, sympy.Expr):
        return spell(value)
    if isinstance(value, complex | torch.dtype | torch.layout | torch.memory_format):
        return f"{type(value).__name__} {value}"
    if isinstance(value, torch.device):
        # The device is part of the database identity; a plan tuned from a meta capture must be found on the GPU.
        return "device"
    kind = type(value).__name__
    raise TypeError(f"attribute {value!r} of type {kind} has no canonical text (planner/groups/canonical_text.py)")
