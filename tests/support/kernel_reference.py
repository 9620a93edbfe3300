"""A reference interpreter for KernelIR in plain torch: slow, obvious, any precision. The emitters' oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from well_formed import validate

from fuseplan.kernels.ir.backend import OutsideTable
from fuseplan.kernels.ir.index import Coord, FloorDiv, Index, Mod, evaluate
from fuseplan.kernels.ir.ir import (
    LARGEST,
    Apply,
    Cast,
    Const,
    Dot,
    Instr,
    Iota,
    KernelIR,
    Load,
    Reduce,
    Round,
    RowValue,
    Scan,
    Segment,
)
from fuseplan.kernels.ir.ops import OPS, REDUCTIONS, torch_dtype


def run_reference(
    ir: KernelIR,
    inputs: Sequence[torch.Tensor],
    symbols: Mapping[str, int] | None = None,
    float_dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """Run ``ir`` on CPU tensors, floats held in ``float_dtype`` and outputs returned unrounded in it.

    Args:
        ir: The kernel.
        inputs: One tensor per input buffer, laid out as the buffer says (any strides).
        symbols: Values of dynamic sizes.
        float_dtype: Precision of every float value.

    Returns:
        One contiguous tensor per output buffer, saturated where its type does; elements never stored are NaN (floats)
        or the minimum (integers).

    Raises:
        OutsideTable: A check fails. Inputs are as they were.
    """
    validate(ir)
    bound = ir.bind(symbols or {})
    flats = [_storage_view(tensor, float_dtype) for tensor in inputs]
    for buffer in bound.outputs:
        dtype = torch_dtype(buffer.dtype)
        span = 1 + sum((extent - 1) * stride for extent, stride in zip(buffer.shape, buffer.strides, strict=True))
        span = max(span, 0)  # below zero where several extents are zero
        if buffer.over is not None:
            flats.append(flats[buffer.over].clone())
        elif dtype.is_floating_point:
            flats.append(torch.full((span,), torch.nan, dtype=float_dtype))
        else:
            poison = 0 if dtype == torch.bool else torch.iinfo(dtype).min
            flats.append(torch.full((span,), poison, dtype=dtype))
    for segment in bound.segments:
        _run_segment(segment, flats, [buffer.dtype for buffer in bound.buffers], float_dtype)
    return [
        flat.as_strided(buffer.shape, buffer.strides).contiguous()
        for buffer, flat in zip(bound.outputs, flats[len(inputs) :], strict=True)
    ]


def _storage_view(tensor: torch.Tensor, float_dtype: torch.dtype) -> torch.Tensor:
    """The elements from the data pointer on, flat."""
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((span if tensor.numel() else 0,), (1,)).cpu()
    return flat.to(float_dtype) if flat.is_floating_point() else flat


def _index_value(index: Index, grids: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.tensor(evaluate(index.const, {}))
    for atom, coef in index.terms:
        if isinstance(atom, Coord):
            value = grids[atom.axis]
        elif isinstance(atom, FloorDiv):
            value = torch.div(_index_value(atom.base, grids), atom.divisor, rounding_mode="floor")
        else:
            assert isinstance(atom, Mod)
            value = torch.remainder(_index_value(atom.base, grids), atom.divisor)
        total = total + value * coef
    return total


def _saturated(value: torch.Tensor, to: str) -> torch.Tensor:
    """``value`` within what storage type ``to`` holds, where a conversion saturates (older PyTorch made it NaN)."""
    return value.clamp(-LARGEST[to], LARGEST[to]) if to in LARGEST else value


def _run_segment(
    segment: Segment, flats: list[torch.Tensor], dtypes: Sequence[str], float_dtype: torch.dtype
) -> None:
    space = (*segment.rows, segment.cols)
    if 0 in space:
        return
    grids = [
        torch.arange(extent).reshape([-1 if axis == position else 1 for position in range(len(space))])
        for axis, extent in enumerate(space)
    ]
    values: list[torch.Tensor] = []
    sides = [
        tuple(_values(side, flats, float_dtype) for side in (one.left, one.right)) for one in segment.products
    ]
    for instr in segment.body:
        if isinstance(instr, Dot):
            product, (left, right) = segment.products[instr.product], sides[instr.product]
            a = left[product.left_value].expand(*segment.rows, product.left.cols)
            b = right[product.right_value].expand(*product.right.rows, product.right.cols)
            picked = b[_index_value(instr.index, grids).expand(space)]
            values.append((a.unsqueeze(-2) * picked).sum(-1))
        elif isinstance(instr, RowValue):
            values.append(sides[instr.product][0][instr.value])
        else:
            values.append(_evaluate(instr, values, flats, grids, space, float_dtype))
    for check in segment.checks:
        if not bool(values[check].all()):
            raise OutsideTable(f"value {check}")
    for store in segment.stores:
        value = _saturated(values[store.value], dtypes[store.buffer])
        at = torch.tensor(0) if store.scatter is None else values[store.scatter.value]
        stride = 1 if store.scatter is None else store.scatter.stride
        index, value = torch.broadcast_tensors(_index_value(store.index, grids) + at * stride, value)
        flats[store.buffer][index] = value.to(flats[store.buffer].dtype)


def _values(side: Segment, flats: list[torch.Tensor], float_dtype: torch.dtype) -> list[torch.Tensor]:
    """All values of one side of a product."""
    space = (*side.rows, side.cols)
    grids = [
        torch.arange(extent).reshape([-1 if axis == position else 1 for position in range(len(space))])
        for axis, extent in enumerate(space)
    ]
    values: list[torch.Tensor] = []
    for instr in side.body:
        values.append(_evaluate(instr, values, flats, grids, space, float_dtype))
    if not all(bool(values[check].all()) for check in side.checks):
        raise OutsideTable("a side of a product")
    return values


def _evaluate(
    instr: Instr,
    values: list[torch.Tensor],
    flats: list[torch.Tensor],
    grids: list[torch.Tensor],
    space: tuple[int, ...],
    float_dtype: torch.dtype,
) -> torch.Tensor:
    def register(dtype: str) -> torch.dtype:
        return float_dtype if dtype.startswith("float") else torch_dtype(dtype)

    if isinstance(instr, Const):
        return torch.tensor(instr.value, dtype=register(instr.dtype))
    if isinstance(instr, Iota):
        return _index_value(instr.index, grids).to(register(instr.dtype))
    if isinstance(instr, Cast):
        return values[instr.arg].to(register(instr.dtype))
    if isinstance(instr, Round):
        return _saturated(values[instr.arg], instr.to).to(torch_dtype(instr.to)).to(register(instr.dtype))
    if isinstance(instr, Reduce):
        # A per-row operand still folds once per column: sum(1) over a row is its length.
        full = values[instr.arg].expand(space)
        return REDUCTIONS[instr.kind].reference(full).to(register(instr.dtype))
    if isinstance(instr, Scan):
        return REDUCTIONS[instr.kind].reference_scan(values[instr.arg].expand(space), -1).to(register(instr.dtype))
    if isinstance(instr, Apply):
        return OPS[instr.op].reference(*(values[arg] for arg in instr.args)).to(register(instr.dtype))
    assert isinstance(instr, Load)
    index = _index_value(instr.index, grids)
    if instr.gather is not None:
        index = index + values[instr.gather.value] * evaluate(instr.gather.stride, {})
    if instr.mask is None:
        return flats[instr.buffer][index].to(register(instr.dtype))
    index, mask = torch.broadcast_tensors(index, values[instr.mask])
    safe = torch.where(mask, index, 0)
    loaded = flats[instr.buffer][safe].to(register(instr.dtype))
    return torch.where(mask, loaded, torch.tensor(instr.other, dtype=loaded.dtype))
