"""The ``torch.compile`` back end: plans are looked up when a graph is compiled, and kernels are called directly after.

What cannot be fused runs as ATen ops, counted in :func:`fuseplan.planner.stats`. With gradients enabled on inputs or
parameters that require them, the whole graph runs unfused.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import fx

from fuseplan.costmodel.devices import KINDS, is_gpu
from fuseplan.kernels.gpu.direct import prepare_first_launch
from fuseplan.planner.capture.normalise import normalise
from fuseplan.planner.capture.subclasses import Apart, take_apart
from fuseplan.planner.capture.trace import trace_predispatch
from fuseplan.planner.dispatch_stats import Tally, new_tally
from fuseplan.planner.errors import RefusedError, failure_reason
from fuseplan.planner.implementations import inductor
from fuseplan.planner.rewrites.merged_projections import merge_projections
from fuseplan.planner.rewrites.packing import pack
from fuseplan.planner.runtime.cuda_graphs import graphed
from fuseplan.planner.runtime.executor import executable, guarded_call
from fuseplan.planner.runtime.logs import show_plans, warn_once
from fuseplan.planner.runtime.lookup import look_up
from fuseplan.planner.runtime.options import DispatchOptions, parse_options
from fuseplan.planner.tuning.planner import PlanSettings
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.search.errors import DatabaseError

logger = logging.getLogger(__name__)

_PLAIN_TENSORS = (torch.Tensor, torch._subclasses.FakeTensor)


def fuseplan(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None,
    mode: str | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph (registered as ``backend="fuseplan"``): a function that fails only where it would.

    For ``options`` see :class:`~fuseplan.planner.runtime.options.DispatchOptions`; ``mode`` is a name of
    :data:`~fuseplan.planner.runtime.options.MODES`.

    Raises:
        ConfigError: A mode, an option or a value is unknown.
    """
    parsed = parse_options(options, mode)
    compile_id = torch._guards.CompileContext.current_compile_id()
    tally = new_tally("" if compile_id is None else str(compile_id))
    try:
        return compile_graph(gm, example_inputs, parsed, tally)
    except Exception as error:  # the model must run whatever is wrong with its plan
        reason = failure_reason(error)
    tally.refuse(reason)
    warn_once(reason, "graph %s runs unfused: %s", tally.compile_id, reason)
    show_plans((), tally, parsed.debug)
    return gm.forward


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: DispatchOptions, tally: Tally
) -> Callable[..., Any]:
    """Trace, plan and rewrite one graph; RefusedError where it must run unfused, FuseplanError where it cannot be
    traced.
    """
    _check_no_gradients(gm, example_inputs)
    apart = take_apart(gm, example_inputs)
    return apart.whole(_compile(apart, options, tally))


def _compile(apart: Apart, options: DispatchOptions, tally: Tally) -> Callable[..., Any]:
    """What runs a graph without tensor subclasses."""
    gm, example_inputs = apart.module, apart.inputs
    _check_plain(gm, example_inputs)
    device_type = _device_type(example_inputs)
    if is_gpu(device_type):
        prepare_first_launch()
    elif options.regime == "graph":
        tally.note("no plans for CUDA graphs: the graph runs on the CPU")
    module = trace_predispatch(
        gm, example_inputs, options.grouped_queries, options.attention_masks, options.decode_attention)
    for name, number in asdict(module.meta["attention"]).items():
        tally.count(name, number)
    tally.count("channels_last", module.meta["channels_last"])
    if options.pack_weights:
        found = merge_projections(module, apart.parameters, partial(pack, example_inputs))
        tally.count("merged_projections", found.merged)
        for reason, number in found.refused.items():
            tally.note(f"linear ops stay apart: {reason}", number)
    traced = normalise(module)
    session = _open(device_type, options)
    session.database.keeps_misses = options.log_misses
    on_miss = options.on_miss if options.on_miss != "tune" or session.database.mode == "write" else "model"
    try:
        lookup = look_up(session, traced.graph, on_miss, tally)
    finally:
        session.database.close()
    whole = None
    if lookup.by_inductor is not None:
        whole = _by_inductor(traced.module, example_inputs, lookup.by_inductor, tally)
    call = whole or executable(
        traced, lookup.groups, session.target, tally, options.numerics, options.debug, options.in_place,
        unguarded=apart.parameters | apart.inner)
    show_plans(lookup.plans if whole is None else (), tally, options.debug, traced.graph)
    if options.cuda_graphs:
        stationary = traced.written | _stationary(gm, example_inputs)
        call = graphed(call, module, stationary, device_type, tally, options.cuda_graphs_copy_outputs)
    return guarded_call(call, gm.forward, traced, tally)


