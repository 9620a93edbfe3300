"""Chosen partitions against every other one, by measurement, on regions small enough for that.

    python tests/checks/check_plans.py [--device cuda] [--regime graph] [--models llama,qwen3,gemma2]
        [--workloads decode8,prefill128] [--most 60] [--optimism 0.1] [--minutes 2.5] [--twice] [--db FILE]

Tunes the models' shapes (random weights, two layers) from nothing, without the shipped records, and says how many of
all enumerated candidates that measured. With ``--twice`` it does so once more in another database and counts the
regions that got another partition. Then it takes the distinct regions with at most ``--most`` choices, the smaller
ones first and the models in turn, and looks for a better partition of each. No new region is begun after ``--minutes``;
what was checked by then stands. Exits with status 1 when a chosen partition is more than 1 % (and more than the noise)
slower than the best, or when the second tune chose another. pytest does not collect it: it takes minutes.

What "every partition" means. A partition is a set of the region's enumerated candidates, fused or as ATen ops, in which
each op occurs once and which can be put in an order. *Every* choice is measured here, no bound and no model leaves any
out, and the cheapest partition over these times is solved exactly, which is the same as pricing all of them. A group is
priced by its tuned kernel where it has one, else by its default kernel less ``--optimism``, and whatever the cheapest
partition uses is tuned, until it is all tuned. So no partition is better than the one found, unless tuning gains
more than ``--optimism`` on the default kernel of some group (what it gained is printed). The two are then run against
each other in one interleaved run of the whole region, and the difference is printed.

Not covered: groups that were not enumerated (those that cannot be one kernel, and what was past its limits,
which is said), kernels outside the back ends' configurations, and what the kernels of a partition cost each other
beyond the model's price of the cache they share: only the last two are run whole.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path

from fuseplan.planner.capture.trace import capture
from fuseplan.planner.cost.prices import MeasuredPrices
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import enumerate_candidates
from fuseplan.planner.groups.regions import region_parts
from fuseplan.planner.implementations.choices import Choice, RegionProblem, region_problem
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.models.workload import Workload, decode, prefill
from fuseplan.planner.partition.by_measurement import MeasuredRegion
from fuseplan.planner.partition.guided_loop import guided_partition
from fuseplan.planner.partition.whole_region import play_off
from fuseplan.planner.tuning.planner import PlanSettings, RegionPlan
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.planner.tuning.tune import Batch, TuneResult, tune
from fuseplan.search.store.record import GroupChoice
from fuseplan.search.tune.tuner import Budget, Tuner

COMMON = {"num_hidden_layers": 2, "vocab_size": 1024, "hidden_act": "silu", "max_position_embeddings": 4096}
CONFIGS = {
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048, "head_dim": 128,
              "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8, **COMMON},
    "gemma2": {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_size": 2304, "head_dim": 256,
               "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4,
               "hidden_activation": "gelu_pytorch_tanh", **COMMON},
}
MODELS = ("llama", *CONFIGS)
#: A slower partition by this much is a loss, if it is more than the noise.
_ALLOWED = 0.01
#: Seconds of one screening; what decides is run longer, interleaved.
_SCREEN_S = 0.03


def say(text: str) -> None:
    """Print at once: a run that is cut off has told what it found."""
    print(text, flush=True)


def workload(text: str) -> Workload:
    """``"decode8"``: a batch of 8; ``"prefill128"``: one sequence of 128 tokens."""
    found = re.fullmatch(r"(decode|prefill)(\d+)", text.strip())
    if found is None:
        raise ConfigError(f"--workloads: cannot read {text!r}; write decode8 or prefill128")
    return decode(int(found[2]), 256) if found[1] == "decode" else prefill(1, int(found[2]))


def graphs(
    models: Sequence[str], workloads: Sequence[Workload], device: str, folder: Path
) -> Iterator[tuple[str, DataflowGraph]]:
    for name in models:
        if name in CONFIGS:
            path = folder / f"{name}.json"
            path.write_text(json.dumps(CONFIGS[name]))
            source = find_source(config=str(path), device_type=device)
        else:
            source = find_source(model=name, device_type=device, layers=2)
        for one in workloads:
            for graph in capture(source, one, device):
                yield f"{name}, {one.label}", graph


# -- one region -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small:
    """A region to check: where it is from, its plan, and everything that it could be partitioned into."""

    label: str
    graph: DataflowGraph
    plan: RegionPlan
    part: Region
    table: GroupTable
    problem: RegionProblem
    cut: bool


class HopefulPrices(MeasuredPrices):
    """Measured prices; an untuned kernel counts for what tuning may make of it."""

    optimism = 0.0

    def measure_s(self, choices: Sequence[Choice]) -> list[float]:
        times = super().measure_s(choices)
        return [
            time_s * (1.0 - self.optimism) if self.untuned(one) else time_s
            for one, time_s in zip(choices, times, strict=True)
        ]


def _kind(group: GroupChoice) -> str:
    """Name of the implementation that the choice of a stored group has."""
    return "kernel" if group.is_kernel else group.implementation


def best_of_all(problem: RegionProblem, prices: HopefulPrices) -> tuple[Choice, ...]:
    """The cheapest partition when every choice is measured, all its groups tuned."""
    while True:
        result = guided_partition(problem, prices, tolerance=0.0, start=problem.choices)
        chosen = tuple(priced.choice for priced in result.chosen)
        untuned = [one.group for one in chosen if prices.untuned(one)]
        if not untuned:
            return chosen
        prices.tuner.prefetch(prices.table.subject(group) for group in untuned)
        for group in untuned:
            prices.tuned(group)


def loss_of(chosen: Sequence[Choice], best: Sequence[Choice], problem: RegionProblem, prices: HopefulPrices
            ) -> tuple[float, float]:
    """What the best partition gains on the chosen one, as a share of the region's time, and the noise of that."""
    if set(best) == set(chosen):
        return 0.0, 0.0
    for one in chosen:
        if one.implementation.backends:
            prices.tuned(one.group)
    part = MeasuredRegion(problem, prices, 0.0, len(problem.choices)).part
    sides = {"challenger": {one: part(one) for one in best}, "incumbent": {one: part(one) for one in chosen}}
    contest = play_off(prices.tuner.play_off, prices.table, sides)
    if contest is None:
        return 1.0 - math.fsum(prices.measure_s(best)) / math.fsum(prices.measure_s(chosen)), 0.0
    return contest.gain("challenger", "incumbent"), contest.threshold


