"""CUDA graphs as a dispatch mode, with a recorder that works on the CPU: what is recorded, when, and what comes out."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
import torch
from dispatch_samples import compiled, fresh_start, llama
from fake_recorder import FakeRecorder
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_backend import ReferenceBackend, use
from static_caches import cache_argument

import fuseplan.planner
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.runtime import cuda_graphs
from fuseplan.planner.runtime.cuda_graphs import PATIENCE, GraphedCall
from fuseplan.planner.runtime.options import parse_options
from fuseplan.planner.runtime.replay_arguments import Roles


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


def graphed(function: Callable[..., Any], roles: Roles, **options: Any) -> tuple[GraphedCall, FakeRecorder, Tally]:
    recorder, tally = FakeRecorder(), Tally()
    return GraphedCall(function, roles, recorder, tally, **options), recorder, tally


def affine(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * weight + 1.0,)


def step(x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode step: the new row is written to the cache, all rows are read."""
    cache.index_copy_(0, at, x[None])
    return cache.sum(0) + x, at + 1


STEP = Roles(kept=(1,), copied=(0, 2))


# -- when it records --------------------------------------------------------------------------------------


def test_the_first_call_is_plain_the_second_records_the_others_replay() -> None:
    call, recorder, tally = graphed(affine, Roles(kept=(1,), copied=(0,)))
    weight, counts = torch.randn(5), []
    results, expected = [], []
    for _ in range(4):
        x = torch.randn(3, 5)
        results.append(call(x, weight)[0])
        expected.append(x * weight + 1.0)
        counts.append((recorder.recorded, recorder.replayed))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3)]
    assert tally.snapshot().recordings == 1 and tally.snapshot().notes == {}
    torch.testing.assert_close(results, expected, rtol=0, atol=0)  # earlier results are not overwritten


def test_what_is_written_in_place_is_written_once_a_call() -> None:
    def count(x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor]:
        total.add_(x)
        return (total * 2.0,)

    call, recorder, _ = graphed(count, Roles(kept=(1,), copied=(0,)))
    total = torch.zeros(3)
    for number in range(1, 6):
        (doubled,) = call(torch.ones(3), total)
        assert total.tolist() == [number] * 3 and doubled.tolist() == [2 * number] * 3
    assert recorder.replayed == 4


def test_a_cache_that_moves_gets_a_recording_of_its_own() -> None:
    call, recorder, _ = graphed(step, STEP)
    caches = [torch.zeros(8, 3) for _ in range(2)]
    twins = [cache.clone() for cache in caches]
    order = [0, 0, 0, 1, 1, 1, 0, 1, 0]
    for number, which in enumerate(order):
        x, at = torch.randn(3), torch.tensor([number % 8])
        result, expected = call(x, caches[which], at), step(x, twins[which], at)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        torch.testing.assert_close(caches, twins, rtol=0, atol=0)
    assert recorder.recorded == 2 and recorder.replayed == 7


def test_what_never_lies_twice_at_one_place_is_never_recorded() -> None:
    call, recorder, tally = graphed(step, STEP)
    alive = []
    for number in range(20):
        cache = torch.zeros(8, 3)
        alive.append(cache)
        x = torch.randn(3)
        torch.testing.assert_close(call(x, cache, torch.tensor([number % 8]))[0], x * 2)
    assert recorder.recorded == 0 and tally.snapshot().notes == {}


