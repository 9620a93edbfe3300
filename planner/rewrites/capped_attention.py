"""Attention whose scores are capped, written as ops between two matmuls, as one op.

PyTorch's attention has no argument for a cap (Gemma 2), so models write ``softmax(cap * tanh(q @ k.T * scale / cap) +
mask) @ v``. For one query position that is a handful of small kernels, and copies of keys and values for every query
head that shares them; a kernel of ours computes it in one launch (:mod:`~fuseplan.planner.graph.decode_attention`).

Without a cap such a chain stays as it is: PyTorch's attention gives zeros where all keys are masked by minus infinity,
and the chain NaN.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fuseplan.costmodel.devices import for_gpu
from fuseplan.planner.rewrites.grouped_queries import shared_heads
from fuseplan.planner.rewrites.paged_cache import (
    GatheredPages,
    decode_instead,
    fits_scores,
    gathered_pages,
    has_same_table,
)
from fuseplan.planner.rewrites.trace_edit import may_write, static_sizes, trace_device, value_of

_aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Chain:
    """``softmax(cap * tanh(query @ keys * scale / cap) + mask) @ value``, whose ops are ``nodes``, the last one last.

    ``keys`` is ``[batch, heads, width, length]``, ``value`` ``[batch, heads, length, width]``.
    """

    query: fx.Node
    keys: fx.Node
    value: fx.Node
    mask: fx.Node | None
    scale: float
    cap: float
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Cache:
    """What keys or values are before they are gathered, or repeated for the query heads that share them.

    Attributes:
        held: What they are in: a static cache, or pages.
        heads: Heads of keys.
        since: Where the chain first reads them.
        pages: How they lie in pages; None for a static cache.
    """

    held: fx.Node
    heads: int
    since: fx.Node
    pages: GatheredPages | None = None


def cap_scores(module: fx.GraphModule, wanted: bool | None = None) -> int:
    """Make one op of every chain of capped attention of one query position; how many there were.

    Every node of the trace carries its fake value in ``meta["val"]``. ``wanted`` is as
    :func:`~fuseplan.planner.rewrites.paged_cache.read_pages` takes it.
    """
    found = 0
    for node in list(module.graph.find_nodes(op="call_function", target=_aten.matmul.default)):
        if wanted or (wanted is None and for_gpu(trace_device(node))):
            chain = _chain(node)
            found += chain is not None and _replace(chain)
    return found


def _chain(last: fx.Node) -> _Chain | None:
    """The chain that ends in a matmul, if nothing else reads what it computes on the way."""
    nodes = [last]

    def step(source: Any, *targets: Any) -> fx.Node | None:
        """``source`` if it is a call of one of some ops that only the node before reads."""
        if not isinstance(source, fx.Node) or source.target not in targets or list(source.users) != [nodes[-1]]:
            return None
        nodes.append(source)
        return source

    weights, value = last.args[:2]
    while (moved := step(weights, _aten.dropout.default, _aten.to.dtype)) is not None:
        if moved.target is _aten.dropout.default and moved.args[1] != 0.0 and moved.args[2]:
            return None
        weights = moved.args[0]
    softmax = step(weights, _aten.softmax.int)
    if softmax is None or softmax.args[1] not in (-1, 3) or not _is_rounded_once(nodes):
        return None
    scores, mask = softmax.args[0], None
    if (added := step(scores, _aten.add.Tensor)) is not None:
        scores, mask = added.args[:2]
        if added.kwargs.get("alpha", 1) != 1 or not isinstance(mask, fx.Node):
            return None
    cap = _factor(times := step(scores, _aten.mul.Tensor))
    tanh = step(times.args[0], _aten.tanh.default) if times is not None else None
    shrunk = step(tanh.args[0], _aten.div.Tensor, _aten.mul.Tensor) if tanh is not None else None
    factor = _factor(shrunk)
    if cap is None or shrunk is None or factor is None or not math.isclose(cap * factor, 1.0, rel_tol=1e-6):
        return None
    scale, inner = 1.0, shrunk.args[0]
    if (scaled := step(inner, _aten.mul.Tensor, _aten.div.Tensor)) is not None:
        scale, inner = _factor(scaled) or 0.0, scaled.args[0]
    first = step(inner, _aten.matmul.default)
    if first is None or not 0 < scale < math.inf or not 0 < cap < math.inf:
        return None
    query, keys = first.args[:2]
    if not all(isinstance(one, fx.Node) for one in (query, keys, value)):
        return None
    return _Chain(query, keys, value, mask, scale, cap, tuple(reversed(nodes)))  # type: ignore[arg-type]


def _is_rounded_once(nodes: list[fx.Node]) -> bool:
    """Whether weights are rounded to the type that they are multiplied in, and to no other, after the softmax."""
    last, *moved, softmax = nodes
    types = [one.dtype for node in (*moved, last) if (one := value_of(node)) is not None]
    whole = value_of(softmax)
    return whole is not None and set(types) <= {types[-1], whole.dtype} and whole.dtype in (torch.float32, types[-1])


def _factor(node: fx.Node | None) -> float | None:
    """The number that a product or quotient multiplies by; None where it is no positive number."""
    if node is None or not isinstance(node.args[0], fx.Node):
        return None
    number = node.args[1]
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 < number < math.inf:
        return None
    return float(number) if node.target is _aten.mul.Tensor else 1.0 / number


def _replace(chain: _Chain) -> bool:
    last, (query, whole) = chain.nodes[-1], (static_sizes(chain.query), static_sizes(chain.keys))
    across = chain.keys
    if query is None or whole is None or len(query) != 4 or len(whole) != 4 or query[2] != 1 or 0 in whole:
        return False
    if across.target is not _aten.transpose.int or {dim % 4 for dim in across.args[1:]} != {2, 3}:  # type: ignore[operator]
        return False
    batch, heads, width, length = whole
    if query != (batch, heads, 1, width) or static_sizes(chain.value) != (batch, heads, length, width):
        return False
    operands = [value_of(one) for one in (chain.query, across, chain.value, last)]
    if len({one.dtype for one in operands if one is not None}) != 1 or operands[0].dtype not in _FLOATS:  # type: ignore[union-attr]
        return False
    mask = value_of(chain.mask)
    if chain.mask is not None and (mask is None or not mask.is_floating_point()):
        return False
    if not fits_scores(chain.mask, (batch, heads, 1, length)):
        return False
    key, value = _cache(across.args[0], across), _cache(chain.value, last)
    if key is None or value is None or key.heads != value.heads or not _is_unchanged(chain, key, value):
        return False
    numbers = {"scale": chain.scale, "cap": chain.cap}
    return decode_instead(
        last, chain.query, key.pages or key.held, value.pages or value.held, chain.mask, numbers, chain.nodes)


def _cache(node: Any, reader: fx.Node) -> _Cache | None:
    """What a key or value that ``reader`` reads is made of."""
    pages = gathered_pages(node, reader)
    if pages is not None:
        return _Cache(pages.pages, pages.sizes[0], pages.path[0], pages)
    shared = shared_heads(node, False)
    held, since = (node, reader) if shared is None or shared.copied is None else (shared.base, shared.copied)
    sizes = static_sizes(held)
    return _Cache(held, sizes[1], since) if sizes is not None and isinstance(node, fx.Node) else None


def _is_unchanged(chain: _Chain, key: _Cache, value: _Cache) -> bool:
    """Whether all that the chain reads is at its end what it was when the chain read it."""
    read = {chain.query, chain.keys, chain.value, key.held, value.held, *chain.nodes}
    read |= {chain.mask} if chain.mask is not None else set()
    if key.pages is not None and value.pages is not None:
        if not has_same_table(key.pages, value.pages):
            return False
        read |= {key.pages.table, value.pages.table, *key.pages.path, *value.pages.path}
    elif key.pages is not value.pages:  # one in pages, the other not
        return False
    return not any(may_write(one, read) for one in _since({key.since, value.since, chain.nodes[0]}, chain.nodes[-1]))


def _since(starts: Collection[fx.Node], last: fx.Node) -> Iterator[fx.Node]:
    """The nodes from the first of some on, before the last."""
    begun = False
    for node in last.graph.nodes:
        if node is last:
            return
        begun = begun or node in starts
        if begun:
            yield node
