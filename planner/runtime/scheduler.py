"""The hand-built door: describe a small graph by its ops, and run it fused through the same planner.

>>> import torch
>>> graph = SubGraph(
...     nodes=(OpNode("silu", ("gate",), ("act",)), OpNode("mul", ("act", "up"), ("out",))),
...     input_names=("gate", "up"),
...     output_names=("out",),
... )
>>> scheduler = FusionScheduler(FusionConfig(enable_fusion=False))
>>> x = torch.ones(2, 8)
>>> scheduler.dispatch(graph, {"gate": x, "up": x})["out"].shape
torch.Size([2, 8])
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fuseplan.kernels.ir.index import evaluate
from fuseplan.planner.capture.normalise import Traced, dtype_name
from fuseplan.planner.capture.subgraph import SubGraph, runner, trace_subgraph
from fuseplan.planner.dispatch_stats import Stats, Tally, new_tally, total
from fuseplan.planner.errors import ConfigError, FuseplanError, GraphError, ShapeError, UnknownOpError, failure_reason
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.ops.table import mutates
from fuseplan.planner.runtime.executor import executable, guarded_call
from fuseplan.planner.runtime.logs import describe, show_plans
from fuseplan.planner.runtime.lookup import GraphLookup, look_up
from fuseplan.planner.tuning.plans import RegionPlan
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.search.store.record import GroupChoice

__all__ = ["FusionConfig", "FusionScheduler", "OpNode", "SubGraph"]

Tensors: TypeAlias = Mapping[str, torch.Tensor]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FusionConfig:
    """How a scheduler behaves.

    Attributes:
        enable_fusion: False runs every graph as its ATen ops.
        enable_cache: Keep what was planned and built for a graph at given input layouts.
        min_tensor_elements: Groups whose largest tensor is smaller stay unfused.
        min_nodes_for_fusion: Groups of fewer ops stay unfused.
        fallback_on_error: When planning or building fails, run the ATen ops instead of raising. A mistake in the
            graph or its inputs is raised either way.
        debug_mode: Show each plan, and compare each kernel with its ATen ops in its first call.
    """

    enable_fusion: bool = True
    enable_cache: bool = True
    min_tensor_elements: int = 0
    min_nodes_for_fusion: int = 2
    fallback_on_error: bool = True
    debug_mode: bool = False

    def __post_init__(self) -> None:
        for name in ("min_tensor_elements", "min_nodes_for_fusion"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"FusionConfig.{name} is a number of at least 0, not {value!r}")


class FusionScheduler:
    """Plans, builds and runs hand-built graphs. Inference only: results carry no gradient.

    ``database`` is a file or SQLAlchemy URL; None for the user's default file.
    """

    def __init__(self, config: FusionConfig | None = None, database: str | Path | None = None) -> None:
        self.config = config if config is not None else FusionConfig()
        self._database = database
        self._cache: dict[Any, Callable[..., Any]] = {}
        self._tallies: list[Tally] = []

    @property
    def stats(self) -> Stats:
        """What this scheduler planned and what fell back."""
        return total(tuple(tally.snapshot() for tally in self._tallies))

    def dispatch(self, graph: SubGraph, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Run ``graph`` on a tensor for each of its ``input_names``, all on one device: one for each ``output_names``.

        Raises:
            GraphError: The graph is malformed.
            UnknownOpError: PyTorch has no such op.
            ShapeError: An input is missing, or an op cannot take its operands' shapes.
        """
        tensors = _checked(graph, inputs)
        key = (graph.signature, *((one.shape, one.stride(), one.dtype, one.device) for one in tensors))
        call = self._cache.get(key)
        with torch.no_grad():
            if call is None:
                call = self._compile(graph, tensors)
                if self.config.enable_cache:
                    self._cache[key] = call
            try:
                results = call(*tensors)
            except Exception as error:
                is_told = isinstance(error, FuseplanError) or not self.config.fallback_on_error
                if is_told or any(mutates(node) for node in graph.ordered):
                    raise
                logger.warning("graph failed (%s); running its ops one by one", failure_reason(error))
                results = _unfused(graph, tensors)(*tensors)  # names the op if it is the op that fails
            return dict(zip(graph.output_names, results, strict=True))

    def explain(self, graph: SubGraph, inputs: Tensors) -> str:
        """The plan in words: every region, its groups with their configuration, and what was not chosen and why."""
        tensors = _checked(graph, inputs)
        if not self.config.enable_fusion:
            return "fusion is off (FusionConfig.enable_fusion)"
        traced, _, found = self._plan(graph, tensors, Tally("explain"))
        small = [set(group.ops) for group in found.groups if group not in self._kept(traced.graph, found)]

        def too_small(plan: RegionPlan, choice: GroupChoice) -> str:
            is_small = any(set(plan.group_ops(choice)) >= ops for ops in small)
            return "unfused: smaller than FusionConfig asks for" if is_small else ""

        lines = describe(found.plans, too_small)
        return "\n".join(lines) or "nothing to fuse: no two ops of the graph can share a kernel"

    def _compile(self, graph: SubGraph, tensors: list[torch.Tensor]) -> Callable[..., Any]:
        unfused = _unfused(graph, tensors)
        if not self.config.enable_fusion:
            return unfused
        tally = new_tally(f"subgraph {len(self._tallies)}")
        self._tallies.append(tally)
        try:
            traced, session, found = self._plan(graph, tensors, tally)
            call = executable(
                traced, self._kept(traced.graph, found), session.target, tally, session.settings.numerics,
                self.config.debug_mode,
            )
            show_plans(found.plans, tally, self.config.debug_mode)
            return guarded_call(call, unfused, traced, tally)
        except Exception as error:
            # What is wrong with the graph itself would fail unfused as well.
            is_mistake = isinstance(error, GraphError | ShapeError | UnknownOpError)
            if is_mistake or not self.config.fallback_on_error:
                raise
            reason = failure_reason(error)
        tally.refuse(reason)
        logger.warning("graph of %d ops runs unfused: %s", len(graph.nodes), reason)
        return unfused

    def _plan(self, graph: SubGraph, tensors: list[torch.Tensor], tally: Tally) -> tuple[Traced, Session, GraphLookup]:
        specs = {name: spec_of(tensor) for name, tensor in zip(graph.input_names, tensors, strict=True)}
        device_type = tensors[0].device.type if tensors else "cpu"
        traced = trace_subgraph(graph, specs, device_type)
        session = open_session(device_type, self._database, mode="read")
        try:
            return traced, session, look_up(session, traced.graph, "model", tally)
        finally:
            session.database.close()

    def _kept(self, graph: DataflowGraph, found: GraphLookup) -> list[PlannedGroup]:
        """The kernels that are large enough for the configuration, and library calls."""
        return [
            group for group in found.groups if not group.implementation.backends
            or (len(group.ops) >= self.config.min_nodes_for_fusion
                and _largest_tensor(graph, group.ops) >= self.config.min_tensor_elements)
        ]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The layout of a tensor."""
    return TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype), tuple(tensor.stride()))


def _unfused(graph: SubGraph, tensors: Sequence[torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    return runner(graph, tensors[0].device.type if tensors else "cpu")


def _checked(graph: SubGraph, inputs: Tensors) -> list[torch.Tensor]:
    """The inputs in the graph's order."""
    for name in graph.input_names:
        if not isinstance(inputs.get(name), torch.Tensor):
            given = ", ".join(inputs) or "nothing"
            raise ShapeError(f"input {name!r} is missing or no tensor; the graph reads it, and was given {given}")
    unknown = [name for name in inputs if name not in graph.input_names]
    if unknown:
        raise ShapeError(f"the graph has no input {unknown[0]!r}; it reads {', '.join(graph.input_names)}")
    tensors = [inputs[name].resolve_neg() for name in graph.input_names]  # kernels read memory as it is
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ShapeError(f"the inputs are on {' and '.join(devices)}; move them to one device")
    return tensors


def _largest_tensor(graph: DataflowGraph, ops: tuple[str, ...]) -> int:
    """Elements of the largest value that the ops read or produce."""
    values = {value for name in ops for value in (*graph.op(name).inputs, *graph.op(name).outputs)}
    return max(evaluate(graph.specs[value].numel, graph.symbols) for value in values)
