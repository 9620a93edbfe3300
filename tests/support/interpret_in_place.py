"""Run a GPU back end's kernels under Triton's interpreter with outputs in inputs, and compare with separate outputs.

A program of its own, as :mod:`interpret_kernels` is. It prints one object for each sample, config and choice of inputs.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fuseplan.kernels.gpu.backend import GpuBackend
from fuseplan.kernels.ir.backend import SM90, fused_call
from fuseplan.kernels.ir.in_place import ReuseOptions

sys.path.insert(0, str(Path(__file__).parent))
from interpret_kernels import backend_under_test, configs
from ir_samples import dynamic_samples, label, static_samples
from triton_interpreter import mend

#: More elements than this take the interpreter too long.
_MOST_ELEMENTS = 1500


def choices(options: ReuseOptions) -> Iterator[dict[int, int]]:
    """Every way to put some outputs into inputs."""
    for picked in itertools.product(*([None, *sources] for sources in options.values())):
        chosen = {to: source for to, source in zip(options, picked, strict=True) if source is not None}
        if chosen and len(set(chosen.values())) == len(chosen):
            yield chosen


def same_bits(own: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN equals itself here."""
    return torch.equal(own.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def main(name: str, cache_dir: str) -> None:
    mend()
    backend = backend_under_test(name, cache_dir)
    assert isinstance(backend, GpuBackend)
    rows: list[dict[str, Any]] = []
    for number, sample in enumerate([*static_samples(), *dynamic_samples()]):
        ir, sizes = sample.ir, [sample.symbols[symbol] for symbol in sample.ir.symbols]
        if backend.refuse(ir, SM90) or sum(t.numel() for t in sample.inputs()) > _MOST_ELEMENTS:
            continue
        default, *others = configs(backend, ir)
        for config in (default, others[number % len(others)]):
            options = backend.reuse_options(ir, config)
            if not options:
                continue
            kernel = backend.load(ir, config, SM90)
            expected = sample.outputs()
            kernel(*sample.inputs(), *expected, *sizes)
            for reuse in choices(options):
                inputs = sample.inputs()
                made = fused_call(kernel, ir, reuse)(*inputs, *sizes)
                results = [made] if isinstance(made, torch.Tensor) else list(made)
                equal = all(same_bits(own, other) for own, other in zip(results, expected, strict=True))
                equal &= all(results[to] is inputs[source] for to, source in reuse.items())
                looped = any(execution.looped for execution in backend.executions(ir, config))
                rows.append({"sample": label(sample), "reuse": reuse, "equal": equal, "looped": looped})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
