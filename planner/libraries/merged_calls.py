"""Linear ops that read one value, merged (:mod:`~fuseplan.planner.graph.merged_linear`): as one product, or as several.

One product is no rule: where rows are many, several smaller ones may be faster. What a graph holds is the merged op
either way, since its weights lie side by side for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fuseplan.planner.graph.execute import bind_call
from fuseplan.planner.graph.merged_linear import MergedLinear, as_one, linear_apart, side_by_side
from fuseplan.planner.libraries.library_call import Call, OpGroup
from fuseplan.planner.rewrites.packing import pack_operands

_MERGED = "fuseplan.merged_linear.default"


@dataclass(frozen=True)
class MergedCall:
    """A way to run a merged linear op (implements
    :class:`~fuseplan.planner.libraries.library_call.LibraryCall`).

    Attributes:
        name: What records call it.
        make: Makes ``run(x, weights, biases)`` for one place in a program.
        packs: Whether weights must lie side by side for it to be what its name says.
        device_types: Where it can run.
        takes: Names of the ops of a group that it may run, in order.
    """

    name: str
    make: Callable[[], Callable[..., torch.Tensor]]
    packs: bool
    device_types: tuple[str, ...] = ("cpu", "cuda")
    takes: frozenset[tuple[str, ...]] = frozenset({(_MERGED,)})

    def refuse(self, group: OpGroup) -> str | None:
        if group.device_type not in self.device_types:
            return f"it runs on {' and '.join(self.device_types)} only"
        if tuple(node.op for node in group.nodes) not in self.takes:
            return "it runs one merged linear op"
        return None

    def prepare(self, group: OpGroup, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The operands; where the call wants weights and biases side by side, and they are not, copies that are."""
        if not self.packs:
            return operands
        prepared = list(operands)
        _, *lists = _operands(group)
        for places in lists:
            given = [operands[at] for at in places]
            if given and as_one(given) is None:
                for at, part in zip(places, side_by_side(given), strict=True):
                    prepared[at] = part
        return prepared

    def build(self, group: OpGroup) -> Call:
        call = self.make()
        x, weights, biases = _operands(group)

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            return call(inputs[x], [inputs[at] for at in weights], [inputs[at] for at in biases])

        return run


def _operands(group: OpGroup) -> tuple[int, list[int], list[int]]:
    """Where among the group's inputs the left operand is, and where weights and biases are."""
    (node,) = group.nodes
    (x, weights, biases), _ = bind_call(node, [group.inputs.index(name) for name in node.inputs])
    return x, list(weights), list(biases)


def _one() -> Callable[..., torch.Tensor]:
    return MergedLinear(pack_operands)


def _apart() -> Callable[..., torch.Tensor]:
    return linear_apart


# Named functions: a call travels to the process that times it.
MERGED_CALLS = (MergedCall("merged.one", _one, packs=True), MergedCall("merged.apart", _apart, packs=False))
