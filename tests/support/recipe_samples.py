"""Kernels that recipes lower to, where they ask for what no hand-built sample has: for every back end's tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from graphs import Builder
from ir_samples import Sample

from fuseplan.planner.graph.dataflow import Ref
from fuseplan.planner.lowering.lower import lower


def _sample(name: str, op: str, *operands: torch.Tensor, results: int = 1, **attrs: Any) -> Sample:
    names = [f"x{number}" for number in range(len(operands))]
    given = dict(zip(names, operands, strict=True))
    builder = Builder(**given)
    values = builder.many(op, *names, outputs=results, **attrs)
    ir = lower(builder.graph(*values), values[:1], "fp32", values).ir
    return Sample(name, ir, overrides=lambda name, _: given[name])


def recipe_samples() -> list[Sample]:
    """One of each kind at odd sizes, made anew and equal every time."""
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator)

    def amounts(dtype: torch.dtype) -> torch.Tensor:
        """Of shifts: none, all bits and more, and less than none."""
        bits = torch.iinfo(dtype).bits
        few = torch.tensor([0, 1, bits - 1, bits, bits + 1, 32, 63, 64, 127, -1, -bits], dtype=torch.int64).to(dtype)
        return few.repeat(4)[torch.randperm(44, generator=generator)][:37]

    half = torch.bfloat16
    words = torch.randint(-(2**31), 2**31, (3, 37), generator=generator)
    holes = torch.where(floats(5, 37) > 1, torch.nan, floats(5, 37))
    tails = torch.cat([torch.tensor([-1e4, -88.0, -20.0, -1e-3, -0.0, 1e-30, 20.0, 21.0, 1e4]), floats(28) * 9])
    return [
        _sample("max_position", "aten.max.dim", holes, results=2, dim=-1),
        _sample("max_position", "aten.max.dim", integers(3, 129), results=2, dim=-1, keepdim=True),
        _sample("max_position", "aten.max.dim", floats(4, 70, dtype=half).round(), results=2, dim=1),
        _sample("argmin", "aten.argmin.default", integers(7, 33).float(), dim=-1),
        _sample("group_norm", "aten.group_norm.default", floats(2, 6, 5, 7), floats(6), floats(6), num_groups=3),
        _sample("group_norm", "aten.group_norm.default", floats(1, 4, 8, 16, dtype=half), floats(4, dtype=half),
                floats(4, dtype=half), num_groups=2),
        _sample("group_norm", "aten.group_norm.default", floats(2, 6, 4, 12), floats(6), floats(6), num_groups=2),
        _sample("batch_norm", "aten.batch_norm.default", floats(2, 3, 5, 7), floats(3), floats(3), floats(3),
                floats(3).abs(), training=False, momentum=0.1, eps=1e-5, cudnn_enabled=True),
        _sample("pooled", "aten.mean.dim", floats(2, 3, 5, 7), dim=(2, 3)),
        _sample("indexed", "aten.index.Tensor", floats(5, 9, 33), integers(4), indices=(Ref(1),)),
        _sample("indexed", "aten.index.Tensor", floats(5, 9, 33, dtype=half), integers(2, 1), integers(3),
                indices=(Ref(1), None, Ref(2))),
        _sample("padded", "aten.pad.default", floats(3, 5, 37), pad=(2, 5, 1, 0), value=-1.5),
        _sample("differences", "aten.diff.default", floats(3, 37), floats(3, 1), append=None),
        _sample("rolled", "aten.roll.default", floats(3, 5, 37), shifts=(2, -40), dims=(1, -1)),
        _sample("repeated", "aten.repeat.default", floats(3, 37), repeats=(2, 1, 3)),
        _sample("upsampled", "aten.upsample_nearest2d.default", floats(2, 3, 5, 9), output_size=(10, 36)),
        _sample("floor_divided", "aten.floor_divide.default", integers(3, 37), other=-3),
        *(_sample("shifted", f"aten.bitwise_{side}_shift.Tensor", words.to(dtype), amounts(dtype))
          for side in ("left", "right") for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)),
        _sample("shifted", "aten.bitwise_right_shift.Tensor_Scalar", words.to(torch.uint8), other=8),
        _sample("softplus", "aten.softplus.default", tails),
        _sample("summed", "aten.sum.dim_IntList", floats(6, 4, 37, dtype=half), dim=(1,)),
        _sample("folded_across", "aten.sum.dim_IntList", floats(3, 45, 37), dim=(1,)),
        _sample("folded_across", "aten.mean.dim", floats(40, 3, 19, dtype=half), dim=(0, 1), keepdim=True),
        _sample("folded_across", "aten.mean.dim", floats(2, 21, 5, 7).to(memory_format=torch.channels_last),
                dim=(2, 3)),
        _sample("folded_across", "aten.softmax.int", floats(2, 19, 3, 13, dtype=half), dim=1),
        _sample("folded_across", "aten.softmax.int", floats(2, 19, 5, 13).transpose(1, 3), dim=2),
        _sample("folded_across", "aten.var.correction", floats(70, 33), dim=(0,), correction=1),
        _sample("folded_across", "aten.max.dim", torch.where(floats(5, 21, 17) > 2, math.nan, floats(5, 21, 17)),
                results=2, dim=1),
        _sample("folded_across", "aten.argmin.default", integers(23, 11), dim=0),
        _sample("folded_across", "aten.any.dim", floats(23, 11) > 2, dim=0),
        _sample("folded_across", "aten.all.dims", integers(3, 23, 11), dim=(0, 1)),
        _sample("folded_across", "aten.sum.dim_IntList", integers(1100, 11).to(torch.uint8), dim=(0,)),
        _sample("scanned", "aten.cumsum.default", floats(3, 129), dim=1),
        _sample("scanned", "aten.cumsum.default", floats(2, 2100, dtype=half), dim=-1),
        _sample("scanned", "aten.cumsum.default", floats(70, 3, 19), dim=0),
        _sample("scanned", "aten.cumsum.default", floats(2, 45, 37, dtype=half), dim=1),
        _sample("scanned", "aten.cumsum.default", floats(5, 37) > 0, dim=1),
        _sample("scanned", "aten.cumsum.default", integers(23, 40), dim=0),
        _sample("scanned", "aten.cumprod.default", floats(9, 37), dim=1),
        _sample("scanned", "aten.cumprod.default", integers(9, 40), dim=0),
        _sample("multiplied", "aten.prod.dim_int", integers(5, 37), dim=1),
        _sample("multiplied", "aten.prod.dim_int", floats(9, 5, 37), dim=0),
        _sample("folded_across", "aten.logsumexp.default", floats(3, 5, 4), dim=(0, 1, 2)),
        _sample("scanned", "aten.cummax.default", holes, results=2, dim=1),
        _sample("scanned", "aten.cummin.default", integers(45, 19), results=2, dim=0),
        _sample("scanned", "aten.cummax.default", floats(2, 2100, dtype=half).round(), results=2, dim=-1),
        _sample("scanned", "aten.logcumsumexp.default", floats(3, 129), dim=1),
        _sample("scanned", "aten.logcumsumexp.default", holes.nan_to_num(-math.inf), dim=0),
    ]
