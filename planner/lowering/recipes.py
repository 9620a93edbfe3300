"""How each ATen op is computed, one row per op: the semantic half of the lowering.

Ops without a recipe are *anchors* (matmuls, convolutions, attention: a library has several ways to run them) or
*opaque* (random numbers, collectives, most in-place updates: only ATen runs them).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from fuseplan.kernels.ir.dtypes import torch_dtype
from fuseplan.kernels.ir.index import row_major_strides
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.lowering.recipe import DTYPES, FLOATS, INTEGERS, Recipe
from fuseplan.planner.lowering.recipes_activation import activation_recipes
from fuseplan.planner.lowering.recipes_index import indexing_recipes
from fuseplan.planner.lowering.recipes_pointwise import pointwise_recipes
from fuseplan.planner.lowering.recipes_rearrange import rearranging_recipes
from fuseplan.planner.lowering.recipes_reduce import normalising_recipes, reducing_recipes
from fuseplan.planner.lowering.views import VIEW_MAPS, Specs, is_address_map

__all__ = [
    "ANCHORS", "RECIPES", "VIEW_MAPS", "OpKind", "Recipe", "is_anchor", "kind_of", "mutates",
    "why_opaque", "why_refused", "written_dim", "written_spec", "written_value",
]

OpKind: TypeAlias = Literal["view", "compute", "anchor", "opaque"]

#: Ops with an inner dimension of their own (ATen's overloads left off).
ANCHORS = frozenset({
    "aten.linear", "aten.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.conv1d", "aten.conv2d",
    "aten.conv3d", "aten.convolution", "aten.scaled_dot_product_attention", "fuseplan.decode_attention",
    "fuseplan.merged_linear",
})

RECIPES: dict[str, Recipe] = {
    **pointwise_recipes(), **activation_recipes(), **rearranging_recipes(), **indexing_recipes(), **reducing_recipes(),
    **normalising_recipes(),
}


def mutates(node: OpNode) -> bool:
    """True when the op writes to one of its operands (ATen names end in ``_``, or it has an ``out``)."""
    name = node.op.split(".")[1] if node.op.count(".") >= 1 else node.op
    return (name.endswith("_") and not name.endswith("__")) or node.op.endswith(".out")


def written_value(node: OpNode) -> str | None:
    """The operand to which the op writes as a kernel can: its elements are stored, and not read. None for other ops."""
    recipe = RECIPES.get(node.op)
    return None if recipe is None or recipe.writes is None else node.inputs[0]


def written_dim(node: OpNode, specs: Specs) -> int | None:
    """The dimension of that operand along which another one says where to; None where all of it is written."""
    recipe = RECIPES.get(node.op)
    return None if recipe is None or recipe.writes is None else recipe.writes(node, specs)


def written_spec(node: OpNode, specs: Specs) -> TensorSpec:
    """Shape of what such an op writes, and strides of the operand in which that lies."""
    target = specs[node.inputs[0]]
    if written_dim(node, specs) is None:
        return target
    return TensorSpec(specs[node.inputs[-1]].shape, target.dtype, target.strides)


def kind_of(node: OpNode, specs: Specs) -> OpKind:
    """``view``: an address map, nothing runs it. ``compute``: a generated kernel can absorb it. ``anchor``: ATen, or
    another library call. ``opaque``: ATen alone.
    """
    if is_address_map(node, specs):
        return "view"
    if is_anchor(node, specs):
        return "anchor"
    return "opaque" if why_opaque(node, specs) else "compute"


def is_anchor(node: OpNode, specs: Specs) -> bool:
    """Whether the op is a matmul, a convolution or attention, on one device, of floats, and draws no random numbers."""
    if node.op.rsplit(".", 1)[0] not in ANCHORS or "device" in node.attrs or node.attrs.get("dropout_p"):
        return False
    return all(specs[value].dtype in FLOATS for value in node.outputs)


def why_opaque(node: OpNode, specs: Specs) -> str | None:
    """Why no generated kernel can absorb the op, None when one can."""
    recipe = RECIPES.get(node.op)
    if recipe is None:
        return f"{node.op} has no recipe: it stays a library call"
    if node.inputs and "device" in node.attrs:
        return f"{node.op}: moves data between devices, or reads a tensor of another one than most of the graph"
    for value in (*node.inputs, *node.outputs):
        if specs[value].dtype not in DTYPES:
            return f"{node.op}: dtype {specs[value].dtype} is not handled"
    return why_refused(node, specs)


#: Arguments that may be numbers in the place of elements.
_NUMBERS = ("self", "other", "value", "fill_value", "s", "alpha", "min", "max", "min_val", "max_val")


def _unheld_number(node: OpNode, specs: Specs) -> str | None:
    """Refuses a number that the op's integer type cannot hold: ATen raises, or wraps it around."""
    dtype = specs[node.outputs[0]].dtype
    compares = dtype == "bool" and bool(node.inputs)  # with a float it compares floats
    if compares:
        dtype = specs[node.inputs[0]].dtype
    if dtype not in INTEGERS:
        return None
    limits = torch.iinfo(torch_dtype(dtype))
    numbers = [one for name in _NUMBERS if isinstance(one := node.attrs.get(name), int if compares else int | float)]
    unheld = [one for one in numbers if not limits.min <= one <= limits.max]
    return f"{unheld[0]} is no number of dtype {dtype}" if unheld else None


def why_refused(node: OpNode, specs: Specs) -> str | None:
    """Why no kernel can compute the op at these sizes and attributes, None when one can."""
    recipe = RECIPES.get(node.op)
    if recipe is None:
        return f"{node.op} has no recipe: it stays a library call"
    dims: tuple[int, ...] = ()
    if recipe.reduced_dim is not None:
        rank = len(specs[node.inputs[0]].shape)
        dims = recipe.reduced_dim(node, specs)
        if not rank or sorted(dims) != list(range(rank - len(dims), rank)):
            return f"{node.op}: reduces dimensions {dims} of {rank}; only the last ones are supported"
        if len(dims) == rank > 1:
            return f"{node.op}: reduces all of {rank} dimensions: a kernel shares rows among threads, and this is one"
    reason = _unheld_number(node, specs) or (recipe.refuse(node, specs) if recipe.refuse is not None else None)
    if reason is not None:
        return f"{node.op}: {reason}"
    # Of dynamic sizes that cannot always be told. A plan is made for some sizes, with which it is.
    if len(dims) > 1 and (spec := specs[node.inputs[0]]).is_static:
        shape = spec.shape[-len(dims) :]
        run = zip(shape, spec.strides[-len(dims) :], row_major_strides(shape), strict=True)
        if any(extent != 1 and stride != expected for extent, stride, expected in run):
            return f"{node.op}: the dimensions that it reduces are not one run of memory"
    return None
