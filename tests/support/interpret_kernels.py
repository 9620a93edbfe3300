"""Run a GPU back end's kernels on CPU tensors under Triton's interpreter and print how wrong they are, as JSON.

A program of its own: Triton reads ``TRITON_INTERPRET`` when it is first imported, and its interpreter patches
``triton.language`` for the whole process. ``python interpret_kernels.py triton FOLDER [--all]`` prints one object for
each sample and config, with ``error`` in units of the tolerance: the default config and another, or all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from kernel_reference import run_reference

from fuseplan.kernels.gpu.tile import next_power_of_2
from fuseplan.kernels.ir.backend import SM90, Backend, Config
from fuseplan.kernels.ir.ir import KernelIR

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
        yield {"block_rows": 2, "block_cols": 16, "num_warps": 1, "splits": 4}
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


def main(name: str, cache_dir: str, *options: str) -> None:
    from triton_interpreter import mend

    mend()
    backend = backend_under_test(name, cache_dir)
    rows = []
    for number, sample in enumerate([*static_samples(), *dynamic_samples(), *recipe_samples()]):
        refused = backend.refuse(sample.ir, SM90)
        if refused:
            rows.append({"sample": label(sample), "config": {}, "error": 0.0, "refused": refused})
            continue
        inputs = sample.inputs()
        reference = run_reference(sample.ir, inputs, sample.symbols)
        longest = max(segment.extents()[-1] for segment in sample.ir.bind(sample.symbols).segments)
        default, *others = configs(backend, sample.ir, longest)
        if "--all" not in options:
            others = [others[number % len(others)]]
        for config in (default, *others):
            outputs = sample.outputs()
            kernel = backend.load(sample.ir, config, SM90)
            kernel(*inputs, *outputs, *(sample.symbols[name] for name in sample.ir.symbols))
            error = worst_error(sample.ir, outputs, reference)
            rows.append({"sample": label(sample), "config": dict(config), "error": error, "refused": None})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
