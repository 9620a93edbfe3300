"""The gains that ``plan tune`` prints, beside those of a script that times the user's model as a user does.

    python tests/checks/check_gain.py [--device cuda|cpu] [--rounds 31] [--python] [NAMES]

Each model is tuned by ``plan tune --module``, in empty folders of data and caches. A fresh process with these folders
then calls the model itself: in eager mode, by ``torch.compile`` and by our back end, in interleaved rounds, launched
and, on a GPU, in CUDA graphs. Gains are ratios of medians; ranges leave out a tenth of the rounds at each end, as the
printed ones do. The table says whether both gains agree within 10 %. Exits with 1 where two do not. On a CPU compare
the speeds at which memory was read, too: gains change with them. pytest does not collect it.

Both differ by construction. The tune times the ops of the rewritten graph, without the model's Python code, Dynamo's
guards and what its line calls unplanned. Its inputs are random, equal layers share weights, and a step that a cache
holds reads its weights from memory. TorchInductor's time is of another run than the plan's. Here all is as a user's
call has it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Calls = Mapping[str, Callable[[], Any]]
#: Microseconds of each round, by way of calling.
Samples = dict[str, list[float]]

MODELS = {"cpu": ("llama", "t5", "wav2vec2", "gcn"), "cuda": ("llama", "wav2vec2", "gcn")}
AGREES, SAMPLE_US, READ_BYTES, LIMIT_S = 0.1, 30_000.0, 128 * 2**20, 1800
EAGER, COMPILED, OURS, MEMORY = "eager", "torch.compile", "fuseplan", "memory"
COLUMNS = ("model", "how", "gain over", "printed", "its range", "script's", "its range", "printed by script's",
           "within 10 %", "in the printed range")
_PLACES = ("XDG_DATA_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_SUPPORT = Path(__file__).resolve().parents[1] / "support"
_USER = """
import sys
import torch
sys.path.insert(0, {support!r})
from whole_models import Models

def made():
    torch.manual_seed(0)
    model, args, kwargs = Models({device!r}, small=False).{name}()
    return model, args or kwargs
"""
_TUNE = "import fuseplan, user_model; print(fuseplan.tune(*user_model.made(), device={device!r}))"
_MISSES = "import fuseplan; print(len(fuseplan.misses()))"
_STEP = re.compile(
    r"^\S.*: (?P<before>[\d.]+) -> (?P<after>[\d.]+) (?P<unit>us|ms|s) a step \((?P<gain>[\d.]+)x"
    r"(?:, (?:unsteady: )?(?P<low>[\d.]+) to (?P<high>[\d.]+) in \d+ rounds?)?(?:; (?P<beside>[^)]*))?\)", re.M)
_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}


# -- what is printed ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Printed:
    """A step's line: microseconds by way of calling, gains, and what TorchInductor takes in a CUDA graph by ours."""

    line: str
    times: Mapping[str, float]
    gain: float
    low: float | None
    high: float | None
    alone: float | None

    @staticmethod
    def of(text: str) -> Printed | None:
        """What a tune's answer says of its only step; None where that is nothing."""
        if (found := _STEP.search(text)) is None:
            return None
        unit, beside = _UNITS[found["unit"]], found["beside"] or ""
        times = {EAGER: float(found["before"]) * unit, OURS: float(found["after"]) * unit}
        graph = re.search(r"in a CUDA graph ([\d.]+)x", beside)
        alone = None if graph is None else float(graph[1])
        if other := re.match(r"torch\.compile(?: \S+)? ([\d.]+) ", beside):
            times[COMPILED] = float(other[1]) * unit
        elif beside.startswith("by torch.compile"):  # which then runs the step, so that both are the same
            times[COMPILED], alone = times[OURS], None if alone is None else 1.0
        low, high = (None if found[name] is None else float(found[name]) for name in ("low", "high"))
        line = text[found.start():].splitlines()[0]
        return Printed(line, times, float(found["gain"]), low, high, alone)


def rows(printed: Printed, measured: Mapping[str, Samples]) -> Iterator[tuple[bool, list[str]]]:
    """Gains over each other way: whether the printed one and the script's agree, and the cells of a row."""
    spread = None if printed.low is None or printed.high is None else (printed.low, printed.high)
    listed = [("launched", EAGER, printed.gain, spread)]
    if COMPILED in printed.times:
        listed.append(("launched", COMPILED, printed.times[COMPILED] / printed.times[OURS], None))
    if printed.alone is not None and "graph" in measured:
        listed.append(("graph", COMPILED, printed.alone, None))
    for kind, other, gain, known in listed:
        samples = measured[kind]
        if not {other, OURS} <= samples.keys():
            yield False, [kind, other, f"{gain:.2f}", "not recorded"]
            continue
        found = statistics.median(samples[other]) / statistics.median(samples[OURS])
        own = middle(slow / fast for slow, fast in zip(samples[other], samples[OURS], strict=True))
        agrees = abs(gain / found - 1) <= AGREES
        within = "-" if known is None else "yes" if known[0] <= found <= known[1] else "no"
        yield agrees, [kind, other, f"{gain:.2f}", "-" if known is None else "{:.2f} to {:.2f}".format(*known),
                       f"{found:.2f}", "{:.2f} to {:.2f}".format(*own), f"{gain / found:.2f}",
                       "yes" if agrees else "NO", within]


