"""Run a GPU back end's kernels on CPU tensors under Triton's interpreter and print how wrong they are, as JSON.

A program of its own: Triton reads ``TRITON_INTERPRET`` when it is first imported, and its interpreter patches
``triton.language`` for the whole process. ``python interpret_kernels.py triton FOLDER`` prints one object for each
sample and config, with ``error`` in units of the tolerance.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_reference import run_reference

from fuseplan.kernels.gpu.tile import next_power_of_2
from fuseplan.kernels.ir.backend import SM90, Backend, Config
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.triton import values

sys.path.insert(0, str(Path(__file__).parent))
from ir_samples import dynamic_samples, label, static_samples
from recipe_samples import recipe_samples

#: Largest error against float64, relative to 1 + |value|: half a unit in the last place of the stored type (some of
#: them for fp32 and fp64).
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 4.2e-3, "float16": 5.2e-4, "float8_e4m3fn": 6.3e-2}


def worst_error(ir: KernelIR, outputs: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Largest error in units of the tolerance; infinite for a wrong integer, or NaN on one side only."""
    worst = 0.0
    floats = {instr.dtype for segment in ir.segments for instr in segment.body} & {"float32", "float64"}
    for output, expected in zip(outputs, reference, strict=True):
        if output.numel() == 0:
            continue
        if not output.dtype.is_floating_point:
            worst = max(worst, 0.0 if torch.equal(output, expected.to(output.dtype)) else float("inf"))
            continue
        name = str(output.dtype).removeprefix("torch.")
        tolerance = TOLERANCE["float32" if name == "float64" and "float32" in floats else name]
        actual, expected = output.double(), expected.double()
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        error = torch.where(same, 0.0, (actual - expected).abs() / (1 + expected.abs()))
        worst = max(worst, error.nan_to_num(nan=float("inf")).max().item() / tolerance)
    return worst


def configs(backend: Backend, ir: KernelIR, longest: int = 8192) -> Iterator[Config]:
    """The default, and corners: one narrow row, several narrow rows, a row in chunks, the ``longest`` at once."""
    default = backend.default_config(ir, SM90)
    yield default
    if backend.name == "triton":
        yield {"block_rows": 1, "block_cols": 32, "num_warps": 1, "num_stages": 1, "loads": "early"}
        yield {"block_rows": 4, "block_cols": 16, "num_warps": 1, "num_stages": 2}
        yield {"block_rows": 1, "block_cols": 128, "num_warps": 1, "num_stages": 1}
        yield {"block_rows": 2, "block_cols": next_power_of_2(longest), "num_warps": 1, "loads": "early"}
    else:
        yield {tunable.name: tunable.choices[0] for tunable in backend.tunables(ir, SM90)}
        yield {tunable.name: tunable.choices[-1] for tunable in backend.tunables(ir, SM90)}


def backend_under_test(name: str, cache_dir: str) -> Backend:
    if name == "triton":
        from fuseplan.kernels.triton.backend import TritonBackend

        return TritonBackend(cache_dir)
    from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend

    return NinetoothedBackend(cache_dir)


def run_interpreted(backend: Backend, ir: KernelIR, inputs: list[torch.Tensor]) -> float:
    """Error of a static kernel's default config on ``inputs``, in units of the tolerance; outputs start as rubbish."""
    outputs = []
    for buffer in ir.outputs:
        dtype = getattr(torch, buffer.dtype)
        outputs.append(torch.empty_strided(buffer.shape, buffer.strides, dtype=dtype))
        outputs[-1].fill_(float("nan") if dtype.is_floating_point else 1)
    kernel = backend.load(ir, backend.default_config(ir, SM90), SM90)
    kernel(*inputs, *outputs)
    return worst_error(ir, outputs, run_reference(ir, inputs))


def round_to_nearest() -> None:
    """Triton's interpreter truncates float32 to bfloat16, and loses a carry of its float8, where the compiled kernel
    rounds to nearest even; its float8 knows no NaN and does not saturate. With that mended, kernels need no clamps of
    their own here, and are what is compiled."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    values.interpreter_is_on = lambda: False
    original = InterpreterBuilder.cast_impl

    def cast_impl(self: InterpreterBuilder, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return original(self, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data, np.float32)).bfloat16()
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast_impl
    original_fp = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: InterpreterBuilder, source: Any, target: Any, mode: Any) -> Any:
        if (source.dtype.scalar, target.scalar) == (tl.float8e4nv, tl.float32):
            narrow = torch.from_numpy(np.ascontiguousarray(source.data)).view(torch.float8_e4m3fn)
            return TensorHandle(narrow.float().numpy(), tl.float32)
        if target.scalar != tl.float8e4nv or source.dtype.scalar not in (tl.float32, tl.float64):
            return original_fp(self, source, target, mode)
        wide = torch.from_numpy(np.ascontiguousarray(source.data)).clamp(-448, 448)
        return TensorHandle(wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), tl.float8e4nv)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def main(name: str, cache_dir: str) -> None:
    round_to_nearest()
    backend = backend_under_test(name, cache_dir)
    rows = []
    for sample in [*static_samples(), *dynamic_samples(), *recipe_samples()]:
        refused = backend.refuse(sample.ir, SM90)
        if refused:
            rows.append({"sample": label(sample), "config": {}, "error": 0.0, "refused": refused})
            continue
        inputs = sample.inputs()
        reference = run_reference(sample.ir, inputs, sample.symbols)
        longest = max(segment.extents()[-1] for segment in sample.ir.bind(sample.symbols).segments)
        for config in configs(backend, sample.ir, longest):
            outputs = sample.outputs()
            kernel = backend.load(sample.ir, config, SM90)
            kernel(*inputs, *outputs, *(sample.symbols[name] for name in sample.ir.symbols))
            error = worst_error(sample.ir, outputs, reference)
            rows.append({"sample": label(sample), "config": dict(config), "error": error, "refused": None})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
