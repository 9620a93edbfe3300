"""Every function of the recipes at every number of a 16-bit type, and densely over float32: how wrong a back end is.

``python function_tails.py triton FOLDER`` (with ``TRITON_INTERPRET=1``) prints a list of complaints as JSON; the C++
back end's test imports this file. The oracle is the ATen op in float64; eager, in the type itself, says what may go.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fuseplan.kernels.ir.backend import SM90
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.planner.groups.compute_graph import lower_group

sys.path.insert(0, str(Path(__file__).parent))
from graphs import Builder
from interpret_kernels import backend_under_test

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Attributes of ops that take some; one kernel has an output for each.
FUNCTIONS: tuple[tuple[str, dict[str, object]], ...] = (
    ("gelu.default", {}), ("gelu.default", {"approximate": "tanh"}), ("silu.default", {}), ("sigmoid.default", {}),
    ("tanh.default", {}), ("erf.default", {}), ("exp.default", {}), ("exp2.default", {}), ("log.default", {}),
    ("log1p.default", {}), ("sqrt.default", {}), ("rsqrt.default", {}), ("reciprocal.default", {}), ("sin.default", {}),
    ("cos.default", {}), ("softplus.default", {}), ("log_sigmoid.default", {}), ("mish.default", {}),
    ("hardswish.default", {}), ("hardsigmoid.default", {}), ("relu6.default", {}), ("leaky_relu.default", {}),
    ("floor.default", {}), ("ceil.default", {}), ("round.default", {}), ("abs.default", {}), ("neg.default", {}),
    ("pow.Tensor_Scalar", {"exponent": 3}), ("pow.Tensor_Scalar", {"exponent": -0.5}),
)
#: Units in the last place, and what is nothing beside the numbers of a model.
_UNITS, _NOTHING = 4, 1e-6

#: GPU kernels reduce angles up to 2^50, but count on fused multiply-adds above 2^20, which the interpreter lacks.
_INTERPRETED_ANGLE = 2.0**20

Results = Callable[[KernelIR, torch.Tensor], list[torch.Tensor]]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a 16-bit type; of float32 every magnitude, the everyday range, and edges."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(16, 4096)
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-40, 3.4e38, -3.4e38, -1e10])
    bits = torch.randint(-(2**31), 2**31, (2**15,), generator=generator).to(torch.int32).view(torch.float32)
    near = (torch.rand(2**15 - len(edges), generator=generator) - 0.5) * 40
    return torch.cat([edges, bits, near]).reshape(16, 4096)


def complaints(run: Results, numerics: str, dtype: torch.dtype, on_gpu: bool = False) -> Iterator[str]:
    """Where a kernel is farther from float64 than eager, by more than a few units in the last place.

    Args:
        run: Runs a kernel on its only input.
        numerics: How it rounds.
        dtype: Type of the input and of all results.
        on_gpu: GPU kernels, interpreted: exp is one instruction after a product, whose rounding it makes |x| times as
            large; and angles are small.
    """
    x = numbers(dtype)
    builder = Builder(x=x)
    outputs = [builder(f"aten.{name}", "x", **attrs) for name, attrs in FUNCTIONS]
    exact_builder = Builder(x=x.double())
    exacts = [exact_builder.tensors[exact_builder(f"aten.{name}", "x", **attrs)] for name, attrs in FUNCTIONS]
    graph = builder.graph(*outputs)
    ir = lower_group(graph, outputs, numerics).ir
    for (name, attrs), value, exact, got in zip(FUNCTIONS, outputs, exacts, run(ir, x), strict=True):
        units = torch.full(x.shape, _UNITS)
        if on_gpu and name == "exp.default":
            units = units + x.abs().nan_to_num(0.0).clamp(max=104)
        wrong = _wrong(got, exact, builder.tensors[value], units)
        if on_gpu and name in ("sin.default", "cos.default"):
            wrong &= ~(x.abs() > _INTERPRETED_ANGLE)
        if wrong.any():
            at = int(torch.where(wrong, (got.double() - exact).abs().nan_to_num(math.inf), -1.0).argmax())
            shown = [f"{float(one.flatten()[at]):.9g}" for one in (x, got, exact, builder.tensors[value])]
            yield (f"{name} {attrs or ''} {dtype} {numerics}: {int(wrong.sum())} wrong; "
                   f"f({shown[0]}) = {shown[1]}, exactly {shown[2]}, eager {shown[3]}")


def _wrong(got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    info = torch.finfo(got.dtype)
    unit = exact.abs().clamp(info.tiny, info.max) * info.eps
    allowed = torch.maximum(1.05 * (eager.double() - exact).abs().nan_to_num(0.0), units * unit + _NOTHING)
    rounded = exact.to(got.dtype)
    same = (got == rounded) | (got == eager) | (got.isnan() & (exact.isnan() | eager.isnan()))
    return ~(same | ((got.double() - exact).abs() <= allowed))


def main(name: str, cache_dir: str) -> None:
    from triton_interpreter import mend

    mend()
    backend = backend_under_test(name, cache_dir)

    def run(ir: KernelIR, x: torch.Tensor) -> list[torch.Tensor]:
        outputs = [torch.full(b.shape, math.nan, dtype=getattr(torch, b.dtype)) for b in ir.outputs]
        few_programs = {**backend.default_config(ir, SM90), "block_cols": 4096}
        backend.load(ir, few_programs, SM90)(x, *outputs)
        return outputs

    print(json.dumps([one for dtype in DTYPES for one in complaints(run, "fp32", dtype, on_gpu=True)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
