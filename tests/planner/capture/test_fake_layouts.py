"""Traces lie in memory as eager's tensors do, where PyTorch's fake tensors do not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start
from reference_backend import ReferenceBackend, use
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from tracing import recording

import fuseplan.planner
from fuseplan.planner.capture.fake_layouts import correct_layouts
from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.capture.trace import record
from fuseplan.planner.graph.serialize import graph_to_json


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def strides(tensor: torch.Tensor) -> list[int]:
    """Those that mean something."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def laid_out(rng: random.Random, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of a shape, in any order of dimensions, some of them expanded."""
    order = rng.sample(range(len(shape)), len(shape))
    sizes = [shape[dim] for dim in order]
    held = torch.zeros([1 if rng.random() < 0.2 else size for size in sizes], dtype=torch.long).expand(sizes)
    return held.permute([order.index(dim) for dim in range(len(shape))])


def last_value(trace: fx.GraphModule) -> torch.Tensor:
    return [node for node in trace.graph.nodes if node.op == "call_function"][-1].meta["val"]


@pytest.mark.parametrize("seed", range(60))
def test_what_is_indexed_lies_as_eagers_does(seed: int) -> None:
    rng = random.Random(seed)
    source = laid_out(rng, [rng.choice((1, 2, 3, 5)) for _ in range(rng.randint(1, 4))])
    dims = sorted(rng.sample(range(source.dim()), rng.randint(1, source.dim())))
    common = [rng.choice((1, 2, 4)) for _ in range(rng.randint(1, 3))]
    indices = [laid_out(rng, [1 if rng.random() < 0.3 else size for size in common]) for _ in dims]

    def look_up(source: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        given = dict(zip(dims, indices, strict=True))
        return torch.ops.aten.index.Tensor(source, [given.get(dim) for dim in range(dims[-1] + 1)]) * 2

    mode = FakeTensorMode()
    with mode:
        trace = make_fx(look_up, pre_dispatch=True)(*map(mode.from_tensor, (source, *indices)))
    correct_layouts(trace)
    expected = look_up(source, *indices)
    assert last_value(trace).shape == expected.shape
    assert strides(last_value(trace)) == strides(expected)


@pytest.mark.parametrize("seed", range(40))
def test_single_elements_have_the_strides_of_eagers_reshape(seed: int) -> None:
    rng = random.Random(seed)
    source = torch.zeros([rng.choice((1, 1, 2, 3)) for _ in range(4)]).permute(rng.sample(range(4), 4))
    shape = [1, *source.flatten(1).shape, 1]
    rng.shuffle(shape)
    mode = FakeTensorMode()
    with mode:
        trace = make_fx(lambda x: x.reshape(shape).unflatten(0, (1, -1)).neg(), pre_dispatch=True)(
            mode.from_tensor(source))
    correct_layouts(trace)
    views = [node.meta["val"] for node in trace.graph.nodes if node.op == "call_function"]
    assert views[0].stride() == source.reshape(shape).stride()
    assert views[-2].stride() == source.reshape(shape).unflatten(0, (1, -1)).stride()


def test_a_view_of_a_tensor_as_itself_is_left_as_it_is() -> None:
    mode, source = FakeTensorMode(), torch.zeros(2, 1, 3)
    with mode:
        trace = make_fx(lambda x: torch.ops.aten.view_as.default(x, x).neg(), pre_dispatch=True)(
            mode.from_tensor(source))
    correct_layouts(trace)
    assert last_value(trace).stride() == source.stride()


def test_one_picture_that_was_a_row_of_patches_is_laid_out_as_eager_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    norm, convolution = torch.nn.BatchNorm2d(8).eval(), torch.nn.Conv2d(6, 8, 1)

    def head(patches: torch.Tensor) -> torch.Tensor:
        picture = patches.transpose(1, 2).reshape(1, -1, 5, 5)
        larger = torch.nn.functional.interpolate(picture, size=(10, 10), mode="bilinear")
        return torch.relu(norm(convolution(larger)))

    patches = torch.randn(1, 25, 6)
    with torch.no_grad():
        expected, result = head(patches), compiled(head, tmp_path / "plans.db")(patches)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()
    assert "runs unfused" not in caplog.text


@pytest.mark.parametrize("name", ["empty", "zeros", "ones", "rand", "randn"])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_made_like_another_lies_as_eagers_does(name: str, seed: int) -> None:
    rng, like = random.Random(seed), getattr(torch, f"{name}_like")
    whole = torch.zeros([rng.choice((1, 2, 3)) for _ in range(4)])
    source = whole[:, -1] if rng.random() < 0.5 else whole.permute(rng.sample(range(4), 4))[..., ::2]
    mode = FakeTensorMode()
    with mode:
        trace = make_fx(lambda x: like(x).abs_(), pre_dispatch=True)(mode.from_tensor(source))
    correct_layouts(trace)
    assert last_value(trace).stride() == like(source).stride()


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("lies", [torch.channels_last, torch.contiguous_format])
def test_what_is_upsampled_lies_as_its_operand_does(mode: str, lies: torch.memory_format) -> None:
    """Fake tensors on CUDA say channels first where there are few; an H200 gave channels last, as here."""
    x = torch.randn(2, 3, 4, 5).to(memory_format=lies)

    def upsample(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2.0, mode=mode).relu()

    mode_of_fakes = FakeTensorMode()
    with mode_of_fakes, torch.no_grad():
        trace = make_fx(upsample, pre_dispatch=True)(mode_of_fakes.from_tensor(x))
        for node in trace.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.args[0].meta["val"] = node.meta["val"] = torch.empty(2, 3, 8, 10)
    correct_layouts(trace)
    assert last_value(trace).stride() == upsample(x).stride()


def test_a_shape_that_fake_tensors_get_wrong_is_told() -> None:
    def look_up(source: torch.Tensor, rows: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index.Tensor(source, [rows, column]).neg()

    mode = FakeTensorMode()
    given = (torch.zeros(3, 5), torch.zeros(4, 2, dtype=torch.long), torch.tensor(1))
    with mode:
        trace = make_fx(look_up, pre_dispatch=True)(*map(mode.from_tensor, given))
    if last_value(trace).shape == look_up(*given).shape:
        correct_layouts(trace)
    else:
        with pytest.raises(ValueError, match="index has 2 dimensions, for PyTorch's fake tensors 0"):
            correct_layouts(trace)


def test_what_one_graph_makes_lies_as_it_does_at_run_time_when_the_next_reads_it() -> None:
    """PyTorch's fake ``zeros_like`` forgets the stride of a batch of one, with which Mamba's state comes."""

    def layer(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        state, picked = torch.zeros_like(x[:, -1]), x.mT[rows]
        torch._dynamo.graph_break()
        return state.add_(1) + picked.sum()

    given = torch.randn(1, 3, 8, 12), torch.zeros(2, dtype=torch.long)
    real: list[Traced] = []
    torch._dynamo.reset()
    torch.compile(layer, backend=recording(real), dynamic=False)(*given)
    with FakeTensorMode() as mode:
        traces = record(layer, list(map(mode.from_tensor, given)), {})
    assert len(traces) == len(real) == 2
    for trace, other in zip(traces, real, strict=True):
        assert graph_to_json(trace.graph) == graph_to_json(other.graph)
    assert (288, 12, 1) in {trace.strides for trace in traces[1].graph.specs.values()}


@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_write_what_is_indexed_where_eager_does(
    dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        picked = x[at % x.shape[0]]
        return picked.relu_().mT, picked.reshape(-1) * 2

    use(monkeypatch, ReferenceBackend())
    fast = compiled(function, tmp_path / "tuning.db", dynamic=dynamic)
    for sizes in ((2, 5, 8), (3, 4, 7)):
        at = torch.randint(0, 9, sizes[::-1]).permute(2, 1, 0)
        x = torch.randn(sum(sizes))
        for one, other in zip(fast(x, at), function(x, at), strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
    assert fuseplan.planner.stats().groups_fused >= 1
