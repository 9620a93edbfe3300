"""What stands behind the call of a group: its ATen ops, which take over when the first call fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fuseplan.kernels.ir.backend import Backend, Config, OutsideTable
from fuseplan.kernels.ir.dtypes import torch_dtype
from fuseplan.kernels.ir.in_place import Reuse
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.planner.dispatch_stats import Source, Tally
from fuseplan.planner.errors import RefusedError, failure_reason
from fuseplan.planner.graph.layouts import layout_of, same_layout
from fuseplan.planner.implementations.direct_calls import GroupCall
from fuseplan.planner.implementations.subject import Fused
from fuseplan.planner.libraries.library_call import LibraryCall
from fuseplan.planner.module_paths import Paths, located, place
from fuseplan.planner.runtime.logs import debug_logger

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupPlan:
    """A group to run as one kernel.

    Attributes:
        ops: Names of its ops in the dataflow graph.
        backend: Who compiles it.
        config: With which configuration.
        source: Where the decision came from.
        label: Short name for people.
        others: Who compiles it with their default configuration where ``backend`` cannot: a plan tuned for fixed
            sizes also serves dynamic ones, which not every back end can express.
        paths: Of the modules that its ops are of.
    """

    ops: tuple[str, ...]
    backend: Backend
    config: Config
    source: Source
    label: str = ""
    others: tuple[Backend, ...] = ()
    paths: Paths = ()

    def placed(self, tally: Tally) -> None:
        tally.fused(self.source)

    def leave_out(self, reason: str, tally: Tally) -> None:
        """Count and log that there is no such kernel."""
        tally.fall_back(reason, paths=self.paths)
        logger.info("group %s runs unfused: %s", located(self.label or self.ops[0], place([self.paths])), reason)

    def give_up(self, reason: str, name: str, tally: Tally) -> None:
        """Count and log that the kernel, called ``name`` in the graph, does not work."""
        tally.fall_back(reason, self.source, self.paths)
        where = place([self.paths])
        logger.warning("group %s runs unfused from now on: %s", located(self.label or name, where), reason)


@dataclass(frozen=True)
class CallPlan:
    """Ops, named as in the dataflow graph, that a library's call runs; ``label`` is for people.

    ``paths`` are of the modules that the ops are of.
    """

    ops: tuple[str, ...]
    library: LibraryCall
    label: str = ""
    paths: Paths = ()

    def placed(self, tally: Tally) -> None:
        tally.count("library_calls")

    def leave_out(self, reason: str, tally: Tally) -> None:
        tally.note(f"{self.library.name} is not called: {reason}", paths=self.paths)

    def give_up(self, reason: str, name: str, tally: Tally) -> None:
        reason = f"{self.library.name}: {reason}"
        tally.count("library_calls", -1)
        tally.note(reason, paths=self.paths)
        where = place([self.paths])
        logger.warning("%s runs as ATen's op from now on: %s", located(self.label or name, where), reason)


#: Pairs of outputs and the inputs that they take, to the call that does so.
Calling: TypeAlias = Callable[[tuple[tuple[int, int], ...]], Fused]


@dataclass(eq=False)
class FirstCall:
    """Runs a kernel or a library's call for the first time, then takes itself out of the way.

    Outputs are allocated in this call, whatever later ones do: the ATen ops need the inputs when it fails. Generated
    code finds it by ``name`` in ``namespace``.

    Attributes:
        group: Its place in the graph.
        calling: ``calling(reuse.items())`` is a call that allocates the outputs that are not in ``reuse``.
        unfused: Runs the ATen ops on given arguments: the result, and what does so in later calls.
        ir: The kernel, whose inputs have to be laid out as it was compiled for.
        debug: Show how far the results are from those of the ATen ops.
        outside: Runs the ATen ops in a call in which the kernel raises ``OutsideTable``: they say what is wrong.
    """

    plan: GroupPlan | CallPlan
    group: GroupCall
    calling: Calling
    unfused: Callable[[Sequence[Any]], tuple[Any, Fused]]
    tally: Tally
    ir: KernelIR | None = None
    debug: bool = False
    outside: Fused | None = None

    def bind(self, namespace: dict[str, Any], name: str, reuse: Reuse) -> None:
        """Take the place ``name`` in ``namespace``. Later calls write outputs over inputs as ``reuse`` says."""
        self.namespace, self.name = namespace, name
        self.call, self.later = self.calling(()), self.calling(tuple(reuse.items()))
        namespace[name] = self
        self.plan.placed(self.tally)
        self.tally.count("in_place", len(reuse))

    def __call__(self, *args: Any) -> Any:
        try:
            if self.ir is not None:  # what a fake tensor promised the device's op may not have kept
                check_layouts(self.ir, args)
            result = self.call(*args)
        except OutsideTable:
            pass  # what ATen's op raises is no consequence of it
        except Exception as error:
            self.plan.give_up(f"first call failed: {failure_reason(error)}", self.name, self.tally)
            result, self.namespace[self.name] = self.unfused(args)
            return result
        else:
            later = self.later
            self.namespace[self.name] = later if self.outside is None else _failing_as(self.outside, later)
            if self.debug:
                self._compare(result, args)
            return result
        assert self.outside is not None
        return self.outside(*args)

    def _compare(self, result: Any, args: Sequence[Any]) -> None:
        label, (expected, _) = self.plan.label or self.name, self.unfused(args)
        debug_logger().info("%s differs from its ATen ops by at most %.3g", label, largest_difference(result, expected))
        if self.later is not self.call:
            copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            difference = largest_difference(self.later(*copies), expected)
            debug_logger().info("%s in place differs from its ATen ops by at most %.3g", label, difference)


def _failing_as(outside: Fused, call: Fused) -> Fused:
    """``call``, or ``outside`` where it raises ``OutsideTable``."""

    def run(*args: Any) -> Any:
        try:
            return call(*args)
        except OutsideTable:
            pass
        return outside(*args)

    return run


def largest_difference(result: Any, expected: Any) -> float:
    """Largest absolute difference over one tensor or a tuple of tensors."""
    pairs = [(result, expected)] if isinstance(result, torch.Tensor) else list(zip(result, expected, strict=True))
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def check_layouts(ir: KernelIR, args: Sequence[Any]) -> None:
    """Raise ``RefusedError`` naming the first input that is not laid out as ``ir`` says."""
    count = len(ir.inputs)
    symbols = dict(zip(ir.symbols, args[count:], strict=True))
    for buffer, tensor in zip(ir.inputs, args[:count], strict=True):
        expected = layout_of(buffer, symbols)
        actual = (tuple(tensor.shape), tuple(tensor.stride()))
        if not same_layout(actual, expected) or tensor.dtype != torch_dtype(buffer.dtype):
            raise RefusedError(f"input is {tensor.dtype} {actual}, the kernel expects {buffer.dtype} {expected}")