def test_sizes_and_shapes_are_kinds_of_calls() -> None:
    def padded(n: int, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x.exp().cumsum(0), n + 1

    call, recorder, _ = graphed(padded, Roles(copied=(1,), sizes=(0,), shaped=(1,)))
    for length in (4, 7, 4, 7, 4, 7, 1):
        x = torch.randn(length, 2)
        result, number = call(length, x)
        torch.testing.assert_close(result, x.exp().cumsum(0), rtol=0, atol=0)
        assert number == length + 1
    assert recorder.recorded == 2 and recorder.replayed == 4


def test_a_bounded_number_of_recordings_is_kept_and_the_oldest_goes() -> None:
    call, recorder, _ = graphed(lambda n, x: (x * n,), Roles(copied=(1,), sizes=(0,)), keep=2)

    def run(n: int, times: int) -> int:
        before = recorder.recorded
        for _ in range(times):
            x = torch.randn(3)
            torch.testing.assert_close(call(n, x)[0], x * n, rtol=0, atol=0)
        return recorder.recorded - before

    assert run(1, 3) == run(2, 3) == 1
    assert run(3, PATIENCE) == 0  # the table is full: a recording has to be worth another one's place
    assert run(1, 1) == 0  # now the second is the least recently used
    assert run(3, 1) == 1
    assert run(1, 5) == 0 and run(3, 5) == 0 and run(2, PATIENCE) == 0
    assert run(2, 1) == 1


@pytest.mark.usefixtures("quick_collections")
def test_recordings_for_caches_that_are_gone_make_room_at_once() -> None:
    """As ``generate()`` makes them: a cache for each call, dropped at its end."""
    call, recorder, _ = graphed(step, STEP, keep=2)
    lasting, at = torch.zeros(4, 3), torch.tensor([1])
    for _ in range(3):
        call(torch.ones(3), lasting, at)
    assert recorder.recorded == 1
    taken = []  # memory that was a cache's stays taken, so that the next one lies elsewhere
    for number in range(2, 7):
        cache = torch.zeros(4, 3)
        taken.append(torch.empty(4, 3))
        for _ in range(3):
            found, _ = call(torch.ones(3), cache, at)
        assert recorder.recorded == number and torch.equal(found, cache.sum(0) + 1)
        recorder.seen[-1] = ()  # it holds what it was given
        del cache, found
        gc.collect()
        taken.append(torch.empty(4, 3))
    call(torch.ones(3), lasting, at)
    assert recorder.recorded == 6  # what still lives was not thrown out


def test_a_long_cycle_of_sizes_does_not_record_all_the_time() -> None:
    call, recorder, _ = graphed(lambda n, x: (x * n,), Roles(copied=(1,), sizes=(0,)), keep=4)
    calls = 40 * 16
    for number in range(calls):
        n = number % 16
        assert call(n, torch.ones(2))[0].tolist() == [n, n]
    assert recorder.recorded <= 4 + calls // PATIENCE


def test_a_caller_who_records_gets_plain_calls() -> None:
    call, recorder, tally = graphed(affine, Roles(kept=(1,), copied=(0,)))
    weight = torch.ones(2)
    for recorder.is_busy in (True, True, True, False, True, False, False):
        assert call(torch.ones(2), weight)[0].tolist() == [2.0, 2.0]
    assert (recorder.recorded, recorder.replayed) == (1, 2) and tally.snapshot().notes == {}


def test_a_failed_recording_is_counted_once_and_never_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fuseplan")
    call, recorder, tally = graphed(step, STEP)
    recorder.refusal = "RuntimeError: operation not permitted when stream is capturing"
    cache, twin = torch.zeros(8, 3), torch.zeros(8, 3)
    for number in range(5):
        x, at = torch.randn(3), torch.tensor([number])
        torch.testing.assert_close(call(x, cache, at), step(x, twin, at), rtol=0, atol=0)
    torch.testing.assert_close(cache, twin, rtol=0, atol=0)
    reason = "no CUDA graph: RuntimeError: operation not permitted when stream is capturing"
    assert tally.snapshot().notes == {reason: 1} and tally.snapshot().recordings == 0
    assert len(caplog.messages) == 1 and "is not replayed as a CUDA graph" in caplog.messages[0]


def test_results_may_be_handed_out_in_place() -> None:
    call, _, _ = graphed(affine, Roles(kept=(1,), copied=(0,)), copy_outputs=False)
    weight = torch.ones(2)
    call(torch.ones(2), weight)
    (second,) = call(torch.ones(2), weight)
    (third,) = call(torch.full((2,), 5.0), weight)
    assert second is third and third.tolist() == [6.0, 6.0]


def test_random_ops_draw_anew_in_each_replay() -> None:
    call, recorder, _ = graphed(lambda x: (x + torch.rand_like(x),), Roles(copied=(0,)))
    x = torch.zeros(4)
    results = [call(x)[0] for _ in range(4)]
    torch.manual_seed(0)
    torch.testing.assert_close(results, [torch.rand(4) for _ in range(4)], rtol=0, atol=0)
    assert recorder.replayed == 3


def test_a_recording_keeps_no_tensor_of_the_caller() -> None:
    call, recorder, _ = graphed(step, STEP)
    cache, x, at = torch.zeros(8, 3), torch.zeros(3), torch.tensor([1])
    for _ in range(2):
        result = call(x, cache, at)
    recorder.seen.clear()  # the fake replay runs with these
    held = [weakref.ref(tensor) for tensor in (cache, x, at, *result)]
    del cache, x, at, result
    gc.collect()
    assert [one() for one in held] == [None] * 5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), min_size=1, max_size=30))
