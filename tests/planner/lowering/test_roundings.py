"""Roundings that a program can see are made under ``numerics="fp32"`` too, in every group that a plan may choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import compiled, fresh_start
from kernel_reference import run_reference
from reference_backend import ReferenceBackend, use
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fuseplan.planner
from fuseplan.kernels.ir.ir import Round
from fuseplan.planner.capture.normalise import normalise
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.graph.execute import run_node
from fuseplan.planner.graph.serialize import graph_from_json, graph_to_json
from fuseplan.planner.groups.candidates import Candidate, enumerate_candidates
from fuseplan.planner.groups.regions import find_regions, is_anchor, region_parts
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.work.extract import extract

HALVES = (torch.bfloat16, torch.float16)
Program = Callable[[torch.Tensor, torch.dtype], Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def beside(x: torch.Tensor, half: torch.dtype) -> Any:
    hi = x.to(half)
    return hi, x - hi.float()


def promoted(x: torch.Tensor, half: torch.dtype) -> Any:
    return x - x.type(half)


def three_pieces(x: torch.Tensor, half: torch.dtype) -> Any:
    high = x.to(half)
    middle = (x - high.float()).to(half)
    low = (x - high.float() - middle.float()).to(half)
    return high, middle, low


def scaled(x: torch.Tensor, half: torch.dtype) -> Any:
    high = (x * 64).to(half)
    return x - high.float() / 64


def scaled_as_halves(x: torch.Tensor, half: torch.dtype) -> Any:
    """Nothing converts the cast itself: a product of halves stands between."""
    return x - (x.to(half) * 0.5).float() * 2


def there_and_back(x: torch.Tensor, half: torch.dtype) -> Any:
    return x.to(half).float() * 2


def chain(x: torch.Tensor, half: torch.dtype) -> Any:
    other = torch.float16 if half == torch.bfloat16 else torch.bfloat16
    return x.to(half).to(other).float()


def of_two_kinds(x: torch.Tensor, half: torch.dtype) -> Any:
    return (x.bfloat16() * 0.5).float() - (x.half() * 0.5).float()


def through_integers(x: torch.Tensor, half: torch.dtype) -> Any:
    return (x * 1000).to(half).to(torch.int32)


def of_integers(x: torch.Tensor, half: torch.dtype) -> Any:
    whole = (x * 10000).to(torch.int64)
    return whole - whole.to(half).to(torch.int64)


def compared(x: torch.Tensor, half: torch.dtype) -> Any:
    return x.to(half) == x, x.to(half) * 1 > x


def stacked(x: torch.Tensor, half: torch.dtype) -> Any:
    high = x.to(half)
    return x - torch.stack([high, (x - high).to(half)]).float().sum(0)


def turned(x: torch.Tensor, half: torch.dtype) -> Any:
    return (-x.to(half).transpose(0, 1)).float() + x.transpose(0, 1)


def returned_and_used(x: torch.Tensor, half: torch.dtype) -> Any:
    high = (x * 3).to(half)
    return high, high * high


def read_by_a_matmul(x: torch.Tensor, half: torch.dtype) -> Any:
    high = (x * 3).to(half)
    return high @ high.new_ones(x.shape[1], 2), high * high


def quantised(x: torch.Tensor, half: torch.dtype) -> Any:
    scale = x.to(half).float() * 0 + 0.25
    return x - (x / scale).round().clamp(-127, 127).to(torch.int8).to(half) * scale


def float8(x: torch.Tensor, half: torch.dtype) -> Any:
    return x - x.to(half).to(torch.float8_e4m3fn).to(half).float()


def sum_of_halves(x: torch.Tensor, half: torch.dtype) -> Any:
    """What the sum lost (Dekker's fast two-sum)."""
    large, small = (x * 0 + 100).to(half), x.to(half)
    total = large + small
    return total, small - (total - large)


PROGRAMS = [
    beside, promoted, three_pieces, scaled, scaled_as_halves, there_and_back, chain, of_two_kinds, through_integers,
    of_integers, compared, stacked, turned, returned_and_used, read_by_a_matmul, quantised, float8, sum_of_halves,
]


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) + torch.linspace(1, 3, shape[-1])


