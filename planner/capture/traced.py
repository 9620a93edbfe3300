"""A traced graph beside its dataflow form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from fuseplan.planner.graph.dataflow import DataflowGraph


@dataclass(frozen=True)
class Traced:
    """A traced graph and its dataflow form.

    Attributes:
        module: Pre-dispatch ATen.
        graph: The normalised graph of ``module``.
        node_of: The FX node that computes each value of ``graph``.
        sizes: Position among the arguments of each dynamic size that is passed as an integer.
        scalars: The FX node that computes a number from sizes, or reads it from an argument, by symbol.
    """

    module: fx.GraphModule
    graph: DataflowGraph
    node_of: Mapping[str, fx.Node]
    sizes: Mapping[str, int] = field(default_factory=dict)
    scalars: Mapping[str, fx.Node] = field(default_factory=dict)
