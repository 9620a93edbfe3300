"""A traced graph beside its dataflow form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fuseplan.planner.graph.dataflow import DataflowGraph


@dataclass(frozen=True)
class Traced:
    """A traced graph and its dataflow form.

    Attributes:
        module: Pre-dispatch ATen.
        graph: The normalised graph of ``module``.
        node_of: The FX node that computes each value of ``graph`` (for an op with several results, the op's own node).
        placeholders: Position among the arguments of each tensor input; constants are not in it.
        sizes: Position among the arguments of each dynamic size that is passed as an integer.
        scalars: The FX node that computes a number from sizes, or reads it from an argument, by symbol.
        constants: Tensors that the trace holds as attributes; they are graph inputs too.
        results: What the module returns, leaf by leaf: ``Ref(i)`` for ``graph.outputs[i]``, a size, or a constant.
        written: Positions among the arguments of tensors whose memory the graph writes to.
    """

    module: fx.GraphModule
    graph: DataflowGraph
    node_of: Mapping[str, fx.Node]
    placeholders: Mapping[str, int]
    sizes: Mapping[str, int]
    scalars: Mapping[str, fx.Node]
    constants: Mapping[str, torch.Tensor]
    results: tuple[Any, ...]
    written: frozenset[int]
