"""ATen calls through the bindings that PyTorch itself uses: a method or function in place of the operator object.

``torch.ops.aten.view.default(x, shape)`` converts each argument by schema; ``Tensor.view`` is generated C++ for the
same operator and takes half the time or less. Which overload a binding picks depends on its arguments, so each use is
tried out: both are traced with operands of the same kind on the meta device, and the binding is taken only where it
dispatches and returns the very same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fuseplan.planner.capture.modules import traceable
from fuseplan.planner.graph.execute import parameters_of
from fuseplan.planner.graph.merged_linear import MERGED, MergedLinear
from fuseplan.planner.rewrites.packing import pack_operands
from fuseplan.planner.rewrites.trace_edit import named_arguments


class Direct:
    """Stands for a function in an FX graph until :func:`fill_namespace`; FX asks a target for its name."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name
        self.__module__ = "fuseplan"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def fill_namespace(namespace: dict[str, Any]) -> None:
    """Put functions where generated code calls their :class:`Direct` stand-ins."""
    for name, value in list(namespace.items()):
        if isinstance(value, Direct):
            namespace[name] = value.function


def bind_calls(graph: fx.Graph, traced: fx.Graph) -> None:
    """Call each ATen op of ``graph`` through its binding; ``meta["traced"]`` names its node of ``traced``."""
    values = FakeValues(traced)
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target is MERGED:
            node.target = Direct(MergedLinear(pack_operands), "merged_linear")
            continue
        try:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda one: _example(values[one]))
        except _NoExample:
            continue
        found = find_binding(node.target, args, kwargs)
        if found is not None:
            node.target = found


class FakeValues:
    """The fake value that a node of a rewritten graph stands for; None where that is not known."""

    def __init__(self, traced: fx.Graph) -> None:
        self._nodes = {node.name: node for node in traced.nodes}

    def __getitem__(self, node: fx.Node) -> Any:
        source = self._nodes.get(node.meta.get("traced", ""))
        return None if source is None else source.meta.get("val")


class _NoExample(Exception):
    """There is no plain value like this one."""


def _example(value: Any) -> Any:
    """A value of the same kind: tensors on the meta device, dynamic sizes as the numbers they were traced with."""
    if isinstance(value, list | tuple):
        return [_example(item) for item in value]
    if isinstance(value, torch.SymInt) and isinstance(hint := value.node.hint, int):
        return hint
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        raise _NoExample
    shape, strides = (_example(list(sizes)) for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")


#: What a binding's choice of an overload depends on.
_Kind = tuple[Any, ...]


def _kind(value: Any) -> _Kind:
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.dim()
    if isinstance(value, list | tuple):
        return "list", *map(_kind, value)
    if isinstance(value, dict):
        return "dict", *((key, _kind(item)) for key, item in value.items())
    if type(value) in (int, float):
        return (type(value),)
    return type(value), value


#: Where PyTorch keeps the functions generated for its operators.
_NAMESPACES: tuple[Any, ...] = tuple(
    namespace for name in ("TensorBase", "_VariableFunctions", "_nn", "_linalg", "_special", "_fft")
    if (namespace := getattr(torch._C, name, None)) is not None
)
_FOUND: dict[tuple[torch._ops.OpOverload, _Kind, _Kind], Direct | None] = {}
_STANDINS: dict[tuple[str, str], Direct] = {}


def find_binding(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Direct | None:
    """A function that does what ``target`` does with arguments of this kind (tensors on the meta device); None without.
    """
    if not _is_eligible(target, args, kwargs):
        return None
    key = target, _kind(tuple(args)), _kind(dict(kwargs))
    if key not in _FOUND:
        _FOUND[key] = None
        named = [(one, getattr(one, target._opname, None)) for one in _NAMESPACES]
        candidates = [(namespace, function) for namespace, function in named if callable(function)]
        wanted = _trace(target, args, kwargs) if candidates else None
        for namespace, function in candidates if wanted is not None else ():
            if _trace(function, args, kwargs) == wanted:
                name = function.__name__  # one stand-in for each function, so that generated code has one name for it
                _FOUND[key] = _STANDINS.setdefault((str(namespace), name), Direct(function, name))
                break
    return _FOUND[key]


def _is_eligible(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Not what makes tensors from nothing, draws random numbers, names a device, or writes to ``out=``."""
    leaves = pytree.tree_leaves((list(args), dict(kwargs)))
    draws = torch.Tag.nondeterministic_seeded in target.tags
    return (
        target.namespace == "aten"
        and any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        and not any(isinstance(leaf, torch.device) for leaf in leaves)
        and not (draws and named_arguments(target, args, kwargs).get("dropout_p") != 0.0)
        and not any(one.kwarg_only and one.is_written for one in parameters_of(str(target)))
    )


def _trace(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What a call dispatches and returns, as text (1, 1.0 and True differ); None where it cannot be tried."""
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def call(*given: torch.Tensor) -> Any:
        remaining = iter(given)
        filled = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        own_args, own_kwargs = pytree.tree_unflatten(filled, structure)
        result = function(*own_args, **own_kwargs)
        return list(result) if isinstance(result, list | tuple) else result

    try:
        with torch.no_grad(), traceable():
            graph = make_fx(call, pre_dispatch=True)(*(tensor.clone() for tensor in tensors)).graph
    except Exception:
        return None
    kinds = {node.op for node in graph.nodes}
    return str(graph) if "call_function" in kinds and "get_attr" not in kinds else None
