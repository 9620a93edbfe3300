"""What a library's way to run an op of a graph is asked: can it, and how is it called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fuseplan.costmodel.devices import is_cpu
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.native.build import required_compiler
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec

#: ``call(*inputs)``: a tensor, or a tuple of tensors where the op has several outputs.
Call: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class OpGroup:
    """A group of one op, with concrete sizes: what a library is asked about.

    Attributes:
        node: The op.
        inputs: Names of the values it reads, each once, in the order in which a call gets them.
        outputs: Names of the values that are needed outside.
        specs: Static layouts of every value named above.
        device_type: ``"cpu"`` or ``"cuda"``.
        only_returned: Whether nothing but the graph's caller reads its result. Its rows may then lie farther apart in
            memory than eager's, as TorchInductor returns them, too.
    """

    node: OpNode
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    specs: Mapping[str, TensorSpec]
    device_type: str
    only_returned: bool = False


class LibraryCall(ABC):
    """A library's way to run an ATen op.

    Attributes:
        name: Unique among implementations, a word that records keep: ``"sdpa.cudnn"``.
        by_rule: Whether the cost model may choose it where nothing was measured: of most calls it cannot tell.
    """

    name: str
    by_rule: bool = False

    @abstractmethod
    def plan(self, group: OpGroup) -> Callable[[], Call]:
        """What builds the call, whose results have the layouts of ``group.specs``. Touches no device memory.

        Raises:
            RefusedError: It cannot run the group here.
        """

    def refuse(self, group: OpGroup) -> str | None:
        """Why it cannot run the group here; None when it can."""
        if not all(group.specs[name].is_static for name in (*group.inputs, *group.outputs)):
            return "its sizes are not static"
        try:
            self.plan(group)
        except RefusedError as error:
            return str(error)
        return None

    def surpasses(self, group: OpGroup) -> bool:
        """Whether it is known to be faster than ATen's op, of a group for which nothing was measured."""
        return self.by_rule and self.refuse(group) is None

    def overhead(self, group: OpGroup) -> Work:
        """What it copies (``l2_bytes``: just read or written) and launches besides the op, of a group that it can run.
        """
        return Work()

    def build(self, group: OpGroup) -> Call:
        """The call itself; RefusedError where it cannot run the group."""
        return self.plan(group)()


def check_cpu(device_type: str) -> None:
    """Raise RefusedError where no kernel of ours is compiled for a CPU."""
    if not is_cpu(device_type):
        raise RefusedError("it runs on CPUs only")
    try:
        required_compiler()
    except BuildError as error:
        raise RefusedError(str(error)) from None


def given(build: Callable[[], Call], at: Sequence[int]) -> Callable[[], Call]:
    """What builds a call that hands some of its inputs on, by their numbers."""
    def built() -> Call:
        call = build()
        return lambda *inputs: call(*(inputs[number] for number in at))

    return built