def test_any_order_of_caches_inputs_and_interruptions_is_like_eager(program: list[tuple[int, int, bool]]) -> None:
    def run(n: int, x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
        cache[n].add_(x * weight)
        flat = (cache + 1.0).flatten()
        return flat[:4], cache, cache[n], flat[2:], x, n * 2

    call, recorder, _ = graphed(run, Roles(kept=(2, 3), copied=(1,), sizes=(0,)), keep=3)
    caches, weight = [torch.zeros(3, 4) for _ in range(3)], torch.arange(4.0)
    twins, results, expected = [cache.clone() for cache in caches], [], []
    for which, n, recorder.is_busy in program:
        x = torch.randn(4)
        results.append(call(n, x, caches[which], weight))
        expected.append(run(n, x.clone(), twins[which], weight))
        assert results[-1][1] is caches[which] and results[-1][4] is x
        assert results[-1][2].data_ptr() == caches[which][n].data_ptr()
        assert results[-1][0].untyped_storage().data_ptr() == results[-1][3].untyped_storage().data_ptr()
    torch.testing.assert_close(caches, twins, rtol=0, atol=0)
    for result, wanted in zip(results, expected, strict=True):
        assert result[0].tolist() == wanted[0].tolist() and result[3].tolist() == wanted[3].tolist()
        assert result[5] == wanted[5]


# -- through torch.compile --------------------------------------------------------------------------------


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    made = FakeRecorder()
    use(monkeypatch, ReferenceBackend())
    monkeypatch.setattr(cuda_graphs, "find_recorder", lambda _: made)
    return made


def test_decoding_with_a_static_cache(db: Path, recorder: FakeRecorder) -> None:
    from transformers import StaticCache

    model = llama()

    def decode(call: Any) -> list[torch.Tensor]:
        results = []
        for _ in range(2):  # two requests, each with a cache of its own
            cache = StaticCache(config=model.config, max_cache_len=16)
            tokens, positions = torch.tensor([[5, 9, 2], [7, 1, 1]]), torch.arange(3)
            for _ in range(6):
                logits = call(tokens, **cache_argument(model, cache), cache_position=positions, use_cache=True).logits
                results.append(logits)
                tokens, positions = logits[:, -1:].argmax(-1), positions[-1:] + 1
            results += [*(layer.keys for layer in cache.layers), *(layer.values for layer in cache.layers)]
        return results

    expected, result = decode(model), decode(compiled(model, db, cuda_graphs=True))
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    done = fuseplan.planner.stats()
    assert done.fallbacks == {} and done.notes == {} and done.groups_fused >= 8
    assert done.recordings == recorder.recorded >= 2 and recorder.replayed >= 6
    # Weights and caches are used where they lie; what changes from step to step is copied, and it is small.
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    for args in recorder.seen:
        assert len([arg for arg in args if isinstance(arg, torch.Tensor) and arg.data_ptr() in weights]) >= 5


def test_parameters_that_are_replaced_are_used(db: Path, recorder: FakeRecorder) -> None:
    layer = torch.nn.Linear(4, 4)
    fast = compiled(torch.nn.Sequential(layer, torch.nn.SiLU()), db, cuda_graphs=True)
    alive = []
    for _ in range(3):
        for _ in range(3):
            x = torch.randn(2, 4)
            torch.testing.assert_close(fast(x), torch.nn.functional.silu(layer(x)), rtol=1e-5, atol=1e-6)
        alive.append(layer.weight.data)  # its address is not given to the next one
        layer.weight.data = torch.randn(4, 4)
    layer.weight.add_(1.0)
    torch.testing.assert_close(fast(x), torch.nn.functional.silu(layer(x)), rtol=1e-5, atol=1e-6)
    assert recorder.recorded == 3 and recorder.replayed >= 6


def test_dynamic_lengths_have_recordings_of_their_own(db: Path, recorder: FakeRecorder) -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.silu(x) * 2.0, -1)

    fast = compiled(chain, db, cuda_graphs=True)
    for length in (5, 7, 5, 7, 9, 9, 9, 7):
        x = torch.randn(length, 6)
        torch.testing.assert_close(fast(x), chain(x))
    done = fuseplan.planner.stats()
    assert len(done.compiles) == 2 and done.fallbacks == {}
    assert recorder.recorded == done.recordings == 2 and recorder.replayed == 4  # lengths 7 and 9 of the second graph