def tupled(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> DataflowGraph:
    with FakeTensorMode() as mode:
        return normalise(make_fx(function, pre_dispatch=True)(*map(mode.from_tensor, inputs))).graph


def run_with(graph: DataflowGraph, table: GroupTable, group: Candidate, x: torch.Tensor) -> list[torch.Tensor]:
    """The graph op by op, but for one group, which is a kernel."""
    lowered = table.lowered(group)
    known, waiting = {graph.inputs[0]: x}, list(graph)
    while waiting:
        node = next(one for one in waiting if all(value in known for value in one.inputs))
        waiting.remove(node)
        results = run_node(node, [known[value] for value in node.inputs], "cpu")
        known.update((name, made) for name, made in zip(node.outputs, results, strict=True) if name not in known)
        if node.name in group.ops and all(value in known for value in lowered.inputs):
            made = run_reference(lowered.ir, [known[value] for value in lowered.inputs], float_dtype=torch.float32)
            for name, tensor in zip(lowered.outputs, made, strict=True):
                known[name] = tensor.to(getattr(torch, graph.specs[name].dtype))
    return [known[value] for value in graph.outputs]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_group_rounds_as_eager_does(program: Program, half: torch.dtype) -> None:
    x = values(3, 127)
    graph, expected = traced(lambda t: program(t, half), x), tupled(program(x, half))
    table = GroupTable(graph, "fp32", "cpu")
    groups = [
        group for region in find_regions(graph) for part in region_parts(graph, region) if not is_anchor(graph, part)
        for group in enumerate_candidates(graph, part, table.legal, 12, 400).candidates
    ]
    assert groups
    for group in groups:
        for result, wanted in zip(run_with(graph, table, group, x), expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_compiled_program_rounds_as_eager_does(
    program: Program, dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = use(monkeypatch, ReferenceBackend())
    function = compiled(program, tmp_path / "tuning.db", dynamic=dynamic)
    for rows, cols in ((3, 127), (5, 33)) if dynamic else ((3, 127),):
        x = values(rows, cols)
        for half in HALVES:
            for result, wanted in zip(tupled(function(x, half)), tupled(program(x, half)), strict=True):
                torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    assert isinstance(kernels, ReferenceBackend) and kernels.calls and fuseplan.planner.stats().fallbacks == {}


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def add_and_norm(x: torch.Tensor, weight: torch.Tensor) -> Any:
    residual = x + weight
    return residual, norm(residual, weight)


def shared_angles(x: torch.Tensor, weight: torch.Tensor) -> Any:
    angles = x.float() * 0.5
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return x * cos + weight * sin, weight * cos - x * sin


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("program", [norm, add_and_norm, shared_angles])
def test_what_nobody_can_tell_keeps_its_bits(program: Callable[..., Any], half: torch.dtype) -> None:
    graph = traced(program, torch.randn(3, 64).to(half), torch.randn(64).to(half))
    (region,) = find_regions(graph)
    table = GroupTable(graph, "fp32", "cpu")
    found = enumerate_candidates(graph, region, table.legal, 20, 400)
    group = max(found.candidates, key=lambda one: len(one.ops))
    body = [instr for one in table.lowered(group).ir.segments for instr in one.body]
    assert len(group.ops) > 5 and not any(isinstance(instr, Round) for instr in body)


def test_a_region_that_is_sent_elsewhere_rounds_as_it_does_here() -> None:
    """The reader that shows the rounding is outside the region: the region alone, and its key, still keep it."""
    def square(x: torch.Tensor) -> torch.Tensor:
        high = x.to(torch.bfloat16)
        return high * high

    x = values(3, 64)
    graph = traced(lambda x: (torch.asinh(x), square(x)), x)
    region = next(one for one in find_regions(graph) if graph.outputs[1] in one.outputs)
    alone = graph_from_json(graph_to_json(extract(graph, region)))
    assert alone.rounds and alone.rounds == graph.rounds
    assert region.key not in {one.key for one in find_regions(traced(square, x))}
