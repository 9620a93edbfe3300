"""Convolutions that sum over no channels (depthwise ones): each element comes from a window of one channel.

They are no matrix products: a kernel that computes them reads its operand a few times, and holds what comes before and
after as any other kernel does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from fuseplan.kernels.ir.index import Index
from fuseplan.planner.graph.dataflow import OpNode, TensorSpec
from fuseplan.planner.ops.builder import BodyBuilder
from fuseplan.planner.ops.op import result_type
from fuseplan.planner.ops.positions import Position, Specs
from fuseplan.planner.ops.rearrange import padded

#: A kernel holds as many products as a window has elements; compiling more takes too long.
MOST_ELEMENTS = 25


def depthwise(p: BodyBuilder, node: OpNode, position: Position) -> int:
    """The sum of ``x[n, c // m, y * sy + i * dy - py, x * sx + j * dx - px] * w[c, 0, i, j]`` over i and j, and a bias.

    x: [N, C, H, W], w: [C * m, 1, KH, KW].
    """
    image, channel, *at = position
    source, weight, *bias = node.inputs
    dtype, sizes = result_type(p, node), p.specs[weight].shape
    steps, margins, spread = (_pair(node, name, default) for name, default in _DEFAULTS.items())
    multiplier = sizes[0] // p.specs[source].shape[1]
    around = [(0, 0), (0, 0), *((margin, margin) for margin in margins)]
    total = None
    for taps in product(range(int(sizes[2])), range(int(sizes[3]))):
        moved = (one * step + tap * by for one, step, tap, by in zip(at, steps, taps, spread, strict=True))
        element = p.cast(padded(p, source, around, (image, channel // multiplier, *moved)), dtype)
        factor = p.cast(p.pull(weight, (channel, Index(0), *map(Index, taps))), dtype)
        one = p.apply("mul", element, factor)
        total = one if total is None else p.apply("add", total, one)
    assert total is not None
    return p.apply("add", total, p.cast(p.pull(bias[0], (channel,)), dtype)) if bias else total


#: Arguments of a convolution that are given for each dimension of a picture.
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1}


def _pair(node: OpNode, name: str, default: int) -> tuple[int, int]:
    given = node.attrs.get(name, default)
    both = tuple(given) if isinstance(given, Sequence) else (given,)
    return both[0], both[-1]


def refuse_depthwise(node: OpNode, specs: Specs) -> str | None:
    """Refuses what sums over channels, and pictures whose channels do not follow one another in memory: their rows are
    short, and libraries are faster.
    """
    picture, weight, result = (specs[value] for value in (node.inputs[0], node.inputs[1], node.outputs[0]))
    if not (picture.is_static and weight.is_static) or len(picture.shape) != 4:
        return "of dynamic sizes, or of no pictures"
    if weight.shape[1] != 1 or picture.shape[1] == 1 or node.attrs.get("groups", 1) != picture.shape[1]:
        return "it sums over channels"
    if not _channels_last(picture) or not _channels_last(result):
        return "channels do not come last in memory"
    elements = int(weight.shape[2]) * int(weight.shape[3])
    return f"a window of {elements} elements" if elements > MOST_ELEMENTS else None


def _channels_last(spec: TensorSpec) -> bool:
    return bool(spec.strides[1] == 1)
