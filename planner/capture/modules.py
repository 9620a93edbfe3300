"""Traces that know of which module of the model each op is: ``meta["modules"]`` of a node, as the user spells them.

Dynamo's nodes have them in ``meta["nn_module_stack"]``, and hand them on while a graph is interpreted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fuseplan.planner.errors import CaptureError
from fuseplan.planner.module_paths import user_paths

_STACK = "nn_module_stack"
#: What Dynamo writes for ``x.data``.
_DATA = getattr(torch._C._autograd, "_get_data_attr", None)


def trace_ops(
    module: fx.GraphModule, arguments: Sequence[Any], decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    pre_dispatch: bool = False
) -> fx.GraphModule:
    """``make_fx`` of a graph, whose nodes keep what Dynamo says of their modules.

    CaptureError where the trace would hold a fake tensor, which has no memory, or a subclass.
    """
    with fx.traceback.preserve_node_meta(), traceable():
        table = dict(decompositions or {})
        trace = make_fx(_Interpreter(module).run, table, pre_dispatch=pre_dispatch)(*arguments)
    for node in trace.graph.find_nodes(op="get_attr"):
        held = operator.attrgetter(str(node.target))(trace)
        if isinstance(held, FakeTensor) or is_traceable_wrapper_subclass(held):
            readers = " and ".join(str(user.target) for user in node.users) or "the result"
            raise CaptureError(f"{readers} reads a tensor that no op of the trace makes")
    return trace


@contextmanager
def traceable() -> Iterator[None]:
    """Within, a pre-dispatch trace sees ops, wherever the graph is called from.

    The dispatcher leaves it out inside of a ``__torch_dispatch__``, and after Dynamo has met a decision by data in a
    tensor subclass (seen with torch 2.13).
    """
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.PreDispatch):
        yield
        return
    included = torch._C._dispatch_tls_local_include_set()  # keeps the modes that are on, such as fake tensors'
    with torch._C._ForceDispatchKeyGuard(included, excluded_in_new_threads()):
        yield


@cache
def excluded_in_new_threads() -> Any:
    """The keys that the dispatcher leaves out in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch._C._dispatch_tls_local_exclude_set).result()


class _Interpreter(fx.Interpreter):
    """Goes into graphs that are called as modules, whose nodes know more than the call does.

    Calls ``x.detach()`` for ``x.data``, which a trace would keep as a constant fake tensor.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(torch.Tensor.detach if target is _DATA else target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        called = self.fetch_attr(target)
        if isinstance(called, fx.GraphModule) and not kwargs:
            return _Interpreter(called).run(*args)
        return super().call_module(target, args, kwargs)


def name_modules(trace: fx.GraphModule) -> None:
    """Give every call its ``meta["modules"]``: one path, ``("",)`` outside of all modules that are called."""
    calls = [node for node in trace.graph.nodes if node.op == "call_function"]
    # The innermost one stands last.
    found = {node: str([("", None), *(node.meta.get(_STACK) or {}).values()][-1][0]) for node in calls}
    paths = user_paths(dict.fromkeys(name for name in found.values() if name)) | {"": ""}
    for node, name in found.items():
        node.meta["modules"] = (paths[name],)
