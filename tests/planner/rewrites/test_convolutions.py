"""Convolutions with channels last: the same results, in the same layouts, and no copies between convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import fresh_start
from torch import fx, nn

from fuseplan.planner.capture.trace import record, trace_predispatch
from fuseplan.planner.dispatch_stats import reset_stats, stats
from fuseplan.planner.rewrites import convolutions

_aten = torch.ops.aten


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU: oneDNN gives results with channels last where its operand lies so, too."""
    monkeypatch.setattr(convolutions, "is_gpu", lambda _: True)
    torch.manual_seed(0)
    yield from fresh_start()


def traced(model: Any, *args: Any) -> fx.GraphModule:
    """The trace of a model, whose result is compared with eager mode's, layout included."""
    traces: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, example_inputs: Any) -> Any:
        traces.append(trace_predispatch(graph, example_inputs))
        return traces[0].forward

    torch._dynamo.reset()
    with torch.no_grad():
        compare(torch.compile(model, backend=backend, dynamic=False)(*args), model(*args))
    (trace,) = traces
    return trace


def compare(result: Any, expected: Any) -> None:
    for one, other in zip(*((item,) if isinstance(item, torch.Tensor) else item for item in (result, expected)),
                          strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        assert one.stride() == other.stride()


def copies(trace: fx.GraphModule) -> list[tuple[int, ...]]:
    """Shapes of what is copied, weights left out."""
    weights = {node.args[1] for node in trace.graph.find_nodes(op="call_function", target=_aten.conv2d.default)}
    found = trace.graph.find_nodes(op="call_function", target=_aten.clone.default)
    return [tuple(node.meta["val"].shape) for node in found if node not in weights]


def pictures(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def halves(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules).to(torch.bfloat16).eval()


@pytest.mark.parametrize(("count", "height", "width"), [(1, 9, 7), (3, 7, 127), (2, 1, 5), (2, 5, 1)])
def test_a_chain_copies_what_it_reads_and_what_it_returns(count: int, height: int, width: int) -> None:
    model = halves(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 1, bias=False),
                   nn.SiLU())
    trace = traced(model, pictures(count, 3, height, width))
    if width == 1:
        assert trace.meta["channels_last"] == 0
    else:
        assert trace.meta["channels_last"] == 2
        assert copies(trace) == [(count, 3, height, width), (count, 4, height, width)], "in and out, not between"


def test_ops_in_place_stay_in_a_chain() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.first(x), inplace=True)
            y = self.second(x)
            y += x
            return F.relu_(y).flatten(1).sum(-1)

    trace = traced(Residual().to(torch.bfloat16).eval(), pictures(2, 4, 6, 6))
    # A picture with channels last is flattened by a copy, which nothing may write to in the picture's place.
    assert trace.meta["channels_last"] == 2 and len(copies(trace)) <= 2


def test_memory_that_is_returned_twice_stays_shared() -> None:
    weight = pictures(4, 3, 1, 1)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = F.conv2d(x, weight)
        return made, made.flatten(2)

    x = pictures(2, 3, 5, 6)
    traced(run, x)
    torch._dynamo.reset()
    first, second = torch.compile(run, backend="fuseplan", dynamic=False)(x)
    assert first.data_ptr() == second.data_ptr()


def test_a_view_that_is_written_to_is_seen_in_the_picture() -> None:
    weight = pictures(4, 3, 1, 1)

    def run(x: torch.Tensor) -> torch.Tensor:
        made = F.conv2d(x, weight)
        rows = made.view(made.shape[0], 4, -1)
        rows.mul_(2)
        return made + 1

    traced(run, pictures(2, 3, 5, 6))


def test_a_copy_that_would_become_a_view_is_not_written_to() -> None:
    weight = pictures(4, 3, 1, 1)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = F.conv2d(x, weight)
        apart = made.permute(0, 2, 3, 1).reshape(-1, 4)  # a copy, of a result with channels first
        apart.add_(1)
        return made.sum((2, 3)), apart

    traced(run, pictures(2, 3, 5, 6))


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("groups", [1, 6])
def test_a_convolution_of_lines_is_one_of_pictures(padding: int, groups: int) -> None:
    model = halves(nn.Conv1d(6, 6, 3, stride=2, padding=padding, dilation=2, groups=groups), nn.GELU(),
                   nn.Conv1d(6, 4, 3))
    trace = traced(model, pictures(2, 6, 31))
    assert trace.meta["channels_last"] == 2 and len(copies(trace)) == 2
    assert not trace.graph.find_nodes(op="call_function", target=_aten.conv1d.default)


def test_a_copy_of_a_picture_that_lies_so_is_not_read() -> None:
    weight = pictures(4, 3, 3, 3)

    def run(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x.permute(0, 3, 1, 2).contiguous(), weight)

    assert copies(traced(run, pictures(2, 9, 8, 3))) == [(2, 4, 7, 6)]


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_groups_of_channels_are_normalised_where_they_lie(groups: int) -> None:
    model = halves(nn.Conv2d(4, 8, 3), nn.GroupNorm(groups, 8), nn.SiLU(), nn.Conv2d(8, 4, 3))
    x = pictures(2, 4, 9, 9)
    reset_stats()
    with torch.no_grad():
        compare(torch.compile(model, backend="fuseplan", dynamic=False)(x), model(x))
    assert stats().channels_last == 2 and not stats().fallbacks
    # The first picture, both weights, the bias with the norm and what follows it, and the last bias with its copy.
    assert stats().groups_fused <= 5


@pytest.mark.parametrize("case", ["float32", "groups", "one channel", "padding in words", "channels last"])
def test_what_is_left_alone(case: str) -> None:
    dtype = torch.float32 if case == "float32" else torch.bfloat16
    channels = 1 if case == "one channel" else 4
    padding: Any = "same" if case == "padding in words" else 1
    model = nn.Conv2d(channels, 4, 3, padding=padding, groups=2 if case == "groups" else 1).to(dtype).eval()
    x = pictures(2, channels, 9, 9, dtype=dtype)
    if case == "channels last":
        trace = traced(model, x.to(memory_format=torch.channels_last))
        assert not copies(trace), "it lies as it should"
    else:
        assert traced(model, x).meta["channels_last"] == 0


def test_a_library_that_wants_channels_first_gets_them() -> None:
    """So PyTorch has it on the meta device."""
    model = nn.Conv2d(4, 4, 3).to("meta", torch.bfloat16).eval()
    (trace,) = record(model, (pictures(2, 4, 9, 9).to("meta"),), {})
    assert trace.module.meta["channels_last"] == 0 and not copies(trace.module)


def test_dispatch_runs_and_counts_them() -> None:
    model = halves(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6(),
                   nn.Conv2d(8, 4, 1))
    x = pictures(2, 3, 12, 13)
    reset_stats()
    torch._dynamo.reset()
    with torch.no_grad():
        compare(torch.compile(model, backend="fuseplan", dynamic=False)(x), model(x))
    assert stats().channels_last == 3 and not stats().fallbacks
    assert "3 convolutions with channels last in memory" in str(stats())
