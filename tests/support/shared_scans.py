"""Scans of few long rows that programs share, and their errors under Triton's interpreter.

A program of its own, as :mod:`interpret_kernels` is: ``python shared_scans.py FOLDER CASES`` prints a JSON object for
each of the cases, which are JSON as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from graphs import Builder, wide
from kernel_reference import run_reference
from long_folds import rubbish

from fuseplan.planner.lowering.lower import Lowered, lower

#: Of rows, of columns that lie across memory, and of a transposed matrix; products; after folds of the row, and after
#: one another; with values stored on the way and folds of what was scanned; of constants; with infinite numbers, none
#: that is a number, and long tails of -inf; of 64 bits, integers and truth; extremes with their positions, of
#: equal numbers and NaN; and logarithms of sums of exponentials.
SHARED_SCANS = ("rows", "across", "strided", "products", "sampling", "centred", "centred across",
                "twice", "folded", "constants", "not a number", "tails", "doubles", "doubles across", "counts",
                "counts across", "halves", "largest", "largest across", "smallest", "logarithms", "logarithms across")
_DTYPES = {"doubles": torch.float64, "doubles across": torch.float64, "halves": torch.bfloat16}


def _input(name: str, length: int) -> torch.Tensor:
    shape = (length, 5) if "across" in name else (3, length)
    shape = (length, 3) if name == "strided" else shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(_DTYPES.get(name, torch.float32))
    if name == "strided":
        return x.T
    if name in ("largest across", "logarithms across"):
        x[length // 3, 1], x[length // 2, 2], x[2 * length // 3, 2], x[: length // 4, 3] = (
            torch.nan, torch.inf, -torch.inf, -torch.inf)
    if "largest" in name:
        return x.mul(2).round()
    if name in ("not a number", "smallest", "logarithms"):
        x[0, length // 2], x[1, length // 3], x[2, 2 * length // 3] = torch.nan, torch.inf, -torch.inf
    if name == "tails":  # as of logits that are sorted and cut off
        x[0, length // 4 :], x[1, 1:] = -torch.inf, -torch.inf
    return x


def built(name: str, length: int) -> tuple[Builder, tuple[str, ...]]:
    b = Builder(x=_input(name, length))
    dim = 0 if "across" in name else 1

    def running(value: str, kind: str = "cumsum") -> str:
        return b(f"aten.{kind}.default", value, dim=dim)

    if name == "products":
        near_one = b("aten.add.Tensor", b("aten.mul.Tensor", "x", other=1e-3), other=1.0)
        return b, (running(near_one, "cumprod"),)
    if "largest" in name or name == "smallest":
        return b, b.many(f"aten.{'cummin' if name == 'smallest' else 'cummax'}.default", "x", dim=dim, outputs=2)
    if "logarithms" in name:
        return b, (running(b("aten.mul.Tensor", "x", other=3.0), "logcumsumexp"),)
    if name in ("sampling", "tails"):
        shares = running(b("aten.softmax.int", "x", dim=dim))
        return b, (shares, b("aten.gt.Scalar", shares, other=0.7))
    if "centred" in name:
        apart = b("aten.sub.Tensor", "x", b("aten.mean.dim", "x", dim=(dim,), keepdim=True))
        return b, (running(b("aten.div.Tensor", apart, b("aten.std.correction", "x", dim=(dim,), keepdim=True))),)
    if name == "twice":
        small = running(b("aten.mul.Tensor", "x", other=1 / length))
        return b, (running(small), small)
    if name == "folded":
        clipped = b("aten.clamp.default", "x", min=-1.0, max=1.0)
        total = running(clipped)
        largest = b("aten.amax.default", total, dim=(dim,), keepdim=True)
        whole = b("aten.sum.dim_IntList", clipped, dim=(dim,), keepdim=True)
        return b, (b("aten.sub.Tensor", total, largest), clipped, whole)
    if name == "constants":
        row = b("aten.narrow.default", "x", dim=1, start=0, length=1)
        return b, (running(b("aten.expand.default", row, size=(3, length))),)
    if "counts" in name:
        positive = b("aten.gt.Scalar", "x", other=0)
        return b, (running(positive), running(b("aten.to.dtype", positive, dtype="int32"), "cumsum"))
    return b, (running("x"),)


def lowered_scan(name: str, length: int) -> Lowered:
    """One of :data:`SHARED_SCANS`, of so many columns."""
    b, outputs = built(name, length)
    return lower(b.graph(*outputs), [node.name for node in b.nodes], "fp32", outputs)


def _error(output: torch.Tensor, expected: torch.Tensor, dim: int) -> float:
    """The largest error beside the largest finite number of its row; infinite where only one is a number."""
    if not output.dtype.is_floating_point:
        return 0.0 if torch.equal(output, expected.to(output.dtype)) else torch.inf
    output, expected = output.double(), expected.double()
    largest = expected.nan_to_num(0, 0, 0).abs().amax(dim, keepdim=True)
    same = (output == expected) | (output.isnan() & expected.isnan())
    return torch.where(same, 0.0, (output - expected).abs() / (1e-30 + largest)).nan_to_num(nan=torch.inf).max().item()


def main(cache_dir: str, cases: str) -> None:
    """``cases``: name, columns, and configuration, or None for the default."""
    from triton_interpreter import mend

    from fuseplan.kernels.gpu.tile import launches
    from fuseplan.kernels.ir.backend import SM90
    from fuseplan.kernels.triton.backend import TritonBackend

    mend()
    backend, rows = TritonBackend(cache_dir), []
    for name, length, given in json.loads(cases):
        lowered = lowered_scan(name, length)
        inputs = built(name, length)[0].values(lowered.inputs)
        expected = run_reference(lowered.ir, wide(inputs))
        config = given or backend.default_config(lowered.ir, SM90)
        kernel, made = backend.load(lowered.ir, config, SM90), []
        for _ in range(2):
            made.append([rubbish(one) for one in lowered.ir.outputs])
            kernel(*inputs, *made[-1])
        dim = 0 if "across" in name else 1
        rows.append({
            "name": name, "config": config, "launches": launches(lowered.ir, config),
            "error": max(_error(one, exact, dim) for one, exact in zip(made[0], expected, strict=True)),
            "repeats": all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(*made, strict=True)),
        })
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
