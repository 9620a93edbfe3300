"""Decoder layers end to end in a CUDA graph, beside eager and TorchInductor: what plans buy where matmuls take time.

Layers of the sizes of Llama-3-8B, Qwen3-8B or Gemma-3-4B as a plain module: shared keys by ``enable_gqa``, static
caches, no head. Every region is tuned in the first call. All contestants of one cell are timed in interleaved rounds of
one run; the peer ``bare`` runs the matmuls and attention alone, in eager's ops, which give another result.

    python tests/checks/check_layers.py --models llama qwen3 --out results/nvidia-h200/layers.md
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fuseplan.planner
from fuseplan.costmodel.probe.timing import cuda_graph
from fuseplan.planner.runtime.dispatch import fuseplan as fuseplan_backend
from fuseplan.planner.tuning.session import open_session

HELD = 1024


@dataclass(frozen=True)
class Sizes:
    """Of a decoder layer."""

    hidden: int
    heads: int
    shared: int
    width: int
    inner: int
    normed_heads: bool = False
    #: Gemma's: norms behind attention and MLP as well, and GELU.
    normed_results: bool = False


MODELS = {
    "llama": Sizes(4096, 32, 8, 128, 14336),
    "qwen3": Sizes(4096, 32, 8, 128, 12288, normed_heads=True),
    "gemma3": Sizes(2560, 8, 4, 256, 10240, normed_heads=True, normed_results=True),
    "tiny": Sizes(64, 4, 2, 16, 96, normed_heads=True, normed_results=True),
}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        wide, narrow = sizes.heads * sizes.width, sizes.shared * sizes.width
        self.before, self.after = Norm(sizes.hidden), Norm(sizes.hidden)
        self.q = nn.Linear(sizes.hidden, wide, bias=False)
        self.k = nn.Linear(sizes.hidden, narrow, bias=False)
        self.v = nn.Linear(sizes.hidden, narrow, bias=False)
        self.o = nn.Linear(wide, sizes.hidden, bias=False)
        self.gate = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)
        if sizes.normed_heads:
            self.q_norm, self.k_norm = Norm(sizes.width), Norm(sizes.width)
        made = (Norm(sizes.hidden) if sizes.normed_results else nn.Identity() for _ in range(2))
        self.behind = nn.ModuleList(made)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor | None,
                cache: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.before(x)
        q = self.q(h).view(batch, length, -1, self.sizes.width)
        k = self.k(h).view(batch, length, -1, self.sizes.width)
        v = self.v(h).view(batch, length, -1, self.sizes.width).transpose(1, 2)
        if self.sizes.normed_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q.transpose(1, 2), cos, sin), rotated(k.transpose(1, 2), cos, sin)
        if at is not None:
            k, v = cache[0].index_copy_(2, at, k), cache[1].index_copy_(2, at, v)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=at is None, enable_gqa=True)
        x = x + self.behind[0](self.o(a.transpose(1, 2).reshape(batch, length, -1)))
        h = self.after(x)
        gate = self.gate(h)
        gate = F.gelu(gate, approximate="tanh") if self.sizes.normed_results else F.silu(gate)
        return x + self.behind[1](self.down(gate * self.up(h)))

    def bare(
        self, x: torch.Tensor, at: torch.Tensor | None, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """The matmuls and attention alone, one after another."""
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, -1, self.sizes.width).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        if at is not None:
            k, v = cache
        a = F.scaled_dot_product_attention(q, k, v, is_causal=at is None, enable_gqa=True)
        o = self.o(a.transpose(1, 2).reshape(batch, length, -1))
        self.gate(o)
        return self.down(self.up(o))


class Layers(nn.Module):
    def __init__(self, sizes: Sizes, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(count))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor | None,
                caches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        mask = None if at is None else (torch.arange(HELD, device=x.device) <= at)[None, None, None]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cos, sin, at, cache, mask)
        return x

    def bare(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor | None,
             caches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer.bare(x, at, cache)
        return x


def example(sizes: Sizes, count: int, batch: int, length: int, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """A call: one token at the end of the caches, or a prompt."""
    torch.manual_seed(0)
    made = {"device": device, "dtype": dtype}
    x = torch.randn(batch, length, sizes.hidden, **made)  # type: ignore[call-overload]
    cos, sin = (torch.randn(1, 1, length, sizes.width, **made) for _ in range(2))  # type: ignore[call-overload]
    at = torch.tensor([HELD - 1], device=device) if length == 1 else None
    held = HELD if length == 1 else 0
    caches = [
        tuple(torch.randn(batch, sizes.shared, held, sizes.width, **made) for _ in range(2))  # type: ignore[call-overload]
        for _ in range(count)
    ]
    return x, cos, sin, at, caches


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
        over = [f"{row.get(f'{peer} us', math.nan) / best:.3f}x" for peer in ("inductor", "max-autotune")]
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
        session = open_session(arguments.device, f"{folder}/tuning.db")
        if session.spec is None:  # what is tuned in a first call is priced by a probed device
            session.probed()
        session.database.close()
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
