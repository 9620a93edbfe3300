"""Ops whose elements each come from a window of one channel: pooling, bilinear upsampling, depthwise convolutions.

None is a matrix product: a kernel reads its operand a few times, and holds what comes before and after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from itertools import product
from operator import add

from fuseplan.kernels.ir.index import Index, Size
from fuseplan.kernels.ir.ir import RegisterType
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.ops.builder import BodyBuilder, Value
from fuseplan.planner.ops.op import FLOATS, result_type, rows
from fuseplan.planner.ops.positions import Position, Specs, is_channels_last
from fuseplan.planner.ops.rearrange import growth, padded, refuse_upsampling

#: A kernel reads as many elements for each of its own as a window has; compiling more takes too long.
MOST_ELEMENTS = 25


def depthwise(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """The sum of ``x[n, c // m, y * sy + i * dy - py, x * sx + j * dx - px] * w[c, 0, i, j]`` over i and j, and a bias.

    x: [N, C, H, W], w: [C * m, 1, KH, KW].
    """
    channel, weight, *bias = position[1], *node.inputs[1:]
    sizes, dtype = p.specs[weight].shape, result_type(p, node)
    own = (position[0], channel // (sizes[0] // p.specs[node.inputs[0]].shape[1]), *position[2:])

    def factor(taps: tuple[int, int]) -> Value:
        return p.pull(weight, (channel, Index(0), *map(Index, taps))).to(dtype)

    elements = _window(p, node, own, (int(sizes[2]), int(sizes[3])))
    total = reduce(add, (element * factor(taps) for taps, element in elements))
    return total + p.pull(bias[0], (channel,)).to(dtype) if bias else total


def _max_pool(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    elements = _window(p, node, position, _pair(node, "kernel_size"), -math.inf)
    return reduce(partial(p.apply, "maximum"), (element for _, element in elements))


def _average_pool(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """The mean of a window, margins counted as zeros."""
    window = _pair(node, "kernel_size")
    total = reduce(add, (element for _, element in _window(p, node, position, window)))
    return total / float(math.prod(window))


def _bilinear(p: BodyBuilder, node: OpNode, position: Position) -> Value:
    """The mean of the four elements around a place, weighted by how near they are; at edges they are repeated."""
    source, dtype = node.inputs[0], result_type(p, node)
    shape, (_, _, *factors) = p.specs[source].shape, growth(node, p.specs)
    sides = [_around(p, *of_one, dtype) for of_one in zip(position[2:], factors, shape[2:], strict=True)]
    margins = [(0, 0), (0, 0), (1, 1), (1, 1)]

    def term(row: Index, share: Value, column: Index, part: Value) -> Value:
        element = padded(p, source, margins, (*position[:2], row, column)).to(dtype)
        return share * part * element

    return reduce(add, (term(*first, *second) for first, second in product(*sides)))


def _around(
    p: BodyBuilder, index: Index, factor: Size, extent: Size, dtype: RegisterType
) -> tuple[tuple[Index, Value], ...]:
    """The two neighbours along a dimension that grows ``factor`` times, which has a margin of one, and their shares."""
    one, zero, half = p.const(1.0, dtype), p.const(0.0, dtype), factor // 2
    if factor == 1:
        return ((index + 1, one),)
    within = p.iota((index + half) % factor).to(dtype)
    share = (within + 0.5) * (1.0 / factor)
    at, last = p.iota(index), p.iota(Index(extent * factor - half))
    share = (at < last).where(share, zero)
    share = (at < p.iota(Index(half))).where(one, share)
    below = (index + half) // factor
    return (below, one - share), (below + 1, share)


def _refuse_bilinear(node: OpNode, specs: Specs) -> str | None:
    if node.attrs.get("align_corners"):
        return "with corners aligned"
    return refuse_upsampling(node, specs) or _refuse(node, specs, (2, 2))


def _window(
    p: BodyBuilder, node: OpNode, position: Position, window: tuple[int, int], around: float = 0.0
) -> Iterator[tuple[tuple[int, int], Value]]:
    """Where in the window each element of operand 0 is that makes a ``position`` of the result, and its value.

    Outside of the picture the value is ``around``.
    """
    dtype = result_type(p, node)
    steps, spread = _pair(node, "stride", default=window if "kernel_size" in node.attrs else 1), _pair(node, "dilation")
    margins = [(0, 0), (0, 0), *((margin, margin) for margin in _pair(node, "padding", default=0))]
    for taps in product(*map(range, window)):
        at = (index * step + tap * by for index, step, tap, by in zip(position[2:], steps, taps, spread, strict=True))
        element = padded(p, node.inputs[0], margins, (*position[:2], *at), around)
        yield (taps[0], taps[1]), element.to(dtype)


def _pair(node: OpNode, name: str, default: int | tuple[int, int] = 1) -> tuple[int, int]:
    """An argument that is given for both dimensions of a picture, or once for both."""
    given = node.attrs.get(name) or default
    both = tuple(given) if isinstance(given, Sequence) else (given,)
    return both[0], both[-1]


def refuse_depthwise(node: OpNode, specs: Specs) -> str | None:
    """Refuses what sums over channels, too."""
    picture, weight = specs[node.inputs[0]], specs[node.inputs[1]]
    if len(weight.shape) != 4 or not weight.is_static:
        return "of dynamic sizes, or of no pictures"
    if weight.shape[1] != 1 or node.attrs.get("groups", 1) != picture.shape[1]:
        return "it sums over channels"
    return _refuse(node, specs, (int(weight.shape[2]), int(weight.shape[3])))


def _refuse_pool(node: OpNode, specs: Specs) -> str | None:
    if node.attrs.get("ceil_mode") or node.attrs.get("divisor_override") is not None:
        return "with windows that end outside, or another divisor"
    if any(_pair(node, "padding", default=0)) and not node.attrs.get("count_include_pad", True):
        return "with means that leave margins out"
    return _refuse(node, specs, _pair(node, "kernel_size"))


def _refuse(node: OpNode, specs: Specs, window: tuple[int, int]) -> str | None:
    """Refuses pictures without channels last: their rows are short, and libraries are faster."""
    picture, result = specs[node.inputs[0]], specs[node.outputs[0]]
    if len(picture.shape) != 4 or not picture.is_static or picture.dtype not in FLOATS:
        return "of dynamic sizes, or of no pictures"
    follow = picture.shape[1] != 1 and picture.strides[1] == 1  # rows of more channels may hold them, as Mamba's do
    if not follow or not is_channels_last(result):
        return "channels do not come last in memory"
    elements = math.prod(window)
    return f"a window of {elements} elements" if elements > MOST_ELEMENTS else None


POOLING = {
    **rows("rearrangement", "max_pool2d", _max_pool, refuse=_refuse_pool),
    **rows("rearrangement", "avg_pool2d", _average_pool, refuse=_refuse_pool),
    **rows("rearrangement", "upsample_bilinear2d upsample_bilinear2d.vec", _bilinear, refuse=_refuse_bilinear,
           grows=True),
}
