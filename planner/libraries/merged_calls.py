"""Linear ops that read one value, merged (:mod:`~fuseplan.planner.graph.merged_linear`): as one product, or as several.

One product is no rule: where rows are many, several smaller ones may be faster. What a graph holds is the merged op
either way, since its weights lie side by side for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuseplan.planner.graph.execute import bind_call
from fuseplan.planner.graph.merged_linear import MergedLinear, linear_apart
from fuseplan.planner.libraries.library_call import Call, OpGroup
from fuseplan.planner.rewrites.packing import pack_operands

_MERGED = "fuseplan.merged_linear.default"


@dataclass(frozen=True)
class MergedCall:
    """A way to run a merged linear op (implements
    :class:`~fuseplan.planner.libraries.library_call.LibraryCall`).

    Records call it by its name; ``joined`` makes it one product.
    """

    name: str
    joined: bool

    def refuse(self, group: OpGroup) -> str | None:
        return None if group.node.op == _MERGED else "it is no merged linear op"

    def build(self, group: OpGroup) -> Call:
        call = MergedLinear(pack_operands) if self.joined else linear_apart
        (x, weights, biases), _ = bind_call(group.node, [group.inputs.index(name) for name in group.node.inputs])

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            return call(inputs[x], [inputs[at] for at in weights], [inputs[at] for at in biases])

        return run


MERGED_CALLS = (MergedCall("merged.one", True), MergedCall("merged.apart", False))
