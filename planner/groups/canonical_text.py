"""The words of a canonical form: texts of layouts and of attribute values in which no name occurs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from fuseplan.planner.graph.dataflow import Ref, TensorSpec


@lru_cache(maxsize=65536)
def spec_text(spec: TensorSpec) -> str:
    """Canonical text of a static layout.

    Raises:
        TypeError: A size is dynamic.
    """
    if not spec.is_static:
        raise TypeError(f"{spec} has dynamic sizes; bind them before asking for a key")
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]@[{','.join(map(str, spec.strides))}]"


def attribute_text(value: Any) -> str:
    """Canonical text of an attribute value; an int and the equal float differ, a tuple and a list do not.

    Raises:
        TypeError: The type has no canonical text.
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{attribute_text(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(attribute_text(item) for item in value) + "]"
    if value is None or isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return "float nan" if math.isnan(value) else f"float {value!r}"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Ref):
        return f"&{value.position}"
    if isinstance(value, complex | torch.dtype | torch.layout | torch.memory_format):
        return f"{type(value).__name__} {value}"
    if isinstance(value, torch.device):
        # The device is part of the database identity; a plan tuned from a meta capture must be found on the GPU.
        return "device"
    kind = type(value).__name__
    raise TypeError(f"attribute {value!r} of type {kind} has no canonical text (planner/groups/canonical_text.py)")
