"""Decoder layers end to end in a CUDA graph, beside eager and TorchInductor: what plans buy where matmuls take time.

Layers of the sizes of Llama-3-8B, Qwen3-8B, Phi-3-mini or Gemma-3-4B as a plain module: shared keys by
``enable_gqa``, static caches, no head. Every region is tuned in the first call. All contestants of one cell are timed
in interleaved rounds of one run; the peer ``bare`` runs the matmuls and attention alone, in eager's ops, which give
another result.

    python tests/checks/check_layers.py --models llama qwen3 --out results/nvidia-h200/layers.md
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from decoder_layers import MODELS, Layers, example, probe_once
from torch import nn

import fuseplan.planner
from fuseplan.costmodel.probe.timing import cuda_graph
from fuseplan.planner.runtime.dispatch import fuseplan as fuseplan_backend


def contestants(
    model: nn.Module, folder: str, packed: bool, device: str, peers: Collection[str]
) -> dict[str, Callable[..., Any]]:
    """What runs the model, by name. Packing moves weights, which a recorded graph of another would not see: a copy."""
    options: dict[str, Any] = {"db": f"{folder}/tuning.db", "on_miss": "tune"}
    if device == "cuda":
        options["regime"] = "graph"

    def compiled(model: nn.Module = model, **more: Any) -> Callable[..., Any]:
        # Dynamo keeps one compiled function for a code object and its guards: each contestant has a forward of its own.
        def forward(*args: Any) -> Any:
            return model.forward(*args)

        return torch.compile(forward, dynamic=False, **more)

    tuned = {**torch._inductor.list_mode_options("max-autotune-no-cudagraphs"), "coordinate_descent_tuning": True,
             "autotune_num_choices_displayed": 0}
    found: dict[str, Callable[..., Any]] = {"eager": model}
    if "bare" in peers:
        found["bare"] = model.bare  # type: ignore[assignment]
    if "inductor" in peers:
        found["inductor"] = compiled()
    if "max-autotune" in peers:
        found["max-autotune"] = compiled(options=tuned)
    found["fuseplan"] = compiled(backend=fuseplan_backend, options=options)
    if packed:
        asked = options | {"pack_weights": True}
        found["fuseplan packed"] = compiled(copy.deepcopy(model), backend=fuseplan_backend, options=asked)
    return found


def replayed(call: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], object]:
    """The call as a replay of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(*args)
    torch.cuda.current_stream().wait_stream(stream)
    with cuda_graph() as graph:
        call(*args)

    def replay(held: tuple[Any, ...] = args) -> None:  # the graph knows its operands by their addresses alone
        graph.replay()

    return replay


def times_us(runs: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Median microseconds of each, in interleaved rounds.

    Each round has another order: at the power limit a run is slower after one that draws more.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            found[name].append(_time_us(runs[name], device))
    return {name: statistics.median(times) for name, times in found.items()}


def _time_us(run: Callable[[], object], device: str, calls: int = 8) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / calls


def check(name: str, count: int, batch: int, length: int, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One cell: times, errors against float64 of what is compiled, peak memory over eager's."""
    device = arguments.device
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if device == "cuda" else "float32"))
    torch._dynamo.reset()
    sizes = MODELS[name]
    torch.manual_seed(1)
    with torch.device(device):
        model = Layers(sizes, count).to(dtype).eval()
    row: dict[str, Any] = {"model": name, "batch": batch, "length": length}
    runs: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        expected: torch.Tensor | None = None
        for who, call in contestants(model, folder, arguments.packed, device, arguments.peers).items():
            args = example(sizes, count, batch, length, device, dtype)
            fuseplan.planner.reset_stats()
            began = time.perf_counter()
            output = call(*args)
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call(*args)
                torch.cuda.synchronize()
                row[f"{who} MB"] = (torch.cuda.max_memory_allocated() - before) / 1e6
            print(f"{name} {batch}x{length} {who}: first call {time.perf_counter() - began:.1f} s", flush=True)
            if "fuseplan" in who:
                print(fuseplan.planner.stats(), flush=True)
            expected = output.double() if expected is None else expected
            if who != "bare":
                row[f"{who} error"] = float((output.double() - expected).norm() / expected.norm())
            runs[who] = replayed(call, args) if device == "cuda" else partial(call, *args)
        row |= {f"{who} us": value for who, value in times_us(runs, arguments.rounds, device).items()}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    names = [name.removesuffix(" us") for name in rows[0] if name.endswith(" us")]
    ours = [name for name in names if name.startswith("fuseplan")]
    heads = ["model", "batch x length", *(f"{name}, us" for name in names), "best of ours over inductor",
             "over max-autotune", "error to eager", "MB a call, eager and ours"]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for row in rows:
        best = min(row[f"{name} us"] for name in ours)
        peers = [row.get(f"{peer} us") for peer in ("inductor", "max-autotune")]
        over = ["-" if time is None else f"{time / best:.3f}x" for time in peers]
        memory = " ".join(f"{row.get(f'{name} MB', 0):.1f}" for name in ("eager", *ours))
        error = max(row[f"{name} error"] for name in ours)
        sizes = [row["model"], f"{row['batch']}x{row['length']}"]
        cells = [*sizes, *(f"{row[f'{name} us']:.1f}" for name in names), *over, f"{error:.1e}", memory]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama"], choices=list(MODELS))
    parser.add_argument("--cells", nargs="+", default=["1x1", "16x1", "64x1", "1x2048", "4x2048"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="by default bfloat16 on GPUs")
    parser.add_argument("--no-packed", dest="packed", action="store_false")
    parser.add_argument("--peers", nargs="*", default=["inductor", "max-autotune"])
    parser.add_argument("--folder", help="keeps the tuning database; a new one otherwise")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or scratch
        probe_once(arguments.device, f"{folder}/tuning.db")
        for name in arguments.models:
            for cell in arguments.cells:
                batch, length = map(int, cell.split("x"))
                rows.append(check(name, arguments.layers, batch, length, arguments, folder))
                print(table(rows[-1:]), flush=True)
    print(table(rows))
    if arguments.out is not None:
        arguments.out.write_text(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
