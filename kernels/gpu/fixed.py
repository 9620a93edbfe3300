"""Triton functions written by hand as kernels: sizes folded, launched like generated ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from fuseplan.kernels.gpu.build import POINTER_TYPES, KernelSpec, compile_kernel
from fuseplan.kernels.gpu.launch import Geometry, Loader, ScratchKernel, Variant, interpreter_is_on, loaded_kernel
from fuseplan.kernels.ir.backend import CompiledKernel, OutputLayout, Resources, Target


@dataclass(frozen=True)
class FixedFunction:
    """A ``@triton.jit`` function of addresses, then of compile-time arguments.

    ``pointers`` are the types of the elements at each address and ``constants`` the compile-time arguments, by
    parameter, in order. An ``overlapped`` one waits for the kernel ahead of it itself; ``asserts``: it has assertions.
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
        self, places: Sequence[int], inputs: int, layouts: Sequence[OutputLayout], target: Target,
        scratch: tuple[int, int] | None = None
    ) -> Callable[..., Any]:
        """``call(*inputs)``, which allocates its outputs and, for each call, float32 numbers of the kernel's own.

        Equal functions share what is compiled and loaded, but no counters: calls of two may run at the same time.
        ``places`` says what is at each address: the number of an input; behind these the kernel's numbers and its
        counters, where it has such, and the outputs. ``scratch``: how many numbers and counters.
        """
        made = tuple(layouts)
        buffers = inputs + len(made) + (0 if scratch is None else 2)
        key = self, tuple(places), buffers, target
        loaded = _LOADED.get(key)  # a name holds it: the dictionary does not
        if loaded is None:
            arguments = (*((place, 0) for place in places), *((None, value) for _, value in self.constants))
            loader = Loader(
                lambda variant: self.function if interpreter_is_on() else self.compiled(target, variant),
                lambda _: Geometry(self.programs, False), (), arguments, buffers)
            loaded = _LOADED[key] = loaded_kernel(loader, Resources())
        kernel = loaded if scratch is None else ScratchKernel(loaded, inputs, *scratch)
        return kernel.fused(inputs, lambda _: made)


#: What is loaded, as long as a call of it is kept: the layers of a model ask for the same kernel.
_LOADED: WeakValueDictionary[tuple[FixedFunction, tuple[int, ...], int, Target], CompiledKernel] = WeakValueDictionary()
