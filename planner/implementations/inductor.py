"""TorchInductor's code for a whole region as an implementation. PyTorch's caches keep it; a plan says that it runs."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.devices import is_cpu, is_gpu
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Config
from fuseplan.kernels.ir.in_place import ReuseOptions
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.groups.candidates import Candidate, candidate_at, group_key
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.implementations.aten import UNFUSED, run_ops
from fuseplan.planner.implementations.first_call import Calling, FirstCall
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementation import Implementation, PlannedGroup, Screening
from fuseplan.planner.implementations.tunable_group import Fused, TunableGroup, group_label, without_body
from fuseplan.planner.ops.op import INTEGERS
from fuseplan.planner.ops.table import kind_of, mutates, op_of
from fuseplan.planner.work.group_work import hot_inputs
from fuseplan.search import policy
from fuseplan.search.store.record import INDUCTOR, TuningRecord
from fuseplan.search.timing.sequence import Part
from fuseplan.search.timing.signs import going_on
from fuseplan.search.tune.tuner import Tuner

#: What TorchInductor is asked for: what plain ``torch.compile`` gives, or the fastest that its own search finds.
InductorMode: TypeAlias = Literal["default", "max-autotune"]
#: The same, or that it is not asked.
InductorAsked: TypeAlias = Literal["default", "max-autotune", "off"]
#: TorchInductor keeps what it is compiling in globals.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class CompiledGroup(TunableGroup):
    """A group that TorchInductor's code runs; compiled in the process that calls it first."""

    compiled_for: InductorMode = "default"

    @cached_property
    def _compiled(self) -> Fused:
        from torch._inductor import config
        from torch._inductor.async_compile import AsyncCompile

        with config.patch(compile_threads=1 if is_cpu(self.device) else config.compile_threads):
            found = self.code()
            # Its compilers start beside this process and import PyTorch for seconds, cached code or not, which would
            # disturb what is timed next. They stay: to stop them would wait as long each time.
            with contextlib.suppress(TimeoutError):
                AsyncCompile.wait_pool_ready()
        return found

    def code(self) -> Fused:
        """What TorchInductor makes of it."""
        return compile_chain(self.chain, [self.specs[name] for name in self.inputs], self.device, self.compiled_for)

    def eager(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return list(self._compiled(*inputs))


def start_compilers() -> None:
    """Start TorchInductor's compilers beside this process, which takes seconds; does not wait for them."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()


def compile_ahead(subject: CompiledGroup) -> None:
    """Leave the code of a group in TorchInductor's caches. By this process alone, which works beside others."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        _ = subject.code()


def compile_chain(
    chain: fx.GraphModule, specs: Sequence[TensorSpec], device: str, mode: InductorMode = "default"
) -> Fused:
    """TorchInductor's code for a module of ATen calls whose inputs have these static layouts."""
    from torch._inductor import standalone_compile

    with FakeTensorMode():
        inputs: list[torch.Tensor | int | torch.SymInt | None] = [
            torch.empty_strided(one.shape, one.strides, dtype=torch_dtype(one.dtype), device=device) for one in specs
        ]
    with _ONE_AT_A_TIME, torch.no_grad(), going_on(policy.PEER_LIMIT_S):
        artifact = standalone_compile(
            chain, inputs, dynamic_shapes="from_example_inputs", options={"config_patches": inductor_settings(mode)})
    assert artifact is not None
    call: Fused = artifact
    return call


def compile_graph(
    module: fx.GraphModule, example_inputs: Sequence[Any], mode: InductorMode = "default"
) -> Callable[..., Any]:
    """A traced graph by TorchInductor's code, with the random numbers that eager mode draws."""
    from torch._inductor.compile_fx import compile_fx

    with _ONE_AT_A_TIME:
        call: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
            module, example_inputs, config_patches={"fallback_random": True, **inductor_settings(mode)})
    return call


def inductor_settings(mode: InductorMode) -> dict[str, Any]:
    """TorchInductor's settings for a mode, without CUDA graphs and what it prints of each matmul that it tunes."""
    from torch._inductor import list_mode_options

    found = list_mode_options("max-autotune-no-cudagraphs") if mode == "max-autotune" else {}
    return {**found, "autotune_num_choices_displayed": 0}


#: Settings that change how code is compiled and kept, not what it is.
_SAME_CODE = frozenset({"compile_threads", "fx_graph_cache", "fx_graph_remote_cache", "triton.unique_kernel_names"})


def changed_settings() -> list[str]:
    """TorchInductor's settings that this process has changed: tunes compile in other processes, with its defaults."""
    config = sys.modules.get("torch._inductor.config")  # what nobody imported nobody changed
    entries, is_default = getattr(config, "_config", {}), getattr(config, "_is_default", lambda name: True)
    given = (name for name in entries if name not in _SAME_CODE and not is_default(name))
    return sorted(name for name in given if getattr(config, name) != entries[name].default)


