"""Chosen partitions against every other one, by measurement, on regions small enough for that.

    python tests/check_plans.py [--device cuda] [--regime graph] [--most 60] [--db FILE]

Plans Llama, Qwen3 and Gemma-2 shapes (decode and prefill; random weights, two layers), then measures *every* candidate
group of each region with at most ``--most`` of them, solves the cover over all those times, tunes what the best cover
uses, and runs it against the chosen one in one interleaved run. Exits with status 1 when a chosen partition is more
than 1 % (and more than the noise) slower. pytest does not collect it: it takes minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fuseplan.planner.candidates import enumerate_candidates
from fuseplan.planner.capture import capture
from fuseplan.planner.graph import DataflowGraph
from fuseplan.planner.measured import MeasuredRegion
from fuseplan.planner.models import find_source
from fuseplan.planner.partition import Choice, RegionProblem, guided_partition, region_problem
from fuseplan.planner.plan import PlanSettings
from fuseplan.planner.prices import GroupBook, MeasuredPrices
from fuseplan.planner.session import Session, open_session
from fuseplan.planner.tune import tune
from fuseplan.planner.workload import decode, prefill
from fuseplan.search.tuner import Budget

COMMON = {"num_hidden_layers": 2, "vocab_size": 1024, "hidden_act": "silu", "max_position_embeddings": 4096}
CONFIGS = {
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048, "head_dim": 128,
              "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8, **COMMON},
    "gemma2": {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_size": 2304, "head_dim": 256,
               "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4,
               "hidden_activation": "gelu_pytorch_tanh", **COMMON},
}


def graphs(device: str, folder: Path) -> Iterator[tuple[str, DataflowGraph]]:
    sources = {"llama": find_source(model="llama", device_type=device, layers=2)}
    for name, config in CONFIGS.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        sources[name] = find_source(config=str(path), device_type=device)
    for name, source in sources.items():
        for workload in (decode(8, 256), prefill(1, 128)):
            for graph in capture(source, workload, device).graphs:
                yield f"{name}, {workload.label}", graph


def best_of_all(problem: RegionProblem, prices: MeasuredPrices) -> tuple[Choice, ...]:
    """The cheapest cover when every choice is measured, all its groups tuned."""
    while True:
        result = guided_partition(problem, prices, tolerance=0.0, start=problem.choices)
        chosen = tuple(priced.choice for priced in result.chosen)
        untuned = [one for one in chosen if one.fused and one.group.ops not in prices.records]
        if not untuned:
            return chosen
        for one in untuned:
            prices.tuned(one.group)


def check(session: Session, named: list[tuple[str, DataflowGraph]], most: int) -> int:
    """Number of regions whose plan is not among the best."""
    budget = Budget.on(session.target.device_type)
    planned = tune(session, named, budget)
    wrong, seen = 0, set()
    with session.tuner(budget) as tuner:
        for (label, graph), workload in zip(named, planned.plans, strict=True):
            book = GroupBook(graph, session.settings.numerics, session.target.device_type)
            for plan in workload.plan.unique():
                if plan.record.enumerated > most or plan.record.enumerated < 4 or plan.region.key in seen:
                    continue
                seen.add(plan.region.key)
                enumeration = enumerate_candidates(graph, plan.region, session.settings.limits, book.legal)
                problem = region_problem(graph, plan.region, enumeration)
                prices = MeasuredPrices(
                    book, session.spec, session.settings.regime, session.backends, session.target, tuner
                )
                wanted = {(frozenset(plan.group_ops(group)), group.kind == "fused") for group in plan.record.groups}
                chosen = [one for one in problem.choices if (frozenset(one.group.ops), one.fused) in wanted]
                best = best_of_all(problem, prices)
                contest = None
                if set(best) != set(chosen):
                    contest = MeasuredRegion(problem, prices, 0.0, 0.0, len(problem.choices)).play_off(best, chosen)
                loss = contest.gain("challenger", "incumbent") if contest is not None else 0.0
                noise = contest.threshold if contest is not None else 0.0
                verdict = "ok" if loss <= max(0.01, noise) else "BETTER EXISTS"
                wrong += verdict != "ok"
                share = plan.record.measured / plan.record.enumerated
                print(f"{label}: {plan.record.label}: {plan.record.enumerated} choices, {share:.0%} measured; the best "
                      f"of all is {max(0.0, loss):.1%} faster (noise {noise:.1%}): {verdict}", flush=True)
    share = planned.measured / max(1, planned.enumerated)
    print(f"{len(seen)} regions checked, {wrong} with a better partition; {share:.1%} of all candidates were measured")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    parser.add_argument("--regime", default="eager")
    parser.add_argument("--most", type=int, default=60)
    parser.add_argument("--db")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(args.device, args.db or Path(folder) / "t.db", PlanSettings(regime=args.regime))
        if session.spec is None:
            session = session.probed()
        named = list(graphs(session.target.device_type, Path(folder)))
        sys.exit(1 if check(session, named, args.most) else 0)


if __name__ == "__main__":
    main()