def check(session: Session, one: Small, tuner: Tuner, optimism: float) -> bool:
    """Look for a better partition of one region, and say what came of it; True when there is none."""
    start = time.monotonic()
    prices = HopefulPrices(one.table, session.spec, tuner)
    prices.optimism = optimism
    wanted = {(frozenset(one.plan.group_ops(group)), _kind(group)) for group in one.plan.record.groups}
    chosen = [
        choice for choice in one.problem.choices
        if (frozenset(choice.group.ops), choice.implementation.name) in wanted
    ]
    best = best_of_all(one.problem, prices)
    loss, noise = loss_of(chosen, best, one.problem, prices)
    right = loss <= max(_ALLOWED, noise)
    record = one.plan.record
    gained = max((tuned.default_gain for tuned in prices.records.values()), default=0.0)
    say(
        f"{one.label}: {record.label}: {len(one.problem.ops)} ops, {record.enumerated} choices all measured "
        f"(the tune measured {record.measured}){', enumeration cut' if one.cut else ''}; {len(prices.records)} groups "
        f"tuned, by up to {gained:.1%}; {'the chosen partition is the best' if set(best) == set(chosen) else 'another'}"
        f"; the best of all is {max(0.0, loss):.1%} faster (noise {noise:.1%}): "
        f"{'ok' if right else 'BETTER EXISTS'} [{time.monotonic() - start:.0f} s]"
    )
    return right


# -- all of them ------------------------------------------------------------------------------------------


def small_regions(session: Session, named: Sequence[tuple[str, DataflowGraph]], planned: TuneResult, most: int
                  ) -> list[Small]:
    """The distinct regions of at most ``most`` choices, small ones first, from each model in turn."""
    by_model: dict[str, list[Small]] = {}
    seen: set[str] = set()
    for (label, graph), workload_plan in zip(named, planned.plans, strict=True):
        table = GroupTable(graph, session.settings.numerics, session.target.device_type)
        for plan in workload_plan.plan.unique():
            for part in region_parts(graph, plan.region):
                found = enumerate_candidates(graph, part, table.legal)
                problem = region_problem(table, part, found, session.planner().implementations)
                if part.key in seen or not 4 <= len(problem.choices) <= most:
                    continue
                seen.add(part.key)
                small = Small(label, graph, plan, part, table, problem, found.truncated is not None)
                by_model.setdefault(label.split(",")[0], []).append(small)
    for members in by_model.values():
        members.sort(key=lambda one: len(one.problem.choices))
    return [one for one in chain.from_iterable(zip_longest(*by_model.values())) if one is not None]


