"""Traces that know of which module of the model each op is: ``meta["modules"]`` of a node, as the user spells them.

Dynamo writes the modules that are being called into ``meta["nn_module_stack"]`` of its nodes. They go over to ATen ops
while a graph is interpreted node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fuseplan.planner.module_paths import user_paths

_STACK = "nn_module_stack"


def trace_ops(
    module: fx.GraphModule, arguments: Sequence[Any], decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    pre_dispatch: bool = False
) -> fx.GraphModule:
    """``make_fx`` of a graph, whose nodes keep what Dynamo says of their modules."""
    with fx.traceback.preserve_node_meta():
        table = dict(decompositions or {})
        return make_fx(_Interpreter(module).run, table, pre_dispatch=pre_dispatch)(*arguments)


class _Interpreter(fx.Interpreter):
    """Goes into graphs that are called as modules, whose nodes know more than the call does."""

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        called = self.fetch_attr(target)
        if isinstance(called, fx.GraphModule) and not kwargs:
            return _Interpreter(called).run(*args)
        return super().call_module(target, args, kwargs)


def name_modules(trace: fx.GraphModule) -> None:
    """Give every call its ``meta["modules"]``: one path, ``("",)`` outside of all modules that are called."""
    found = {node: _innermost(node.meta.get(_STACK)) for node in trace.graph.nodes if node.op == "call_function"}
    paths = user_paths(dict.fromkeys(name for name in found.values() if name)) | {"": ""}
    for node, name in found.items():
        node.meta["modules"] = (paths[name],)


def _innermost(stack: Any) -> str:
    """The name of the module whose code an op is in."""
    names = [str(name) for name, _ in stack.values()] if stack else [""]
    return names[-1]
