"""Graphs whose arguments are tensor subclasses (quantised or distributed weights), as graphs of the tensors inside.

A graph is given the tensors inside, makes the subclasses (by ``__tensor_unflatten__``), and runs as it did: its trace
holds the ops that ``__torch_dispatch__`` calls. Dynamo guards what a class is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode, _get_overloaded_args
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

from fuseplan.planner.errors import CaptureError

#: Of a graph module, in ``meta``.
_HOLDS_SUBCLASSES = "holds_subclasses"

#: A result of a call: the argument at a position, a subclass of this form, or, None, the next plain result.
_Result: TypeAlias = "int | _Form | None"


@dataclass(frozen=True)
class Apart:
    """A graph without tensor subclasses.

    Attributes:
        module: The graph; the one that was given where there are none.
        inputs: What it is compiled for.
        parameters: Positions in ``inputs`` of parameters, and of the tensors inside parameters.
        inner: Positions in ``inputs`` of tensors inside of arguments.
        whole: Makes a function of what the graph took before from one that takes what ``module`` does.
    """

    module: fx.GraphModule
    inputs: Sequence[Any]
    parameters: frozenset[int]
    inner: frozenset[int]
    whole: Callable[[Callable[..., Any]], Callable[..., Any]]


def take_apart(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Apart:
    """A Dynamo graph on the tensors inside of its arguments. Call it inside a ``torch.compile`` back end.

    CaptureError where a class is not made of tensors alone.
    """
    owners = example_inputs
    if not any(is_traceable_wrapper_subclass(node.meta.get("example_value")) for node in module.graph.nodes):
        return Apart(module, example_inputs, _parameters(owners), frozenset(), lambda call: call)
    fakes = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    forms = [_Form.of_argument(*pair) for pair in zip(example_inputs, fakes, strict=True)]
    parts = [_parts(*argument) for argument in zip(example_inputs, fakes, forms, strict=True)]
    owners = [item for item, inside in zip(example_inputs, parts, strict=True) for _ in inside]
    apart, results = _on_parts(module, forms, list(map(len, parts)))
    read = _reader(forms)

    def whole(call: Callable[..., Any]) -> Callable[..., Any]:
        if not any(isinstance(how, int | _Form) for how in results):
            return lambda *args: call(*read(*args))

        def remade(*args: Any) -> tuple[Any, ...]:
            parts = iter(call(*read(*args)))
            return tuple(next(parts) if how is None else args[how] if isinstance(how, int) else how.make(parts)
                         for how in results)

        return remade

    inputs = [one for inside in parts for one in inside]
    inner = frozenset(at for at, pair in enumerate(zip(inputs, owners, strict=True)) if pair[0] is not pair[1])
    return Apart(apart, inputs, _parameters(owners), inner, whole)


def _parameters(owners: Sequence[Any]) -> frozenset[int]:
    return frozenset(at for at, owner in enumerate(owners) if isinstance(owner, torch.nn.Parameter))


def _parts(item: Any, fake: Any, form: _Form | None) -> list[Any]:
    """What stands for an argument: itself, or the tensors inside, and its sizes as the graph knows them."""
    if form is None:
        return [item]
    pairs = zip(form.flatten(item), form.flatten(fake), strict=True)
    return [real if isinstance(real, torch.Tensor) else size for real, size in pairs]


def _reader(forms: Sequence[_Form | None]) -> Callable[..., Any]:
    """Makes what stands for the arguments from these: straight code, for it is part of each call."""
    graph = fx.Graph()
    arguments = [graph.placeholder(f"argument_{at}") for at in range(len(forms))]
    graph.output(tuple(part for argument, form in zip(arguments, forms, strict=True)
                       for part in ([argument] if form is None else form.nodes(argument))))
    return fx.GraphModule({}, graph).forward


def _on_parts(
    module: fx.GraphModule, forms: Sequence[_Form | None], counts: Sequence[int]
) -> tuple[fx.GraphModule, list[_Result]]:
    """The graph on what stands for its arguments, ``counts`` each, and how its results are made of that one's."""
    graph, made, calls = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, torch.nn.Module]()
    checks: list[tuple[str, tuple[fx.Node, ...]]] = []
    for node, form, count in zip(module.graph.find_nodes(op="placeholder"), forms, counts, strict=True):
        if form is None:
            made[node] = graph.node_copy(node)
            continue
        given = tuple(graph.placeholder(f"{node.name}_{number}") for number in range(count))
        for one in given:
            one.meta["tensor_dict"] = node.meta.get("tensor_dict")  # says whether it ever moves
        calls |= {f"make_{node.name}": _Calls(form.make_of), f"check_{node.name}": _Calls(form.check)}
        made[node] = graph.call_module(f"make_{node.name}", given)
        checks.append((f"check_{node.name}", (made[node], *given)))
    returned: Any = graph.graph_copy(module.graph, made)
    for check in checks:
        graph.call_module(*check)
    results = _flatten_results(module.graph, graph, returned)
    held = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    apart = fx.GraphModule({name: calls.get(name) or attrgetter(name)(module) for name in sorted(held)}, graph)
    apart.meta[_HOLDS_SUBCLASSES] = True
    return apart, results


