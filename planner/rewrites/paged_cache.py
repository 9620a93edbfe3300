"""Attention over a cache in pages, without a copy of the pages in every call.

A model in plain PyTorch gathers the pages of each sequence by its block table (``key_pages[block_table]``), puts them
one after another, and calls attention on that copy. Here the gather and the call become one op, which a kernel computes
from the pages where they lie (:mod:`~fuseplan.planner.graph.decode_attention`).

What lies between the gather and attention may be any ops that only move elements: where each element of the keys comes
from is worked out, and compared with where it should come from
(:mod:`~fuseplan.planner.rewrites.view_algebra`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import fx

from fuseplan.costmodel.devices import for_gpu
from fuseplan.planner.graph.decode_attention import DECODE_ATTENTION
from fuseplan.planner.ops.table import op_of
from fuseplan.planner.rewrites.attention_call import ATTENTION, arguments_of
from fuseplan.planner.rewrites.trace_edit import (
    ancestors,
    between,
    erase_unused,
    fake_result,
    insert_call,
    is_pure,
    may_write,
    put_in_place,
    static_sizes,
    trace_device,
    value_of,
)
from fuseplan.planner.rewrites.view_algebra import Digit, ElementMap, moved_from
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


def read_pages(module: fx.GraphModule, wanted: bool | None = None) -> int:
    """Let attention of one query position read pages in the place of gathered copies; how many calls there were.

    Every node of the trace carries its fake value in ``meta["val"]``. ``wanted`` is None where it is done on devices
    for which there is a kernel.
    """
    found = 0
    for node in list(module.graph.find_nodes(op="call_function", target=ATTENTION)):
        if wanted or (wanted is None and for_gpu(trace_device(node))):
            found += _read(node)
    return found


def _read(node: fx.Node) -> bool:
    call = arguments_of(node)
    query, mask = static_sizes(call["query"]), call["attn_mask"]
    if query is None or len(query) != 4 or query[2] != 1 or call["dropout_p"] != 0.0 or call["is_causal"]:
        return False
    key, value = gathered_pages(call["key"], node), gathered_pages(call["value"], node)
    if key is None or value is None or not has_same_table(key, value):
        return False
    sizes = static_sizes(call["key"])
    assert sizes is not None
    batch, heads, length, width = sizes
    if static_sizes(call["value"]) != sizes or (query[0], query[3]) != (batch, width):
        return False
    if query[1] != heads and (not call["enable_gqa"] or query[1] % heads):
        return False
    types = {one.dtype for name in ("query", "key", "value") if (one := value_of(call[name])) is not None}
    if len(types) != 1 or not _is_positive(call["scale"]) or not fits_scores(mask, (query[0], query[1], 1, length)):
        return False
    if _is_written(key, value, node):
        return False
    numbers = {} if call["scale"] is None else {"scale": call["scale"]}
    return decode_instead(node, call["query"], key, value, mask, numbers, [node])


def decode_instead(
    node: fx.Node, query: Any, key: GatheredPages | fx.Node, value: GatheredPages | fx.Node, mask: Any,
    numbers: Mapping[str, float], replaces: Sequence[fx.Node],
) -> bool:
    """Put attention of one query position in the place of ``node``, the last of the calls that it ``replaces``, if the
    program stays the same. Keys and values are both in pages, or neither is.
    """
    graph, read = node.graph, node.all_input_nodes
    given: list[fx.Node | None] = []
    made = None
    with graph.inserting_before(node):
        if isinstance(key, GatheredPages) and isinstance(value, GatheredPages):
            batch, _, length, _ = static_sizes(key.path[-1]) or ()
            table = viewed(graph, key.table, (batch, length // key.sizes[1]))
            given = [in_order(graph, key), in_order(graph, value), table]
            numbers = numbers if key.wraps else {**numbers, "wraps": False}
        if None not in given:
            args = query, *(given or (key, value, None)), mask
            made = insert_call(graph, DECODE_ATTENTION, args, dict(numbers), replaces)
    done = made is not None and put_in_place(made, node)
    unread = read if done else [made, *given]
    for one in reversed([one for one in graph.nodes if one in unread]):
        erase_unused(graph, ancestors(one))
    return done


def gathered_pages(node: Any, reader: fx.Node) -> GatheredPages | None:
    """The pages that a key or value is gathered from, if all that is done to them is to put them in order."""
    sizes = static_sizes(node)
    if sizes is None or len(sizes) != 4 or 0 in sizes:
        return None
    path = moved_from(node, lambda one: _rows_by(one) is not None)
    if path is None or any(set(one.users) - {*path, reader} for one in path):
        return None  # others read the copy, too: it has to be made anyhow
    found = _lookup(path[0])
    if found is None:
        return None
    pages, table = found
    shape, whole = static_sizes(pages), static_sizes(path[0])
    if shape is None or whole is None or len(shape) < 2:
        return None
    where: ElementMap | None = ElementMap.of(whole)
    for one in path[1:]:
        where = where.through(one) if where is not None else None
    if where is None or where.shape != sizes:
        return None
    order = _order(where.plain(), sizes, shape[1:])
    if order is None or math.prod(static_sizes(table) or ()) * order[0][1] != sizes[0] * sizes[2]:
        return None  # not all that is gathered is read
    return GatheredPages(pages, table, tuple(path), *order, path[0].target is _aten.index.Tensor)


def _rows_by(node: fx.Node) -> int | None:
    """Position of the argument that says which rows a look-up along the first dimension gives; None for other calls."""
    return op_of(str(node.target)).rows_by


def _lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The table and the indices of a look-up along the first dimension."""
    by = _rows_by(node)
    if by is None or node.kwargs.get("sparse_grad") or len(node.args) <= by:
        return None
    pages, table = node.args[0], node.args[by]
    if node.target is _aten.index.Tensor:
        if not isinstance(table, Sequence) or len(table) != 1:
            return None
        (table,) = table
    elif node.target is _aten.index_select.default and node.args[1] != 0:
        return None
    value = value_of(table)
    if not isinstance(pages, fx.Node) or not isinstance(table, fx.Node) or value is None:
        return None
    return (pages, table) if value.dtype in _INDEX_TYPES and static_sizes(table) is not None else None