def middle(values: Iterable[float]) -> tuple[float, float]:
    """The least and the most, without a tenth at each end."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return ordered[tenth], ordered[-1 - tenth]


# -- what the script measures ------------------------------------------------------------------------------


def timed_us(call: Callable[[], Any], count: int, device: str) -> float:
    settle = torch.cuda.synchronize if device == "cuda" else int
    settle()
    start = time.perf_counter()
    for _ in range(count):
        call()
    settle()
    return (time.perf_counter() - start) / count * 1e6


def contest(calls: Calls, rounds: int, device: str) -> Samples:
    """Interleaved rounds, which begin with other ways, every second one backwards; on a CPU each reads memory first."""
    numbers = torch.ones(READ_BYTES // 4) if device == "cpu" else None
    counts = {name: max(1, round(SAMPLE_US / timed_us(call, 3, device))) for name, call in calls.items()}
    samples: Samples = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds):
        if numbers is not None:
            samples.setdefault(MEMORY, []).append(timed_us(numbers.sum, 1, device))
        turn = number // 2 % len(names)
        for name in (names[turn:] + names[:turn])[:: 1 if number % 2 else -1]:
            samples[name].append(timed_us(calls[name], counts[name], device))
    return samples


def captured(call: Callable[[], Any]) -> Callable[[], Any] | None:
    """A call as a CUDA graph; None where no graph records what it does."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        print(f"no CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return graph.replay


def measure(device: str, rounds: int) -> dict[str, Any]:
    """The samples of each kind of launch, and how far our results are from eager mode's, as a norm."""
    model, inputs = importlib.import_module("user_model").made()
    ways = {EAGER: model, COMPILED: torch.compile(model), OURS: torch.compile(model, backend="fuseplan")}
    calls: dict[str, Callable[[], Any]] = {
        name: partial(way, **inputs) if isinstance(inputs, dict) else partial(way, *inputs)
        for name, way in ways.items()}
    with torch.no_grad():
        floats = {name: [one.double() for one in tree_leaves(call())
                         if isinstance(one, torch.Tensor) and one.is_floating_point()] for name, call in calls.items()}
        error = max(float((ours - plain).norm() / plain.norm())
                    for ours, plain in zip(floats[OURS], floats[EAGER], strict=True))
        del floats
        gc.disable()
        found = {"launched": contest(calls, rounds, device)}
        if device == "cuda":
            graphs = {name: graph for name, call in calls.items() if (graph := captured(call)) is not None}
            found["graph"] = contest(graphs, rounds, device)
    return {"samples": found, "error": error}


# -- a model -----------------------------------------------------------------------------------------------


def run(command: Sequence[str], env: Mapping[str, str]) -> str:
    """What a process prints; CalledProcessError where it fails, whose complaints are shown."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, timeout=LIMIT_S)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr, flush=True)
    done.check_returncode()
    return done.stdout


def check(name: str, given: argparse.Namespace, folder: Path) -> list[tuple[bool, list[str]]]:
    """The rows of a model that is tuned and timed in two processes, which share their empty folders."""
    (folder / "user_model.py").write_text(_USER.format(support=str(_SUPPORT), device=given.device, name=name))
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, **{place: str(folder / place.lower()) for place in _PLACES}}
    on = ["--device", given.device]
    start = time.perf_counter()
    answer = run(["-c", _TUNE.format(device=given.device)] if given.python else
                 ["-m", "fuseplan.planner", "tune", "--module", "user_model:made", *on], env)
    spent, printed = time.perf_counter() - start, Printed.of(answer)
    print(f"{name}, tuned in {spent:.0f} s\n  {answer if printed is None else printed.line}", flush=True)
    # TorchInductor's compilers would import PyTorch for seconds meanwhile.
    env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    timed = json.loads(run([__file__, "--timed", "--rounds", str(given.rounds), *on], env).splitlines()[-1])
    for kind, samples in timed["samples"].items():
        slow, fast = middle(READ_BYTES * 1e-3 / one for one in samples.pop(MEMORY, [1.0]))
        told = ", ".join(f"{way} {statistics.median(taken):.1f} us" for way, taken in samples.items())
        read = f"; memory was read at {slow:.0f} to {fast:.0f} GB/s" if given.device == "cpu" else ""
        print(f"  {kind} here: {told}{read}", flush=True)
    print(f"  error {timed['error']:.1e}; regions without a plan: {run(['-c', _MISSES], env).strip()}", flush=True)
    return [(False, ["no step is printed"])] if printed is None else list(rows(printed, timed["samples"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAMES", help="of tests/support/whole_models.py; a few by default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--python", action="store_true", help="tune by fuseplan.tune() in place of the command line")
    parser.add_argument("--timed", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.timed:
        print(json.dumps(measure(given.device, given.rounds)))
        return 0
    lines, failed = [], False
    for name in given.names or MODELS[given.device]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = check(name, given, Path(folder))
            except (subprocess.SubprocessError, ValueError) as error:
                found = [(False, [f"failed: {type(error).__name__}"])]
        failed |= not all(agrees for agrees, _ in found)
        lines += [f"| {' | '.join((name, *cells))} |" for _, cells in found]
    print(f"\n| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|\n" + "\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