def _flatten_results(before: fx.Graph, graph: fx.Graph, returned: Sequence[Any]) -> list[_Result]:
    """Let ``graph`` return the tensors inside the results of ``before``; says how a call makes each result of them."""
    given = {id(node.meta.get("example_value")): at for at, node in enumerate(before.find_nodes(op="placeholder"))}
    results, flat = list[_Result](), list[Any]()
    for node, leaf in zip(before.output_node().args[0], returned, strict=True):  # type: ignore[arg-type]
        fake = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if not is_traceable_wrapper_subclass(fake):
            results.append(None)
            flat.append(leaf)
        elif (at := given.get(id(fake))) is not None:
            results.append(at)
        else:
            form = _Form.of(fake)
            # It fails here where calls would: a class may know its sizes by other names.
            if type(form.make_of(*form.flatten(fake))) is not form.kind:
                raise CaptureError(f"a {form.kind.__name__} cannot be made again")
            results.append(form)
            flat += form.nodes(leaf)
    graph.output(tuple(flat))
    return results


class _Calls(torch.nn.Module):
    """A function that a graph calls, which may know what no graph can hold."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


@dataclass(frozen=True)
class _Form:
    """How to take a tensor subclass apart, and how to make it again.

    Attributes:
        inside: The tensors; for each that is a subclass what that is made of.
        size, stride: Its own; dynamic ones are None here, and follow on the tensors inside.
    """

    kind: Any
    context: Any
    inside: Mapping[str, _Form | None]
    size: tuple[int | None, ...]
    stride: tuple[int | None, ...]

    @staticmethod
    def of_argument(item: Any, fake: Any) -> _Form | None:
        """None of what is no subclass; CaptureError where a graph's fake argument is of another class."""
        if not is_traceable_wrapper_subclass(item):
            return None
        if type(item) is not type(fake):
            raise CaptureError(f"a {type(item).__name__} cannot be made again")
        _hand_down_sizes(item)
        return _Form.of(fake)

    @staticmethod
    def of(value: Any) -> _Form:
        names, context = value.__tensor_flatten__()
        inside = {name: getattr(value, name) for name in names}
        is_fixed = not any(isinstance(one, torch.SymInt) for one in pytree.tree_leaves(context))
        if not is_fixed or not all(isinstance(one, torch.Tensor) for one in inside.values()):
            raise CaptureError(f"a {type(value).__name__} is not made of tensors and constants alone")
        size, stride = (tuple(one if isinstance(one, int) else None for one in numbers)
                        for numbers in (value.size(), value.stride()))
        forms = {name: _Form.of(one) if is_traceable_wrapper_subclass(one) else None for name, one in inside.items()}
        return _Form(type(value), context, forms, size, stride)

    def flatten(
        self, value: Any, get: Callable[[Any, str], Any] = getattr,
        number: Callable[[Any, str, int], Any] = lambda value, which, dim: getattr(value, which)(dim),
    ) -> list[Any]:
        """The plain tensors inside, and sizes. ``get`` reads an attribute, ``number`` a size or stride."""
        found = list[Any]()
        for name, form in self.inside.items():
            part = get(value, name)
            found += [part] if form is None else form.flatten(part, get, number)
        for which, numbers in (("size", self.size), ("stride", self.stride)):
            found += [number(value, which, dim) for dim, known in enumerate(numbers) if known is None]
        return found

    def nodes(self, value: fx.Node) -> list[fx.Node]:
        """Nodes that flatten what a node stands for."""
        graph = value.graph
        return self.flatten(
            value, lambda node, name: graph.call_function(getattr, (node, name)),
            lambda node, which, dim: graph.call_method(which, (node, dim)))

    def make(self, parts: Iterator[Any]) -> Any:
        """The subclass, of the next of ``parts``."""
        inside = {name: next(parts) if form is None else form.make(parts) for name, form in self.inside.items()}
        size, stride = (tuple(next(parts) if known is None else known for known in numbers)
                        for numbers in (self.size, self.stride))
        return self.kind.__tensor_unflatten__(inside, self.context, torch.Size(size), stride)

    def make_of(self, *parts: Any) -> Any:
        return self.make(iter(parts))

    def check(self, value: Any, *parts: Any) -> None:
        """CaptureError where a subclass is not what it was made as, once the graph has run.

        Writing to a tensor inside is no change: the argument shares it.
        """
        same = all(one is part for one, part in zip(self.flatten(value), parts, strict=True) if torch.is_tensor(part))
        if type(value) is not self.kind or not same or value.__tensor_flatten__()[1] != self.context:
            raise CaptureError(f"a {self.kind.__name__} cannot be made again, or has other tensors inside after an op")


