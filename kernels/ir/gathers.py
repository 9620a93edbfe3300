"""What a kernel's gathers reach: loads whose address is data, such as the rows of an embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fuseplan.kernels.ir.index import evaluate
from fuseplan.kernels.ir.ir import Apply, Instr, Iota, KernelIR, Load, Reduce, Segment, operands


def value_axes(segment: Segment) -> list[frozenset[int]]:
    """For each value, the coordinates it depends on."""
    found: list[frozenset[int]] = []
    for instr in segment.body:
        own = instr.index.axes() if isinstance(instr, Load | Iota) else set()
        axes = frozenset(own).union(*(found[arg] for arg in operands(instr)))
        found.append(axes - {segment.col_axis} if isinstance(instr, Reduce) else axes)
    return found


def gathered_elements(ir: KernelIR) -> Mapping[int, int]:
    """Most elements that a launch of a static kernel can read through gathers, by buffer."""
    most: dict[int, int] = {}
    for segment in ir.segments:
        sizes = [evaluate(extent, {}) for extent in (*segment.rows, segment.cols)]
        for instr, axes in zip(segment.body, value_axes(segment), strict=True):
            if isinstance(instr, Load) and instr.gather is not None:
                reached = math.prod(sizes[axis] for axis in axes)
                most[instr.buffer] = most.get(instr.buffer, 0) + reached
    return {buffer: min(count, evaluate(ir.buffers[buffer].numel, {})) for buffer, count in most.items()}


@dataclass(frozen=True)
class Table:
    """A buffer that is read through gathers only, along its outermost dimension.

    Attributes:
        buffer: Its position.
        rows: Size of that dimension.
        indices: Positions of the integer buffers whose values pick its rows.
    """

    buffer: int
    rows: int
    indices: frozenset[int]


def tables(ir: KernelIR) -> tuple[Table, ...]:
    """The tables of a static kernel."""
    indices: dict[int, set[int]] = {}
    plain: set[int] = set()
    for segment in ir.segments:
        for instr in segment.body:
            if not isinstance(instr, Load):
                continue
            buffer = ir.buffers[instr.buffer]
            if instr.gather is None or (instr.gather.stride, instr.gather.extent) != (
                buffer.strides[0], buffer.shape[0]
            ):
                plain.add(instr.buffer)
                continue
            indices.setdefault(instr.buffer, set()).update(_integer_sources(ir, segment, instr.gather.value))
    return tuple(
        Table(number, evaluate(ir.buffers[number].shape[0], {}), frozenset(sources))
        for number, sources in indices.items()
        if number not in plain
    )


def index_limits(ir: KernelIR) -> Mapping[int, int]:
    """For each integer buffer whose values pick elements by gathers: every value below this is one that exists."""
    limits: dict[int, int] = {}
    for segment in ir.segments:
        for instr in segment.body:
            if isinstance(instr, Load) and instr.gather is not None:
                extent = evaluate(instr.gather.extent, {})
                for source in _integer_sources(ir, segment, instr.gather.value):
                    limits[source] = min(extent, limits.get(source, extent))
    return limits


def computes_indices(ir: KernelIR) -> bool:
    """Whether a kernel looks up elements by numbers that it computes from its inputs, not only by inputs themselves."""
    return any(
        isinstance(instr, Load) and instr.gather is not None and _computed(segment, instr.gather.value)
        for segment in ir.segments for instr in segment.body
    )


def _computed(segment: Segment, value: int) -> bool:
    pending, arithmetic, loaded = [value], False, False
    while pending:
        instr: Instr = segment.body[pending.pop()]
        arithmetic |= isinstance(instr, Apply | Reduce)
        loaded |= isinstance(instr, Load)
        pending.extend(operands(instr))
    return arithmetic and loaded


def _integer_sources(ir: KernelIR, segment: Segment, value: int) -> set[int]:
    """Integer buffers that ``value`` is computed from."""
    found: set[int] = set()
    pending = [value]
    while pending:
        instr: Instr = segment.body[pending.pop()]
        if isinstance(instr, Load) and not ir.buffers[instr.buffer].dtype.startswith(("float", "bfloat")):
            found.add(instr.buffer)
        pending.extend(operands(instr))
    return found
