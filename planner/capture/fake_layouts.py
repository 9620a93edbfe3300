"""Layouts that fake tensors get wrong: a trace must lie in memory as eager's tensors will.

* Fake ``x[i]`` lies as ``x``. Eager's goes by the index too where ``x`` tells nothing about the order of dimensions:
  those that it replaces have stride 0 for it (``restride_src`` in ATen's ``TensorAdvancedIndexing.cpp``).
* Fake upsampled pictures of few channels have them first on CUDA. Eager lays its result out as its operand
  (``UpSampleBilinear2d.cu``).
* Fake ``zeros_like``, ``reshape`` and ``view`` have other strides of single elements. They address nothing, but a
  compiled graph is called with them, and they say whether channels come last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._prims_common import (
    compute_elementwise_output_strides,
    make_channels_last_strides_for,
    suggest_memory_format,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuseplan.planner.ops.table import op_of
from fuseplan.planner.rewrites.trace_edit import follow, is_static, set_values, value_of

_ATEN = torch.ops.aten
_INDEX = _ATEN.index.Tensor


def correct_layouts(module: fx.GraphModule) -> None:
    """Give what fake tensors get wrong in a pre-dispatch trace, and all that reads it, the layout that eager makes.

    A trace that cannot run with it stays: eager fails there. ValueError where a fake value has another shape than
    eager's.
    """
    mode: Any = torch._guards.detect_fake_mode([value_of(node) for node in module.graph.nodes])
    for node in module.graph.nodes:
        strides, result = _strides(node, mode), value_of(node)
        if strides is None or result is None or _same(strides, result.stride()):
            continue
        with torch.no_grad(), mode:
            made = result.as_strided(result.shape, strides) if op_of(str(node.target)).family == "view" else (
                torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device))
        values = follow(node, made, corrected=True)
        if values is not None:
            set_values(values)


def laid_out(run: Callable[..., Any], trace: fx.GraphModule) -> Callable[..., Any]:
    """``run``, whose fake results get the strides of its corrected ``trace``: the next graph is called with them."""
    expected = [value_of(leaf) for leaf in pytree.tree_leaves(trace.graph.output_node().args)]

    def corrected(*args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(run(*args))
        return pytree.tree_unflatten([_restrided(*pair) for pair in zip(leaves, expected, strict=True)], spec)

    return corrected


def _restrided(result: Any, expected: torch.Tensor | None) -> Any:
    """A fake tensor with the strides of another one of its shape, where both are plain numbers."""
    if not isinstance(result, torch.Tensor) or expected is None or result.stride() == expected.stride():
        return result
    return result.as_strided(expected.shape, expected.stride()) if is_static(result, expected) else result


def _strides(node: fx.Node, mode: Any) -> Sequence[Any] | None:
    """Strides that eager's result has; None where a fake tensor's are right, or nothing is known."""
    if node.op != "call_function":
        return None
    if node.target is _INDEX:
        return _indexed(node, mode)
    op = op_of(str(node.target))
    if op.grows:
        return _grown(node)
    return _like(node) if op.like else _viewed(node) if op.family == "view" else None


def _grown(node: fx.Node) -> Sequence[Any] | None:
    """Strides of a picture that was upsampled: channels come last where they did."""
    source, result = value_of(node.args[0]), value_of(node)
    if source is None or result is None or result.dim() != 4 or not is_static(source, result):
        return None  # some versions of PyTorch tie a graph to sizes that are compared
    last = suggest_memory_format(source) == torch.channels_last
    return make_channels_last_strides_for(result.shape) if last else None


def _viewed(node: fx.Node) -> Sequence[Any] | None:
    """Strides of a view, or of a ``reshape``, that has single elements: what PyTorch does without fake tensors."""
    source, result = value_of(node.args[0]), value_of(node)
    if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor) or 1 not in result.shape:
        return None
    numbers = (*source.shape, *source.stride(), *result.shape)
    if len(node.all_input_nodes) > 1 or not all(isinstance(size, int) for size in numbers):
        return None
    with torch.no_grad(), unset_fake_temporarily():
        plain = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: plain)
        made: torch.Tensor = cast(Callable[..., Any], node.target)(*args, **kwargs)
    return made.stride()


def _indexed(node: fx.Node, mode: Any) -> Sequence[Any] | None:
    """Strides of what is indexed with tensors; None where nothing is known."""
    source, result, listed = value_of(node.args[0]), value_of(node), cast(Sequence[Any], node.args[1])
    indices = {dim: value for dim, one in enumerate(listed) if (value := value_of(one)) is not None}
    if source is None or result is None or not indices:
        return None
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices.values()):
        return None
    with torch.no_grad(), mode:
        strides = compute_elementwise_output_strides(*_operands(source.detach(), indices))
    if len(strides) != result.dim():  # an index without dimensions, which fake tensors do not broadcast
        raise ValueError(f"{node} has {len(strides)} dimensions, for PyTorch's fake tensors {result.dim()}")
    return strides


def _like(node: fx.Node) -> Sequence[Any] | None:
    """Strides of a tensor made like another: the other's, if those that count are."""
    source, result = value_of(node.args[0]), value_of(node)
    if source is None or result is None or node.kwargs.get("memory_format") not in (None, torch.preserve_format):
        return None
    count = [not statically_known_true(size == 1) for size in source.shape]
    own, other = (list(compress(one.stride(), count)) for one in (result, source))
    return source.stride() if _same(own, other) else None


def _operands(source: torch.Tensor, indices: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """What ATen walks together, each in the shape of the result: the source where the indices are 0, and these."""
    shape = torch.broadcast_shapes(*(one.shape for one in indices.values()))
    common = [one.expand(shape) for one in indices.values()]
    at, count = min(indices), len(indices)
    if max(indices) - at + 1 != count:  # a slice parts them: their dimensions come first
        source, at = source.permute(*indices, *(dim for dim in range(source.dim()) if dim not in indices)), 0

    def replaced(of_source: Sequence[Any], of_index: Sequence[Any]) -> tuple[Any, ...]:
        return (*of_source[:at], *of_index, *of_source[at + count :])

    strides = replaced(source.stride(), (0,) * len(shape))
    # Single elements have strides that count: those of ``reshape``, as in ATen.
    aligned, whole = replaced([1] * source.dim(), shape), replaced(source.shape, shape)
    return [source.as_strided(whole, strides), *(one.reshape(aligned).expand(whole) for one in common)]


def _same(strides: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(statically_known_true(one == other) for one, other in zip(strides, others, strict=True))
