"""Linear ops that read one value, merged (:mod:`~fuseplan.planner.graph.merged_linear`): as one product, or as several.

One product is no rule: where rows are many, several smaller ones may be faster. What a graph holds is the merged op
either way, since its weights lie side by side for both.
"""

from __future__ import annotations

from collections.abc import Callable
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

    Records call it by its name; ``make`` makes ``run(x, weights, biases)`` for one place in a program.
    """

    name: str
    make: Callable[[], Callable[..., torch.Tensor]]

    def refuse(self, group: OpGroup) -> str | None:
        return None if group.node.op == _MERGED else "it is no merged linear op"

    def build(self, group: OpGroup) -> Call:
        call = self.make()
        (x, weights, biases), _ = bind_call(group.node, [group.inputs.index(name) for name in group.node.inputs])

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            return call(inputs[x], [inputs[at] for at in weights], [inputs[at] for at in biases])

        return run


def _one() -> Callable[..., torch.Tensor]:
    return MergedLinear(pack_operands)


def _apart() -> Callable[..., torch.Tensor]:
    return linear_apart


# Named functions: a call travels to the process that times it.
MERGED_CALLS = (MergedCall("merged.one", _one), MergedCall("merged.apart", _apart))
