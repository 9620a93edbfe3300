"""How fast matmuls of few rows read their weights on this CPU: our kernel, PyTorch's op, and memory alone.

    python tests/checks/check_few_rows.py [--sizes 8192x2048 2048x8192] [--rows 1 8] [--dtypes bfloat16 int8]

Weights come from memory: each call reads other ones. All take turns for some rounds; the table has medians in GB/s of
weights as they are stored, and the relative distance of each result from float64. Of int8 weights with a scale a row,
ours is what `torch.compile(backend="fuseplan")` runs untuned, and TorchInductor's code stands beside it. pytest does
not collect it: it times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseplan.kernels.cpp.matmul import FewRows
from fuseplan.search.timing.operands import memory_bytes, memory_read

#: Bytes of weights that are read in turn, and rounds.
READ, ROUNDS = 160_000_000, 15
Call: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def row(cols: int, inner: int, rows: int, name: str) -> str:
    dtype: torch.dtype = getattr(torch, name)
    x = torch.randn(rows, inner, dtype=torch.bfloat16 if dtype == torch.int8 else dtype)
    size = cols * inner * dtype.itemsize
    calls, weights, exact = (narrow if dtype == torch.int8 else wide)(x, cols, dtype, max(2, -(-READ // size)))
    errors = [float((call(x, weights[0]) - exact).norm() / exact.norm()) for call in calls[:2]]
    memory = memory_read(0)

    def reading(call: Call) -> Callable[[], object]:
        return lambda: [call(x, one) for one in weights]

    sides: list[tuple[int, Callable[[], object]]] = [(size * len(weights), reading(call)) for call in calls]
    sides.append((memory_bytes(0), memory))
    speeds: list[list[float]] = [[] for _ in sides]
    for _ in range(ROUNDS + 1):
        for (count, run), own in zip(sides, speeds, strict=True):
            began = time.perf_counter()
            run()
            own.append(count / (time.perf_counter() - began) / 1e9)
    ours, torch_, *compiled, alone = (f"{statistics.median(own[1:]):.1f}" for own in speeds)
    found = (ours, torch_, *(compiled or [""]), alone)
    return f"| {cols}x{inner} | {rows} | {name} | {' | '.join(found)} | {errors[0]:.1e} | {errors[1]:.1e} |"


def wide(x: Tensor, cols: int, dtype: torch.dtype, count: int) -> tuple[Sequence[Call], list[Tensor], Tensor]:
    """Our kernel and PyTorch's op, ``count`` weights, and what the first of them should give."""
    rows, inner = x.shape
    weights = [torch.randn(cols, inner, dtype=dtype) for _ in range(count)]
    name = str(dtype).removeprefix("torch.")
    ours = FewRows(rows, cols, inner, inner, name, False, (rows, cols)).build()
    return (ours, F.linear), weights, F.linear(x.double(), weights[0].double())


def narrow(x: Tensor, cols: int, dtype: torch.dtype, count: int) -> tuple[Sequence[Call], list[Tensor], Tensor]:
    """The same for int8 weights with a scale a row, TorchInductor's code too."""
    weights = [torch.randint(-128, 128, (cols, x.shape[1]), dtype=dtype) for _ in range(count)]
    scales = torch.rand(cols).to(x.dtype)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w.to(x.dtype)) * scales

    torch._dynamo.reset()
    options = {"db": str(Path(tempfile.mkdtemp()) / "tuning.db")}
    ours, compiled = torch.compile(plain, backend="fuseplan", options=options), torch.compile(plain)
    return (ours, plain, compiled), weights, F.linear(x.double(), weights[0].double()) * scales.double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["2048x2048", "8192x2048", "2048x8192", "128256x2048"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 12, 16])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    given = parser.parse_args()
    print("| weights | rows | type | ours, GB/s | torch, GB/s | Inductor, GB/s | memory, GB/s | our error | torch's |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    torch.set_grad_enabled(False)
    for name in given.dtypes:
        for size in given.sizes:
            cols, inner = map(int, size.split("x"))
            for rows in given.rows:
                print(row(cols, inner, rows, name), flush=True)


if __name__ == "__main__":
    main()
