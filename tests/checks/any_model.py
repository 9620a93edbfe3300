"""Models that nobody tuned for, beside eager mode and TorchInductor's default: one line of code, and tuned on the spot.

    python tests/checks/any_model.py [--tune] [--twice] [--max-autotune] [--small] [--profile] [--device cuda|cpu]
        [NAMES]

One interleaved run a model, launched from Python and, on a GPU, in a CUDA graph; medians in microseconds a call.
Weights are random. Says how long each first call took and how far results are from eager mode's. With ``--tune`` each
model is then tuned as ``plan tune --module`` does it, into the user's database, and compared again. ``--small``, and a
CPU, take few layers and small sizes. ``--max-autotune`` compares the tuned model alone, and has TorchInductor's
max-autotune beside it, which takes minutes to compile. ``--twice`` only tunes each model two times from nothing, and
counts the regions that got the same answer. ``--profile`` lists the kernels that take longest on a GPU. pytest does not
collect it.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.async_compile
from torch._inductor.compile_fx import compile_fx

import fuseplan.planner
import fuseplan.planner.api.tune as tune_module
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import PlanRecord

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from whole_models import Models

ROUNDS, SAMPLE_US = 9, 15000.0
MOST = "max-autotune"


NAMES = [name for name in vars(Models) if not name.startswith("_")]


def tensor(result: Any) -> torch.Tensor:
    """The result that is compared."""
    if isinstance(result, torch.Tensor):
        return result.float()
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if (found := getattr(result, name, None)) is not None:
            return tensor(found)
    return tensor(result[0])


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed_us(call: Callable[[], Any], calls: int, device: str) -> float:
    settle(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    settle(device)
    return (time.perf_counter() - start) / calls * 1e6


def contest(calls: Mapping[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Medians of interleaved rounds, which begin with another one each time."""
    counts = {name: max(2, int(SAMPLE_US / timed_us(call, 2, device))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for at in range(ROUNDS):
        turn = at % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(timed_us(calls[name], counts[name], device))
    return {name: statistics.median(values) for name, values in samples.items()}


def captured(call: Callable[[], Any]) -> Callable[[], Any] | None:
    """A call as a CUDA graph; None where it does what no graph records."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        print(f"  no CUDA graph: {str(error).splitlines()[-1]}", flush=True)
        return None
    return graph.replay


def compiler(name: str) -> Callable[..., Any]:
    """A back end that is not equal to any other, so that what Dynamo compiled by one does not serve another."""
    if name == MOST:
        return lambda module, inputs: compile_fx(module, inputs, config_patches={"max_autotune": True})
    found = torch._dynamo.backends.registry.lookup_backend(name)
    return lambda module, inputs, **options: found(module, inputs, **options)


def print_kernels(way: str, call: Callable[[], Any], calls: int = 3) -> None:
    """The kernels of a GPU that take longest, with microseconds and launches a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as taken:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    kernels = sorted((one for one in taken.key_averages() if one.device_time_total > 0),
                     key=lambda one: -one.device_time_total)
    total, launches = (sum(getattr(one, of) for one in kernels) / calls for of in ("device_time_total", "count"))
    print(f"  {way}: {total:.0f} us of kernels, {launches:.0f} launches")
    for one in kernels[:16]:
        print(f"    {one.device_time_total / calls:8.1f} us {one.count / calls:6.1f} x {one.key[:100]}", flush=True)


class Comparison:
    """A model called in several ways, which are timed beside each other."""

    def __init__(self, name: str, models: Models) -> None:
        self.name, self.device = name, models.device
        self.model, self.args, self.kwargs = getattr(models, name)()
        torch._dynamo.reset()
        self.eager = lambda: self.model(*self.args, **self.kwargs)
        self.expected = tensor(self.eager())

    def compiled(self, way: str) -> Callable[[], Any]:
        """The model compiled and called once; says how long that took and how far its result is from eager mode's."""
        backend = compiler(way if way in ("inductor", MOST) else "fuseplan")
        call = torch.compile(self.model, dynamic=False, backend=backend)
        start = time.perf_counter()
        result = tensor(call(*self.args, **self.kwargs))
        settle(self.device)
        spent = time.perf_counter() - start
        error = float((result - self.expected).norm() / self.expected.norm())
        print(f"  {self.name} {way}: first call {spent:.1f} s, error {error:.1e}", flush=True)
        return lambda: call(*self.args, **self.kwargs)

    def run(self, way: str, profile: bool, peers: Sequence[str] = ("inductor",)) -> None:
        """One way beside eager mode and TorchInductor, launched and in a CUDA graph."""
        calls = {"eager": self.eager, way: self.compiled(way)} | {peer: self.compiled(peer) for peer in peers}
        # TorchInductor's compilers import PyTorch for seconds, and disturb all sides.
        torch._inductor.async_compile.AsyncCompile.wait_pool_ready()
        self._print("launched", way, contest(calls, self.device))
        if self.device == "cuda":
            graphs = {one: graph for one, call in calls.items() if (graph := captured(call)) is not None}
            self._print("graph", way, contest(graphs, self.device))
            for one, call in (calls if profile else {}).items():
                print_kernels(one, call)

    def _print(self, kind: str, way: str, times: Mapping[str, float]) -> None:
        best = min(us for one, us in times.items() if one not in (way, MOST))
        cells = [f"{times[one]:.0f}" if one in times else "-" for one in ("eager", way, "inductor")]
        cells += [f"{best / times[way]:.2f}x"]
        cells += [f"{MOST} {times[MOST]:.0f}", f"{times[MOST] / times[way]:.2f}x"] if MOST in times else []
        print(f"| {self.name}, {way} | {kind} | {' | '.join(cells)} |", flush=True)

    def tune(self) -> None:
        start = time.perf_counter()
        result = fuseplan.planner.tune(self.model, self.args or self.kwargs, device=self.device)
        print(f"  {self.name} was tuned in {time.perf_counter() - start:.0f} s\n  {result}", flush=True)


    def tune_twice(self) -> None:
        """Say of how many regions two tunes from nothing give the same answer, where that matters by over 2 %."""
        found = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                db = Path(folder) / "t.db"
                fuseplan.planner.tune(self.model, self.args or self.kwargs, device=self.device, db=db, shipped=False)
                with Database(db, "read") as database:
                    found.append({plan.key: plan for plan in database.plans()})
        first, second = found
        both = [(plan, second[key]) for key, plan in first.items() if key in second]
        matter = [pair for pair in both if max(abs(plan.margin) for plan in pair) > 0.02]
        cuts, ways = (sum(told(one) == told(other) for one, other in matter) for told in (cut_of, ways_of))
        counts = (f"{len(first)}, {len(second)}", len(both), len(matter), cuts, ways)
        print(f"| {self.name} | {' | '.join(map(str, counts))} |", flush=True)


def cut_of(plan: PlanRecord) -> frozenset[tuple[int, ...]]:
    """The partition: which ops run together."""
    return frozenset(group.ops for group in plan.groups)


def ways_of(plan: PlanRecord) -> frozenset[tuple[tuple[int, ...], str]]:
    """The partition, and what runs each group."""
    return frozenset((group.ops, group.implementation) for group in plan.groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAMES", help=", ".join(NAMES))
    parser.add_argument("--tune", action="store_true", help="tune each model on the spot, too")
    parser.add_argument("--twice", action="store_true", help="only tune each model two times, and compare the answers")
    parser.add_argument("--max-autotune", action="store_true", help="beside the tuned model, on a GPU")
    parser.add_argument("--small", action="store_true", help="few layers, small sizes")
    parser.add_argument("--profile", action="store_true", help="list the kernels that take longest, on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    logging.basicConfig(format="  %(message)s")
    logging.getLogger(tune_module.__name__).setLevel(logging.INFO)  # where the time went
    print("| model | regions | in both | margin over 2 % | same groups | run alike |" if args.twice else
          "| model | | eager | fuseplan | inductor | of the better of both |")
    with torch.no_grad():
        for name in args.names or NAMES:
            comparison = Comparison(name, Models(args.device, args.small))
            if args.twice:
                comparison.tune_twice()
                continue
            if not args.max_autotune:
                comparison.run("untuned", args.profile)
            if args.tune:
                comparison.tune()
                comparison.run("tuned", args.profile, ("inductor", MOST) if args.max_autotune else ("inductor",))
            print(f"  {fuseplan.planner.stats()}".replace("\n", "\n  "), flush=True)


if __name__ == "__main__":
    main()
