"""Where the host's time goes in a call launched from Python: fuseplan's code beside TorchInductor's, by kind of call.

    python tests/checks/host_time.py [--small] [--max-autotune] [--device cuda|cpu] [NAMES]

Each model runs untuned, or as the user's database has it; with ``--max-autotune``, beside what TorchInductor's search
finds. One row a kind of call: how many there are, microseconds of each (medians), and of all. What a wrapper of each
call adds (a few tenths of a microsecond) is measured with a function that does nothing, and taken off. The last rows
are the whole call without wrappers, until it returns (``host``) and until the device is done. Both run in turn. pytest
does not collect it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._inductor.codecache import PyCodeCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from any_model import MOST, NAMES, compiler, settle
from whole_models import Made, Models

import fuseplan.planner.runtime.executor as executor

ROUNDS = 41


class Timers:
    """Wraps functions, and adds up how long each kind takes."""

    def __init__(self) -> None:
        self.samples: dict[str, list[int]] = defaultdict(list)

    def wrapped(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        samples, now = self.samples[kind], time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            result = call(*args, **kwargs)
            samples.append(now() - start)
            return result

        return timed

    def nothing_us(self) -> float:
        """What is timed of a function that does nothing."""
        call = self.wrapped("nothing", lambda x: x)
        for _ in range(1000):
            call(self)
        return statistics.median(self.samples.pop("nothing")) / 1000


class Members:
    """An object whose methods are timed, each as a kind or all as one."""

    def __init__(self, held: Any, timers: Timers, kind: str = "") -> None:
        self._held, self._timers, self._kind = held, timers, kind

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._held, name)
        timed = self._timers.wrapped(self._kind or name, found) if callable(found) else found
        setattr(self, name, timed)
        return timed


def wrap_ours(namespace: MutableMapping[str, Any], timers: Timers) -> None:
    for name, call in list(namespace.items()):
        if name.startswith("fuseplan_") and callable(call):
            kind = "kernels" if "fused_" in name else name.removeprefix("fuseplan_").rstrip("0123456789_")
            namespace[name] = timers.wrapped(kind, call)


def wrap_inductor(namespace: MutableMapping[str, Any], timers: Timers) -> None:
    for name, call in list(namespace.items()):
        if name.startswith(("triton_", "cpp_fused")):
            kind = "kernels"
            namespace[name] = Members(call, timers, kind) if hasattr(call, "run") else timers.wrapped(kind, call)
        elif name == "extern_kernels":
            namespace[name] = Members(call, timers)
        elif name.startswith(("empty_strided", "reinterpret_tensor", "assert_size_stride", "assert_alignment")):
            namespace[name] = timers.wrapped(name, call)


@dataclass(frozen=True)
class Run:
    """A compiled model, and the namespaces of its code."""

    call: Callable[[], Any]
    wrap: Callable[[Timers], None]
    timers: Timers = field(default_factory=Timers)


def spent_us(runs: Mapping[str, Run], device: str) -> dict[str, tuple[float, float]]:
    """Microseconds of a call, until it returns and until the device is done: medians of interleaved rounds."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            settle(device)
            start = time.perf_counter()
            run.call()
            returned = time.perf_counter()
            settle(device)
            samples[name].append(((returned - start) * 1e6, (time.perf_counter() - start) * 1e6))
    return {name: (statistics.median(one[0] for one in own), statistics.median(one[1] for one in own))
            for name, own in samples.items()}


def report(title: str, runs: Mapping[str, Run], device: str) -> None:
    for _ in range(3):
        for run in runs.values():
            run.call()
    times = spent_us(runs, device)
    for run in runs.values():
        run.wrap(run.timers)
        run.call()
        for samples in run.timers.samples.values():
            samples.clear()
    spent_us(runs, device)
    for name, run in runs.items():
        print_rows(f"{title}, {name}", run.timers, *times[name])


def print_rows(title: str, timers: Timers, host: float, done: float) -> None:
    extra, total = timers.nothing_us(), 0.0
    rows: dict[str, tuple[int, float]] = {}
    for kind, samples in timers.samples.items():
        count = len(samples) // ROUNDS
        medians = (statistics.median(samples[at::count]) / 1000 for at in range(count))
        rows[kind] = count, sum(max(0.0, one - extra) for one in medians)
    for kind, (count, us) in sorted(rows.items(), key=lambda row: -row[1][1]):
        if count:
            total += us
            print(f"| {title} | {kind} | {count} | {us / count:.2f} | {us:.0f} |")
    print(f"| {title} | rest | | | {host - total:.0f} |")
    print(f"| {title} | host | | | {host:.0f} |\n| {title} | device done | | | {done:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAMES", help=", ".join(NAMES))
    parser.add_argument("--small", action="store_true", help="few layers, small sizes")
    parser.add_argument("--max-autotune", action="store_true", help="beside TorchInductor's max-autotune")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    print("| model | kind | calls | us each | us |\n| --- | --- | ---: | ---: | ---: |")
    add_ranges, namespaces = executor.add_ranges, list[MutableMapping[str, Any]]()

    def spied(module: Any, ranges: Any) -> None:
        add_ranges(module, ranges)
        namespaces.append(module.forward.__globals__)

    executor.add_ranges = spied
    with torch.no_grad():
        for name in args.names or NAMES:
            made = getattr(Models(args.device, args.small), name)()
            torch._dynamo.reset()
            runs: dict[str, Run] = {}
            for way in ("fuseplan", MOST if args.max_autotune else "inductor"):
                namespaces.clear()
                before = len(PyCodeCache.modules)
                call = compiled(made, way)
                spaces = namespaces if way == "fuseplan" else [vars(one) for one in PyCodeCache.modules[before:]]
                runs[way] = Run(call, partial(wrap_all, way, tuple(spaces)))
            report(name, runs, args.device)


def compiled(made: Made, way: str) -> Callable[[], Any]:
    """A model compiled and called once."""
    model, given, named = made
    call = torch.compile(model, dynamic=False, backend=compiler(way))
    call(*given, **named)
    return lambda: call(*given, **named)


def wrap_all(way: str, spaces: Sequence[MutableMapping[str, Any]], timers: Timers) -> None:
    for space in spaces:
        (wrap_ours if way == "fuseplan" else wrap_inductor)(space, timers)


if __name__ == "__main__":
    main()
