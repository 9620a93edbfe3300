"""Triton's interpreter, mended: it rounds as compiled kernels do, and takes a third of its time.

For programs that run with ``TRITON_INTERPRET=1``: what is mended stays so for the whole process.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

from fuseplan.kernels.triton import values


def mend() -> None:
    """Mend the interpreter of this process, before it runs a kernel."""
    round_to_nearest()
    patch_once()
    ReduceOps.generic_reduce = reduce_by_halves
    ScanOps.generic_scan = scan_by_doubling
    interpreter._get_np_dtype = numpy_type(interpreter._get_np_dtype)


def round_to_nearest() -> None:
    """Triton's interpreter truncates float32 to bfloat16, and loses a carry of its float8, where the compiled kernel
    rounds to nearest even; its float8 knows no NaN and does not saturate. With that mended, kernels need no clamps of
    their own here, and are what is compiled."""
    values.interpreter_is_on = lambda: False
    original = InterpreterBuilder.cast_impl

    def cast_impl(self: InterpreterBuilder, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return original(self, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data, np.float32)).bfloat16()
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast_impl
    original_fp = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: InterpreterBuilder, source: Any, target: Any, mode: Any) -> Any:
        if (source.dtype.scalar, target.scalar) == (tl.float8e4nv, tl.float32):
            narrow = torch.from_numpy(np.ascontiguousarray(source.data)).view(torch.float8_e4m3fn)
            return TensorHandle(narrow.float().numpy(), tl.float32)
        if target.scalar != tl.float8e4nv or source.dtype.scalar not in (tl.float32, tl.float64):
            return original_fp(self, source, target, mode)
        wide = torch.from_numpy(np.ascontiguousarray(source.data)).clamp(-448, 448)
        return TensorHandle(wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), tl.float8e4nv)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def patch_once() -> None:
    """The interpreter looks through ``triton.language`` and patches it at each call of each function."""
    original, patched = interpreter._patch_lang, set[tuple[bool, ...]]()

    def patch_lang(function: Any) -> Any:
        given = function.__globals__.values()
        seen = tuple(any(value is language for value in given) for language in (tl, tl.core))
        if seen not in patched:
            patched.add(seen)
            original(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_lang


def reduce_by_halves(self: ReduceOps, given: tuple[Any, ...]) -> list[Any]:
    """A reduction by a function of ours: of one half and the other, as compiled, not of one number at a time."""
    arrays, axis = [one.handle.data for one in given], self.axis
    if axis is None:
        arrays, axis = [array.reshape(-1) for array in arrays], 0
    while (extent := arrays[0].shape[axis]) > 1:
        halves = [
            self.to_tensor(np.ascontiguousarray(half), one.dtype)
            for part in (slice(extent // 2), slice(extent // 2, None))
            for one, array in zip(given, arrays, strict=True)
            for half in (array[(slice(None),) * axis + (part,)],)
        ]
        made = self.combine_fn.fn(*halves)
        arrays = [one.handle.data for one in (made if isinstance(made, tuple) else (made,))]
    if not self.keep_dims:
        arrays = [np.squeeze(array, axis) for array in arrays]
    elif self.axis is None:
        arrays = [array.reshape((1,) * len(given[0].shape)) for array in arrays]
    return [self.to_tensor(array, one.dtype) for one, array in zip(given, arrays, strict=True)]


def scan_by_doubling(self: ScanOps, given: tuple[Any, ...]) -> list[Any]:
    """A scan by a function of ours: of all numbers and those 1, 2, 4, ... before them, not of one number at a time."""
    (one,), axis = given, self.axis
    array, step = one.handle.data, 1
    at = np.arange(array.shape[axis]).reshape((-1,) + (1,) * (array.ndim - axis - 1))
    while step < len(at):
        before = self.to_tensor(np.roll(array, step, axis), one.dtype)
        made = self.combine_fn.fn(before, self.to_tensor(array, one.dtype)).handle.data
        array, step = np.where(at < step, array, made), 2 * step
    return [self.to_tensor(array, one.dtype)]


def numpy_type(original: Any) -> Any:
    """The interpreter makes its table of types at each look at it."""
    known = cache(original)

    def numpy_type(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return original(scalar) if isinstance(scalar, tl.pointer_type) else known(scalar)

    return numpy_type
