"""Does a matmul of 64 rows gain from activations that stay in shared memory? A sketch, timed beside cuBLAS on a GPU.

    python tests/checks/check_resident_activations_gpu.py [--seconds 0.1]

In kernels with matmuls each tile of weights reads all activations from the second-level cache: for 64 rows as many
bytes as weights, or more. Here a program keeps one block of the inner dimension of all rows, and only weights pass by.
The sums of all blocks, in float32, are added by a second kernel, in order. Sizes are those of Llama-3-8B.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fuseplan.kernels.registry import local_target
from fuseplan.search.timing.measure import rotating_operands, screen
from fuseplan.search.timing.timers import timer_for

ROWS = 64
#: Rows of weights, and the inner dimension.
SHAPES = {"qkv": (6144, 4096), "proj": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
#: Inner elements of a block, columns of a tile, tiles on their way, warps, programs for each multiprocessor.
CONFIGS = (
    (1024, 16, 2, 4, 1), (1024, 16, 2, 8, 1), (512, 32, 3, 4, 1), (512, 32, 4, 4, 1), (512, 32, 4, 8, 1),
    (512, 64, 2, 8, 1), (512, 16, 2, 4, 2), (256, 32, 3, 4, 2), (256, 64, 4, 4, 1), (256, 64, 2, 4, 2),
    (256, 128, 2, 8, 1),
)


@triton.jit
def partial_sums(
    x, w, partial, rows: tl.constexpr, inner: tl.constexpr, cols: tl.constexpr, block: tl.constexpr,
    tile: tl.constexpr, groups: tl.constexpr, stages: tl.constexpr,
):
    """[inner / block, rows, cols]: products of a block of each row with that of all weights."""
    blocks: tl.constexpr = inner // block
    program = tl.program_id(0)
    at = program % blocks
    k = at * block + tl.arange(0, block)
    row = tl.arange(0, rows)
    gdc_launch_dependents()
    gdc_wait()
    held = tl.load(x + row[:, None] * inner + k[None, :])
    for number in tl.range(program // blocks, cols // tile, groups, num_stages=stages):
        col = number * tile + tl.arange(0, tile)
        weights = tl.load(w + col[:, None] * inner + k[None, :], eviction_policy="evict_first")
        tl.store(partial + (at * rows + row[:, None]) * cols + col[None, :], tl.dot(held, tl.trans(weights)))


@triton.jit
def added(partial, residual, out, count: tl.constexpr, blocks: tl.constexpr, size: tl.constexpr):
    """The sum of all blocks, and a residual."""
    at = tl.program_id(0) * size + tl.arange(0, size)
    gdc_launch_dependents()
    gdc_wait()
    total = tl.load(residual + at).to(tl.float32)
    for block in tl.static_range(blocks):
        total += tl.load(partial + block * count + at)
    tl.store(out + at, total.to(out.dtype.element_ty))


def resident(config: tuple[int, int, int, int, int], cores: int) -> Callable[..., torch.Tensor]:
    block, tile, stages, warps, each = config

    def run(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        (cols, inner), blocks = w.shape, x.shape[1] // block
        partial = torch.empty(blocks, ROWS, cols, device=x.device)
        groups, out = min(max(1, each * cores // blocks), cols // tile), torch.empty_like(residual)
        partial_sums[(blocks * groups,)](
            x, w, partial, ROWS, inner, cols, block, tile, groups, stages, num_warps=warps, launch_pdl=True)
        added[(ROWS * cols // 1024,)](partial, residual, out, ROWS * cols, blocks, 1024, launch_pdl=True)
        return out

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.1, help="for each configuration")
    seconds = parser.parse_args().seconds
    target, timer = local_target("cuda"), timer_for("cuda", "graph")
    print("| matmul | floor, us | cuBLAS and an add, us | block, tile, stages, warps, programs | us | error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (cols, inner) in SHAPES.items():
        x, w, residual = (
            torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 8
            for shape in ((ROWS, inner), (cols, inner), (ROWS, cols))
        )
        operands = rotating_operands([x, w, residual], [True, False, True], target.l2_bytes, 40 * 2**30)
        exact = residual.double() + x.double() @ w.double().T
        library = screen(timer, lambda x, w, residual: residual + torch.nn.functional.linear(x, w), operands, seconds)
        for config in CONFIGS:
            run = resident(config, target.cores)
            try:
                error = float((run(x, w, residual).double() - exact).norm() / exact.norm())
                time_us = f"{screen(timer, run, operands, seconds).median_us:.2f}"
            except Exception as failure:  # one that does not fit costs only itself
                error, time_us = float("nan"), type(failure).__name__
            floor_us = w.nbytes / 4.27e6
            cells = (name, f"{floor_us:.1f}", f"{library.median_us:.2f}", config, time_us, f"{error:.1e}")
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
