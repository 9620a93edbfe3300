"""From a model to its dataflow graph, with no weights in memory.

Dynamo traces the model on fake tensors, exactly as ``torch.compile`` does at run time, and the trace goes through the
same :func:`trace_predispatch` and :func:`~fuseplan.planner.normalise.normalise` as in the back end. That is what
makes a plan tuned offline a hit at run time: models branch on ``torch.compiler.is_compiling()``, and attention's
output layout depends on the device, so neither plain tracing nor the meta device gives the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuseplan.planner.attention import rewrite_attention
from fuseplan.planner.build import Model, construct, load_module
from fuseplan.planner.errors import CaptureError, FuseplanError
from fuseplan.planner.graph import DataflowGraph
from fuseplan.planner.models import ModelSource, first_line
from fuseplan.planner.normalise import Normalised, normalise
from fuseplan.planner.transforms import modes_restored, without_transforms
from fuseplan.planner.workload import Workload


@dataclass(frozen=True)
class Captured:
    """The graphs of one model under one workload.

    Attributes:
        graphs: One per graph that Dynamo makes, in call order; a model without graph breaks has one.
        workload: The sizes it was captured for.
        traces: The same graphs with their fx modules; empty when the capture came from a file.
    """

    graphs: tuple[DataflowGraph, ...]
    workload: Workload
    traces: tuple[Normalised, ...] = ()

    @property
    def graph(self) -> DataflowGraph:
        """The graph of a model without graph breaks.

        Raises:
            CaptureError: There are several graphs.
        """
        if len(self.graphs) != 1:
            raise CaptureError(f"the model breaks into {len(self.graphs)} graphs; use Captured.graphs")
        return self.graphs[0]


def trace_predispatch(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    grouped_queries: bool | None = None,
    attention_masks: bool = True,
) -> fx.GraphModule:
    """The pre-dispatch ATen trace of a Dynamo graph. Call it inside a ``torch.compile`` back end.

    No decomposition and no functionalisation: ``linear`` and attention stay whole, in-place updates stay in place. But
    attention is asked for less (:func:`~fuseplan.planner.attention.rewrite_attention`, which takes the other two
    arguments); ``meta["attention"]`` of the result says how often.

    Raises:
        CaptureError: Tracing failed, or autocast is on (its casts are not part of the trace).
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise CaptureError("trace_predispatch works only inside a torch.compile back end")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise CaptureError("autocast is on; cast the model with model.to(dtype) instead")
    fakes = [_fake(item, context) for item in example_inputs]
    try:
        with context.fake_mode, modes_restored():
            trace = make_fx(without_transforms(module, fakes), pre_dispatch=True)(*fakes)
        trace.meta["attention"] = rewrite_attention(trace, grouped_queries, attention_masks)
    except Exception as error:
        raise CaptureError(f"tracing to ATen ops failed: {first_line(error)}") from error
    return trace


def _fake(item: Any, context: Any) -> Any:
    """The argument under the back end's fake mode, with the dynamic sizes that Dynamo gave it."""
    if not isinstance(item, torch.Tensor):
        return item
    symbolic = context.tensor_to_context.get(item)
    return context.fake_mode.from_tensor(
        item, symbolic_context=symbolic, source=getattr(symbolic, "tensor_source", None)
    )


def capture(source: ModelSource, workload: Workload, device_type: str) -> Captured:
    """Capture a model as ``torch.compile`` would see it on this kind of device.

    Args:
        source: The model.
        workload: The sizes of the call.
        device_type: ``"cpu"`` or ``"cuda"``. Without a GPU, ``"cuda"`` is captured on the meta device: the same ops,
            but attention's output layout may differ from the real device's.

    Forgets all graphs that ``torch.compile`` holds in this process (they are compiled again when next called).

    Raises:
        CaptureError: The model cannot be traced without data; the message names the reason.
        ConfigError: The model cannot be built, or has no such regime.
    """
    device = "meta" if device_type == "cuda" and not torch.cuda.is_available() else device_type
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = _faked(load_module(source), mode, device) if source.kind == "module" else construct(source, device)
        args, kwargs = model.example(workload)
        traces = record(model.module, args, kwargs)
    return Captured(tuple(trace.graph for trace in traces), workload, tuple(traces))


def record(module: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Normalised]:
    """Call ``module`` once under ``torch.compile`` and give every graph it makes, normalised.

    Raises:
        CaptureError: Dynamo cannot trace the call, or traces nothing.
    """
    traces: list[Normalised] = []
    errors: list[FuseplanError] = []

    def backend(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            traces.append(normalise(trace_predispatch(graph, example_inputs)))
        except FuseplanError as error:
            errors.append(error)
        return graph.forward

    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(module, backend=backend, dynamic=False)(*args, **kwargs)
    except Exception as error:
        raise errors[0] if errors else CaptureError(f"the model cannot be traced: {first_line(error)}") from error
    finally:
        torch._dynamo.reset()
    if errors:
        raise errors[0]
    if not traces:
        raise CaptureError("the model runs no tensor op that torch.compile can trace; nothing can be planned")
    return traces


def _faked(model: Model, mode: FakeTensorMode, device: str) -> Model:
    """The user's module with every tensor replaced by a fake one on ``device``; shared tensors stay shared."""
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            twin: Any = mode.from_tensor(tensor.detach()).to(device)
            if isinstance(tensor, torch.nn.Parameter):
                twin = torch.nn.Parameter(twin, requires_grad=False)
            # The original is kept too: a freed tensor's id could come back.
            made[id(tensor)] = (tensor, twin)
        return made[id(tensor)][1]

    for module in model.module.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = fake(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)
    inputs = pytree.tree_map_only(torch.Tensor, fake, model.inputs)
    return Model(model.module, torch.device(device), inputs=inputs)
