"""Triton functions written by hand as kernels: sizes folded, launched like generated ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from fuseplan.kernels.gpu.build import POINTER_TYPES, KernelSpec, compile_kernel
from fuseplan.kernels.gpu.direct import OutputLayout, find_launcher
from fuseplan.kernels.gpu.launch import (
    Geometry,
    GpuKernel,
    InterpretedKernel,
    Variant,
    fused_call,
    interpreter_is_on,
)
from fuseplan.kernels.gpu.scratch import ScratchKernel
from fuseplan.kernels.ir.backend import CompiledKernel, Resources, Target


@dataclass(frozen=True)
class FixedFunction:
    """A ``@triton.jit`` function of addresses, then of compile-time arguments.

    Attributes:
        pointers: Type of the elements at each address, by parameter, in order.
        constants: The compile-time arguments by parameter, in order.
        programs: Programs of a launch.
        overlapped: It waits for the kernel ahead of it itself, and may be launched before.
        asserts: It has assertions.
    """

    function: Any
    pointers: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    programs: int
    num_warps: int
    overlapped: bool = False
    asserts: bool = False

    def compiled(self, target: Target, variant: Variant) -> Any:
        """Triton's ``CompiledKernel``; needs no GPU."""
        signature = {name: POINTER_TYPES[dtype] for name, dtype in self.pointers}
        constants = dict(self.constants)
        aligned = tuple(signature) if variant.aligned else ()
        spec = KernelSpec(
            {**signature, **dict.fromkeys(constants, "constexpr")}, aligned, self.num_warps, constants=constants,
            overlapped=self.overlapped, asserts=self.asserts,
        )
        return compile_kernel(self.function, spec, target)

    def call(
        self, places: Sequence[int], inputs: int, layout: OutputLayout, scratch: tuple[int, int], target: Target
    ) -> Callable[..., torch.Tensor]:
        """``call(*inputs)``, which allocates its one output and, for each call, float32 numbers of the kernel's own.

        Equal functions share what is compiled and loaded, but no counters: calls of two may run at the same time.

        Args:
            places: What is at each address: the number of an input; behind these the kernel's numbers, its counters,
                and the output.
            scratch: How many numbers and counters.
        """
        arguments = tuple((place, 0) for place in places)
        key = self, arguments, inputs + 3, target
        loaded = _LOADED.get(key)  # a name holds it: the dictionary does not
        if loaded is None:
            loaded = _LOADED[key] = _loaded(*key)
        kernel = ScratchKernel(loaded, inputs, *scratch)
        return kernel.given(fused_call(kernel.kernel, inputs + 2, lambda _: (layout,), {}))


#: A function, its arguments, how many buffers it has, and for what it is compiled.
_Key: TypeAlias = tuple[FixedFunction, tuple[tuple[int | None, int], ...], int, Target]
#: What is loaded, as long as a call of it is kept: the layers of a model ask for the same kernel.
_LOADED: WeakValueDictionary[_Key, CompiledKernel] = WeakValueDictionary()


def _loaded(
    fixed: FixedFunction, arguments: tuple[tuple[int | None, int], ...], buffers: int, target: Target
) -> CompiledKernel:
    """The function as a kernel."""
    if interpreter_is_on():
        return InterpretedKernel(_Folded(fixed), lambda _: fixed.programs, (), arguments, buffers)
    # Triton's launcher expects something in the place of each compile-time argument.
    given = (*arguments, *((None, 0) for _ in fixed.constants))
    return GpuKernel(
        functools.partial(fixed.compiled, target), lambda _: Geometry(fixed.programs, False), (), given, buffers,
        Resources(), find_launcher(),
    )


@dataclass(frozen=True)
class _Folded:
    """The function as the interpreter calls it: by addresses alone."""

    fixed: FixedFunction

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self.fixed.function[grid], **dict(self.fixed.constants))