def partitions(planned: TuneResult) -> dict[str, frozenset[tuple[tuple[int, ...], str]]]:
    """The groups of each distinct region, by its key."""
    return {
        plan.region.key: frozenset((tuple(group.ops), group.implementation) for group in plan.record.groups)
        for _, plan in planned.distinct()
    }


def tuned(session: Session, named: Sequence[tuple[str, DataflowGraph]], budget: Budget, words: str) -> TuneResult:
    planned = tune(session, Batch(named), budget)
    share = planned.measured / max(1, planned.enumerated)
    say(
        f"{words}: {len(planned.distinct())} distinct regions in {planned.elapsed_s:.0f} s; {planned.measured} of "
        f"{planned.enumerated} candidates measured ({share:.1%}; at most 25 % wanted)"
    )
    return planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--regime", default="eager")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--workloads", default="decode8,prefill128")
    parser.add_argument("--most", type=int, default=60, help="choices of a region")
    parser.add_argument("--optimism", type=float, default=0.1, help="what tuning may gain on a default kernel")
    parser.add_argument("--minutes", type=float, help="begin no region after this")
    parser.add_argument("--twice", action="store_true", help="tune a second time from nothing")
    parser.add_argument("--trials", type=int, help="configurations of a group to try; the device's default otherwise")
    parser.add_argument("--db")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(compare(args, Path(folder)))


def compare(args: argparse.Namespace, folder: Path) -> int:
    """Tune, check, and say so; the exit status."""
    start = time.monotonic()
    settings = PlanSettings(regime=args.regime)
    session = open_session(args.device, args.db or folder / "first.db", settings)
    session = replace(session, shipped=False)
    if session.spec is None:
        session = session.probed()
    spec = session.spec
    assert spec is not None
    kind = session.target.device_type
    budget = Budget.on(kind) if args.trials is None else replace(Budget.on(kind), trials=args.trials)
    named = list(graphs(args.models.split(","), [workload(one) for one in args.workloads.split(",")], kind, folder))
    say(f"{len(named)} graphs captured and the device known after {time.monotonic() - start:.0f} s")
    planned = tuned(session, named, budget, "first tune")
    other = 0
    if args.twice:
        second = replace(open_session(args.device, folder / "second.db", settings), shipped=False).with_spec(spec)
        ours, theirs = partitions(planned), partitions(tuned(second, named, budget, "second tune"))
        other = sum(ours[key] != theirs[key] for key in ours)
        say(f"two tunes from nothing: {other} of {len(ours)} regions got another partition")
    return int(check_all(session, small_regions(session, named, planned, args.most), budget, args, start) or other > 0)


def check_all(
    session: Session, listed: Sequence[Small], budget: Budget, args: argparse.Namespace, start: float
) -> bool:
    """Check region after region while there is time; True when some plan is not among the best."""
    say(f"{len(listed)} regions have at most {args.most} choices, {time.monotonic() - start:.0f} s have passed")
    checked: list[bool] = []
    with session.tuner(replace(budget, screen_s=_SCREEN_S)) as tuner:
        for one in listed:  # every kernel that will be measured, compiled in the order in which it will be
            kernels = (choice for choice in one.problem.choices if choice.implementation.backends)
            tuner.prefetch_default(one.table.subject(choice.group) for choice in kernels)
        for one in listed:
            if args.minutes is not None and time.monotonic() - start > 60 * args.minutes:
                break
            checked.append(check(session, one, tuner, args.optimism))
    models = {one.label.split(",")[0] for one in listed[: len(checked)]}
    say(
        f"{len(checked)} of {len(listed)} regions of {len(models)} models checked, {checked.count(False)} with a "
        f"better partition, in {time.monotonic() - start:.0f} s"
    )
    return not all(checked)


if __name__ == "__main__":
    main()
