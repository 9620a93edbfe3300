"""What stands behind a kernel call: the group's ATen ops, which take over when its first call fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fuseplan.kernels.ir.backend import Backend, CompiledKernel, Config
from fuseplan.kernels.ir.dtypes import torch_dtype
from fuseplan.kernels.ir.in_place import ReuseOptions
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.planner.dispatch_stats import Source, Tally
from fuseplan.planner.errors import RefusedError, failure_reason
from fuseplan.planner.graph.layouts import layout_of, same_layout
from fuseplan.planner.implementations.subject import Fused, chain_module
from fuseplan.planner.libraries.library_call import Call, LibraryCall, OpGroup
from fuseplan.planner.lowering.lower import Lowered

logger = logging.getLogger("fuseplan")


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
    """

    ops: tuple[str, ...]
    backend: Backend
    config: Config
    source: Source
    label: str = ""
    others: tuple[Backend, ...] = ()


@dataclass(frozen=True)
class CallPlan:
    """Ops that a library's call runs in the place of ATen's.

    ``ops`` are their names in the dataflow graph; ``label`` is for people.
    """

    ops: tuple[str, ...]
    library: LibraryCall
    label: str = ""


@dataclass(frozen=True)
class BuiltCall:
    """A library's call, ready to be placed."""

    plan: CallPlan
    group: OpGroup
    call: Call


@dataclass(frozen=True)
class BuiltGroup:
    """A group with its kernel.

    The kernel was made of ``lowered``. ``call`` calls it and allocates its outputs; ``kernel`` is the kernel itself,
    where some outputs can lie in inputs, as ``reuse_options`` say.
    """

    plan: GroupPlan
    lowered: Lowered
    call: Fused
    kernel: CompiledKernel | None = None
    reuse_options: ReuseOptions = field(default_factory=dict)


class FirstCall:
    """Runs a kernel for the first time, then takes itself out of the way.

    The kernel must get tensors laid out as it was compiled for: what a fake tensor promised and the device's ATen op
    did not keep is found here, before memory is read through wrong strides.

    Outputs are allocated in this call, whatever later ones do: the ATen ops need the inputs when it fails.

    Calls look the kernel up by ``name`` in ``namespace``. ``unfused`` runs its ATen ops on given arguments
    (:func:`~fuseplan.planner.implementations.aten.run_unfused`). Later calls use ``in_place`` where they write outputs
    over inputs.
    """

    def __init__(
        self, group: BuiltGroup, unfused: Callable[[Sequence[Any]], tuple[Any, Fused]], namespace: dict[str, Any],
        name: str, tally: Tally, debug: bool, in_place: Fused | None = None
    ) -> None:
        self._group = group
        self._later = group.call if in_place is None else in_place
        self._unfused = unfused
        self._namespace = namespace
        self._name = name
        self._tally = tally
        self._debug = debug

    def __call__(self, *args: Any) -> Any:
        group = self._group
        try:
            check_layouts(group.lowered.ir, args)
            result = group.call(*args)
        except Exception as error:
            reason = f"first call failed: {failure_reason(error)}"
            self._tally.fall_back(reason, group.plan.source)
            logger.warning("group %s runs unfused from now on: %s", group.plan.label or self._name, reason)
            result, self._namespace[self._name] = self._unfused(args)
            return result
        self._namespace[self._name] = self._later
        if self._debug:
            self._compare(result, args)
        return result

    def _compare(self, result: Any, args: Sequence[Any]) -> None:
        """Log how far the kernel is from the ATen ops; one that works in place is tried on copies, too."""
        label, (expected, _) = self._group.plan.label or self._name, self._unfused(args)
        difference = largest_difference(result, expected)
        logger.info("%s differs from its ATen ops by at most %.3g", label, difference)
        if self._later is not self._group.call:
            copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            difference = largest_difference(self._later(*copies), expected)
            logger.info("%s in place differs from its ATen ops by at most %.3g", label, difference)


class FirstLibraryCall:
    """Runs a library's call for the first time, then takes itself out of the way; ATen's op takes over if it fails."""

    def __init__(self, built: BuiltCall, namespace: dict[str, Any], name: str, tally: Tally) -> None:
        self._built = built
        self._namespace = namespace
        self._name = name
        self._tally = tally

    def __call__(self, *args: Any) -> Any:
        built = self._built
        try:
            result = built.call(*args)
        except Exception as error:
            reason = f"{built.plan.library.name}: first call failed: {failure_reason(error)}"
            self._tally.count("library_calls", -1)
            self._tally.note(reason)
            logger.warning("%s runs as ATen's op from now on: %s", built.plan.label or self._name, reason)
            group = built.group
            chain = chain_module([group.node], group.inputs, group.outputs, group.device_type).forward
            self._namespace[self._name] = (lambda *given: chain(*given)[0]) if len(group.outputs) == 1 else chain
            return self._namespace[self._name](*args)
        self._namespace[self._name] = built.call
        return result


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