def test_each_graph_of_a_broken_model_is_recorded(db: Path, recorder: FakeRecorder) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) * 2.0
        torch._dynamo.graph_break()
        return torch.sigmoid(y) + x

    fast = compiled(broken, db, cuda_graphs=True)
    results, expected = [], []
    for _ in range(4):
        x = torch.randn(3, 5)
        results.append(fast(x))
        expected.append(broken(x))
    torch.testing.assert_close(results, expected)
    assert recorder.recorded == 2 and recorder.replayed == 6


def test_a_failing_kernel_falls_back_before_anything_is_recorded(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = FakeRecorder()
    use(monkeypatch, ReferenceBackend(fails_in_call=True))
    monkeypatch.setattr(cuda_graphs, "find_recorder", lambda _: made)
    fast = compiled(lambda x: torch.tanh(x) * 2.0, db, cuda_graphs=True)
    for _ in range(3):
        x = torch.randn(4)
        torch.testing.assert_close(fast(x), torch.tanh(x) * 2.0)
    done = fuseplan.planner.stats()
    assert made.recorded == 1 and made.replayed == 2 and done.unfused == 1 and done.notes == {}


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_data_read_by_the_host_is_never_recorded(db: Path, recorder: FakeRecorder) -> None:
    def reads(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * n.item()

    fast = compiled(reads, db, cuda_graphs=True)
    for number in (2.0, 3.0, 4.0):
        x, n = torch.randn(3), torch.tensor(number)
        torch.testing.assert_close(fast(x, n), reads(x, n))
    (reason,) = fuseplan.planner.stats().fallbacks
    assert recorder.recorded == 0 and "depends on the data" in reason


def test_on_a_cpu_the_option_does_nothing_and_says_so(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ReferenceBackend())
    fast = compiled(lambda x: torch.tanh(x) * 2.0, db, cuda_graphs=True)
    for _ in range(3):
        fast(torch.randn(4))
    done = fuseplan.planner.stats()
    assert done.notes == {"no CUDA graph: the graph runs on the CPU": 1} and done.groups_fused == 1
    assert "note: 1 x no CUDA graph: the graph runs on the CPU" in str(done)


@pytest.mark.parametrize("on_miss", ["model", "tune", "measure"])
def test_on_a_cpu_plans_for_cuda_graphs_are_those_for_launches(
    db: Path, monkeypatch: pytest.MonkeyPatch, on_miss: str
) -> None:
    use(monkeypatch, ReferenceBackend())
    compiled(lambda x: torch.tanh(x) * 2.0, samples.known_machine(db), regime="graph", on_miss=on_miss)(torch.randn(4))
    done = fuseplan.planner.stats()
    assert done.notes["no plans for CUDA graphs: the graph runs on the CPU"] == 1
    assert not done.fallbacks and done.groups_fused + done.planned_unfused == 1


def test_options() -> None:
    assert parse_options({"cuda_graphs": True}).regime_on("cuda") == "graph"
    assert parse_options({"cuda_graphs": True}).regime_on("cpu") == "eager"
    assert parse_options({"cuda_graphs": True, "regime": "eager"}).regime_on("cuda") == "eager"
    assert parse_options({"regime": "graph"}).regime_on("cpu") == "eager"
    assert parse_options({"regime": "graph"}).regime_on("cuda") == "graph"
    assert parse_options({}).regime_on("cuda") == "eager"
    with pytest.raises(ConfigError, match="option 'cuda_graphs' cannot be 1; it is True or False"):
        parse_options({"cuda_graphs": 1})
