"""How fast matmuls of few rows read their weights on this CPU: our kernel, PyTorch's op, and memory alone.

    python tests/checks/check_few_rows.py [--sizes 8192x2048 2048x8192] [--rows 1 8] [--dtypes bfloat16]

Weights come from memory: each call reads other ones. All take turns for some rounds; the table has medians in GB/s of
weights, and the relative distance of each result from float64. pytest does not collect it: it times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fuseplan.kernels.cpp.matmul import FewRows
from fuseplan.search.timing.operands import memory_bytes, memory_read

#: Bytes of weights that are read in turn, and rounds.
READ, ROUNDS = 160_000_000, 15


def row(cols: int, inner: int, rows: int, name: str) -> str:
    dtype: torch.dtype = getattr(torch, name)
    x = torch.randn(rows, inner, dtype=dtype)
    size = cols * inner * dtype.itemsize
    weights = [torch.randn(cols, inner, dtype=dtype) for _ in range(max(2, -(-READ // size)))]
    ours, memory = FewRows(rows, cols, inner, inner, name, False, (rows, cols)).build(), memory_read(0)
    exact = F.linear(x.double(), weights[0].double())
    errors = [float((call(x, weights[0]) - exact).norm() / exact.norm()) for call in (ours, F.linear)]
    sides: dict[str, tuple[int, Callable[[], object]]] = {
        "ours": (size * len(weights), lambda: [ours(x, one) for one in weights]),
        "torch": (size * len(weights), lambda: [F.linear(x, one) for one in weights]),
        "memory": (memory_bytes(0), memory),
    }
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS + 1):
        for side, (count, run) in sides.items():
            began = time.perf_counter()
            run()
            speeds[side].append(count / (time.perf_counter() - began) / 1e9)
    found = [f"{statistics.median(own[1:]):.1f}" for own in speeds.values()]
    return f"| {cols}x{inner} | {rows} | {name} | {' | '.join(found)} | {errors[0]:.1e} | {errors[1]:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["2048x2048", "8192x2048", "2048x8192", "128256x2048"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 12, 16])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    given = parser.parse_args()
    print("| weights | rows | type | ours, GB/s | torch, GB/s | memory, GB/s | our error | torch's |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for name in given.dtypes:
        for size in given.sizes:
            cols, inner = map(int, size.split("x"))
            for rows in given.rows:
                print(row(cols, inner, rows, name), flush=True)


if __name__ == "__main__":
    main()
