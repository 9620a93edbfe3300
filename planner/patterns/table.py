"""Named patterns: small graphs that inference engines fuse by hand, for tests and as tuning shortcuts.

They are spelled as Hugging Face models spell them, so that their plans serve those models too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.capture.subgraph import SubGraph, trace_function, trace_subgraph
from fuseplan.planner.errors import ShapeError, UnknownPatternError
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.models.workload import read_size
from fuseplan.planner.patterns.functions import FUNCTIONS, InputSpecs, Pattern, Shape
from fuseplan.planner.patterns.listing import LISTING
from fuseplan.planner.patterns.quantisation import quantisation_patterns

#: What activations may be.
_DTYPES = ("bfloat16", "float16", "float32", "float64")
#: Every named pattern.
PATTERNS: Mapping[str, Pattern] = MappingProxyType({**FUNCTIONS, **quantisation_patterns()})


def parse_shape(text: str, example: str = "32x4096") -> Shape:
    """``"32x4096"`` as a tuple; a :class:`ShapeError` for what is no shape, or has a size of zero."""
    parts = re.split(r"[x×,]", text.strip().lower().strip("()[]"))
    numbers = [part.strip() for part in parts]
    if not all(re.fullmatch(r"[0-9]+", number) for number in numbers):
        raise ShapeError(f"cannot read shape {text!r}; write sizes joined by x, such as {example}")
    if any(not number.strip("0") for number in numbers):
        raise ShapeError(f"shape {text!r} has an empty dimension; every size is at least 1, as in {example}")
    return tuple(read_size(number, f"shape {text[:60]!r}", example) for number in numbers)


def inputs_of(name: str, shape: str | Sequence[int], dtype: str | None = None) -> tuple[Shape, str, InputSpecs]:
    """The shape and dtype that a pattern is built in, by default its own, and the layout of each of its inputs.

    UnknownPatternError where no pattern has that name; ShapeError for a shape or a dtype that it does not take.
    """
    if name not in PATTERNS:
        raise UnknownPatternError(name, PATTERNS)
    found, words = PATTERNS[name], LISTING[name]
    sizes = parse_shape(shape, words.example) if isinstance(shape, str) else tuple(int(size) for size in shape)
    if len(sizes) not in words.ranks:
        raise ShapeError(
            f"pattern {name} takes {words.dims}, not {len(sizes)} sizes ({'x'.join(map(str, sizes))}); "
            f"try {words.example}"
        )
    dtype = found.dtype if dtype is None else dtype
    if dtype not in _DTYPES:
        raise ShapeError(f"pattern {name} cannot be built in dtype {dtype!r}; use bfloat16, float16 or float32")
    try:
        return sizes, dtype, found.inputs(sizes, dtype)
    except ShapeError as error:
        raise ShapeError(f"pattern {name} {error}") from None


def pattern(name: str, shape: str | Sequence[int], dtype: str | None = None) -> tuple[SubGraph, InputSpecs]:
    """A named pattern at one shape: the graph, and the layouts of its inputs; raises what :func:`inputs_of` does."""
    _, dtype, specs = inputs_of(name, shape, dtype)
    found = PATTERNS[name]
    compute = partial(found.compute, dtype=torch_dtype(dtype)) if found.typed else found.compute
    traced = trace_function(compute, specs.values()).graph
    names = dict(zip((*traced.inputs, *traced.outputs), (*specs, *found.outputs), strict=True))

    def named(values: Iterable[str]) -> tuple[str, ...]:
        return tuple(names.get(value, value) for value in values)

    nodes = [replace(node, inputs=named(node.inputs), outputs=named(node.outputs)) for node in traced]
    return SubGraph(tuple(nodes), tuple(specs), found.outputs), specs


def trace_pattern(
    name: str, shape: str | Sequence[int], dtype: str | None = None, device_type: str = "cpu"
) -> tuple[Traced, InputSpecs]:
    """A pattern as eager runs it, and the layout of its inputs; its graph knows its activations (``fresh``)."""
    graph, specs = pattern(name, shape, dtype)
    traced = trace_subgraph(graph, specs, device_type)
    fresh = activations(name, shape, dtype)
    traced.graph.fresh = frozenset(value for value, own in zip(traced.graph.inputs, specs, strict=True) if own in fresh)
    return traced, specs


def pattern_graph(name: str, shape: str | Sequence[int], dtype: str | None = None) -> DataflowGraph:
    """The normalised graph of a pattern, as ``plan tune --pattern`` plans it; raises what :func:`inputs_of` does."""
    return trace_pattern(name, shape, dtype)[0].graph


def activations(name: str, shape: str | Sequence[int], dtype: str | None = None) -> frozenset[str]:
    """Names of a pattern's inputs that grow with its first size; the others are weights, which come cold from memory.
    """
    (first, *rest), dtype, specs = inputs_of(name, shape, dtype)
    try:
        grown = PATTERNS[name].inputs((2 * first, *rest), dtype)
    except ShapeError:
        return frozenset(specs)
    return frozenset(given for given in specs if grown[given].shape != specs[given].shape)
