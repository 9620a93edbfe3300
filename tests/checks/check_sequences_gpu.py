"""What kernels of a region cost each other in the cache: timed together and alone, beside the model's price of it.

    python tests/checks/check_sequences_gpu.py [--patterns rope,qk_norm_rope] [--tokens 512,1024] [--seconds 0.3]
        [--db FILE]

Rotary embedding of q and k as one kernel and as two, in default configurations, each called as dispatch runs it, in one
interleaved run in CUDA graphs; then the two kernels' times alone, added up, and what the cost model says that they take
longer together, where the database knows the device's bandwidths. pytest does not collect it: it needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from fuseplan.costmodel.device import DeviceSpec
from fuseplan.planner.cost.shared_cache import SharedCache
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.choices import kernel_mode
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.lowering.lower import Lowered
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.contestant import make_case
from fuseplan.planner.peers.peers import fused
from fuseplan.planner.tuning.planner import PlanSettings
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.planner.work.group_work import hot_inputs, kernel_work
from fuseplan.search.timing.contest import contest
from fuseplan.search.timing.timers import timer_for

HEADS, WIDTH = 32, 128
TOKENS = "512,1024,1152,1280,1408,1536,2048,4096"
REGIME = "graph"


def ancestors(graph: DataflowGraph, value: str) -> set[str]:
    """Names of the ops behind a value."""
    found: set[str] = set()
    waiting = [value]
    while waiting:
        producer = graph.producer(waiting.pop())
        if producer is not None and producer not in found:
            found.add(producer)
            waiting += graph.op(producer).inputs
    return found


def kernels(
    graph: DataflowGraph, divisions: Sequence[Sequence[str]], session: Session
) -> list[tuple[Lowered, PlannedGroup]]:
    """Each group lowered, with its default configuration."""
    backend, made = session.backends[0], []
    for ops in divisions:
        lowered = lower_group(graph, ops, session.settings.numerics)
        config = backend.default_config(lowered.ir, session.target)
        made.append((lowered, PlannedGroup(tuple(ops), GeneratedKernel((backend,), session.target), config)))
    return made


def delay_us(graph: DataflowGraph, parts: Sequence[Lowered], spec: DeviceSpec) -> float:
    (region,) = find_regions(graph)
    neighbours = SharedCache(GroupTable(graph, "fp32", "cuda"), region)
    works = [kernel_work(one.ir, hot_inputs(graph, one.inputs)) for one in parts]
    return sum(
        neighbours.delay_us(work, spec, kernel_mode(REGIME), one) for work, one in zip(works, parts, strict=True)
    )


def check(cell: Cell, session: Session, seconds: float) -> str:
    case = make_case(cell, session.target, session.backends, session.settings.numerics)
    graph, inputs = case.traced.graph, case.inputs
    computes = [node.name for node in graph if kind_of(node, graph.specs) != "view"]
    first = ancestors(graph, graph.outputs[0])
    divided = [[name for name in computes if name in first], [name for name in computes if name not in first]]
    timer, given = timer_for("cuda", REGIME), dict(zip(graph.inputs, inputs, strict=True))
    runs, alone_us, lowered = {}, 0.0, []
    for side, divisions in (("one", [computes]), ("two", divided)):
        found = kernels(graph, divisions, session)
        groups = tuple(plan for _, plan in found)
        runs[side] = fused(case, groups).run
        lowered = [one for one, _ in found]
        if side == "two":
            for one, plan in found:
                run = plan.implementation.backends[0].fused_callable(one.ir, plan.config, session.target)
                operands = [tuple(given[name] for name in one.inputs)]
                alone_us += contest(timer, {"alone": run}, operands, seconds / 2).time("alone").median_us
    together = contest(timer, runs, [inputs], seconds)
    one_us, two_us = (together.time(side).median_us for side in runs)
    said = f", by the model {delay_us(graph, lowered, session.spec):.2f} us" if session.spec is not None else ""
    nbytes = sum(graph.specs[name].nbytes() for name in (*graph.inputs, *graph.outputs))
    return (f"{cell.key}: {nbytes / 1e6:.1f} MB: one kernel {one_us:.2f} us, two {two_us:.2f} us, the two alone "
            f"{alone_us:.2f} us: {two_us - alone_us:.2f} us less{said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patterns", default="rope,qk_norm_rope")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--db", help="a tuning database, for the device's bandwidths; the user's own by default")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("check_sequences_gpu.py needs a CUDA device")
    session = open_session("cuda", args.db, PlanSettings(regime=REGIME), mode="read")
    with torch.no_grad():
        for pattern in args.patterns.split(","):
            for tokens in map(int, args.tokens.split(",")):
                print(check(Cell(pattern, (1, HEADS, tokens, WIDTH), "bfloat16"), session, args.seconds), flush=True)


if __name__ == "__main__":
    main()
