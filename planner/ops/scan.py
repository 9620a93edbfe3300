"""Recipes of scans: sums, products, logarithms and extremes of a row up to each of its elements."""

from __future__ import annotations

from functools import partial

from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.ops.builder import BodyBuilder, Value
from fuseplan.planner.ops.op import FLOATS, HALVES, Build, float_result, result_type, rows
from fuseplan.planner.ops.positions import Position, Specs
from fuseplan.planner.ops.reduce import across, reduced_dims


def _scanned_dims(node: OpNode, specs: Specs) -> tuple[int, ...]:
    """The dimension that a scan goes along; none of a single element."""
    return tuple(dim for dim in reduced_dims(node, specs) if specs[node.inputs[0]].shape[dim : dim + 1] != (1,))


def _scan_refuse(node: OpNode, specs: Specs) -> str | None:
    given, made = specs[node.inputs[0]].dtype, specs[node.outputs[0]].dtype
    if made not in (*FLOATS, "int64", "int32") or (made in HALVES and given != made):
        return f"of dtype {given} in dtype {made}"
    return None


def _scan_slowness(node: OpNode, specs: Specs) -> float:
    along = 1.4 if specs[node.outputs[0]].dtype in FLOATS else 1.0
    return max(along, across(2.0)(node, specs))


def _scan(kind: str) -> Build:
    """The fold of a row up to and with each of its elements."""

    def build(p: BodyBuilder, node: OpNode, position: Position) -> Value:
        x = p.pull(node.inputs[0], position).to(result_type(p, node))
        dims = _scanned_dims(node, p.specs)
        return p.scan(kind, node, position, dims[0], x) if dims else x

    return build


def _extreme_so_far(kind: str) -> Build:
    def build(p: BodyBuilder, node: OpNode, position: Position) -> Value:
        return _with_extreme(kind, p, node, position)[1].to(result_type(p, node))

    return build


def _with_extreme(kind: str, p: BodyBuilder, node: OpNode, position: Position) -> tuple[Value, Value]:
    """The element at ``position``, booleans as integers, and the extreme of its row up to there."""
    x, dims = p.pull(node.inputs[0], position), _scanned_dims(node, p.specs)
    x = x.to("int32" if x.dtype == "bool" else x.dtype)
    return x, p.scan(kind, node, position, dims[0], x) if dims else x


def _position_so_far(kind: str) -> Build:
    """The position of that extreme: the last of equal elements, or of NaN, as in ATen."""

    def build(p: BodyBuilder, node: OpNode, position: Position) -> Value:
        dims = _scanned_dims(node, p.specs)
        if not dims:
            return p.const(0, "int64")
        x, best = _with_extreme(kind, p, node, position)
        hit = x.eq(best) | x.ne(x) if x.dtype.startswith("float") else x.eq(best)
        extent = p.specs[node.inputs[0]].shape[dims[0]]
        at = p.iota(position[dims[0]]).to("int32" if isinstance(extent, int) and extent < 2**31 else "int64")
        return p.scan("max", node, position, dims[0], hit.where(at, 0)).to("int64")

    return build


_scan_row = partial(rows, "scan", reduced_dim=_scanned_dims, effort="scan", walk=lambda node, specs: None)
_sum_row = partial(_scan_row, refuse=_scan_refuse, slow_on_cpu=_scan_slowness)
_extreme_row = partial(_scan_row, slow_on_cpu=lambda node, specs: (
    1.2 if specs[node.inputs[0]].dtype in FLOATS else 1.0))

SCANS = {
    **_sum_row("cumsum", _scan("sum")),
    **_sum_row("cumprod", _scan("prod")),
    **_extreme_row("cummax", _extreme_so_far("max"), others=(_position_so_far("max"),)),
    **_extreme_row("cummin", _extreme_so_far("min"), others=(_position_so_far("min"),)),
    **_scan_row("logcumsumexp", _scan("logaddexp"), refuse=float_result),
}
