"""How much of a graph runs in generated kernels: of the ops that a kernel could take over, those that one did.

What could be taken over is said by kinds of op, not by what this project has recipes for. Left out are anchors (ops
with an inner dimension of their own), views, constants, and what only ATen can run: see :func:`role_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias
from unittest import mock

import torch

from fuseplan.planner.errors import UnknownOpError
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, Ref, bind_graph
from fuseplan.planner.graph.execute import resolve_op
from fuseplan.planner.groups import compute_graph
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.ops.positions import Specs
from fuseplan.planner.ops.table import OpKind, is_address_map

Role: TypeAlias = Literal["coverable", "anchor", "opaque", "view", "constant"]

#: Ops that read windows.
WINDOWS = frozenset({
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "unfold", "im2col",
})  # fmt: skip
#: Ops of ATen (overload, leading and trailing underscores left off) with an inner dimension of their own.
ANCHORS = frozenset({
    "linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm", "einsum", "bilinear", "inner",
    "tensordot", "grouped_mm", "scaled_mm", "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "multi_head_attention_forward",
    "native_multi_head_attention", "transformer_encoder_layer_fwd", "lstm", "gru", "rnn_tanh", "rnn_relu",
    *WINDOWS,
})  # fmt: skip
#: Ops that only ATen can run, by the reason. Random numbers, writes and sizes that depend on data show in the schema.
OPAQUE: Mapping[str, frozenset[str]] = MappingProxyType({
    "sorts": frozenset({"sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode", "quantile"}),
    "carries from element to element": frozenset({"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"}),
    "writes where data says": frozenset({
        "scatter", "scatter_add", "scatter_reduce", "index_put", "index_add", "index_copy", "index_fill",
        "index_reduce", "masked_scatter", "put", "histc", "bincount",
    }),
    "makes memory only": frozenset({"empty", "empty_like", "new_empty", "empty_strided", "empty_permuted"}),
})  # fmt: skip

#: Ops that look at nothing of their operand but its layout.
CONSTANTS = frozenset({"full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"})

_OPAQUE_NAMES = frozenset().union(*OPAQUE.values())
_OPAQUE_TAGS = (
    torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded,
)  # fmt: skip


@dataclass(frozen=True)
class MemoryBound:
    """Ops whose time is that of memory.

    All that do work are, but matmuls and their like, random numbers, and what has a size that depends on data or is no
    op of ATen. Sorts, scans, windows and writes are among them.

    Attributes:
        ops: How many there are.
        fused: Those of them that run in fused code.
        alone: The others that no other op can join.
        left: What is neither, by name.
    """

    ops: int = 0
    fused: int = 0
    alone: int = 0
    left: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Coverage:
    """Counts of one graph, or of several.

    Attributes:
        coverable: Ops that a kernel could take over.
        fused: Those of them that run in a kernel, whether with others or alone.
        alone: Those left to ATen that no other coverable op can join: a kernel of one op saves no launch.
        left: Every coverable op that is left to ATen, by name.
        memory_bound: Of one graph: the same question about more ops (no sum of coverages has it).
    """

    coverable: int = 0
    fused: int = 0
    alone: int = 0
    left: Mapping[str, int] = field(default_factory=dict)
    memory_bound: MemoryBound = field(default_factory=MemoryBound, compare=False)

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            self.coverable + other.coverable, self.fused + other.fused, self.alone + other.alone,
            MappingProxyType(dict(Counter(self.left) + Counter(other.left))),
        )  # fmt: skip

    @property
    def share(self) -> float:
        """Strictly: what runs in kernels, of all that could (1 where nothing could)."""
        return self.fused / self.coverable if self.coverable else 1.0

    @property
    def share_or_alone(self) -> float:
        """The same, where an op that no other can join also counts as well placed with ATen."""
        return (self.fused + self.alone) / self.coverable if self.coverable else 1.0


def coverage(graph: DataflowGraph, fused: Collection[str]) -> Coverage:
    """What of ``graph`` is covered when its ops named ``fused`` run in kernels."""
    members = frozenset(fused)
    roles = {node.name: role_of(node, graph.specs) for node in graph}
    with mock.patch.object(compute_graph, "kind_of", lambda node, specs: _KINDS[roles[node.name]]):
        regions = find_regions(copy(bind_graph(graph)))  # a graph of its own, of which no kinds are remembered
    groups = [[name for name in region.ops if roles[name] == "coverable"] for region in regions]
    names = [name for group in groups for name in group]
    left = Counter(graph.op(name).op for name in names if name not in members)
    lone = {group[0] for group in groups if len(group) == 1} - members
    bound = [node for node in graph if _is_memory_bound(node, graph.specs, roles[node.name])]
    apart = Counter(node.op for node in bound if node.name not in members | lone)
    return Coverage(
        len(names), len(members.intersection(names)), len(lone), MappingProxyType(dict(left)),
        MemoryBound(len(bound), len(bound) - apart.total() - len(lone), len(lone), MappingProxyType(dict(apart))))


#: What a role is to the search for regions: a constant can be in any of them, and is in none by itself.
_KINDS: Mapping[Role, OpKind] = {
    "coverable": "compute", "anchor": "opaque", "opaque": "opaque", "view": "view", "constant": "view",
}  # fmt: skip


def role_of(node: OpNode, specs: Specs) -> Role:
    """What an op is to coverage.

    An op is opaque when its schema says that it writes to an operand, draws random numbers or has a size that depends
    on data, when it indexes with booleans, when it is no op of ATen, or when :data:`OPAQUE` lists it.
    """
    if is_address_map(node, specs):
        return "view"
    if not node.op.startswith("aten."):
        return "opaque"
    name = node.op.split(".")[1].strip("_")
    if name in ANCHORS or "attention" in name:
        return "anchor"
    if name in _OPAQUE_NAMES or "device" in node.attrs or _is_opaque(node) or _indexes_with_booleans(node, specs):
        return "opaque"
    return "coverable" if node.inputs and name not in CONSTANTS else "constant"


def _is_memory_bound(node: OpNode, specs: Specs, role: Role) -> bool:
    if role in ("view", "constant") or not node.op.startswith("aten."):
        return False
    name = node.op.split(".")[1].strip("_")
    if role == "anchor":
        return name in WINDOWS
    if role == "coverable" or name in _OPAQUE_NAMES - OPAQUE["makes memory only"]:
        return True
    target = resolve_op(node.op)
    return target._schema.is_mutable and not any(tag in target.tags for tag in _OPAQUE_TAGS)


def _is_opaque(node: OpNode) -> bool:
    """What the schema says."""
    try:
        target = resolve_op(node.op)
    except UnknownOpError:
        return True
    if target._schema.is_mutable:
        return True
    random = torch.Tag.nondeterministic_seeded in target.tags
    if random and (not node.attrs.get("train", True) or node.attrs.get("p") == 0):
        return False
    return any(tag in target.tags for tag in _OPAQUE_TAGS) and node.op != "aten.index.Tensor"


def _indexes_with_booleans(node: OpNode, specs: Specs) -> bool:
    if node.op != "aten.index.Tensor":
        return False
    given = [entry.position for entry in node.attrs["indices"] if isinstance(entry, Ref)]
    return any(specs[node.inputs[number]].dtype in ("bool", "uint8") for number in given)
