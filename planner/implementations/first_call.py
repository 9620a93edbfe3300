"""The call of a group in a compiled graph, and its ATen ops, which take over when the first call fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from fuseplan.kernels.ir.backend import OutsideTable
from fuseplan.kernels.ir.in_place import Reuse, ReuseOptions
from fuseplan.kernels.ir.ir import Buffer, KernelIR
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.errors import RefusedError, failure_reason
from fuseplan.planner.graph.layouts import layout_of, same_layout
from fuseplan.planner.implementations.tunable_group import Fused
from fuseplan.search.workers.compilers import Compilation


@dataclass(eq=False)
class GroupCall:
    """Stands for ``call(*inputs, *symbols)`` of a group of ops in an FX graph; ``symbols`` are dynamic sizes.

    ``buffers`` say how the results lie, ``reuse_options`` which inputs' memory they may take.
    """

    name: str
    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    symbols: tuple[str, ...] = ()
    buffers: Sequence[Buffer] = ()
    reuse_options: ReuseOptions = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = self.name
        self.__module__ = "fuseplan"

    def __call__(self, *args: Any) -> Any:
        raise AssertionError(f"{self.name} was never filled")


#: Pairs of outputs and the inputs whose memory they take, to the call that does so and allocates the other outputs.
Calling: TypeAlias = Callable[[tuple[tuple[int, int], ...]], Fused]


@dataclass(eq=False, kw_only=True)
class FirstCall(GroupCall):
    """Runs a kernel or a library's call for the first time, then takes itself out of the way.

    Outputs are allocated in this call, whatever later ones do: the ATen ops need the inputs when it fails.

    Attributes:
        build: Makes the call; whether outputs may be written over inputs is given.
        key: Equal for calls that one build serves: those of repeated layers.
        unfused: Runs the ATen ops on given arguments: the result, and what does so in later calls.
        ir: The kernel, whose inputs have to be laid out as it was compiled for.
        outside: Runs the ATen ops in a call in which the kernel raises ``OutsideTable``: they say what is wrong.
        source: The kernel's source text.
        compilation: What a worker process needs to compile the kernel into the cache, before it is built.
        debug: Shows how far the results are from those of the ATen ops.
        calling: What was built.
    """

    build: Callable[[bool], tuple[Calling, ReuseOptions]]
    unfused: Callable[[Sequence[Any]], tuple[Any, Fused]]
    key: Hashable
    ir: KernelIR | None = None
    outside: Fused | None = None
    source: Callable[[], str] | None = None
    compilation: Compilation | None = None
    debug: logging.Logger | None = None
    calling: Calling = field(init=False)

    def number(self, number: int) -> None:
        """Give it a name in generated code: a number, and the first word of its own."""
        words = "".join(letter if letter.isalnum() else "_" for letter in self.name.split(" ")[0])
        self.__name__ = self.__qualname__ = f"fused_{number}_{words}".rstrip("_")

    def bind(self, namespace: dict[str, Any], place: str, reuse: Reuse, give_up: Callable[[str], None]) -> None:
        """Take the name ``place`` in ``namespace``, to write over inputs as ``reuse`` says; ``give_up`` gets failures.
        """
        self.namespace, self.place, self.give_up = namespace, place, give_up
        self.call, self.later = self.calling(()), self.calling(tuple(reuse.items()))
        namespace[place] = self

    def __call__(self, *args: Any) -> Any:
        try:
            if self.ir is not None:  # what a fake tensor promised the device's op may not have kept
                check_layouts(self.ir, args)
            result = self.call(*args)
        except OutsideTable:
            pass  # what ATen's op raises is no consequence of it
        except Exception as error:
            self.give_up(f"first call failed: {failure_reason(error)}")
            result, self.namespace[self.place] = self.unfused(args)
            return result
        else:
            later = self.later
            self.namespace[self.place] = later if self.outside is None else _failing_as(self.outside, later)
            if self.debug is not None:
                self._compare(self.debug, result, args)
            return result
        assert self.outside is not None
        return self.outside(*args)

    def _compare(self, log: logging.Logger, result: Any, args: Sequence[Any]) -> None:
        expected, _ = self.unfused(args)
        log.info("%s differs from its ATen ops by at most %.3g", self.name, largest_difference(result, expected))
        if self.later is not self.call:
            copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            difference = largest_difference(self.later(*copies), expected)
            log.info("%s in place differs from its ATen ops by at most %.3g", self.name, difference)


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
