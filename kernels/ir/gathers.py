"""What loads and stores reach, where their address is data too: the rows of an embedding, the end of a cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fuseplan.kernels.ir.index import Coord, Index, Size, evaluate
from fuseplan.kernels.ir.ir import (
    Apply,
    Dot,
    Instr,
    Iota,
    KernelIR,
    Load,
    Reduce,
    RowValue,
    Scan,
    Segment,
    operands,
)
from fuseplan.kernels.ir.rewrite import ancestors


def may_fail(ir: KernelIR) -> bool:
    """Whether a call of a kernel fails for some data: an index outside its table."""
    return any(body.checks for body in ir.bodies)


def value_axes(segment: Segment) -> list[frozenset[int]]:
    """For each value, the coordinates it depends on."""
    found: list[frozenset[int]] = []
    for instr in segment.body:
        own = instr.index.axes() if isinstance(instr, Load | Iota | Dot) else set()
        if isinstance(instr, Dot | RowValue):  # all rows tell it apart, though its left side may not know some
            own = {*own, *range(segment.col_axis)}
        if isinstance(instr, Scan):
            own = {segment.col_axis}
        axes = frozenset(own).union(*(found[arg] for arg in operands(instr)))
        found.append(axes - {segment.col_axis} if isinstance(instr, Reduce) else axes)
    return found


def footprint(index: Index, sizes: Sequence[int]) -> int:
    """Distinct elements that an index reaches: the product of the extents it depends on."""
    total = math.prod(sizes[axis] for axis in index.axes())
    plain = all(isinstance(atom, Coord) for atom, _ in index.terms)
    return total if plain else min(total, evaluate(index.maximum(), {}) + 1)


def gathered_elements(ir: KernelIR) -> Mapping[int, int]:
    """Most elements that a launch of a static kernel can read through gathers, by buffer."""
    most: dict[int, int] = {}
    for segment in ir.segments:
        if not any(load.gather is not None for load in segment.loads):
            continue
        sizes = segment.extents()
        for instr, axes in zip(segment.body, value_axes(segment), strict=True):
            if isinstance(instr, Load) and instr.gather is not None:
                reached = math.prod(sizes[axis] for axis in axes)
                most[instr.buffer] = most.get(instr.buffer, 0) + reached
    return {buffer: min(count, evaluate(ir.buffers[buffer].numel, {})) for buffer, count in most.items()}


def tables(ir: KernelIR) -> dict[int, int]:
    """Buffers that a static kernel reads through gathers only, along their outermost dimension, with its size."""
    found: dict[int, int] = {}
    plain: set[int] = set()
    for load in (load for segment in ir.segments for load in segment.loads):
        buffer, gather = ir.buffers[load.buffer], load.gather
        if gather is not None and (gather.stride, gather.extent) == (buffer.strides[0], buffer.shape[0]):
            found[load.buffer] = evaluate(buffer.shape[0], {})
        else:
            plain.add(load.buffer)
    return {number: rows for number, rows in found.items() if number not in plain}


def index_limits(ir: KernelIR) -> Mapping[int, int]:
    """For each integer buffer whose values pick elements: every value below this is one that exists."""
    limits: dict[int, int] = {}
    for size, made_of in _gathers(ir):
        extent = evaluate(size, {})
        for instr in made_of:
            if isinstance(instr, Load) and not ir.buffers[instr.buffer].dtype.startswith(("float", "bfloat")):
                limits[instr.buffer] = min(extent, limits.get(instr.buffer, extent))
    return limits


def computes_indices(ir: KernelIR) -> bool:
    """Whether a kernel looks up elements by numbers that it computes from its inputs, not only by inputs themselves."""
    return any(
        any(isinstance(one, Apply | Reduce | Scan) for one in made_of) and any(isinstance(one, Load) for one in made_of)
        for _, made_of in _gathers(ir)
    )


def _gathers(ir: KernelIR) -> Iterator[tuple[Size, list[Instr]]]:
    """Of each gather its extent, and all that its value is made of."""
    for segment in ir.segments:
        for gather in segment.gathers():
            yield gather.extent, [segment.body[value] for value in ancestors(segment.body, [gather.value])]
