"""The work of matmuls, attention and cache writes, whoever runs them: ATen, or a library's call.

Products count two operations for each pair of numbers, in the unit of their type. Every byte counts once: where heads
share keys, where operands are broadcast, and where several products read one value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.index import evaluate
from fuseplan.kernels.ir.ir import ITEMSIZE
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec

#: Positions of the two operands whose product an op is; the length that is summed over is the last of the first.
_FACTORS: Mapping[str, int] = {
    "aten.linear.default": 0, "aten.matmul.default": 0, "aten.mm.default": 0, "aten.bmm.default": 0,
    "aten.addmm.default": 1, "aten.baddbmm.default": 1, "fuseplan.merged_linear.default": 0,
}
_ATTENTION = "aten.scaled_dot_product_attention.default"
#: Ops that write some rows of their first operand and leave the others alone.
_ROW_WRITES = frozenset({"index_copy_", "index_put_", "copy_", "scatter_", "index_add_"})
_UNITS = {"bfloat16": "bf16_matmul", "float16": "fp16_matmul", "float64": "fp64"}


def library_work(
    nodes: Iterable[OpNode],
    inputs: Sequence[str],
    outputs: Sequence[str],
    specs: Mapping[str, TensorSpec],
    call: str,
    cold: Collection[str] = (),
    symbols: Mapping[str, int | float] | None = None,
) -> Work:
    """Work of one call that runs some ops, views among them.

    Args:
        nodes: The ops.
        inputs: Values that they read from outside.
        outputs: Values that are needed outside.
        specs: Layouts of all values named by the ops that compute.
        call: ``Work.call``: ``"sdpa.flash"``, or the ATen op with its type.
        cold: Of ``inputs``, those that nothing has touched recently: weights, caches.
        symbols: Dynamic sizes.
    """
    nodes, known = list(nodes), symbols or {}
    flops: dict[str, float] = {}
    for node in nodes:
        for unit, count in _flops(node, specs, known).items():
            flops[unit] = flops.get(unit, 0.0) + count
    written = {node.inputs[0] for node in nodes if _writes_rows(node)}
    read = {value: _read_bytes(value, nodes, specs, known) for value in dict.fromkeys(inputs) if value not in written}
    sources = [value for node in nodes if _writes_rows(node) for value in _source(node, specs)]
    made = [value for node in nodes if not _writes_rows(node) for value in node.outputs]
    stored = [*sources, *(value for value in outputs if value in made)]
    written_bytes = sum(_bytes(specs[value], known) for value in stored)
    return Work(
        flops=flops, dram_bytes=sum(read.values()) + written_bytes, launches=1, written_bytes=written_bytes,
        cold_bytes=sum(nbytes for value, nbytes in read.items() if value in cold), call=call,
    )


def _flops(node: OpNode, specs: Mapping[str, TensorSpec], symbols: Mapping[str, int | float]) -> dict[str, float]:
    shapes = [_shape(specs[value], symbols) for value in node.inputs]
    unit = _UNITS.get(specs[node.inputs[0]].dtype, "fp32_matmul") if node.inputs else ""
    if node.op in _FACTORS:
        results = math.prod(_shape(specs[node.outputs[0]], symbols))
        return {unit: 2.0 * results * shapes[_FACTORS[node.op]][-1]}
    if node.op == _ATTENTION:
        *_, positions, width = shapes[0]
        heads = math.prod(shapes[0][:-2])
        pairs = float(heads * _seen(node, positions, shapes[1][-2]))
        return {unit: 2.0 * pairs * (width + shapes[2][-1]), "sfu": pairs}
    return {}


def _seen(node: OpNode, positions: int, keys: int) -> int:
    """Pairs of a query position and a key that it attends to; causal: keys up to its own position."""
    if not node.attrs.get("is_causal"):
        return positions * keys
    within = min(positions, keys)
    return within * (within + 1) // 2 + (positions - within) * keys


def _read_bytes(
    value: str, nodes: Iterable[OpNode], specs: Mapping[str, TensorSpec], symbols: Mapping[str, int | float]
) -> float:
    """Bytes of an operand; of keys and values after the last position that sees them, none."""
    for node in nodes:
        if node.op == _ATTENTION and node.attrs.get("is_causal") and value in node.inputs[1:3]:
            keys, positions = _shape(specs[value], symbols)[-2], _shape(specs[node.inputs[0]], symbols)[-2]
            return _bytes(specs[value], symbols) * min(keys, positions) / max(keys, 1)
    return _bytes(specs[value], symbols)


def _writes_rows(node: OpNode) -> bool:
    return node.op.split(".")[1] in _ROW_WRITES


def _source(node: OpNode, specs: Mapping[str, TensorSpec]) -> list[str]:
    """What an op writes to rows of its first operand: that of the operand's type."""
    return [value for value in node.inputs[1:] if specs[value].dtype == specs[node.inputs[0]].dtype][-1:]


def _shape(spec: TensorSpec, symbols: Mapping[str, int | float]) -> tuple[int, ...]:
    return tuple(evaluate(extent, symbols) for extent in spec.shape)


def _bytes(spec: TensorSpec, symbols: Mapping[str, int | float]) -> float:
    """Distinct bytes: a dimension of stride zero repeats the same ones."""
    sizes = zip(_shape(spec, symbols), spec.strides, strict=True)
    return float(math.prod(size for size, stride in sizes if stride != 0 or size == 0) * ITEMSIZE.get(spec.dtype, 1))
