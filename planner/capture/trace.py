"""From a model to its dataflow graph, with no weights in memory.

Dynamo traces the model on fake tensors as ``torch.compile`` does, and the trace goes through the back end's own
functions: so a plan tuned offline is found at run time. Plain tracing gives other graphs, since models ask
``torch.compiler.is_compiling()``; so does the meta device, since attention's layout depends on the device.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from fuseplan.costmodel.devices import traced_on
from fuseplan.planner.capture.fake_layouts import correct_layouts, laid_out
from fuseplan.planner.capture.modules import name_modules, trace_ops
from fuseplan.planner.capture.normalise import Traced, normalise
from fuseplan.planner.capture.subclasses import classes_first, take_apart
from fuseplan.planner.capture.transforms import modes_restored, without_transforms
from fuseplan.planner.errors import CaptureError, ConfigError, FuseplanError, UnknownOpError, in_words, user_line
from fuseplan.planner.graph.dataflow import DataflowGraph, bind_graph
from fuseplan.planner.graph.execute import resolve_op
from fuseplan.planner.models.build import Model, construct, foreign_code, load_module
from fuseplan.planner.models.sources import ModelSource, quiet
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.ops.table import OPS
from fuseplan.planner.rewrites.attention import rewrite_attention
from fuseplan.planner.rewrites.convolutions import lay_channels_last
from fuseplan.planner.rewrites.merged_projections import merge_projections
from fuseplan.search.errors import OWN_FAULTS

#: Of one model under one workload: one, or with graph breaks several in call order.
Graphs: TypeAlias = tuple[DataflowGraph, ...]


def trace_predispatch(
    module: fx.GraphModule, example_inputs: Sequence[Any], grouped_queries: bool | None = None,
    attention_masks: bool = True, decode_attention: bool | None = None
) -> fx.GraphModule:
    """The pre-dispatch ATen trace of a Dynamo graph. Call it inside a ``torch.compile`` back end.

    Only ops that rearrange elements are decomposed. :func:`~fuseplan.planner.rewrites.attention.rewrite_attention`
    takes the other arguments; ``meta["attention"]`` of the result says what it did, ``meta["channels_last"]`` how many
    convolutions were laid out otherwise. CaptureError where tracing fails, or autocast is on (its casts are not part of
    the trace).
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise CaptureError("trace_predispatch works only inside a torch.compile back end")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise CaptureError("autocast is on; cast the model with model.to(dtype) instead")
    fakes = [_fake(item, context) for item in example_inputs]
    try:
        with context.fake_mode, modes_restored(), classes_first(module):
            plain = without_transforms(module, fakes)
            trace = trace_ops(plain, fakes, decompositions(), pre_dispatch=True)
        name_modules(trace)
        correct_layouts(trace)
        trace.meta["attention"] = rewrite_attention(trace, grouped_queries, attention_masks, decode_attention)
        trace.meta["channels_last"] = lay_channels_last(trace)
        if trace.meta["channels_last"]:
            correct_layouts(trace)
    except Exception as error:
        OWN_FAULTS.tolerate(error)
        raise CaptureError(f"tracing to ATen ops failed: {in_words(error)}") from error
    return trace


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """How ops are traced that are written in other ops, those of libraries among them; or that give an operand back."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    of_libraries = [name.replace("::", ".") for name in names if not name.startswith(("aten::", "prim"))]
    found = {op: op.decompose for name in of_libraries if (op := _resolved(name)) is not None}
    for name, kind in OPS.items():
        if (kind.family == "composed" or kind.drops) and (op := _resolved(name)) is not None:
            found[op] = _undropped if kind.drops else op.decompose
    return found


def _resolved(name: str) -> torch._ops.OpOverload | None:
    with suppress(UnknownOpError):
        return resolve_op(name)
    return None


def _undropped(operand: torch.Tensor, p: float, train: bool) -> Any:
    """A dropout's operand, where it drops nothing; it is one op otherwise."""
    return NotImplemented if train and p > 0 else operand


def _fake(item: Any, context: Any) -> Any:
    """The argument under the back end's fake mode, with the dynamic sizes that Dynamo gave it."""
    if not isinstance(item, torch.Tensor):
        return item
    symbolic = context.tensor_to_context.get(item)
    return context.fake_mode.from_tensor(
        item, symbolic_context=symbolic, source=getattr(symbolic, "tensor_source", None)
    )


