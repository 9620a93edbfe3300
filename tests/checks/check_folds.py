"""Functions that reduce any dimensions, untuned or tuned, beside eager mode and TorchInductor's default.

    python tests/checks/check_folds.py [--tune] [--device cuda|cpu] [--only WORDS]

Medians of interleaved rounds in microseconds a call, in CUDA graphs on a GPU, and the error against float64 as a norm.
Exits with 1 where a result is off. pytest does not collect it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from any_model import captured, compiler, contest
from torch import Tensor

import fuseplan

#: How far a result may be from float64, by the type of what is read.
MOST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_BF16 = torch.bfloat16


def _normed(x: Tensor) -> Tensor:
    dims = (0, 2, 3)
    return (x - x.mean(dims, keepdim=True)) * torch.rsqrt(x.var(dims, keepdim=True) + 1e-5)


def _scaled(x: Tensor) -> Tensor:
    """By its largest element, as numbers are scaled that are stored in 8 bits."""
    return x * 2 / (x * 2).abs().amax().clamp(min=1e-12)


#: What is computed; the shape, dtype and layout of x.
CASES: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...], torch.dtype, bool]] = {
    "(2x + 1).sum(1)": (lambda x: (x * 2 + 1).sum(1), (32, 197, 768), _BF16, False),
    "relu(x).mean((2, 3)), channels last": (lambda x: torch.relu(x).mean((2, 3)), (32, 64, 56, 56), _BF16, True),
    "relu(x).mean((2, 3))": (lambda x: torch.relu(x).mean((2, 3)), (32, 64, 56, 56), torch.float32, False),
    "norm over (0, 2, 3), channels last": (_normed, (32, 64, 56, 56), _BF16, True),
    "(x*x).sum(0), few": (lambda x: (x * x).sum(0), (4096, 512), torch.float32, False),
    "(x*x).sum(0), square": (lambda x: (x * x).sum(0), (4096, 4096), torch.float32, False),
    "(x*x).sum(0), tall": (lambda x: (x * x).sum(0), (100000, 64), torch.float32, False),
    "(x - mean(0)) / (std(0) + eps)": (
        lambda x: (x - x.mean(0, keepdim=True)) / (x.std(0, keepdim=True) + 1e-5), (4096, 4096), torch.float32, False),
    "softmax(2x, 1)": (lambda x: torch.softmax(x * 2, 1), (8, 12, 128, 128), torch.float32, False),
    "softmax(2x, 0)": (lambda x: torch.softmax(x * 2, 0), (4096, 1024), _BF16, False),
    "(x + 1).max(1)": (lambda x: (x + 1).max(1), (64, 128, 512), torch.float32, False),
    "(x + 1).amax(0)": (lambda x: (x + 1).amax(0), (3, 4097, 127), torch.float32, False),
    "(x + 1).prod(1)": (lambda x: (x + 1).prod(1), (64, 16, 512), torch.float32, False),
    "(x + 1).logsumexp(1)": (lambda x: (x + 1).logsumexp(1), (64, 128, 512), torch.float32, False),
    "vector_norm(2x, dim=1)": (lambda x: torch.linalg.vector_norm(x * 2, dim=1), (64, 128, 512), _BF16, False),
    "(x*x).sum()": (lambda x: (x * x).sum(), (4096, 4096), torch.float32, False),
    "(x*x).sum(1), long": (lambda x: (x * x).sum(1), (4, 4194304), torch.float32, False),
    "abs(2x).amax()": (lambda x: (x * 2).abs().amax(), (4096, 4096), _BF16, False),
    "2x / abs(2x).amax()": (_scaled, (4096, 4096), _BF16, False),
    "relu(x).mean((0, 2, 3))": (lambda x: torch.relu(x).mean((0, 2, 3)), (8, 3, 512, 512), torch.float32, False),
    "(x*x).sum((0, 2))": (lambda x: (x * x).sum((0, 2)), (64, 128, 512), torch.float32, False),
}


def floats(result: Any) -> Iterator[Tensor]:
    """The results that are no indices."""
    for one in (result,) if isinstance(result, Tensor) else result:
        if one.is_floating_point():
            yield one.double()


class Fold(torch.nn.Module):
    """One of the functions, as a model that can be tuned."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def check(name: str, device: str, tuned: bool) -> bool:
    """Print a row of the table; whether the result is right. ``tuned``: into the user's database."""
    function, shape, dtype, last = CASES[name]
    x = torch.randn(shape, device=device).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    if tuned:
        fuseplan.tune(Fold(function), (x,), device=device)
    torch._dynamo.reset()
    calls: dict[str, Callable[[], Any]] = {"eager": partial(function, x)}
    for way in ("fuseplan", "inductor"):  # each needs a function of its own: Dynamo keeps what it compiled for one
        calls[way] = partial(torch.compile(lambda y: function(y), dynamic=False, backend=compiler(way)), x)
    error = max(float((ours - exact).norm() / exact.norm())
                for ours, exact in zip(floats(calls["fuseplan"]()), floats(function(x.double())), strict=True))
    calls["inductor"]()
    timed = {way: graph for way, call in calls.items() if (graph := captured(call)) is not None
             } if device == "cuda" else calls
    times = contest(timed, device)
    cells = " | ".join(f"{times[way]:.1f}" if way in times else "-" for way in calls)
    over = f"{times['inductor'] / times['fuseplan']:.2f}x"
    print(f"| {name} of {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')} | {cells} | {over} "
          f"| {error:.1e} |", flush=True)
    return error <= MOST_ERROR[dtype]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tune", action="store_true", help="tune each function first")
    parser.add_argument("--only", default="", metavar="WORDS", help="functions with this in their names")
    args = parser.parse_args()
    torch.manual_seed(0)
    print("| function | eager | fuseplan | TorchInductor | over TorchInductor | error |")
    with torch.no_grad():
        wrong = [name for name in CASES if args.only in name and not check(name, args.device, args.tune)]
    print(fuseplan.stats())
    for name in wrong:
        print(f"off: {name}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
