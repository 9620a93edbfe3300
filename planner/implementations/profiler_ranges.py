"""Ranges of profilers around the calls of a compiled graph: ``fuseplan::silu+mul (layers.*.mlp  x32)``.

They are there while ``torch.profiler`` or ``emit_nvtx`` is on. Off, a compiled graph reads one flag in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch.autograd.profiler
from torch import fx

from fuseplan.planner.module_paths import located

#: Stands for the module with PyTorch's flag where that was looked at already.
_OFF = SimpleNamespace(_is_profiler_enabled=False)
#: Names in the generated code: the module with PyTorch's flag, and the same graph with ranges.
_PROFILER, _RANGED = "_fuseplan_profiler", "_fuseplan_ranged"


def ask_for_profilers(graph: fx.Graph) -> None:
    """Let the code generated for ``graph`` begin with a look at the flag; :func:`add_ranges` fills in the names."""
    arguments = ", ".join(str(node.target) for node in graph.find_nodes(op="placeholder"))
    line = f"if {_PROFILER}._is_profiler_enabled: return {_RANGED}({arguments})\n"
    graph.on_generate_code(lambda current: lambda body: [line, *(current(body) if current else body)])


def add_ranges(module: fx.GraphModule, names: Mapping[str, str]) -> None:
    """``names`` are those of ranges, by the global name of a call in the generated code; what is called may change."""
    code, namespace = module.forward.__code__, module.forward.__globals__

    def ranged(*args: Any) -> Any:
        calls = {slot: _in_range(namespace, slot, name) for slot, name in names.items()}
        own = FunctionType(code, {**namespace, **calls, _PROFILER: _OFF}, "forward")
        return own(module, *args)

    namespace[_PROFILER], namespace[_RANGED] = torch.autograd.profiler, ranged


def _in_range(namespace: Mapping[str, Any], slot: str, name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch._C._profiler._RecordFunctionFast(name):
            return namespace[slot](*args)

    return call


def range_name(label: str, library: str = "", place: str = "") -> str:
    """Of a group with a label for people, whose first word says its ops; ``place`` says where in the model it is.

    >>> range_name("silu+mul 32x4096 bfloat16", place="layers.*.mlp  x32"), range_name("linear 1x4096", "matmul.rows")
    ('fuseplan::silu+mul (layers.*.mlp  x32)', 'fuseplan::linear by matmul.rows')
    """
    ops = f"fuseplan::{label.split(' ')[0]}"
    return located(f"{ops} by {library}" if library else ops, place)