def _is_written(key: GatheredPages, value: GatheredPages, reader: fx.Node) -> bool:
    """Whether something may write to what is gathered, or to what says which, before attention reads it."""
    return any(
        may_write(one, (whole.pages, whole.table, *whole.path))
        for whole in (key, value) for one in between(whole.path[0], reader)
    )


def _order(
    where: ElementMap, sizes: Sequence[int], page: Sequence[int]
) -> tuple[tuple[int, int, int], tuple[int, ...]] | None:
    """Heads, rows and width of a page, and where they lie in it, so that a map of keys is the one of pages in order.

    ``sizes`` are those of the keys, ``page`` the shape of a page.
    """
    batch, heads, length, width = sizes
    elements = math.prod(page)
    shared = math.prod(size for size, stride in where.dims[1] if stride)
    rows, rest = divmod(elements, shared * width)
    if rest or not rows or length % rows or heads % shared:
        return None
    found: list[tuple[int, ...]] = []
    extents = shared, rows, width
    for order in permutations(range(3)):
        (_, of_head), (_, of_row), (_, of_element) = _digits(extents, order)
        wanted = ElementMap((
            ((batch, length // rows * elements),), ((shared, of_head), (heads // shared, 0)),
            ((length // rows, elements), (rows, of_row)), ((width, of_element),),
        ))
        if wanted.plain() == where:
            found.append(order)
    if not found:
        return None
    # Where a size is one, several orders are the same; pages that have one of them already need no other shape.
    as_is = [order for order in found if tuple(extents[one] for one in order) == tuple(page)]
    return extents, (as_is or found)[0]


def _digits(extents: Sequence[int], order: Sequence[int]) -> list[Digit]:
    """Heads, rows and width of a page with their strides, where they lie in an order."""
    strides = [math.prod(extents[one] for one in order[order.index(dim) + 1 :]) for dim in range(3)]
    return list(zip(extents, strides, strict=True))


def in_order(graph: fx.Graph, whole: GatheredPages) -> fx.Node | None:
    """Pages as ``[pages, kv heads, rows, width]``, a view put into the graph; None where there is no such view."""
    pages = viewed(graph, whole.pages, (-1, *(whole.sizes[one] for one in whole.order)))
    dims = [0, *(1 + whole.order.index(dim) for dim in range(3))]
    return pages if pages is None or dims == [0, 1, 2, 3] else insert_call(graph, _aten.permute.default, (pages, dims))


def viewed(graph: fx.Graph, node: fx.Node, shape: Sequence[int]) -> fx.Node | None:
    """A view of another shape put into the graph, the node itself if it has it; None where there is no such view."""
    sizes = static_sizes(node)
    if sizes is not None and sizes[1:] == tuple(shape[1:]) and len(sizes) == len(shape):
        return node
    args = node, list(shape)
    try:
        fake_result(_aten.view.default, args, {}, {})
    except Exception as error:  # its dimensions are no runs of memory
        OWN_FAULTS.tolerate(error)
        return None
    return insert_call(graph, _aten.view.default, args)


def has_same_table(key: GatheredPages, value: GatheredPages) -> bool:
    """Whether keys and values are in pages of one size, and one block table says which.

    Models convert a table twice. The two are equal if nothing writes to what they are made of.
    """
    if (key.sizes, key.wraps) != (value.sizes, value.wraps) or not _is_same(key.table, value.table):
        return False
    made = ancestors(key.table) if key.table is not value.table else []
    return not any(may_write(one, made) for one in key.table.graph.nodes)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two operands are one node, or equal calls."""
    if one is other:
        return True
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        return (
            one.op == other.op == "call_function" and one.target is other.target and is_pure(one.target)
            and _is_same(one.args, other.args) and _is_same(dict(one.kwargs), dict(other.kwargs))
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    return type(one) is type(other) and not isinstance(one, fx.Node) and bool(one == other)


def _is_positive(scale: Any) -> bool:
    return scale is None or (isinstance(scale, int | float) and 0 < scale < math.inf)


def fits_scores(mask: Any, scores: Sequence[int]) -> bool:
    """Whether a mask says something of each score, and no more is broadcast than batches and heads."""
    if mask is None:
        return True
    sizes = static_sizes(mask)
    if sizes is None or not 2 <= len(sizes) <= 4 or sizes[-1] != scores[-1]:
        return False
    return all(own in (1, its) for own, its in zip(sizes, scores[-len(sizes) :], strict=True))
