"""Linear ops that read one value (queries, keys and values; gate and up) as one op over packed weights.

One matrix product fills a device better than several small ones. Its weights are moved side by side in memory
(:mod:`~fuseplan.planner.rewrites.packing`), which is the user's to ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import fx

from fuseplan.planner.graph.merged_linear import MERGED
from fuseplan.planner.ops.table import op_of
from fuseplan.planner.rewrites import trace_edit as edit

_aten = torch.ops.aten
_LINEAR = _aten.linear.default

#: ``pack(weights, biases)``: makes arguments of the trace, given by position, lie side by side; or why it cannot.
Pack: TypeAlias = Callable[[Sequence[int], Sequence[int]], str | None]


@dataclass(frozen=True)
class MergedProjections:
    """Groups of linear ops that are one op now, and by reason those that stay as they were."""

    merged: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Linear:
    """One linear op: its node and those of its operands; ``bias`` is None where it has none."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for ops that can be one: width and type of the weight, and whether there is a bias."""
        weight = edit.value_of(self.weight)
        assert weight is not None
        return weight.shape[1], weight.dtype, weight.device, self.bias is None


def merge_projections(
    module: fx.GraphModule, parameters: Collection[int], pack: Pack | None = None
) -> MergedProjections:
    """Make one op of linear ops that read one value, in a trace with fake values, wherever that computes the same.

    ``parameters`` are positions of arguments. What ``pack`` refuses to move stays; it is None if there are only fakes.
    """
    graph = module.graph
    places = {node: at for at, node in enumerate(graph.find_nodes(op="placeholder")) if at in parameters}
    merged, refused = 0, Counter[str]()
    for run in list(_runs(graph)):
        fit: dict[tuple[Any, ...], list[_Linear]] = {}
        for one in run:
            if (reason := _why_unfit(one, places)) is not None:
                refused[reason] += 1
            else:
                fit.setdefault(one.kind, []).append(one)
        for site in (site for site in fit.values() if len(site) > 1):
            if (reason := _merge(graph, site, places, pack)) is not None:
                refused[reason] += 1
            else:
                merged += 1
    if merged:
        graph.lint()
        module.recompile()
    return MergedProjections(merged, dict(refused))


def _runs(graph: fx.Graph) -> Iterator[list[_Linear]]:
    """Linear ops that read one value, two at least; no other anchor is between them, across which results were kept."""
    anchors = [node for node in graph.nodes if node.op == "call_function" and op_of(str(node.target)).is_anchor]
    for _, run in groupby(anchors, lambda node: node.args[0] if node.target is _LINEAR else node):
        nodes = list(run)
        if len(nodes) > 1:
            yield [_Linear(node, *edit.arguments_of(node).values()) for node in nodes]


def _why_unfit(one: _Linear, places: Collection[fx.Node]) -> str | None:
    """Why an op cannot be part of a merged one; None when it can."""
    for name, operand in (("weight", one.weight), ("bias", one.bias)):
        if operand is None:
            continue
        sizes, value = edit.static_sizes(operand), edit.value_of(operand)
        if operand not in places:
            return f"a {name} is no parameter of the model"
        if len(operand.users) > 1:
            return f"a {name} is used in several places"
        if value is None or sizes is None or 0 in sizes or not value.is_floating_point() or not value.is_contiguous():
            return f"a {name} is not laid out row by row"
        if len(sizes) != (2 if name == "weight" else 1):
            return f"a {name} has {len(sizes)} dimensions"
    return None


def _merge(graph: fx.Graph, site: Sequence[_Linear], places: Mapping[fx.Node, int], pack: Pack | None) -> str | None:
    """Make one op of several; why that cannot be, and then nothing is changed."""
    first, last, x = site[0].node, site[-1].node, site[0].x
    if edit.is_written_between(first, last, [x]):
        return "what they read is written to between them"
    weights, biases = [one.weight for one in site], [one.bias for one in site if one.bias is not None]
    with graph.inserting_before(first):
        made = [edit.insert_call(graph, MERGED, (x, weights, biases), replaces=[one.node for one in site])]
        dim, start = edit.value_of(made[0]).dim() - 1, 0  # type: ignore[union-attr]
        for one in site:
            end = start + one.weight.meta["val"].shape[0]
            made.append(edit.insert_call(graph, _aten.slice.Tensor, (made[0], dim, start, end), replaces=[one.node]))
            start = end
    before: dict[fx.Node, Any] = {}
    reason = None
    for one, part in zip(site, made[1:], strict=True):
        values = edit.follow(one.node, part.meta["val"], shared=True)
        if values is None:
            reason = "their results are written to, returned, or viewed in a way that needs memory of their own"
            break
        before = {node: node.meta.get("val") for node in values} | before
        edit.set_values(values)
    if reason is None and pack is not None:
        reason = pack([places[one] for one in weights], [places[one] for one in biases])
    if reason is not None:
        edit.set_values(before)
        edit.erase_unused(*made[1:])
        return reason
    for one, part in zip(site, made[1:], strict=True):
        one.node.replace_all_uses_with(part)
        graph.erase_node(one.node)
    return None
