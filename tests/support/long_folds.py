"""Folds of few rows with many columns, and their errors under Triton's interpreter.

A program of its own, as :mod:`interpret_kernels` is: ``python long_folds.py FOLDER CONFIGS`` prints a JSON object for
each fold and each of the configurations, which are JSON as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from graphs import Builder, wide
from kernel_reference import run_reference

from fuseplan.kernels.ir.ir import Buffer
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.lowering.lower import Lowered, lower

#: Folds that programs can share: of everything, of rows that lie apart, of rows side by side, several of one row, with
#: elements stored on the way, with infinite ones and none that is a number; variances around large means, and of rows
#: with infinite ones; of 32 and of 64 bits, and of truth, beside each other.
LONG_FOLDS = ("sum", "largest", "rows", "across", "several", "stored", "not a number", "variances", "variances across",
              "endless variances", "counts", "counts across", "doubles")
#: Those that each program needs before it goes on.
WHOLE_FOLDS = ("scaled", "normalised", "normalised across")


def _input(name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
    columns = {"rows": (3, length), "several": (2, length), "variances": (3, length), "endless variances": (3, length),
               "normalised": (3, length), "counts": (3, length), "doubles": (3, length)}
    shape = (length, 5) if "across" in name else columns.get(name, (length,))
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    if name.startswith(("variances", "normalised")):
        x = x + 100 * (torch.arange(5) if "across" in name else torch.arange(3)[:, None])  # deviations are small
    if name == "endless variances":
        x[0, 0], x[1, length - 1], x[2, length // 2] = torch.inf, -torch.inf, torch.nan
    if name == "not a number":
        x[length // 2], x[length // 3] = torch.nan, torch.inf
    return x


def built(name: str, length: int, dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    b = Builder(x=_input(name, length, dtype))
    doubled = b("aten.mul.Tensor", "x", "x")
    if name in ("sum", "stored"):
        total = b("aten.sqrt.default", b("aten.sum.default", doubled))
        return b, (total, doubled) if name == "stored" else (total,)
    if name == "scaled":
        return b, (b("aten.div.Tensor", "x", b("aten.amax.default", b("aten.abs.default", "x"), dim=())),)
    dim = 0 if "across" in name else 1
    if "variances" in name:
        return b, (b("aten.var.correction", "x", dim=(dim,), correction=1), b("aten.mean.dim", "x", dim=(dim,)))
    if "normalised" in name:
        apart = b("aten.sub.Tensor", "x", b("aten.mean.dim", "x", dim=(dim,), keepdim=True))
        return b, (b("aten.div.Tensor", apart, b("aten.std.correction", "x", dim=(dim,), correction=0, keepdim=True)),)
    if name in ("largest", "not a number"):
        return b, (b("aten.amax.default", doubled, dim=()),)
    if "counts" in name:
        positive = b("aten.gt.Scalar", "x", other=0)
        count = b("aten.sum.dim_IntList", positive, dim=(dim,))
        return b, (b("aten.amax.default", doubled, dim=(dim,)), count, b("aten.all.dim", positive, dim=dim))
    if name == "several":
        folds = [b(f"aten.{kind}.default", doubled, dim=(1,)) for kind in ("amax", "amin")]
        means = b("aten.mean.dim", "x", dim=(1,))
        return b, (b("aten.sub.Tensor", *folds), means)
    return b, (b("aten.sum.dim_IntList", doubled, dim=(dim,)),)


def lowered_fold(name: str, length: int, dtype: torch.dtype = torch.float32) -> Lowered:
    """One of :data:`LONG_FOLDS` or :data:`WHOLE_FOLDS`, of so many columns."""
    b, outputs = built(name, length, dtype)
    return lower(b.graph(*outputs), [node.name for node in b.nodes], "fp32", outputs)


def rubbish(buffer: Buffer) -> torch.Tensor:
    dtype = torch_dtype(buffer.dtype)
    return torch.full(buffer.shape, torch.nan if dtype.is_floating_point else 1, dtype=dtype)


def main(cache_dir: str, configs: str) -> None:
    from interpret_kernels import worst_error
    from triton_interpreter import mend

    from fuseplan.kernels.ir.backend import SM90
    from fuseplan.kernels.triton.backend import TritonBackend

    mend()
    backend, rows = TritonBackend(cache_dir), []
    for name in (*LONG_FOLDS, *WHOLE_FOLDS):
        dtype = torch.float64 if name == "doubles" else torch.float32
        lowered = lowered_fold(name, 1031, dtype)
        inputs = built(name, 1031, dtype)[0].values(lowered.inputs)
        expected = run_reference(lowered.ir, wide(inputs))
        for config in json.loads(configs):
            kernel, made = backend.load(lowered.ir, config, SM90), []
            for _ in range(2):
                made.append([rubbish(one) for one in lowered.ir.outputs])
                kernel(*inputs, *made[-1])
            repeats = all(map(lambda a, b: torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)), *made))
            rows.append({"name": name, "config": config, "error": worst_error(lowered.ir, made[0], expected),
                         "repeats": repeats})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
