"""What a library's way to run some ops of a graph is asked: can it, what does it need, how is it called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from fuseplan.planner.graph.dataflow import OpNode, TensorSpec

#: ``call(*inputs)``: a tensor, or a tuple of tensors where the group has several outputs.
Call: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class OpGroup:
    """Some ops with concrete sizes: what an implementation is asked about.

    Attributes:
        nodes: The ops with the views between them, topological.
        inputs: Names of the values they read from outside, in the order in which a call gets them.
        outputs: Names of the values that are needed outside.
        specs: Static layouts of every value named above.
        device_type: ``"cpu"`` or ``"cuda"``.
    """

    nodes: tuple[OpNode, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    specs: Mapping[str, TensorSpec]
    device_type: str


class LibraryCall(Protocol):
    """A library's way to run a group of ATen ops."""

    @property
    def name(self) -> str:
        """Unique among implementations, a word that records keep: ``"sdpa.cudnn"``."""
        ...

    @property
    def device_types(self) -> tuple[str, ...]:
        """Kinds of device it can run on: ``("cpu", "cuda")``."""
        ...

    @property
    def takes(self) -> frozenset[tuple[str, ...]]:
        """Op names, in order, of the groups that it may run; it refuses all others."""
        ...

    def refuse(self, group: OpGroup) -> str | None:
        """Why it cannot run the group here; None when it can. Touches no device memory."""
        ...

    def prepare(self, group: OpGroup, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The operands as the call wants them, made once at compile time (packed weights); most return them as is."""
        ...

    def build(self, group: OpGroup) -> Call:
        """The call itself; its results have the layouts of ``group.specs``."""
        ...
