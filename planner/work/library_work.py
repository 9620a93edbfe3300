"""The work of matmuls, convolutions, attention and cache writes, whoever runs them. Each byte counts once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.index import evaluate_all
from fuseplan.kernels.ir.ir import ITEMSIZE
from fuseplan.kernels.ir.ops import op_spec
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.ops.table import op_of

#: Special functions in a hyperbolic tangent.
_TANH = op_spec("tanh").flops
_UNITS = {"bfloat16": "bf16_matmul", "float16": "fp16_matmul", "float64": "fp64"}


def library_work(
    node: OpNode, inputs: Sequence[str], outputs: Sequence[str], specs: Mapping[str, TensorSpec], call: str,
    cold: Collection[str] = (),
) -> Work:
    """Work of a call that reads ``inputs``, of which ``cold`` ones lie in memory, for ``outputs``; ``specs`` are
    static.
    """
    writes_rows = op_of(node.op).family == "write"
    read = {value: read_bytes(value, node, specs) for value in inputs if not writes_rows or value != node.inputs[0]}
    # What is written to rows of the first operand is that of the operand's type.
    source = [value for value in node.inputs[1:] if specs[value].dtype == specs[node.inputs[0]].dtype][-1:]
    written_bytes = sum(_bytes(specs[value]) for value in (source if writes_rows else outputs))
    return Work(
        flops=_flops(node, specs), dram_bytes=sum(read.values()) + written_bytes, launches=op_of(node.op).launches,
        written_bytes=written_bytes, cold_bytes=sum(nbytes for value, nbytes in read.items() if value in cold),
        call=call,
    )


def _flops(node: OpNode, specs: Mapping[str, TensorSpec]) -> dict[str, float]:
    shapes = [_shape(specs[value]) for value in node.inputs]
    unit = _UNITS.get(specs[node.inputs[0]].dtype, "fp32_matmul") if node.inputs else ""
    op = op_of(node.op)
    if op.factors is not None:
        results = math.prod(_shape(specs[node.outputs[0]]))
        return {unit: 2.0 * results * shapes[op.factors[0]][-1]}
    if op.family == "convolution":
        # Each result sums over a kernel's window and the channels of its group; of a transposed one, each operand does.
        counted = shapes[0] if node.attrs.get("transposed") else _shape(specs[node.outputs[0]])
        return {unit: 2.0 * math.prod(counted) * math.prod(shapes[1][1:]) / _winograd(node, shapes[1], unit)}
    if op.pairs is not None:
        pairs = op.pairs(node, specs)
        capped = node.attrs.get("cap") is not None  # by a hyperbolic tangent
        return {unit: 2.0 * pairs * (shapes[0][-1] + shapes[2][-1]), "sfu": pairs * (1 + _TANH * capped)}
    return {}


def _winograd(node: OpNode, weight: Sequence[int], unit: str) -> float:
    """How many times fewer products Winograd's F(4x4, 3x3) needs (Lavin and Gray, 2015), if a library may use it."""
    steps = (node.attrs.get(name, 1) for name in ("stride", "dilation"))
    by_one = all(step == 1 for given in steps for step in (given if isinstance(given, list | tuple) else (given,)))
    return 4.0 if by_one and tuple(weight[2:]) == (3, 3) and unit == "fp32_matmul" else 1.0


def read_bytes(value: str, node: OpNode, specs: Mapping[str, TensorSpec]) -> float:
    """Bytes of an operand; of attention's keys and values the share that is read."""
    share = op_of(node.op).share
    if share is None or value not in node.inputs[1:3]:
        return _bytes(specs[value])
    read, held = share(node, specs)
    return _bytes(specs[value]) * read / held


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    return evaluate_all(spec.shape, {})


def _bytes(spec: TensorSpec) -> float:
    """Distinct bytes: a dimension of stride zero repeats the same ones."""
    sizes = zip(_shape(spec), spec.strides, strict=True)
    return float(math.prod(size for size, stride in sizes if stride != 0 or size == 0) * ITEMSIZE.get(spec.dtype, 1))
