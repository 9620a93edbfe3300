"""Triton kernels that do nothing, or keep one arithmetic unit of a GPU busy. Imported only where a GPU is probed."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def nothing(x_ptr):  # type: ignore[no-untyped-def]
    """Only launches."""


@triton.jit
def only_wait(x_ptr):  # type: ignore[no-untyped-def]
    """Only launches: lets the next kernel start, waits for the one before; for launches with ``launch_pdl=True``."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def wait_and_negate(x_ptr, y_ptr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The shortest elementwise kernel that waits for the one before; for launches with ``launch_pdl=True``."""
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    gdc_wait()
    tl.store(y_ptr + offsets, -tl.load(x_ptr + offsets))


@triton.jit  # type: ignore[untyped-decorator]
def fma_chain(x_ptr, y_ptr, steps, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """``steps`` dependent fused multiply-adds on every element; the factors keep any start value finite."""
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + offsets)
    for _ in range(0, steps, 4):
        x = tl.fma(x, 0.5, 0.25)
        x = tl.fma(x, 0.5, 0.75)
        x = tl.fma(x, 0.5, 0.25)
        x = tl.fma(x, 0.5, 0.75)
    tl.store(y_ptr + offsets, x)


@triton.jit  # type: ignore[untyped-decorator]
def exp2_chain(x_ptr, y_ptr, steps, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """``steps`` dependent ``x = 2 ** -x`` on every element; they converge to 0.64."""
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + offsets)
    for _ in range(0, steps, 4):
        x = tl.exp2(-x)
        x = tl.exp2(-x)
        x = tl.exp2(-x)
        x = tl.exp2(-x)
    tl.store(y_ptr + offsets, x)
