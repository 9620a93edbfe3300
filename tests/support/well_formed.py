"""Checks that a kernel is well formed, as every emitter takes it to be."""

from __future__ import annotations

from fuseplan.kernels.ir.ir import ITEMSIZE, Apply, Dot, KernelIR, Load, Reduce, RowValue, Scan, Segment, operands
from fuseplan.kernels.ir.ops import REDUCTIONS, op_spec


def validate(ir: KernelIR) -> None:
    """Raise ``ValueError`` naming the first malformed part."""
    for number, buffer in enumerate(ir.buffers):
        if buffer.dtype not in ITEMSIZE:
            raise ValueError(f"buffer {buffer.name}: unsupported dtype {buffer.dtype}")
        if buffer.is_output != (number >= len(ir.inputs)):
            raise ValueError(f"buffer {buffer.name}: inputs come before outputs")
        if buffer.over is not None and not (buffer.is_output and 0 <= buffer.over < len(ir.inputs)):
            raise ValueError(f"buffer {buffer.name}: lies over buffer {buffer.over}, which is no input")
    for read in {load.buffer for segment in ir.bodies for load in segment.loads} & set(ir.overwritten.values()):
        raise ValueError(f"buffer {ir.buffers[read].name} is loaded, and an output lies over it")
    for number, segment in enumerate(ir.segments):
        _validate_body(ir, f"segment {number}", segment)
        _validate_segment(ir, number, segment)


def _validate_body(ir: KernelIR, name: str, segment: Segment) -> None:
    for value, instr in enumerate(segment.body):
        where = f"{name}, value {value} ({type(instr).__name__})"
        if any(arg >= value for arg in operands(instr)):
            raise ValueError(f"{where}: operands must be defined earlier")
        if isinstance(instr, Load) and not 0 <= instr.buffer < len(ir.buffers):
            raise ValueError(f"{where}: no buffer {instr.buffer}")
        if isinstance(instr, Load) and instr.gather is not None and instr.mask is None:
            raise ValueError(f"{where}: a gather without a mask could read outside its buffer")
        if isinstance(instr, Apply) and len(instr.args) != op_spec(instr.op).arity:
            raise ValueError(f"{where}: {instr.op} takes {op_spec(instr.op).arity} operands")
        if isinstance(instr, Reduce) and instr.kind not in REDUCTIONS:
            raise ValueError(f"{where}: unknown reduction {instr.kind}")
        if isinstance(instr, Scan) and instr.kind not in REDUCTIONS:
            raise ValueError(f"{where}: unknown scan {instr.kind}")
        if isinstance(instr, Dot | RowValue) and not 0 <= instr.product < len(segment.products):
            raise ValueError(f"{where}: no product {instr.product}")
        if isinstance(instr, RowValue) and not segment.products[instr.product].left.per_row[instr.value]:
            raise ValueError(f"{where}: it has not one value a row")
    for value in segment.checks:
        if not 0 <= value < len(segment.body) or segment.body[value].dtype != "bool":
            raise ValueError(f"{name}: value {value}, a check, is no bool")
    for number, product in enumerate(segment.products):
        if product.left.rows != segment.rows or product.left.cols != product.right.cols:
            raise ValueError(f"{name}, product {number}: its sides do not fit")
        for side in (product.left, product.right):
            if side.stores or side.products:
                raise ValueError(f"{name}, product {number}: a side stores, or has products of its own")
            _validate_body(ir, f"{name}, product {number}", side)


def _validate_segment(ir: KernelIR, number: int, segment: Segment) -> None:
    if not segment.stores:
        raise ValueError(f"segment {number} stores nothing")
    for store in segment.stores:
        if not ir.buffers[store.buffer].is_output:
            raise ValueError(f"segment {number}: store into input buffer {ir.buffers[store.buffer].name}")
        if store.scatter is not None and not all(segment.per_row[value] for value in store.scatter.values):
            raise ValueError(f"segment {number}: a store's address is data that changes from column to column")
