"""How each ATen op is computed, one row per op: the semantic half of the lowering.

A recipe emits the op's value at one position through a :class:`~fuseplan.planner.lowering.body.BodyBuilder`. Ops
without a recipe (matmul, attention, gathers, in-place updates) are *extern*: they stay ATen and bound the regions.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from fuseplan.kernels.ir.index import row_major_strides
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.lowering.recipe import DTYPES, Recipe
from fuseplan.planner.lowering.recipes_activation import activation_recipes
from fuseplan.planner.lowering.recipes_index import indexing_recipes
from fuseplan.planner.lowering.recipes_norm import normalising_recipes
from fuseplan.planner.lowering.recipes_pointwise import pointwise_recipes
from fuseplan.planner.lowering.recipes_rearrange import rearranging_recipes
from fuseplan.planner.lowering.recipes_reduce import reducing_recipes
from fuseplan.planner.lowering.views import VIEW_MAPS, Specs, is_address_map, same_size

__all__ = ["RECIPES", "VIEW_MAPS", "OpKind", "Recipe", "find_recipe", "kind_of", "mutates", "why_extern", "why_refused"]

OpKind: TypeAlias = Literal["view", "compute", "extern"]

RECIPES: dict[str, Recipe] = {
    **pointwise_recipes(), **activation_recipes(), **rearranging_recipes(), **indexing_recipes(), **reducing_recipes(),
    **normalising_recipes(),
}


def find_recipe(op: str) -> Recipe | None:
    """The recipe of an ATen op, None when it has none."""
    return RECIPES.get(op)


def mutates(node: OpNode) -> bool:
    """True when the op writes to one of its operands (ATen names end in ``_``, or it has an ``out``)."""
    name = node.op.split(".")[1] if node.op.count(".") >= 1 else node.op
    return (name.endswith("_") and not name.endswith("__")) or node.op.endswith(".out")


def kind_of(node: OpNode, specs: Specs) -> OpKind:
    """``view``: an address map. ``compute``: a kernel can absorb it. ``extern``: it stays a library call."""
    if is_address_map(node, specs):
        return "view"
    return "extern" if why_extern(node, specs) else "compute"


def why_extern(node: OpNode, specs: Specs) -> str | None:
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


def why_refused(node: OpNode, specs: Specs) -> str | None:
    """Why no kernel can compute the op at these sizes and attributes, None when one can."""
    recipe = RECIPES.get(node.op)
    if recipe is None:
        return f"{node.op} has no recipe: it stays a library call"
    if recipe.reduced_dim is not None:
        rank = len(specs[node.inputs[0]].shape)
        dims = recipe.reduced_dim(node, specs)
        if not rank or sorted(dims) != list(range(rank - len(dims), rank)):
            return f"{node.op}: reduces dimensions {dims} of {rank}; only the last ones are supported"
        if len(dims) == rank > 1:
            return f"{node.op}: reduces all of {rank} dimensions: a kernel shares rows among threads, and this is one"
    refused = recipe.refuse(node, specs) if recipe.refuse is not None else None
    if refused is None and recipe.reduced_dim is not None and len(recipe.reduced_dim(node, specs)) > 1:
        return _why_no_rows(node, specs)
    return refused


def _why_no_rows(node: OpNode, specs: Specs) -> str | None:
    """Why the folded dimensions of operand 0 are not walked as one: they are not one run of memory.

    Of dynamic sizes that cannot always be told. A plan is made for some sizes, with which it is.
    """
    recipe, spec = RECIPES[node.op], specs[node.inputs[0]]
    assert recipe.reduced_dim is not None
    if not spec.is_static:
        return None
    first = len(spec.shape) - len(recipe.reduced_dim(node, specs))
    wanted = row_major_strides(spec.shape[first:])
    run = zip(spec.shape[first:], spec.strides[first:], wanted, strict=True)
    if all(same_size(extent, 1) or same_size(stride, expected) for extent, stride, expected in run):
        return None
    return f"{node.op}: the dimensions that it reduces are not one run of memory"
