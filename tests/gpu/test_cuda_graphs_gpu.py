"""CUDA graphs as a dispatch mode on a GPU: decode steps, moving caches, changing shapes, what cannot be recorded."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import fresh_start
from model_samples import write_config
from static_caches import cache_argument

import fuseplan.planner
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.runtime.cuda_graphs import GraphedCall
from fuseplan.planner.runtime.replay_arguments import Roles

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def compiled(function: Any, folder: Path, **options: Any) -> Any:
    return torch.compile(
        function, backend="fuseplan", options={"db": str(folder / "tuning.db"), "cuda_graphs": True, **options}
    )


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.nn.functional.silu(x) * y, -1)


def notes() -> dict[str, int]:
    return dict(fuseplan.planner.stats().notes)


def graphed(function: Callable[..., Any], roles: Roles, **options: Any) -> tuple[GraphedCall, Tally]:
    from fuseplan.planner.runtime.cuda_recorder import cuda_recorder

    tally = Tally()
    return GraphedCall(function, roles, cuda_recorder(torch.cuda.current_device()), tally, **options), tally


# -- models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouped_queries", [None, True])
def test_decode_steps_with_a_static_cache_are_like_eager(grouped_queries: bool | None, tmp_path: Path) -> None:
    from transformers import StaticCache

    model = build_model(find_source(config=write_config(tmp_path, "llama"), dtype="float32"), "cuda").module

    def decode(call: Any) -> list[torch.Tensor]:
        results = []
        for _ in range(2):  # two requests, each with a cache of its own
            cache = StaticCache(config=model.config, max_cache_len=32)
            tokens, positions = torch.tensor([[5, 9, 2], [7, 1, 1]]).cuda(), torch.arange(3, device="cuda")
            for _ in range(8):
                logits = call(
                    input_ids=tokens, **cache_argument(model, cache), cache_position=positions, use_cache=True
                ).logits
                results.append(logits)
                tokens, positions = logits[:, -1:].argmax(-1), positions[-1:] + 1
            results += [*(layer.keys for layer in cache.layers), *(layer.values for layer in cache.layers)]
        return results

    expected, result = decode(model), decode(compiled(model, tmp_path, grouped_queries=grouped_queries))
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    done = fuseplan.planner.stats()
    assert done.recordings >= 1 and done.groups_fused >= 5 and done.fallbacks == {}
    assert (done.grouped_queries > 0) == bool(grouped_queries)
    # A fresh cache may count its tokens on the CPU: then its first step, the prefill, is not a CUDA graph.
    assert all("is on the CPU: its value would be frozen" in note for note in done.notes)
    decode_steps = [one for one in done.compiles if one.recordings]
    assert decode_steps and all(one.notes == {} for one in decode_steps)


def test_results_survive_later_calls(tmp_path: Path) -> None:
    fast = compiled(chain, tmp_path)
    results, expected = [], []
    for _ in range(6):
        x, y = rand(33, 127), rand(33, 127)
        results.append(fast(x, y))
        expected.append(chain(x, y))
    torch.testing.assert_close(results, expected)
    assert fuseplan.planner.stats().recordings == 1


def test_results_in_place_are_overwritten_when_asked_for(tmp_path: Path) -> None:
    fast = compiled(chain, tmp_path, cuda_graphs_copy_outputs=False)
    x, y = rand(33, 127), rand(33, 127)
    fast(x, y)
    first = fast(x, y)
    second = fast(y, x)
    assert first.data_ptr() == second.data_ptr()
    torch.testing.assert_close(second, chain(y, x))


def test_shapes_change(tmp_path: Path) -> None:
    fast = compiled(chain, tmp_path)
    for rows in (16, 31, 64, 31, 64, 31, 100, 64, 100, 1, 1, 1, 16):
        x, y = rand(rows, 130), rand(rows, 130)
        torch.testing.assert_close(fast(x, y), chain(x, y))
    assert fuseplan.planner.stats().recordings >= 3 and notes() == {}


def test_graphs_of_a_broken_model_follow_each_other(tmp_path: Path) -> None:
    def broken(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) * 2.0
        cache.add_(y)
        torch._dynamo.graph_break()
        return torch.sigmoid(cache) + y @ y.T

    fast = compiled(broken, tmp_path)
    cache, twin = rand(64, 64), torch.empty(64, 64, device="cuda")
    twin.copy_(cache)
    for _ in range(6):
        x = rand(64, 64)
        torch.testing.assert_close(fast(x, cache), broken(x, twin), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cache, twin)
    assert fuseplan.planner.stats().recordings == 2


def test_parameters_that_move_and_change(tmp_path: Path) -> None:
    layer = torch.nn.Linear(64, 64).cuda()
    model = torch.nn.Sequential(layer, torch.nn.SiLU())
    fast = compiled(model, tmp_path)
    alive = []
    for _ in range(3):
        for _ in range(4):
            x = rand(8, 64)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
            layer.weight.mul_(0.9)
        alive.append(layer.weight.data)  # its address is not given to the next one
        layer.weight.data = rand(64, 64)
    assert fuseplan.planner.stats().recordings == 3


def test_graphs_come_and_go(tmp_path: Path) -> None:
    x, y = rand(33, 127), rand(33, 127)
    expected = chain(x, y)
    for number in range(1, 5):
        fast = compiled(chain, tmp_path)
        for _ in range(3):
            result = fast(x, y)
            torch.testing.assert_close(result, expected)
        assert fuseplan.planner.stats().recordings == number and notes() == {}
        del fast  # with it goes the only recording; what it returned stays
        torch._dynamo.reset()
        gc.collect()
        if number % 2:
            torch.cuda.empty_cache()
        torch.testing.assert_close(result, expected)


def test_memory_that_the_caller_keeps_outlives_its_recording(tmp_path: Path) -> None:
    x, y = rand(33, 127), rand(33, 127)
    alive: list[torch.Tensor] = []
    for _ in range(3):
        fast = compiled(chain, tmp_path, cuda_graphs_copy_outputs=False)
        for _ in range(3):
            result = fast(x, y)
        alive.append(result)
        del fast
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        rand(2**20)  # would land in memory that was freed too early
    torch.testing.assert_close(alive, [chain(x, y)] * 3)
    assert fuseplan.planner.stats().recordings == 3


# -- state ------------------------------------------------------------------------------------------------


def test_in_place_updates_happen_once_a_call(tmp_path: Path) -> None:
    def step(x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache.index_copy_(0, at, torch.tanh(x)[None] * 2.0)
        cache.mul_(0.5)
        return cache.sum(0) + x, cache

    fast = compiled(step, tmp_path)
    caches = [rand(16, 128) for _ in range(3)]
    twins = [cache.clone() for cache in caches]
    for number, which in enumerate([0, 0, 0, 0, 1, 1, 1, 0, 1, 2, 0, 2, 2, 2]):
        x, at = rand(128), torch.tensor([number], device="cuda")
        result, returned = fast(x, caches[which], at)
        expected, _ = step(x, twins[which], at)
        torch.testing.assert_close(result, expected)
        assert returned.data_ptr() == caches[which].data_ptr()
        torch.testing.assert_close(caches, twins)
    assert fuseplan.planner.stats().recordings == 3


def test_random_ops_draw_anew_and_follow_the_seed() -> None:
    call, tally = graphed(lambda x: (x + torch.rand_like(x),), Roles(copied=(0,)))
    x = torch.zeros(1000, device="cuda")
    call(x)
    first, second = call(x)[0], call(x)[0]
    assert not torch.equal(first, second) and 0.4 < float(first.mean()) < 0.6
    torch.cuda.manual_seed(7)
    third = call(x)[0]
    torch.cuda.manual_seed(7)
    assert torch.equal(call(x)[0], third)
    assert tally.snapshot().recordings == 1


def test_inputs_of_every_layout() -> None:
    def total(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.float() * 2.0 for tensor in tensors)

    makers: list[Callable[[], torch.Tensor]] = [
        lambda: rand(3, 5),
        lambda: rand(5, 3).t(),
        lambda: rand(3, 10)[:, 1::2],
        lambda: rand(3, 1).expand(3, 5),
        lambda: rand(7).unfold(0, 5, 1),
        lambda: rand(9)[1:],
        lambda: rand(0, 5),
        lambda: torch.randint(0, 9, (4097,), device="cuda"),
        lambda: rand(127, dtype=torch.bfloat16)[1:],
    ]
    call, tally = graphed(total, Roles(copied=tuple(range(len(makers)))))
    for _ in range(4):
        args = [make() for make in makers]
        torch.testing.assert_close(call(*args), total(*args), rtol=0, atol=0)
    assert tally.snapshot().recordings == 1


# -- what cannot be recorded ------------------------------------------------------------------------------


def test_a_sync_while_recording_falls_back_and_leaves_the_device_usable() -> None:
    def syncs(x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor]:
        total.add_(x)
        return (x * x.sum().item() + torch.rand_like(x) * 0.0,)

    call, tally = graphed(syncs, Roles(kept=(1,), copied=(0,)))
    total, expected = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    for _ in range(5):
        x = rand(8)
        expected += x
        torch.testing.assert_close(call(x, total)[0], x * x.sum().item())
        torch.testing.assert_close(total, expected)
    assert list(tally.snapshot().notes.values()) == [1] and tally.snapshot().recordings == 0
    # The allocator, the generator and later recordings work as if nothing had happened.
    torch.cuda.empty_cache()
    torch.cuda.manual_seed(3)
    first = torch.rand(5, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(5, device="cuda"), first)
    again, tally = graphed(lambda x: (x @ x + torch.rand_like(x) * 0.0,), Roles(copied=(0,)))
    for _ in range(4):
        x = rand(64, 64)
        torch.testing.assert_close(again(x)[0], x @ x)
    assert tally.snapshot().recordings == 1
    gc.collect()
    torch.cuda.empty_cache()
    torch.empty(1, pin_memory=True)
    torch.cuda.synchronize()


def test_an_item_breaks_the_graph_and_the_parts_are_replayed(tmp_path: Path) -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) * 2.0
        return torch.sigmoid(x) * y.sum().item()

    fast = compiled(reads, tmp_path)
    for _ in range(5):
        x = rand(8, 8)
        torch.testing.assert_close(fast(x), reads(x), rtol=1e-4, atol=1e-4)


def test_a_cpu_argument_is_not_frozen(tmp_path: Path) -> None:
    def scaled(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2.0 * n

    fast = compiled(scaled, tmp_path)
    for number in (1.0, 2.0, 3.0, 4.0):
        x, n = rand(8, 8), torch.tensor(number)
        torch.testing.assert_close(fast(x, n), scaled(x, n))
    done = fuseplan.planner.stats()
    assert done.groups_fused == 1 and done.fallbacks == {}  # the op that reads the number is no part of a group
    (reason,) = done.notes
    assert "is on the CPU: its value would be frozen" in reason


# -- streams, threads, callers ----------------------------------------------------------------------------


def test_a_caller_who_captures_gets_its_kernels(tmp_path: Path) -> None:
    fast = compiled(chain, tmp_path)
    x, y = rand(33, 127), rand(33, 127)
    for _ in range(3):
        fast(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fast(x, y)
    x.copy_(rand(33, 127))
    graph.replay()
    torch.testing.assert_close(result, chain(x, y))


def test_calls_on_several_streams_are_in_order() -> None:
    def work(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(10):
            x = torch.tanh(x @ weight)
        return (x,)

    call, tally = graphed(work, Roles(kept=(1,), copied=(0,)))
    weight = rand(512, 512) * 0.04
    streams = [torch.cuda.Stream() for _ in range(3)]
    call(rand(512, 512), weight)
    call(rand(512, 512), weight)
    inputs = [rand(512, 512) for _ in range(12)]
    results: list[torch.Tensor] = []
    torch.cuda.synchronize()
    for number, x in enumerate(inputs):
        with torch.cuda.stream(streams[number % 3]):
            results.append(call(x, weight)[0])
    torch.cuda.synchronize()
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, work(x, weight)[0], rtol=1e-3, atol=1e-3)
    assert tally.snapshot().recordings == 1


def test_threads_take_turns() -> None:
    call, _ = graphed(lambda x: (torch.tanh(x) * 2.0,), Roles(copied=(0,)))
    # Made here: the device's generator belongs to whoever is recording.
    inputs = [rand(256, 256) for _ in range(50)]
    torch.cuda.synchronize()
    wrong: list[float] = []

    def work() -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for x in inputs:
                difference = float((call(x)[0] - torch.tanh(x) * 2.0).abs().max())
                if difference > 1e-5:
                    wrong.append(difference)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_inference_mode_and_no_grad_share_recordings() -> None:
    call, _ = graphed(lambda x, total: (total.add_(x) * 2.0,), Roles(kept=(1,), copied=(0,)))
    total = torch.zeros(4, device="cuda")
    for number in range(1, 8):
        with torch.inference_mode(number % 2 == 0):
            (result,) = call(torch.ones(4, device="cuda"), total)
        assert result.tolist() == [2.0 * number] * 4


def test_memory_does_not_grow_with_calls_and_moving_caches() -> None:
    call, tally = graphed(lambda x, cache: ((cache.add_(x) @ cache).tanh(),), Roles(kept=(1,), copied=(0,)), keep=2)
    used = []
    alive: list[torch.Tensor] = []
    for _ in range(12):
        cache = rand(512, 512)
        alive = [*alive[-3:], cache]  # the next one lies elsewhere
        for _ in range(12):
            call(rand(512, 512), cache)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_reserved())
    assert tally.snapshot().recordings >= 4
    assert used[-1] <= used[3] + 2**25