def capture(source: ModelSource, workload: Workload, device_type: str, pack_weights: bool = False) -> Graphs:
    """Capture a model as ``torch.compile`` would see it on this kind of device, ``"cpu"`` or ``"cuda"``.

    Without a GPU, ``"cuda"`` is captured on the meta device: the same ops, but attention's output layout may differ.
    With ``pack_weights`` linear ops that read one value are one op. Forgets all compiled graphs of this process.
    CaptureError where the model cannot be traced without data, ConfigError where it cannot be built or run so.
    """
    device = traced_on(device_type)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _without_data(source, mode, device)
    if workload.regime == "generate":
        traces = record_generation(model, workload, mode, pack_weights)
    else:
        try:
            traces = _record_call(model, workload, mode, pack_weights)
        except FuseplanError as error:
            if not isinstance(error.__cause__, DataDependentOutputException):
                raise
            traces = _record_call(replace(model, counts=True), workload, mode, pack_weights)
    return tuple(bind_graph(trace.graph) for trace in traces)


def _record_call(model: Model, workload: Workload, mode: FakeTensorMode, pack_weights: bool) -> list[Traced]:
    with mode, foreign_code("the model cannot be run"):
        args, kwargs = model.example(workload)
        return record(model.module, args, kwargs, pack_weights)


def record(
    module: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], pack_weights: bool = False
) -> list[Traced]:
    """Every graph that one call of ``module`` makes under ``torch.compile``, normalised; CaptureError without any."""
    with _recording("the model cannot be traced", pack_weights) as recorder, torch.no_grad():
        torch.compile(module, backend=recorder, dynamic=False)(*args, **kwargs)
    return recorder.traces


def record_generation(
    model: Model, workload: Workload, mode: FakeTensorMode, pack_weights: bool = False
) -> list[Traced]:
    """Let ``generate()`` call the model until it makes no new graphs, and give these, normalised.

    The loop of ``transformers`` runs for real, on traced calls whose tokens all have the same score. So masks,
    positions and caches are those of run time: of a prompt, a first token, one after that, and those that fill a
    sliding window. CaptureError where Dynamo cannot trace a call, or ``generate()`` fails.
    """
    if model.device.type == "meta":
        raise CaptureError("generate() needs a device to run on; this machine has no GPU")
    module: Any = model.module
    forward = module.forward
    calls = _calls(model.config, workload)
    new = workload.kv_len - workload.seq + 1 if workload.kv_len else calls
    static = {"cache_implementation": "static"} if workload.kv_len else {}
    with _recording("generate() cannot be followed", pack_weights) as recorder, quiet():
        for mask in _prompt_masks(workload, model.device):
            torch._dynamo.reset()  # a process that has seen other prompts before takes more sizes for dynamic
            module.forward = _Followed(forward, recorder, mode, model.device, calls)
            with suppress(_Enough):
                module.generate(
                    input_ids=torch.ones_like(mask), attention_mask=mask, do_sample=False, num_beams=1,
                    max_new_tokens=new, min_new_tokens=min(new, calls), disable_compile=True, **static,
                )
    return recorder.traces


