"""Outputs of a kernel in the memory of inputs that nobody needs afterwards: when that is right, and how it is called.

An output may lie in an input's memory when each program reads an element of that input only where it stores that
element of the output, and before. Another thread may have loaded it: so every load of the input must flow into the
value stored there, for which the store waits. A tile of fewer elements than threads is loaded by several threads alike,
where a second store could see what the first one wrote (Triton issue 1615): such programs may only have one.

CPU kernels do not write in place: their pointers are ``__restrict__``, and a row's last vector overlaps the one before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import networkx as nx

from fuseplan.kernels.ir.index import Size, as_size, is_static, product, row_major_strides
from fuseplan.kernels.ir.ir import KernelIR, Load, Reduce, Segment, Store, operands
from fuseplan.kernels.ir.reduction_loops import Phase, schedule
from fuseplan.kernels.ir.rewrite import ancestors

#: For positions among a kernel's outputs, the position among its inputs whose memory each takes.
Reuse: TypeAlias = Mapping[int, int]
#: The same with every input that could be taken.
ReuseOptions: TypeAlias = Mapping[int, tuple[int, ...]]
#: A buffer: its position, or the graph's name for it.
_Name = TypeVar("_Name", bound=Hashable)


@dataclass(frozen=True)
class Execution:
    """How programs compute a segment."""

    #: A program walks its rows in blocks, once for each phase of the schedule; else it evaluates each value once.
    looped: bool
    #: Several threads of a program hold the same element.
    replicated: bool
    #: ``schedule``'s ``rescale``.
    rescaled: bool = False


def reuse_options(ir: KernelIR, executions: Sequence[Execution]) -> dict[int, tuple[int, ...]]:
    """Which inputs' memory each output may take; outputs that can take none are left out.

    Any choice that gives an input to one output is right, if nobody else needs it, which no kernel can know. Around a
    matmul there is none: all programs read what the others read, and would wait for lines that some store into.
    """
    if any(segment.products for segment in ir.segments):
        return {}
    inputs = range(len(ir.inputs))
    found = {
        number: tuple(source for source in inputs if _may_take(ir, executions, len(inputs) + number, source))
        for number in range(len(ir.outputs))
    }
    return {number: sources for number, sources in found.items() if sources}


def choose_reuse(options: Mapping[_Name, tuple[_Name, ...]], free: Iterable[_Name]) -> dict[_Name, _Name]:
    """As many outputs as can be in inputs that are ``free``, each in one of its own.

    >>> choose_reuse({0: (0, 1), 1: (0,)}, [0, 1])
    {0: 1, 1: 0}
    """
    outputs, inputs = list(options), list(dict.fromkeys(free))
    # Outputs are numbered from 0 up, inputs from -1 down.
    graph = nx.Graph(
        (number, ~inputs.index(source))
        for number, output in enumerate(outputs) for source in options[output] if source in inputs
    )
    found = nx.bipartite.hopcroft_karp_matching(graph, [node for node in graph if node >= 0])
    return {output: inputs[~found[number]] for number, output in enumerate(outputs) if number in found}


def _may_take(ir: KernelIR, executions: Sequence[Execution], target: int, source: int) -> bool:
    """Whether buffer ``target``, an output, may lie in the memory of buffer ``source``, an input."""
    before, after = ir.buffers[source], ir.buffers[target]
    if after.over is not None or source in ir.overwritten.values():
        return False
    if (before.dtype, before.shape, before.strides) != (after.dtype, after.shape, after.strides):
        return False
    writers = [
        (number, position) for number, segment in enumerate(ir.segments)
        for position, store in enumerate(segment.stores) if store.buffer == target
    ]
    if len(writers) != 1 or not _is_dense(after.shape, after.strides):
        return False
    number, position = writers[0]
    segment = ir.segments[number]
    if as_size(product((*segment.rows, segment.cols)) - after.numel) != 0:
        return False  # an element per row would be read by all threads of the row
    readers = {n for n, other in enumerate(ir.segments) if any(load.buffer == source for load in other.loads)}
    return readers <= {number} and _segment_allows(segment, executions[number], position, source)


def _is_dense(shape: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Whether no two positions lie in one element, and none between them is left out."""
    if not is_static(*shape, *strides):
        return tuple(strides) == tuple(row_major_strides(shape))
    dims = sorted((dim for dim in zip(strides, shape, strict=True) if dim[1] != 1), reverse=True)
    return tuple(stride for stride, _ in dims) == row_major_strides(extent for _, extent in dims)


def _segment_allows(segment: Segment, execution: Execution, position: int, source: int) -> bool:
    """Whether all loads of ``source`` are at the position of the store, and done before it."""
    store = segment.stores[position]
    if segment.store_per_row(store):
        return False
    if execution.replicated and (execution.looped or len(segment.stores) > 1):
        return False
    phases = schedule(segment, rescale=execution.rescaled, centre=execution.looped)
    stored_in = next((number for number, phase in enumerate(phases) if position in phase.stores), None)
    if stored_in is None:
        return False
    for value, load in enumerate(segment.body):
        runs = [number for number, phase in enumerate(phases) if value in (*phase.elements, *phase.rows)]
        if not runs or not isinstance(load, Load) or load.buffer != source:
            continue
        if load.index != store.index or load.mask is not None or load.gather is not None:
            return False
        if execution.looped:
            done = _done_when_looped(segment, phases, value, runs, store, stored_in)
        else:  # a tile in registers is loaded once, by the first phase that needs it at the latest
            done = runs[0] <= stored_in and value in ancestors(segment.body, [store.value])
        if not done:
            return False
    return True


def _done_when_looped(
    segment: Segment, phases: Sequence[Phase], value: int, runs: Sequence[int], store: Store, stored_in: int
) -> bool:
    """Each phase loads anew: those before the store's must fold what they load into a number that the store needs."""
    body = segment.body

    def beside(root: int) -> list[int]:
        return ancestors(body, [root], lambda one: not isinstance(body[one], Reduce))

    needed = ancestors(body, [store.value])
    for number in runs:
        if number > stored_in:
            return False
        if number == stored_in:
            if value not in beside(store.value):
                return False
        elif not any(fold in needed and value in beside(operands(body[fold])[0]) for fold in phases[number].reductions):
            return False
    return True
