"""Attention of one token on this CPU: our kernel beside PyTorch's op, grouped and as it is written; memory alone.

    python tests/checks/check_attention_cpu.py [--heads 32 8] [--widths 64 128] [--keys 256 2048 8192] [--batches 1 16]
        [--dtypes bfloat16] [--visible 1.0]

Keys and values come from memory: each call reads other ones. All take turns for some rounds; medians in microseconds,
then GB/s of keys and values, and the relative distance of each result from float64. A mask hides what is not visible,
as that of a static cache does. pytest does not collect it: it times.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from fuseplan.planner.libraries.few_rows_attention import ROWS_ATTENTION
from fuseplan.search.timing.operands import memory_bytes, memory_read

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from library_samples import attention

#: Bytes of keys and values that are read in turn, and rounds.
READ, ROUNDS = 160_000_000, 15


def row(given: argparse.Namespace, batch: int, keys: int, width: int, name: str) -> str:
    dtype: torch.dtype = getattr(torch, name)
    heads, shared = given.heads
    query = torch.randn(batch, heads, 1, width, dtype=dtype)
    size = 2 * batch * shared * keys * width * dtype.itemsize
    caches = [tuple(torch.randn(batch, shared, keys, width, dtype=dtype) for _ in range(2))
              for _ in range(max(2, -(-READ // size)))]
    mask = (torch.arange(keys) < keys * given.visible).expand(batch, 1, 1, keys)
    rows = query.view(batch, shared, heads // shared, width)
    shown = mask.expand(batch, 1, heads // shared, keys)
    call = ROWS_ATTENTION.build(attention(rows, *caches[0], shown).group)
    sides: dict[str, Callable[..., torch.Tensor]] = {
        "ours": lambda k, v: call(rows, k, v, shown),
        "grouped": lambda k, v: F.scaled_dot_product_attention(rows, k, v, shown),
        "as written": lambda k, v: F.scaled_dot_product_attention(query, k, v, mask, enable_gqa=True),
    }
    exact = attention(query, *caches[0], mask, enable_gqa=True).exact()
    errors = [float((run(*caches[0]).view_as(exact) - exact).norm() / exact.norm()) for run in sides.values()]
    memory = memory_read(0)
    times: dict[str, list[float]] = {side: [] for side in (*sides, "memory")}
    for _ in range(ROUNDS + 1):
        for side, run in sides.items():
            began = time.perf_counter()
            for cache in caches:
                run(*cache)
            times[side].append((time.perf_counter() - began) / len(caches) * 1e6)
        began = time.perf_counter()
        memory()
        times["memory"].append(time.perf_counter() - began)
    taken = {side: statistics.median(own[1:]) for side, own in times.items()}
    seconds = taken.pop("memory")
    best = min(us for side, us in taken.items() if side != "ours")
    cells = [f"{us:.0f}" for us in taken.values()]
    cells += [f"{best / taken['ours']:.2f}x", f"{size * given.visible / taken['ours'] * 1e-3:.1f}",
              f"{memory_bytes(0) / seconds * 1e-9:.1f}", f"{errors[0]:.1e}", f"{min(errors[1:]):.1e}"]
    return f"| {batch} | {keys} | {width} | {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs=2, type=int, default=(32, 8), help="of queries, and of keys and values")
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--keys", nargs="+", type=int, default=[256, 2048, 8192])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--visible", type=float, default=1.0, help="the share of the keys that the mask shows")
    given = parser.parse_args()
    print("| batch | keys | elements | type | ours, us | torch, grouped | torch, as written | over the better "
          "| ours, GB/s | memory, GB/s | our error | torch's |")
    print("| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with torch.no_grad():
        for sizes in itertools.product(given.batches, given.keys, given.widths, given.dtypes):
            print(row(given, *sizes), flush=True)


if __name__ == "__main__":
    main()
