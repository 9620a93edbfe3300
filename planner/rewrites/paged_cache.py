"""Keys and values that attention reads as a copy of pages: the pages, and the table that lists them.

Between the gather and attention may be any ops that only move elements (``view_algebra.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from fuseplan.kernels.ir.index import Index, flatten, row_major_strides
from fuseplan.planner.ops.table import op_of
from fuseplan.planner.rewrites import trace_edit as edit
from fuseplan.planner.rewrites.view_algebra import coordinates, origins
from fuseplan.search.errors import OWN_FAULTS

_aten = torch.ops.aten
_INDEX_TYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class GatheredPages:
    """Keys or values that are gathered: ``[batch, kv heads * group, blocks * rows, width]``.

    Attributes:
        pages: What they are gathered from, ``[pages, ...]``.
        table: The block table, of ``batch * blocks`` numbers of pages.
        path: The gather, and the calls by which its result becomes an operand of attention.
        sizes: Heads, rows and width of a page.
        order: Where these three lie in a page, the fastest last.
        wraps: Whether negative numbers of pages count from the end; else there are none.
    """

    pages: fx.Node
    table: fx.Node
    path: tuple[fx.Node, ...]
    sizes: tuple[int, int, int]
    order: tuple[int, ...]
    wraps: bool


def gathered_pages(node: Any, reader: fx.Node) -> GatheredPages | None:
    """The pages that a key or value is gathered from, if all that is done to them is to put them in order."""
    sizes = edit.static_sizes(node)
    if sizes is None or len(sizes) != 4 or 0 in sizes:
        return None
    moved = list(origins(node))
    gathers = [number for number, (one, _) in enumerate(moved) if op_of(str(one.target)).rows_by is not None]
    if not gathers:
        return None
    path, (gather, position) = [one for one, _ in moved[: gathers[0] + 1]], moved[gathers[0]]
    if any(set(one.users) - {*path, reader} for one in path):
        return None  # others read the copy, too: it has to be made anyhow
    found, whole = _lookup(gather), edit.static_sizes(gather)
    if found is None or whole is None:
        return None
    pages, table = found
    shape, listed = edit.static_sizes(pages), math.prod(edit.static_sizes(table) or ())
    if shape is None or len(shape) < 2:
        return None
    order = _order(flatten(position, row_major_strides(whole)), sizes, shape[1:], listed)
    if order is None:
        return None
    return GatheredPages(pages, table, tuple(path[::-1]), *order, gather.target is _aten.index.Tensor)


def _lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The table and the indices of a look-up along the first dimension."""
    call, by = edit.arguments_of(node), op_of(str(node.target)).rows_by
    pages, table = (list(call.values())[at] for at in (0, by or 0))
    if isinstance(table, Sequence):
        table = table[0] if len(table) == 1 else None
    value = edit.value_of(table)
    if call.get("dim", 0) != 0 or value is None or edit.static_sizes(table) is None:
        return None
    return (pages, table) if value.dtype in _INDEX_TYPES else None


def _order(
    where: Index, sizes: Sequence[int], page: Sequence[int], listed: int
) -> tuple[tuple[int, int, int], tuple[int, ...]] | None:
    """Heads, rows and width of a page, and where they lie in it, if each key lies ``where`` it should.

    ``sizes`` are those of the keys, ``page`` the shape of one of ``listed`` pages.
    """
    (_, heads, length, width), elements = sizes, math.prod(page)
    rows, rest = divmod(sizes[0] * length, listed)
    if rest or not rows or length % rows or elements % (rows * width):
        return None
    shared = elements // (rows * width)
    if not shared or heads % shared:
        return None
    extents = shared, rows, width
    batch, head, row, column = coordinates(sizes)
    within, number = (head // (heads // shared), row % rows, column), batch * (length // rows) + row // rows

    def of_keys(order: Sequence[int]) -> Index:
        strides = row_major_strides(extents[dim] for dim in order)
        return number * elements + flatten((within[dim] for dim in order), strides)

    found = [order for order in permutations(range(3)) if of_keys(order) == where]
    if not found:
        return None
    # Where a size is one, several orders are the same; pages that have one of them already need no other shape.
    as_is = [order for order in found if tuple(extents[one] for one in order) == tuple(page)]
    return extents, (as_is or found)[0]


def in_order(graph: fx.Graph, whole: GatheredPages) -> fx.Node | None:
    """Pages as ``[pages, kv heads, rows, width]``, a view put into the graph; None where there is no such view."""
    pages = viewed(graph, whole.pages, (-1, *(whole.sizes[one] for one in whole.order)))
    if pages is None or whole.order == (0, 1, 2):
        return pages
    dims = [0, *(1 + whole.order.index(dim) for dim in range(3))]
    return edit.insert_call(graph, _aten.permute.default, (pages, dims))


def viewed(graph: fx.Graph, node: fx.Node, shape: Sequence[int]) -> fx.Node | None:
    """A view of another shape put into the graph, the node itself if it has it; None where there is no such view."""
    sizes = edit.static_sizes(node)
    if sizes is not None and sizes[1:] == tuple(shape[1:]) and len(sizes) == len(shape):
        return node
    args = node, list(shape)
    try:
        edit.fake_result(_aten.view.default, args, {}, {})
    except Exception as error:  # its dimensions are no runs of memory
        OWN_FAULTS.tolerate(error)
        return None
    return edit.insert_call(graph, _aten.view.default, args)


def has_same_table(key: GatheredPages, value: GatheredPages) -> bool:
    """Whether keys and values are in pages of one size, and one block table says which, perhaps converted twice."""
    if (key.sizes, key.wraps) != (value.sizes, value.wraps) or not _is_same(key.table, value.table):
        return False
    made = edit.ancestors(key.table) if key.table is not value.table else []
    return not any(edit.may_write(one, made) for one in key.table.graph.nodes)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two operands are one node, or equal calls."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return type(one) is type(other) and bool(one == other)
    if one is other:
        return True
    if not one.op == other.op == "call_function" or one.target is not other.target or not edit.is_pure(one.target):
        return False
    (mine, form), (others, its_form) = (pytree.tree_flatten((node.args, dict(node.kwargs))) for node in (one, other))
    return form == its_form and all(map(_is_same, mine, others))