@dataclass(frozen=True)
class InductorCode(Implementation):
    """TorchInductor's code, in mode ``compiled_for``, for several ops of a static graph that write to no operand."""

    mode: Mode = "eager"
    name: str = INDUCTOR
    compiled_for: InductorMode = "default"

    def refuse(self, table: GroupTable, group: Candidate) -> str | None:
        if len(group.ops) == 1:
            return "a single op is ATen's, a library's or a kernel's"
        for node in map(table.graph.op, group.ops):
            if mutates(node):
                return f"{node.op} writes to memory"
            if fails_otherwise(table.graph, node, table.device_type):
                return f"{node.op} has to fail as in eager mode where an index is outside its table"
        return self.refuse_step(table, group.ops)

    def refuse_step(self, table: GroupTable, ops: Collection[str]) -> str | None:
        """Why a whole step of these ops is not timed; None when it can be. Unlike a region's, its code may write to
        memory and look up; where that fails otherwise than in eager mode it is timed, and runs nothing.
        """
        if table.numerics == "eager":
            return "it keeps more bits than casts do"
        for node in map(table.graph.op, ops):
            if not node.op.startswith("aten."):
                return f"{node.op} is no op of ATen"
            if not table.graph.rounds.isdisjoint(node.outputs):
                return f"the program can see how {node.op} rounds"
            if not all(table.graph.specs[value].is_static for value in (*node.inputs, *node.outputs)):
                return "sizes are dynamic"
        return None

    def work(self, table: GroupTable, group: Candidate) -> Work:
        """Each input read and each output written once, and all that is computed."""
        return self.subject(table, group).work

    def calibration(self, table: GroupTable, group: Candidate) -> str:
        return UNFUSED

    def subject(self, table: GroupTable, group: Candidate) -> CompiledGroup:
        return CompiledGroup(**vars(_chain(table, group)), compiled_for=self.compiled_for)

    def part(self, table: GroupTable, group: Candidate, backend: str, config: Config) -> Part:
        recorded = replace(self, compiled_for=_mode_of(config))
        return Implementation.part(recorded, table, group, backend, config)

    def recorded(self, table: GroupTable, group: Candidate, tuning: TuningRecord | None) -> tuple[str, Config, str]:
        return self.name, {} if self.compiled_for == "default" else {"mode": self.compiled_for}, ""

    def screen(self, table: GroupTable, group: Candidate, tuner: Tuner) -> Screening:
        """Checked, and timed beside its ops one by one."""
        return self._beside(_chain(table, group), table, group, tuner)

    def refuse_record(self, table: GroupTable, group: Candidate, config: Config) -> str | None:
        if config not in ({}, {"mode": "max-autotune"}):
            return "TorchInductor's code has no such configuration"
        reason = self.refuse(table, group)
        return None if reason is None else f"TorchInductor's code cannot run a group: {reason}"

    # -- at run time ------------------------------------------------------------------------------------------

    def prepare(self, table: GroupTable, traced: Traced, group: PlannedGroup) -> FirstCall:
        candidate = whole_candidate(table.graph, group.ops)
        if (reason := self.refuse(table, candidate)) is not None:
            raise RefusedError(reason)
        subject = _chain(table, candidate)
        run = partial(run_ops, subject.nodes, subject.inputs, subject.outputs, subject.device)
        return FirstCall(
            f"{self.name} {group.label}", group.ops, subject.inputs, subject.outputs, buffers=subject.ir.outputs,
            build=partial(_build, subject, _mode_of(group.config)), unfused=run,
            key=(self.name, *group.config.values(), subject.key),
        )


def _mode_of(config: Config) -> InductorMode:
    """Which mode of TorchInductor's a record names."""
    return "max-autotune" if config else "default"


def fails_otherwise(graph: DataflowGraph, node: OpNode, device_type: str) -> bool:
    """Whether TorchInductor's code of an op does not fail as eager mode does where indices lie outside their table.

    On GPUs both end in a device-side assertion, unless negative numbers count from the end; on CPUs it raises another
    error, or ends the process.
    """
    op = op_of(node.op)
    if not any(graph.specs[value].dtype in INTEGERS for value in node.inputs):
        return False
    if op.family in ("lookup", "write"):
        return op.wraps or not is_gpu(device_type)
    return kind_of(node, graph.specs) == "opaque" and len(node.inputs) > 1


def whole_candidate(graph: DataflowGraph, ops: Collection[str]) -> Candidate:
    """All of ``ops`` as one group."""
    flow = compute_graph_of(graph)
    return candidate_at(flow, sorted(flow.position[op] for op in ops))


def _chain(table: GroupTable, group: Candidate) -> TunableGroup:
    """The group as a chain of ATen's ops, with the views between them."""
    graph, flow = table.graph, compute_graph_of(table.graph)
    members = [flow.position[op] for op in group.ops]
    nodes = tuple(flow.nodes[at] for at in sorted({*members, *flow.views_behind(members)}))
    values = {*group.inputs, *(value for node in nodes for value in (*node.inputs, *node.outputs))}
    specs = {value: graph.specs[value] for value in values}
    hot = hot_inputs(graph, group.inputs)
    return TunableGroup(
        key=group_key(graph, group.ops, group.outputs), label=group_label(graph, group.ops, group.outputs),
        ir=without_body(specs, group.inputs, group.outputs), work=_work(table, group, hot), hot_inputs=hot, nodes=nodes,
        inputs=group.inputs, outputs=group.outputs, specs=specs, device=table.device_type,
    )


def _work(table: GroupTable, group: Candidate, hot: Sequence[bool]) -> Work:
    sizes = [table.graph.specs[value].nbytes() for value in group.inputs]
    written = sum(table.graph.specs[value].nbytes() for value in group.outputs)
    flops = sum(map(table.unfused_work, group.ops), Work()).flops
    cold = sum(size for size, is_hot in zip(sizes, hot, strict=True) if not is_hot)
    return Work(flops, dram_bytes=sum(sizes) + written, launches=1, written_bytes=written, cold_bytes=cold)


def _build(subject: TunableGroup, mode: InductorMode, in_place: bool) -> tuple[Calling, ReuseOptions]:
    call = compile_chain(subject.chain, [subject.specs[name] for name in subject.inputs], subject.device, mode)
    single: Callable[..., Any] = (lambda *args: call(*args)[0]) if len(subject.outputs) == 1 else call
    return lambda _: single, {}
