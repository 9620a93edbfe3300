"""Groups built around a matmul, as graphs: a projection, a gated pair, projections of one normalised input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from graphs import Builder, wide
from lower_oracle import rms_norm
from quantised_groups import quantised_groups

from fuseplan.kernels.ir.backend import SM90, Config
from fuseplan.kernels.ir.index import symbol
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.kernels.triton.split_sums import unsplittable
from fuseplan.kernels.triton.tiles import is_tiled
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.tunable_group import _widened, chain_module
from fuseplan.planner.lowering.lower import Lowered, group_nodes
from fuseplan.planner.ops.table import kind_of


def lowered_whole(b: Builder, *outputs: str) -> tuple[Lowered, list[torch.Tensor]]:
    """Everything as one group, matmuls and all, and what the chain gives in float64."""
    graph = b.graph(*outputs)
    lowered = lower_group(graph, [node.name for node in graph if kind_of(node, graph.specs) != "view"])
    nodes = [_widened(node) for node in group_nodes(graph, lowered)]
    chain = chain_module(nodes, lowered.inputs, lowered.outputs, "cpu")
    return lowered, list(chain(*wide(b.values(lowered.inputs))))


def weights(
    *names: str, width: int = 24, inner: int = 16, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(width, inner, generator=generator).to(dtype) for name in names}


def hidden(*rows: int, inner: int = 16, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*rows, inner, generator=torch.Generator().manual_seed(2)).to(dtype)


def scales(inner: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(inner, generator=torch.Generator().manual_seed(3)).to(dtype)


def angles() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(1, 8, generator=generator) for name in ("cos", "sin")}


def rotated(b: Builder, x: str) -> str:
    """Rotary embedding of heads of 8."""
    low, high = (b("aten.slice.Tensor", x, dim=3, start=start, end=start + 4) for start in (0, 4))
    half = b("aten.cat.default", b("aten.neg.default", high), low, dim=-1)
    return b("aten.add.Tensor", b("aten.mul.Tensor", x, "cos"), b("aten.mul.Tensor", half, "sin"))


def heads(b: Builder, x: str, weight: str, count: int = 3) -> str:
    """A projection read head by head: [B, count, S, 8]."""
    batch, length = b.tensors[x].shape[:2]
    made = b("aten.view.default", b("aten.linear.default", x, weight), size=[batch, length, count, 8])
    return b("aten.transpose.int", made, dim0=1, dim1=2)


def residual(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    """A projection to which the residual is added."""
    b = Builder(x=hidden(rows, 1, inner=inner, dtype=dtype), residual=hidden(rows, 1, inner=width, dtype=dtype),
                **weights("w", width=width, inner=inner, dtype=dtype))
    return b, (b("aten.add.Tensor", "residual", b("aten.linear.default", "x", "w")),)


def gated(
    rows: int, width: int, inner: int, dtype: torch.dtype, given: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> tuple[Builder, tuple[str, ...]]:
    """SwiGLU of two projections of a normalised row."""
    made = {"x": hidden(rows, 1, inner=inner, dtype=dtype), "gamma": scales(inner, dtype), **given}
    b = Builder(**made, **weights("gate", "up", width=width, inner=inner, dtype=dtype))
    normed = rms_norm(b, "x", "gamma", str(dtype).removeprefix("torch."))
    gate, up = (b("aten.linear.default", normed, name) for name in ("gate", "up"))
    return b, (b("aten.mul.Tensor", b("aten.silu.default", gate), up),)


def large(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    """The same of rows that fit float16 only once they are normalised."""
    usual, _ = gated(rows, width, inner, dtype)
    x, gamma = usual.tensors["x"], usual.tensors["gamma"]
    x.mul_(6e4 / x.abs().max())
    gamma.mul_(4.0)
    return gated(rows, width, inner, dtype, {"x": x, "gamma": gamma})


def attention_inputs(rows: int, inner: int, dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    """Queries and keys of a normalised row, rotated, and values; keys and values go into caches."""
    caches = {name: torch.zeros(rows, 3, 6, 8, dtype=dtype) for name in ("keys", "values")}
    b = Builder(x=hidden(rows, 1, inner=inner, dtype=dtype), gamma=scales(inner, dtype), at=torch.tensor([4]),
                **angles(), **caches, **weights("q", "k", "v", inner=inner, dtype=dtype))
    name = str(dtype).removeprefix("torch.")
    normed = rms_norm(b, "x", "gamma", name)
    q, k, v = (heads(b, normed, weight) for weight in "qkv")
    turned = b("aten.to.dtype", rotated(b, k), dtype=name)
    return b, (
        rotated(b, q), b("aten.index_copy_.default", "keys", "at", turned, dim=2),
        b("aten.index_copy_.default", "values", "at", v, dim=2),
    )


def one_row_for_all(dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    """A projection of one row, added to each of three."""
    b = Builder(x=hidden(1, inner=40, dtype=dtype), residual=hidden(3, inner=24, dtype=dtype),
                **weights("w", inner=40, dtype=dtype))
    made = b("aten.linear.default", b("aten.expand.default", "x", size=[3, 40]), "w")
    return b, (b("aten.add.Tensor", "residual", made),)


def activated(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    """SwiGLU of two projections of one value."""
    given = weights("gate", "up", width=width, inner=inner, dtype=dtype)
    b = Builder(x=hidden(rows // 3, 3, inner=inner, dtype=dtype), **given)
    gate, up = (b("aten.linear.default", "x", name) for name in ("gate", "up"))
    return b, (b("aten.mul.Tensor", b("aten.silu.default", gate), up),)


def halved(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    """SwiGLU of the halves of one projection, whose rows of weights do not begin at a block."""
    b = Builder(x=hidden(rows, inner=inner, dtype=dtype), **weights("w", width=2 * width, inner=inner, dtype=dtype))
    made = b("aten.linear.default", "x", "w")
    gate, up = (b("aten.slice.Tensor", made, dim=1, start=at, end=at + width) for at in (0, width))
    return b, (b("aten.mul.Tensor", b("aten.silu.default", gate), up),)


def biased(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    """A projection of a part of wider rows with a bias, and GELU; the sum is a result, too."""
    wide = hidden(rows, inner=2 * inner, dtype=dtype)
    b = Builder(x=wide, bias=scales(width, dtype), **weights("w", width=width, inner=inner, dtype=dtype))
    part = b("aten.slice.Tensor", "x", dim=1, start=inner, end=2 * inner)
    made = b("aten.linear.default", part, "w", "bias")
    return b, (b("aten.gelu.default", made, approximate="tanh"), made)


def multiplied_apart(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    """The sum of two projections, of either half of each row."""
    given = weights("w", "u", width=width, inner=inner, dtype=dtype)
    b = Builder(x=hidden(rows, inner=2 * inner, dtype=dtype), **given)
    halves = (b("aten.slice.Tensor", "x", dim=1, start=at, end=at + inner) for at in (0, inner))
    one, other = (b("aten.linear.default", half, name) for half, name in zip(halves, "wu", strict=True))
    return b, (b("aten.add.Tensor", one, other),)


def squared(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    """Products of all pairs of rows: the same memory on both sides."""
    b = Builder(x=hidden(rows, inner=inner, dtype=dtype))
    return b, (b("aten.relu.default", b("aten.linear.default", "x", "x")),)


def widened(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    """A projection in float32 of numbers of half the bits."""
    b = Builder(x=hidden(rows, inner=inner, dtype=dtype), **weights("w", width=width, inner=inner, dtype=dtype))
    x, w = (b("aten.to.dtype", name, dtype="float32") for name in "xw")
    return b, (b("aten.silu.default", b("aten.linear.default", x, w)),)


def scaled_rows(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Builder, tuple[str, ...]]:
    """A projection of rows with a factor each."""
    b = Builder(x=hidden(rows, inner=inner, dtype=dtype), factors=hidden(rows, inner=1, dtype=dtype),
                **weights("w", width=width, inner=inner, dtype=dtype))
    return b, (b("aten.silu.default", b("aten.linear.default", b("aten.mul.Tensor", "x", "factors"), "w")),)


def tiled_groups(dtype: torch.dtype) -> Iterator[tuple[str, Builder, tuple[str, ...]]]:
    """Groups of more rows than blocks have, in sizes that no block divides."""
    kinds = (residual, activated, halved, biased, multiplied_apart, squared, widened)
    for rows, width, inner in ((129, 72, 8), (387, 136, 72), (1200, 65, 16)):
        for made in kinds if rows < 1000 else kinds[:3]:
            yield f"{made.__name__} {rows} {width} {inner}", *made(rows, width, inner, dtype)


def with_dynamic_rows(batch: int, width: int, inner: int, dtype: torch.dtype) -> DataflowGraph:
    """:func:`activated` and a residual, of ``batch`` times any number of rows."""
    name, rows = str(dtype).removeprefix("torch."), (batch, symbol("n"))
    wide, narrow, weight = (
        TensorSpec.contiguous(shape, name) for shape in ((*rows, width), (*rows, inner), (width, inner)))
    nodes = [
        OpNode("aten.linear.default", ("x", "gate"), ("gated",), {}),
        OpNode("aten.linear.default", ("x", "up"), ("raised",), {}),
        OpNode("aten.silu.default", ("gated",), ("active",), {}),
        OpNode("aten.mul.Tensor", ("active", "raised"), ("product",), {}),
        OpNode("aten.add.Tensor", ("product", "residual"), ("sum",), {}),
    ]
    made = ("residual", "gated", "raised", "active", "product", "sum")
    specs = {"x": narrow, "gate": weight, "up": weight, **dict.fromkeys(made, wide)}
    return DataflowGraph(nodes, specs, ("x", "gate", "up", "residual"), ("sum",), symbols={"n": 300})


def dynamic_errors(backend: TritonBackend, dtype: torch.dtype, device: str) -> Iterator[dict[str, Any]]:
    """As :func:`errors`, of one kernel that is called with several numbers of rows."""
    for batch, width, inner in ((1, 72, 40), (3, 136, 72)):
        graph = with_dynamic_rows(batch, width, inner, dtype)
        lowered = lower_group(graph, [node.name for node in graph])
        config = backend.default_config(lowered.ir, SM90)
        kernel = backend.fused_callable(lowered.ir, config, SM90)
        for rows in (1, 5, 128, 300, 1100):
            x, residual = (torch.randn(batch, rows, size).to(dtype) for size in (inner, width))
            given = {"x": x, "residual": residual, **weights("gate", "up", width=width, inner=inner, dtype=dtype)}
            operands = [given[name] for name in lowered.inputs]
            plain = chain_module(group_nodes(graph, lowered), lowered.inputs, lowered.outputs, "cpu")
            exact = list(plain(*wide(operands)))
            made, again = (kernel(*(one.to(device) for one in operands), rows) for _ in range(2))
            yield {"group": f"dynamic rows {batch}x{rows}", "dtype": str(dtype), "config": dict(config),
                   "error": _error([made], exact), "eager": _error(plain(*operands), exact),
                   "same": torch.equal(made, again)}


def plain_groups(dtype: torch.dtype) -> Iterator[tuple[str, Builder, tuple[str, ...]]]:
    """Groups of odd sizes by name, with weights as they are multiplied."""
    for rows in (1, 3, 17):
        for width, inner in ((24, 16), (25, 40), (33, 127)):
            yield f"residual {rows} {width} {inner}", *residual(rows, width, inner, dtype)
            yield f"gated {rows} {width} {inner}", *gated(rows, width, inner, dtype)
        yield f"attention inputs {rows}", *attention_inputs(rows, 40, dtype)
        yield f"large {rows}", *large(rows, 24, 40, dtype)
    yield "one row for all", *one_row_for_all(dtype)


def groups(dtype: torch.dtype) -> Iterator[tuple[str, Builder, tuple[str, ...]]]:
    """The same, and with weights stored in few bits."""
    yield from plain_groups(dtype)
    yield from quantised_groups(dtype)


#: Errors allowed, of the largest result: what tensor cores are given is rounded to the type of the weights.
TOLERANCE = {"torch.bfloat16": 1.2e-2, "torch.float16": 1.5e-3, "torch.float32": 2e-6}


def configs(backend: TritonBackend, ir: KernelIR, rows: int) -> Iterator[Config]:
    """The default, and blocks that end before, at and behind the last row, column and inner element."""
    yield backend.default_config(ir, SM90)
    if is_tiled(ir):
        for cols, warps, stages in ((64, 4, 3), (128, 8, 4)):
            blocks = {"block_rows": 128, "block_cols": cols, "block_inner": 64}
            config = {**blocks, "num_warps": warps, "num_stages": stages}
            if "shared memory" not in (backend.infeasible(ir, config, SM90) or ""):
                yield config
        return
    for height, cols, inner in ((1, 1, 64), (1, 8, 16), (16, 16, 32)) if rows == 1 else ((16, 16, 16), (16, 32, 64)):
        yield {"block_rows": height, "block_cols": cols, "block_inner": inner, "num_warps": 1}
    splittable = all(unsplittable(segment) is None for segment in ir.segments)
    for cols, splits in ((16, 2), (32, 4)) if splittable else ():
        yield {"block_rows": 16, "block_cols": cols, "block_inner": 16, "num_warps": 1, "splits": splits}


def errors(
    backend: TritonBackend, dtype: torch.dtype, device: str,
    given: Iterable[tuple[str, Builder, tuple[str, ...]]] | None = None, most: int | None = None,
) -> Iterator[dict[str, Any]]:
    """How wrong each group's kernel is with each configuration, and whether a second call gives the same bits.

    Beside the error stands that of ATen's ops. ``given`` are other groups than :func:`groups`. Each group runs with
    ``most`` of its configurations, the next group with the next ones.
    """
    for number, (name, b, outputs) in enumerate(groups(dtype) if given is None else given):
        lowered, expected = lowered_whole(b, *outputs)
        plain = chain_module(group_nodes(b.graph(*outputs), lowered), lowered.inputs, lowered.outputs, "cpu")
        eager = _error(plain(*(_copied(value, "cpu") for value in b.values(lowered.inputs))), expected)
        several = list(configs(backend, lowered.ir, b.tensors["x"].shape[0]))
        at = (most or 0) * number % len(several)
        for config in (several[at:] + several[:at])[:most]:
            kernel = backend.fused_callable(lowered.ir, config, SM90)
            # An interpreter can only get wrong what a call leaves behind: counters of programs that share a tile.
            calls = 2 if device == "cuda" or config.get("splits", 1) != 1 else 1
            made, *again = (
                _all(kernel(*(_copied(value, device) for value in b.values(lowered.inputs)))) for _ in range(calls)
            )
            same = all(torch.equal(one, other) for later in again for one, other in zip(made, later, strict=True))
            yield {"group": name, "dtype": str(dtype), "config": dict(config), "error": _error(made, expected),
                   "eager": eager, "same": same}


def _error(made: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest, of the largest result."""
    return max(
        float((one.cpu().double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
        for one, wanted in zip(made, expected, strict=True)
    )


def is_right(found: Mapping[str, Any]) -> bool:
    """Whether what :func:`errors` says of a kernel is as it should be: no more wrong than ATen, but for rounding."""
    most = TOLERANCE[found["dtype"]]
    return bool(found["same"] and found["error"] <= min(most, found["eager"] + most / 4))


def _copied(value: torch.Tensor, device: str) -> torch.Tensor:
    """The same numbers in the same layout."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)


def _all(made: Any) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)
