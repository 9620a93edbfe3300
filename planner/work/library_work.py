"""The work of matmuls, attention and cache writes, whoever runs them: ATen, or a library's call.

Products count two operations for each pair of numbers. Every byte counts once, where heads share keys, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.index import evaluate_all
from fuseplan.kernels.ir.ir import ITEMSIZE
from fuseplan.kernels.ir.ops import op_spec
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec

#: Positions of the two operands whose product an op is; the length that is summed over is the last of the first.
_FACTORS: Mapping[str, int] = {
    "aten.linear.default": 0, "aten.matmul.default": 0, "aten.mm.default": 0, "aten.bmm.default": 0,
    "aten.addmm.default": 1, "aten.baddbmm.default": 1, "fuseplan.merged_linear.default": 0,
}
_ATTENTION = "aten.scaled_dot_product_attention.default"
#: Attention of one query position, whose keys may lie in pages.
_DECODE_ATTENTION = "fuseplan.decode_attention.default"
#: Ops that write some rows of their first operand and leave the others alone.
_ROW_WRITES = frozenset({"index_copy_", "index_put_", "copy_", "scatter_", "index_add_"})
#: Special functions in a hyperbolic tangent.
_TANH = op_spec("tanh").flops
_UNITS = {"bfloat16": "bf16_matmul", "float16": "fp16_matmul", "float64": "fp64"}


def library_work(
    node: OpNode, inputs: Sequence[str], outputs: Sequence[str], specs: Mapping[str, TensorSpec], call: str,
    cold: Collection[str] = (),
) -> Work:
    """Work of one call that runs an op: values that it reads, results that are needed, and static layouts of all these.

    ``call`` is ``Work.call``; ``cold`` are those of ``inputs`` that nothing has touched recently: weights, caches.
    """
    writes_rows = node.op.split(".")[1] in _ROW_WRITES
    read = {value: read_bytes(value, node, specs) for value in inputs if not writes_rows or value != node.inputs[0]}
    # What is written to rows of the first operand is that of the operand's type.
    source = [value for value in node.inputs[1:] if specs[value].dtype == specs[node.inputs[0]].dtype][-1:]
    written_bytes = sum(_bytes(specs[value]) for value in (source if writes_rows else outputs))
    return Work(
        flops=_flops(node, specs), dram_bytes=sum(read.values()) + written_bytes, launches=1,
        written_bytes=written_bytes, cold_bytes=sum(nbytes for value, nbytes in read.items() if value in cold),
        call=call,
    )


def _flops(node: OpNode, specs: Mapping[str, TensorSpec]) -> dict[str, float]:
    shapes = [_shape(specs[value]) for value in node.inputs]
    unit = _UNITS.get(specs[node.inputs[0]].dtype, "fp32_matmul") if node.inputs else ""
    if node.op in _FACTORS:
        results = math.prod(_shape(specs[node.outputs[0]]))
        return {unit: 2.0 * results * shapes[_FACTORS[node.op]][-1]}
    if node.op == _ATTENTION:
        *_, positions, width = shapes[0]
        heads = math.prod(shapes[0][:-2])
        pairs = float(heads * _seen(node, positions, shapes[1][-2]))
        return {unit: 2.0 * pairs * (width + shapes[2][-1]), "sfu": pairs}
    if node.op == _DECODE_ATTENTION:
        rows, width = math.prod(shapes[0][:-1]), shapes[0][-1]
        pairs = float(rows * _keys(node, specs))
        capped = node.attrs.get("cap") is not None  # by a hyperbolic tangent
        return {unit: 2.0 * pairs * (width + shapes[2][-1]), "sfu": pairs * (1 + _TANH * capped)}
    return {}


def _keys(node: OpNode, specs: Mapping[str, TensorSpec]) -> int:
    """Keys of a sequence in attention of one query position."""
    rows = _shape(specs[node.inputs[1]])[2]
    table = _table(node)
    return rows if table is None else rows * _shape(specs[table])[1]


def _table(node: OpNode) -> str | None:
    """The block table of attention over pages; None where there is none."""
    return node.inputs[3] if node.op == _DECODE_ATTENTION and "block_table" not in node.attrs else None


def _seen(node: OpNode, positions: int, keys: int) -> int:
    """Pairs of a query position and a key that it attends to; causal: keys up to its own position."""
    if not node.attrs.get("is_causal"):
        return positions * keys
    within = min(positions, keys)
    return within * (within + 1) // 2 + (positions - within) * keys


def read_bytes(value: str, node: OpNode, specs: Mapping[str, TensorSpec]) -> float:
    """Bytes of an operand; of keys and values after the last position that sees them, none. Of pages those in use."""
    table = _table(node)
    if table is not None and value in node.inputs[1:3]:
        pages = _shape(specs[value])[0]
        return _bytes(specs[value]) * min(pages, math.prod(_shape(specs[table]))) / max(pages, 1)
    if node.op == _ATTENTION and node.attrs.get("is_causal") and value in node.inputs[1:3]:
        keys, positions = _shape(specs[value])[-2], _shape(specs[node.inputs[0]])[-2]
        return _bytes(specs[value]) * min(keys, positions) / max(keys, 1)
    return _bytes(specs[value])


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    return evaluate_all(spec.shape, {})


def _bytes(spec: TensorSpec) -> float:
    """Distinct bytes: a dimension of stride zero repeats the same ones."""
    sizes = zip(_shape(spec), spec.strides, strict=True)
    return float(math.prod(size for size, stride in sizes if stride != 0 or size == 0) * ITEMSIZE.get(spec.dtype, 1))