def _by_inductor(
    module: fx.GraphModule, example_inputs: Sequence[Any], mode: inductor.InductorMode, tally: Tally
) -> Callable[..., Any] | None:
    """A traced graph by TorchInductor's code, as it was timed; None, counted, where that cannot be compiled here."""
    try:
        call = inductor.compile_graph(module, example_inputs, mode)
    except Exception as error:
        tally.note(f"no code of TorchInductor's for the whole graph: {failure_reason(error)}")
        return None
    tally.count("whole_by_inductor")
    logger.info("graph %s runs by TorchInductor's code, which is faster as measured or as the cost model says",
                tally.compile_id)
    return call


def _open(device_type: str, options: DispatchOptions) -> Session:
    settings = PlanSettings(numerics=options.numerics, regime=options.regime_on(device_type))
    known = None

    def tell(message: str) -> None:
        if known is None or not message.startswith(known):
            warn_once(message, "%s", message)

    if options.on_miss == "tune":
        try:
            return open_session(device_type, options.db, settings, patient=False, tell=tell)
        except DatabaseError as error:
            known = str(error)
            warn_once(known, "nothing is tuned now, since it could not be stored: %s", known)
    return open_session(device_type, options.db, settings, mode="read", tell=tell)


def _stationary(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> set[int]:
    """Positions of parameters, buffers and tensors marked with ``torch._dynamo.mark_static_address``."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return {
        position for position, (node, item) in enumerate(zip(placeholders, example_inputs, strict=True))
        if isinstance(item, torch.nn.Parameter) or (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
    }


def _check_no_gradients(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    switched_on = any(node.target is torch._C._set_grad_enabled and node.args[:1] == (True,) for node in gm.graph.nodes)
    if (torch.is_grad_enabled() or switched_on) and any(one.requires_grad for one in _tensors(gm, example_inputs)):
        raise RefusedError("gradients are enabled; call the model under torch.no_grad() or torch.inference_mode()")


def _check_plain(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    for tensor in _tensors(gm, example_inputs):
        if not _is_plain(type(tensor)):
            raise RefusedError(f"an input is a {type(tensor).__name__}, and kernels read plain tensors; where that "
                               "class adds nothing, use torch.nn.Parameter or torch.Tensor")
        # Fakes of the compiler stand for inputs with memory.
        if isinstance(tensor, torch._subclasses.FakeTensor) and tensor.fake_mode is not mode:
            raise RefusedError("an input is the caller's FakeTensor; kernels read memory")


def _tensors(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    return [one for one in (*example_inputs, *gm.parameters(), *gm.buffers()) if isinstance(one, torch.Tensor)]


def _is_plain(kind: type[torch.Tensor]) -> bool:
    """True where ops treat a tensor of that class as plain, such as ``torch.nn.Parameter`` and what only adds to it."""
    return kind in _PLAIN_TENSORS or (
        kind.__torch_function__ is torch._C._disabled_torch_function_impl
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _device_type(example_inputs: Sequence[Any]) -> str:
    """The device of most inputs; ops on another one are left alone."""
    tensors = [item for item in example_inputs if isinstance(item, torch.Tensor)]
    if not tensors:
        return "cpu"
    ((device_type, _),) = Counter(tensor.device.type for tensor in tensors).most_common(1)
    if device_type not in KINDS:
        raise RefusedError(f"there are no kernel back ends for device {device_type}; use a CPU or a GPU")
    if is_gpu(device_type):
        current = torch.cuda.current_device()
        used = {tensor.device.index for tensor in tensors if tensor.is_cuda}
        if used - {current, None}:
            raise RefusedError(f"inputs are on GPU {max(used)}, not the current {current}; use torch.cuda.set_device")
    return device_type