def _hand_down_sizes(tensor: Any) -> None:
    """Let what Dynamo knows of the sizes of tensors inside be found by these tensors."""
    contexts: Any = torch._guards.TracingContext.get().tensor_to_context
    known = getattr(contexts.get(tensor), "inner_contexts", {})
    for name in known:
        inside = getattr(tensor, name)
        if inside not in contexts:
            contexts[inside] = known[name]
        if is_traceable_wrapper_subclass(inside):
            _hand_down_sizes(inside)


def classes_first(module: fx.GraphModule) -> AbstractContextManager[Any]:
    """Within, a pre-dispatch trace of a graph that was taken apart sees what its classes call."""
    return _ClassesFirst() if _HOLDS_SUBCLASSES in module.meta else nullcontext()


class _ClassesFirst(TorchFunctionMode):
    """Hands calls with subclasses to their classes: a pre-dispatch trace comes before these, and knows no subclass."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        subclasses = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_traceable_wrapper_subclass(leaf)]
        trace = torch._ops._get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)
        if not subclasses or trace is None:
            return function(*args, **kwargs)
        if overriding := _get_overloaded_args(subclasses):
            kinds: Any = tuple(map(type, overriding))
            with self:
                return _first(function, [kind.__torch_function__ for kind in kinds], kinds, args, kwargs)
        with disable_proxy_modes_tracing(), _Turn(self, trace):
            return function(*args, **kwargs)


class _Turn(TorchDispatchMode):
    """Where eager mode calls a class: what that calls is traced."""

    def __init__(self, classes_first: _ClassesFirst, trace: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._classes_first, self._trace = classes_first, trace

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds: list[Any] = [kind for kind in types if is_traceable_wrapper_subclass_type(kind)]
        # Down here the dispatcher has left behind what calls a trace.
        included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        for key in (torch._C.DispatchKey.PreDispatch, torch._C.DispatchKey.PythonTLSSnapshot):
            excluded = excluded.remove(key)
        with torch._C._ForceDispatchKeyGuard(included, excluded), self._classes_first, self._trace:
            if not kinds:
                return function(*args, **(kwargs or {}))
            return _first(function, [kind.__torch_dispatch__ for kind in kinds], types, args, kwargs or {})


def _first(function: Any, turns: Sequence[Callable[..., Any]], types: Any, args: Any, kwargs: Any) -> Any:
    """What the first class gives that knows the function."""
    for turn in turns:
        if (result := turn(function, types, args, kwargs)) is not NotImplemented:
            return result
    raise TypeError(f"no class knows {function}")