def _prompt_masks(workload: Workload, device: torch.device) -> list[torch.Tensor]:
    """Attention masks of prompts, batch x seq, int64, padded on the left and not: ``transformers`` drops the latter."""
    full = torch.ones(workload.batch, workload.seq, dtype=torch.long, device=device)
    if workload.batch == 1 or workload.seq == 1:
        return [full]
    padded = full.clone()
    padded[:-1, : workload.seq // 2] = 0
    return [padded, full]


#: Calls of a model after which ``generate()`` only repeats itself.
_CALLS = 3
#: Tokens after a prompt within which a sliding window that fills up is followed: each takes a call of the model.
_FAR = 64


def _calls(config: Any, workload: Workload) -> int:
    window = getattr(config.get_text_config(), "sliding_window", None) or 0
    near = not workload.kv_len and workload.seq < window <= workload.seq + _FAR
    return max(_CALLS, window - workload.seq + 2) if near else _CALLS


class _Enough(Exception):
    """Nothing new can come."""


class _Followed:
    """A compiled model in the hands of ``generate()``: it sees fake tensors, and every token has the same score."""

    def __init__(
        self, forward: Callable[..., Any], backend: _Recorder, mode: FakeTensorMode, device: torch.device, calls: int
    ) -> None:
        self.__signature__ = inspect.signature(forward)  # generate() hands over only what forward() names
        self._compiled = torch.compile(forward, backend=backend)
        self._mode = mode
        self._device = device
        self._left = calls

    def __call__(self, **kwargs: Any) -> Any:
        with self._mode, torch.no_grad():
            outputs = self._compiled(**pytree.tree_map_only(torch.Tensor, self._fake, kwargs))
        self._left -= 1
        if not self._left:
            raise _Enough
        batch, _, words = outputs.logits.shape
        outputs.logits = torch.zeros(batch, 1, words, device=self._device)
        return outputs

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)


class _Recorder:
    """A ``torch.compile`` back end that keeps every graph, normalised."""

    def __init__(self, pack_weights: bool) -> None:
        self._pack_weights = pack_weights
        self.traces: list[Traced] = []
        self.errors: list[FuseplanError] = []

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            apart = take_apart(graph, example_inputs)
            trace = trace_predispatch(apart.module, apart.inputs)
            if self._pack_weights:
                merge_projections(trace, apart.parameters)
            run = laid_out(apart.module.forward, trace)
            self.traces.append(normalise(trace))
            return apart.whole(run)
        except FuseplanError as error:
            self.errors.append(error)
            return graph.forward


#: Writes pages about an operation that fails on fake tensors; the error says it in one line.
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def _recording(failure: str, pack_weights: bool) -> Iterator[_Recorder]:
    """A recorder for what is compiled meanwhile; all graphs that ``torch.compile`` holds are forgotten.

    CaptureError, named by ``failure``, where that fails, or a graph cannot be normalised or is missing.
    """
    recorder = _Recorder(pack_weights)
    torch._dynamo.reset()
    was_disabled, _FAKE_LOG.disabled = _FAKE_LOG.disabled, True
    try:
        yield recorder
    except Exception as error:
        OWN_FAULTS.tolerate(error)
        if recorder.errors:
            raise recorder.errors[0] from error
        asked = isinstance(error, DataDependentOutputException)
        why = "it decides by a number in a tensor, and a trace has none" if asked else in_words(error)
        if isinstance(error, DynamicOutputShapeException):
            why = f"the size of what {error.func} makes depends on numbers in a tensor, and a trace has none"
        raise CaptureError(f"{failure}: {why}{user_line(error)}") from error
    finally:
        _FAKE_LOG.disabled = was_disabled
        torch._dynamo.reset()
    if recorder.errors:
        raise recorder.errors[0]
    if not recorder.traces:
        raise CaptureError("the model runs no tensor op that torch.compile can trace; nothing can be planned")


def _without_data(source: ModelSource, mode: FakeTensorMode, device: str) -> Model:
    """The model on fake tensors."""
    if source.kind == "module":
        # What a user's factory does with weights (casts, loads, asks) is only possible with real ones.
        real = load_module(source)
    else:
        try:
            with mode:
                return construct(source, device)
        except ConfigError as error:
            if not isinstance(error.__cause__, DataDependentOutputException):
                raise
            real = construct(source, "cpu")  # its constructor looks at numbers
    with mode:
        return _faked(real, mode, device)


def _faked(model: Model, mode: FakeTensorMode, device: str) -> Model:
    """The model with every tensor replaced by a fake one on ``device``; shared tensors stay shared."""

    @cache  # by identity
    def fake(tensor: torch.Tensor) -> Any:
        if is_traceable_wrapper_subclass(tensor):
            twin: Any = transform_subclass(tensor, lambda _, inside: fake(inside))
        else:
            twin = mode.from_tensor(tensor.detach()).to(device)
        return torch.nn.Parameter(twin, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else twin

    for module in model.module.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    held[name] = fake(value)
    inputs = pytree.tree_map_only(torch.Tensor, fake, model.inputs)
    return replace(model, device=torch.device(device), inputs=inputs)
