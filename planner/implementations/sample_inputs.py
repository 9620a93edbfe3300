"""Random operands for a chain of ops: numbers its ops are defined on, indices that exist, words with all their bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fuseplan.kernels.ir.gathers import index_limits, tables
from fuseplan.kernels.ir.ir import Buffer, KernelIR
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.graph.execute import bind_call
from fuseplan.planner.ops.table import chosen_integers, kind_of, op_of

#: Rows of a table that are made at least. More would only take memory: whatever a kernel looks up lies in these.
MOST_TABLE_ROWS = 8192
_INTEGERS_BELOW = 8

#: Random numbers that larger tensors repeat, in a sixth of the time: a prime, so that no two rows begin alike.
_PERIOD = 1_048_573

#: Ops undefined below zero, ops never negative, and ops as non-negative as their operands.
_ROOTS = frozenset({"rsqrt", "sqrt", "log", "log2", "log1p", "pow"})
_NEVER_NEGATIVE = frozenset({"abs", "square", "exp", "exp2", "sigmoid", "softmax", "_softmax", "relu", "arange"})
_KEEP_SIGN = frozenset({
    "add", "mul", "div", "mean", "sum", "amax", "amin", "maximum", "to", "_to_copy", "clone", "view", "reshape",
    "transpose", "slice", "unsqueeze", "expand", "cat", "contiguous", "clamp", "clamp_min", "sqrt", "rsqrt",
})
#: Ops that pass their first operand on, perhaps in another place or type.
_CARRIERS = frozenset({
    "to", "_to_copy", "clone", "contiguous", "view", "reshape", "unsqueeze", "squeeze", "expand", "transpose", "slice",
    "select", "repeat_interleave",
})
#: Operand that an op divides by (batch norm by the variance, its last), and operand that it takes apart bit by bit.
_DIVISORS = {"div": 1, "true_divide": 1, "reciprocal": 0, "batch_norm": -1}
_PACKED = {"bitwise_right_shift": 0, "__rshift__": 0}
#: Operand that says where an op writes: no place twice, since what stays there then would be chance.
_PLACES = {"index_copy_": 1}
#: Operand that masks attention, and the share of the keys, the last, that such masks hide.
_MASKS, _HIDDEN_SHARE = {"scaled_dot_product_attention": 3}, 8
_DECODE_ATTENTION, _BAGS = "fuseplan.decode_attention.default", "aten.embedding_bag."
#: Types that hold any index; bytes have all their numbers.
_INDEX_TYPES = (torch.int32, torch.int64)


def sample_inputs(
    ir: KernelIR, nodes: Sequence[OpNode], names: Sequence[str], generator: torch.Generator, most: int | None = None
) -> list[torch.Tensor]:
    """One tensor for each input of a static kernel, in the layout it expects, on the generator's device.

    Floats are N(0, 1); |N(0, 1)| + 0.1 where something is divided by them, and everywhere if the chain takes a root or
    logarithm of something that could be negative. Integers are 0 to 7, or what a lookup by them can find; words that
    the chain takes apart have random bits. Masks that all heads share are as those of prompts and caches: they hide
    some last keys and change no score; one index alone is that of the last key shown. A table that is only looked up
    has at most ``MOST_TABLE_ROWS`` rows; of the pages of a cache there are as many as are read, each once, in no order.
    Integers are below ``most``, too; where that is 1, floats are equal as well.

    ``nodes`` are the chain of ops that the kernel stands for, ``names`` its inputs in order.
    """
    positive = needs_positive_inputs(nodes)
    divisors, packed, places, masks = (_flowing_into(nodes, one) for one in (_DIVISORS, _PACKED, _PLACES, _MASKS))
    limits = {number: min(limit, MOST_TABLE_ROWS) for number, limit in index_limits(ir).items()}
    short = {buffer for buffer, rows in tables(ir).items() if rows > MOST_TABLE_ROWS}
    pages, listed, hidden = _paged(nodes, dict(zip(names, ir.inputs, strict=True)))
    masks |= hidden
    made = []
    for number, (name, buffer) in enumerate(zip(names, ir.inputs, strict=True)):
        rows = pages.get(name, MOST_TABLE_ROWS if number in short else None)
        if rows is not None:
            buffer = replace(buffer, shape=(rows, *buffer.shape[1:]))
        below = None if name in packed else limits.get(number, _INTEGERS_BELOW)
        if below is not None and most is not None:
            below = min(below, most)
        spread = 0.0 if most == 1 else 1.0
        tensor = random_tensor(buffer, generator, positive or name in divisors, below, spread)
        distinct = limits.get(number) if name in places else listed.get(name)
        if distinct is not None:  # different numbers; more than there are of them are repeated
            order = torch.randperm(distinct, generator=generator, device=generator.device)
            tensor.copy_(order.repeat(-(-tensor.numel() // distinct))[: tensor.numel()].view(tensor.shape))
        if number in limits and below is not None and tensor.numel() == 1 and tensor.dtype in _INDEX_TYPES:
            tensor.fill_(below - 1 - below // _HIDDEN_SHARE)  # as far as masks show keys
        if name in masks and (tensor.dim() < 3 or tensor.shape[-3] == 1):
            _hide_last(tensor)
        made.append(tensor)
    return made


def start_bags(nodes: Sequence[OpNode], specs: Mapping[str, TensorSpec], inputs: Mapping[str, torch.Tensor]) -> None:
    """Let bags of embeddings whose starts are among the ``inputs`` all be as large."""
    for node in nodes:
        if node.op.startswith(_BAGS) and (starts := inputs.get(node.inputs[2])) is not None:
            size = specs[node.inputs[1]].numel // max(1, starts.numel())
            starts.copy_(torch.arange(starts.numel(), device=starts.device) * size)


def opaque_positions(nodes: Sequence[OpNode], specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """By the names of integers that opaque ops read: all numbers below this are safe. Those are the positions along the
    dimension where an op scatters, and 0 alone for other ops.
    """
    below: dict[str, int] = {}
    for node in reversed(nodes):
        if kind_of(node, specs) == "opaque":
            below |= dict.fromkeys(chosen_integers(node, specs), 1)
            if op_of(node.op).family == "scatter":
                shape = specs[node.inputs[0]].shape or (1,)
                below[node.inputs[1]] = max(1, int(shape[node.attrs["dim"]]))
        elif node.op.split(".")[1] in _CARRIERS and node.inputs and node.outputs[0] in below:
            below[node.inputs[0]] = below[node.outputs[0]]
    return below


def choose_positions(
    below: Mapping[str, int], inputs: Mapping[str, torch.Tensor], generator: torch.Generator
) -> None:
    """Let some of the ``inputs`` be random integers below so many."""
    for name in below.keys() & inputs.keys():
        own = _without_repeats(inputs[name])
        own.copy_(torch.randint(below[name], own.shape, generator=generator, device=own.device))


def _paged(nodes: Sequence[OpNode], buffers: Mapping[str, Buffer]) -> tuple[dict[str, int], dict[str, int], set[str]]:
    """Of caches in pages, and of the tables that list these: how many pages are read at most. And what masks them."""
    pages, tables, masks = dict[str, int](), dict[str, int](), set[str]()
    for node in nodes:
        if node.op == _DECODE_ATTENTION:
            _, key, value, table, mask = bind_call(node, node.inputs)[0]
            if table in buffers and key in buffers:
                count = min(int(buffers[key].shape[0]), math.prod(map(int, buffers[table].shape)))
                pages |= {key: count, value: count}
                tables[table] = count
                masks |= {mask} - {None}
    return pages, tables, masks


def _hide_last(mask: torch.Tensor) -> None:
    """Make of a tensor [..., keys] a mask that shows all keys but some last ones."""
    keys = mask.shape[-1]
    mask = _without_repeats(mask, mask.dim() - 1)  # batches or heads may share it
    hidden = torch.arange(keys, device=mask.device) >= keys - keys // _HIDDEN_SHARE
    if mask.dtype == torch.bool:
        mask.copy_(~hidden)
    elif mask.dtype.is_floating_point:
        mask.copy_(torch.zeros_like(hidden, dtype=mask.dtype).masked_fill_(hidden, -torch.inf))


def _without_repeats(tensor: torch.Tensor, dims: int | None = None) -> torch.Tensor:
    """A view of a tensor without the elements that repeat others along the first so many dimensions, or along any."""
    for dim, stride in enumerate(tensor.stride()[:dims]):
        if stride == 0 and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _flowing_into(nodes: Sequence[OpNode], operands: Mapping[str, int]) -> set[str]:
    """Values that reach, at most moved or converted, one of the named operands of an op."""
    found: set[str] = set()
    for node in reversed(nodes):
        name = node.op.split(".")[1]
        position = operands.get(name)
        if position is not None and position < len(node.inputs):
            found.add(node.inputs[position])
        if name in _CARRIERS and node.inputs and not found.isdisjoint(node.outputs):
            found.add(node.inputs[0])
    return found


def needs_positive_inputs(nodes: Iterable[OpNode]) -> bool:
    """True when a root or logarithm in the chain may see a negative number if the inputs may be negative."""
    never_negative: set[str] = set()
    for node in nodes:
        name = node.op.split(".")[1]
        operands_safe = all(value in never_negative for value in node.inputs)
        exponent = node.attrs.get("exponent")
        if name == "pow" and isinstance(exponent, int | float) and exponent == int(exponent):
            if exponent % 2 == 0 or operands_safe:
                never_negative.update(node.outputs)
            continue
        if name in _ROOTS and not operands_safe:
            return True
        other = node.attrs.get("other", 0)
        adds_negative = isinstance(other, int | float) and not other >= 0
        if name in _NEVER_NEGATIVE or (name in _KEEP_SIGN and operands_safe and not adds_negative):
            never_negative.update(node.outputs)
    return False


def random_tensor(
    spec: TensorSpec | Buffer, generator: torch.Generator, positive: bool = False, below: int | None = _INTEGERS_BELOW,
    spread: float = 1.0,
) -> torch.Tensor:
    """A random tensor with this layout, on the generator's device.

    Floats are spread * N(0, 1), or spread * |N(0, 1)| + 0.1 if ``positive``. Integers are at least 0 and less than
    ``below``; with None, and of bytes always, all numbers of their type.
    """
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(spec.shape, spec.strides, strict=True))
    dtype, limits = torch_dtype(spec.dtype), (0, below or 0)
    make: dict[str, Any] = {"generator": generator, "device": generator.device}
    if below is None or spec.dtype in ("int8", "uint8"):
        limits = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if 0 in spec.shape:
        span = 0
    count = min(span, _PERIOD)
    if dtype.is_floating_point:
        noise = torch.randn(count, **make) * spread
        numbers = (noise.abs() + 0.1 if positive else noise).to(dtype)
    elif dtype == torch.bool:
        numbers = torch.rand(count, **make) < 0.5
    else:
        numbers = torch.randint(*limits, (count,), **make).to(dtype)
    flat = numbers if span == count else _repeated(numbers, span)
    return flat.as_strided(spec.shape, spec.strides)


def _repeated(numbers: torch.Tensor, span: int) -> torch.Tensor:
    """``span`` elements: the numbers again and again."""
    flat = torch.empty(span, dtype=numbers.dtype, device=numbers.device)
    whole = span // len(numbers) * len(numbers)
    flat[:whole].view(-1, len(numbers)).copy_(numbers)
    flat[whole:] = numbers[: span - whole]
    return flat
