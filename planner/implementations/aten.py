"""A group as the ATen ops that eager runs: an implementation of single ops, and what takes over from any other one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode
from fuseplan.planner.graph.layouts import laid_out, layout_of
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.implementations.direct_calls import bind_calls, fill_namespace
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementation import Implementation, Screening
from fuseplan.planner.implementations.tunable_group import Fused, chain_module
from fuseplan.planner.lowering.lower import Lowered, group_nodes
from fuseplan.planner.ops.table import op_of
from fuseplan.search.store.record import ATEN
from fuseplan.search.tune.tuner import Tuner

#: Calibrations of ATen ops that a kernel could absorb, and of matmuls and attention by whatever call: attention is far
#: from the peak of matmuls. In each, calls differ by name (``Work.call``). Kernels go by the name of their back end.
UNFUSED, MATMUL, ATTENTION = "unfused", "matmul", "attention"


def anchor_calibration(table: GroupTable, group: Candidate) -> str:
    """Name of the calibration of a matmul or attention, whoever runs it; another op's is that of other ATen ops."""
    known = [op_of(table.graph.op(op).op) for op in group.ops]
    if not any(op.is_anchor and op.family != "order" for op in known):
        return UNFUSED
    return ATTENTION if any("attention" in table.graph.op(op).op for op in group.ops) else MATMUL


@dataclass(frozen=True)
class AtenOp(Implementation):
    """ATen's own op, as eager runs it: what every other way to run an op is measured against."""

    mode: Mode = "eager"
    name: str = ATEN

    def refuse(self, table: GroupTable, group: Candidate) -> str | None:
        return None if len(group.ops) == 1 else "ATen runs one op after another"

    def work(self, table: GroupTable, group: Candidate) -> Work:
        return table.unfused_work(group.ops[0])

    def calibration(self, table: GroupTable, group: Candidate) -> str:
        return anchor_calibration(table, group) if table.is_anchor(group) else UNFUSED

    def screen(self, table: GroupTable, group: Candidate, tuner: Tuner) -> Screening:
        return Screening(tuner.time_unfused(table.subject(group)).median_us)


def run_unfused(traced: Traced, lowered: Lowered, device_type: str, args: Sequence[Any]) -> tuple[Any, Fused]:
    """Run the group's ops; the result, laid out like the kernel ``lowered`` has it, and what does so in later calls."""
    module, ir = _chain(traced.graph, lowered, device_type), lowered.ir
    for node in module.graph.nodes:
        if (value := node.meta.get("value")) is not None:
            node.meta["traced"] = traced.node_of[value].name
    bind_calls(module.graph, traced.module.graph)
    module.recompile()
    fill_namespace(module.forward.__globals__)
    plain: Fused = module.forward
    results = plain(*args)
    fitted = _fitted(ir, results, args)
    return fitted, plain if fitted is results else lambda *args: _fitted(ir, plain(*args), args)


def run_chain(graph: DataflowGraph, lowered: Lowered, device_type: str, *args: Any) -> Any:
    """The same where a kernel finds an index outside its table (ATen's op says which); made anew in each such call."""
    return _fitted(lowered.ir, _chain(graph, lowered, device_type)(*args), args)


def _chain(graph: DataflowGraph, lowered: Lowered, device_type: str) -> fx.GraphModule:
    nodes, symbols = group_nodes(graph, lowered), lowered.ir.symbols
    return chain_module(nodes, lowered.inputs, lowered.outputs, device_type, symbols, graph, as_kernel=True)


def _fitted(ir: KernelIR, results: Any, args: Sequence[Any]) -> Any:
    """The results of a call, laid out like a kernel's; themselves if nothing has to be copied."""
    symbols = dict(zip(ir.symbols, args[len(ir.inputs) :], strict=True))
    given = (results,) if isinstance(results, torch.Tensor) else results
    fitted = [laid_out(one, *layout_of(buffer, symbols)) for one, buffer in zip(given, ir.outputs, strict=True)]
    if all(map(operator.is_, fitted, given)):
        return results
    return fitted[0] if isinstance(results, torch.Tensor) else tuple(fitted)


def run_ops(
    nodes: Sequence[OpNode], inputs: Sequence[str], outputs: Sequence[str], device: str, args: Sequence[Any]
) -> tuple[Any, Fused]:
    """Run the ops that a call stands for, one by one; the result, and what does so in later calls."""
    chain: Fused = chain_module(nodes, inputs, outputs, device, as_kernel=True).forward
    return chain(*args), chain
