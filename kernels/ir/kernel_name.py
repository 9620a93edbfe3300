"""The name of a kernel's function, which is what profilers show: what the kernel computes, in a few words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from fuseplan.kernels.ir.ir import Apply, KernelIR, Reduce, Scan, Segment

#: Letters of a name: profilers cut longer ones.
_LONGEST = 60


def kernel_name(ir: KernelIR) -> str:
    """``fuseplan_`` and each run of an op in order, cut to 60 letters at an op: equal kernels have equal names."""
    words = [word for segment in ir.segments for word, _ in groupby(_ops(segment))]
    name = "fuseplan"
    for word in words or ["copy"]:
        if len(name) + 1 + len(word) > _LONGEST:
            break
        name += f"_{word}"
    return name


def _ops(segment: Segment) -> Iterator[str]:
    """What a segment applies, and its sums; the left sides of its matmuls, then the right ones, come before it."""
    for product in segment.products:
        yield from _ops(product.left)
        yield from _ops(product.right)
        yield "matmul"
    for instr in segment.body:
        if isinstance(instr, Apply):
            yield instr.op
        elif isinstance(instr, Reduce):
            yield instr.kind
        elif isinstance(instr, Scan):
            yield f"cum{instr.kind}"
