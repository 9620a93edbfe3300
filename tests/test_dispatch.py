"""The torch.compile back end: results against float64 and eager, mutation and aliasing, look-ups, every failure."""

from __future__ import annotations

import copy
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_samples import write_config
from reference_backend import ReferenceBackend, use
from torch import nn

import fuseplan.planner
from fuseplan.kernels.backend import BuildError
from fuseplan.planner import resolve
from fuseplan.planner.binding import bind_graph
from fuseplan.planner.build import build_model
from fuseplan.planner.capture import capture, trace_predispatch
from fuseplan.planner.dispatch import fuseplan as backend
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.models import find_source
from fuseplan.planner.normalise import normalise
from fuseplan.planner.options import parse_options
from fuseplan.planner.plan import GraphPlan, Planner
from fuseplan.planner.session import open_session
from fuseplan.planner.workload import Workload, decode, prefill
from fuseplan.search.database import Database

BATCH = 2


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    resolve._LOGGED.clear()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ReferenceBackend:
    """Interpreted kernels in place of compiled ones."""
    made = ReferenceBackend()
    use(monkeypatch, made)
    return made


def compiled(function: Any, db: Path, **options: Any) -> Any:
    dynamic = options.pop("dynamic", None)
    return torch.compile(function, backend="fuseplan", dynamic=dynamic, options={"db": str(db), **options})


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


class Block(nn.Module):
    """Add, RMSNorm, projection, SwiGLU: the groups of a decoder layer without the attention."""

    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.gate = nn.Linear(width, 65, bias=False)
        self.up = nn.Linear(width, 65, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = residual + x
        normal = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return swiglu(self.gate(normal), self.up(normal)), hidden


# -- models -----------------------------------------------------------------------------------------------


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **changes,
    )).eval()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=32, n_embd=48, n_layer=1, n_head=4)).eval()


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        vocab_size=61, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=80,
        max_position_embeddings=32,
    )).eval()


@pytest.mark.parametrize("make", [gpt2, bert])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_are_no_less_exact_than_eager(
    make: Callable[[], nn.Module], dtype: torch.dtype, db: Path, kernels: ReferenceBackend
) -> None:
    model = make().to(dtype)
    exact_model = copy.deepcopy(model).double()
    tokens = torch.randint(0, 61, (BATCH, 7))
    result = compiled(model, db)(tokens).logits
    exact, eager = exact_model(tokens).logits, model(tokens).logits
    assert result.dtype == eager.dtype and result.stride() == eager.stride()
    # fp32 kernels and eager differ by rounding alone, in either direction; in bf16 fused groups round less often.
    assert relative_error(result, exact) <= relative_error(eager, exact) * 1.25
    assert fuseplan.planner.stats().groups_fused >= 3
    assert fuseplan.planner.stats().fallbacks == {}
    assert kernels.calls


def test_llama_prefill_with_growing_lengths_compiles_twice(db: Path, kernels: ReferenceBackend) -> None:
    model = llama().to(torch.bfloat16)
    exact_model = copy.deepcopy(model).double()
    fast = compiled(model, db)
    for length in (5, 7, 12):
        tokens = torch.randint(0, 61, (BATCH, length))
        result = fast(tokens, use_cache=False).logits
        exact, eager = exact_model(tokens).logits, model(tokens).logits
        assert relative_error(result, exact) <= relative_error(eager, exact) * 1.25
    done = fuseplan.planner.stats()
    assert len(done.compiles) == 2  # one static graph, one with a symbolic length
    assert done.fallbacks == {}
    assert done.groups_fused == done.from_model == 2 * done.compiles[0].groups_fused > 0


def test_decoding_with_a_static_cache(db: Path, kernels: ReferenceBackend) -> None:
    from transformers import StaticCache

    model = llama()

    def decode(call: Any) -> list[torch.Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=16)
        tokens = torch.tensor([[5, 9, 2], [7, 1, 1]])
        positions = torch.arange(3)
        results = []
        for _ in range(4):
            logits = call(tokens, past_key_values=cache, cache_position=positions, use_cache=True).logits
            results.append(logits)
            tokens, positions = logits[:, -1:].argmax(-1), positions[-1:] + 1
        return [*results, *(layer.keys for layer in cache.layers), *(layer.values for layer in cache.layers)]

    expected, result = decode(model), decode(compiled(model, db))
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert fuseplan.planner.stats().fallbacks == {}
    assert fuseplan.planner.stats().groups_fused >= 8


# -- order, aliases, layouts ------------------------------------------------------------------------------


def mutates_between(x: torch.Tensor, y: torch.Tensor) -> Any:
    before = F.silu(x) * y
    x.add_(1.0)
    after = F.silu(x) * y
    x.mul_(2.0)
    return before, after, (x + y) * 0.5


def writes_a_cache(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> Any:
    stale = (cache + 1.0).tanh()
    cache.index_copy_(1, at, torch.tanh(new) * 2.0)
    return stale, (cache * 3.0 + 1.0).sum(-1)


def writes_through_a_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    made = x * 2.0 + y
    row = made[1]
    row.copy_(torch.sigmoid(y[0]) * 3.0)
    return (made + 1.0) * y, row


def returns_aliases(x: torch.Tensor, y: torch.Tensor) -> Any:
    total = (x + y) * 2.0
    return x.float(), total, total.t(), x.view(-1), y[1:]


def several_outputs(x: torch.Tensor, y: torch.Tensor) -> Any:
    total = x + y
    low, high = total.chunk(2, dim=-1)
    return total, F.gelu(low) * high, torch.softmax(total * 0.5, -1), total.var(-1, keepdim=True)


def unread_write(x: torch.Tensor, y: torch.Tensor) -> Any:
    made = torch.exp(x * 0.1) + y
    y.zero_()
    return made


def skips_ahead(x: torch.Tensor, y: torch.Tensor) -> Any:
    """The residual add is traced early and read late, on both sides of a matmul."""
    total = x + y
    product = total @ total.t()
    return torch.relu(product * 2.0) @ total + total * 0.5


FUNCTIONS = [
    mutates_between, writes_through_a_view, returns_aliases, several_outputs, unread_write, skips_ahead, swiglu,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_do_what_eager_does(
    function: Callable[..., Any], dynamic: bool, db: Path, kernels: ReferenceBackend
) -> None:
    inputs = torch.randn(5, 6), torch.randn(5, 6)
    mine, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    result, expected = compiled(function, db, dynamic=dynamic)(*mine), function(*theirs)
    result, expected = (r if isinstance(r, tuple) else (r,) for r in (result, expected))
    for one, other in zip((*result, *mine), (*expected, *theirs), strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()
    places = [t.data_ptr() for t in (*expected, *theirs)], [t.data_ptr() for t in (*result, *mine)]
    same = [[a == b for b in place] for place in places for a in place]
    assert same[: len(same) // 2] == same[len(same) // 2 :]  # what shares memory in eager shares it here
    assert kernels.calls and fuseplan.planner.stats().fallbacks == {}


def test_a_cache_is_updated_in_place(db: Path, kernels: ReferenceBackend) -> None:
    inputs = torch.randn(2, 8, 3), torch.randn(2, 2, 3), torch.tensor([3, 6])
    mine, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    result, expected = compiled(writes_a_cache, db)(*mine), writes_a_cache(*theirs)
    for one, other in zip((*result, *mine), (*expected, *theirs), strict=True):
        torch.testing.assert_close(one, other)
    assert fuseplan.planner.stats().groups_fused >= 2


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (127, 2), (1,), (2, 0)])
def test_odd_shapes_and_strides(shape: tuple[int, ...], db: Path, kernels: ReferenceBackend) -> None:
    gate, up = torch.randn(*shape, 2)[..., 0], torch.randn(*shape[:-1], 1).expand(shape)
    result = compiled(swiglu, db)(gate, up)
    expected = swiglu(gate, up)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()


def test_sizes_reach_the_kernel_whether_passed_or_read_off_a_tensor(db: Path, kernels: ReferenceBackend) -> None:
    fast = compiled(swiglu, db, dynamic=True)
    for rows, cols in ((4, 6), (9, 3), (2, 127)):
        gate, up = torch.randn(rows, cols), torch.randn(rows, cols)
        torch.testing.assert_close(fast(gate, up), swiglu(gate, up))
    assert len(fuseplan.planner.stats().compiles) == 1
    assert kernels.loaded[0].symbols


def test_bf16_groups_round_like_eager_when_asked(db: Path, kernels: ReferenceBackend) -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        return ((x * 3.0) + 1.0) * 0.3

    x = torch.randn(64, 33, dtype=torch.bfloat16)
    as_eager = compiled(chain, db, numerics="eager")(x)
    assert torch.equal(as_eager, chain(x))
    torch._dynamo.reset()
    assert not torch.equal(compiled(chain, db)(x), chain(x))


def test_calls_after_the_first_go_straight_to_the_kernel(db: Path, kernels: ReferenceBackend) -> None:
    traced: list[Any] = []

    def keeping(gm: Any, inputs: Any) -> Any:
        traced.append(backend(gm, inputs, options={"db": str(db)}))
        return traced[-1]

    fast = torch.compile(swiglu, backend=keeping)
    x = torch.randn(4, 4)
    fast(x, x)
    (name,) = [key for key in traced[0].__globals__ if "fused_0" in key]
    assert "FirstCall" not in repr(traced[0].__globals__[name])
    fast(x, x)
    assert len(kernels.calls) == 2


# -- look-ups ---------------------------------------------------------------------------------------------


def store_plans(function: Any, inputs: tuple[torch.Tensor, ...], db: Path, sizes: tuple[dict[str, int], ...]) -> None:
    """Plan ``function`` by the model at several sizes and store the plans, as a tune would."""
    def keeping(gm: Any, example_inputs: Any) -> Any:
        graph = normalise(trace_predispatch(gm, example_inputs)).graph
        session = open_session("cpu", db)
        for bound in sizes:
            for plan in session.planner().plan_graph(bind_graph(graph, bound)).unique():
                session.database.put_plan(plan.record)
        session.database.close()
        return gm.forward

    torch.compile(function, backend=keeping, dynamic=bool(sizes[0]))(*inputs)
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()


def test_a_miss_is_counted_logged_once_and_stored(
    db: Path, kernels: ReferenceBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fuseplan")
    x = torch.randn(3, 8)
    for _ in range(2):
        compiled(swiglu, db)(x, x)
        torch._dynamo.reset()
    assert fuseplan.planner.stats().misses == 2
    assert sum("no tuned plan for silu+mul 3x8 float32" in message for message in caplog.messages) == 1
    (row,) = Database(db, mode="read").misses()
    assert row["count"] == 2 and row["payload"]["ops"] == ["aten.silu.default", "aten.mul.Tensor"]


def test_stored_plans_are_hits(db: Path, kernels: ReferenceBackend) -> None:
    model = Block()
    inputs = torch.randn(4, 33), torch.randn(4, 33)
    store_plans(model, inputs, db, ({},))
    result = compiled(model, db)(*inputs)
    for one, other in zip(result, model(*inputs), strict=True):
        torch.testing.assert_close(one, other)
    done = fuseplan.planner.stats()
    assert (done.from_database, done.from_model, done.misses) == (2, 0, 0)
    assert done.lookup_s > 0 and str(done).startswith("1 graphs, 2 regions: 2 groups fused (2 from the database")


def test_plans_by_other_versions_are_misses(db: Path, kernels: ReferenceBackend, monkeypatch: Any) -> None:
    x = torch.randn(4, 8)
    store_plans(swiglu, (x, x), db, ({},))
    monkeypatch.setattr("fuseplan.search.record._version", lambda package: "0.0.1")
    compiled(swiglu, db)(x, x)
    assert fuseplan.planner.stats().misses == 1


@pytest.mark.parametrize(("tuned", "served"), [((8, 64), True), ((16, 32), True), ((8,), False), ((32, 64), False),
                                               ((2, 256), False)])
def test_a_size_between_two_tuned_ones_uses_the_nearer_plan(
    tuned: tuple[int, ...], served: bool, db: Path, kernels: ReferenceBackend
) -> None:
    x = torch.randn(24, 7)

    def rows_only(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate, up)

    torch._dynamo.mark_dynamic(x, 0)
    store_plans(rows_only, (x, x), db, tuple({"s0": size} for size in tuned))
    result = torch.compile(rows_only, backend="fuseplan", options={"db": str(db), "on_miss": "unfused"})(x, x)
    torch.testing.assert_close(result, swiglu(x, x))
    done = fuseplan.planner.stats()
    assert (done.bucketed, done.from_database) == ((1, 1) if served else (0, 0))
    assert done.misses == 1  # the exact size was not tuned, and the next tune may want to know


def test_unfused_on_miss(db: Path, kernels: ReferenceBackend) -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(swiglu, db, on_miss="unfused")(x, x), swiglu(x, x))
    done = fuseplan.planner.stats()
    assert (done.groups_fused, done.misses, done.regions) == (0, 1, 1) and not kernels.calls


def test_tune_on_miss_stores_a_plan(db: Path, kernels: ReferenceBackend, monkeypatch: Any) -> None:
    planned: list[str] = []

    class Pretender:
        """Stands for a tuner: plans come from the model, and are stored as tuned."""

        def __init__(self, database: Database) -> None:
            self.database = database

        def __enter__(self) -> Pretender:
            return self

        def __exit__(self, *exc: object) -> None:
            planned.append("closed")

    by_model = Planner.plan_graph

    def plan_graph(planner: Planner, graph: Any) -> GraphPlan:
        tuner, planner.tuner = planner.tuner, None
        regions = by_model(planner, graph).regions
        for region in regions:
            tuner.database.put_plan(region.record)
        return GraphPlan(tuple(replace(region, source="tuned") for region in regions))

    monkeypatch.setattr("fuseplan.planner.session.Session.tuner", lambda self, budget: Pretender(self.database))
    monkeypatch.setattr("fuseplan.planner.plan.Planner.plan_graph", plan_graph)
    x = torch.randn(3, 8)
    compiled(swiglu, db, on_miss="tune")(x, x)
    assert fuseplan.planner.stats().from_tuned == 1 and planned == ["closed"]
    torch._dynamo.reset()
    compiled(swiglu, db)(x, x)
    assert fuseplan.planner.stats().from_database == 1


def test_a_stored_do_not_fuse_is_obeyed(db: Path, kernels: ReferenceBackend) -> None:
    x = torch.randn(4, 8)
    store_plans(swiglu, (x, x), db, ({},))
    with Database(db) as database:
        (plan,) = database.plans()
        (group,) = plan.groups
        singles = tuple(replace(group, ops=(op,), kind="unfused", backend="", config={}) for op in group.ops)
        database.put_plan(replace(plan, groups=singles))
    compiled(swiglu, db)(x, x)
    done = fuseplan.planner.stats()
    assert (done.groups_fused, done.planned_unfused, done.misses, done.fallbacks) == (0, 1, 0, {})


@pytest.mark.parametrize("workload", [decode(2, 16), prefill(1, 7)], ids=lambda workload: workload.label)
def test_what_was_planned_offline_is_hit_when_the_model_runs(
    workload: Workload, db: Path, tmp_path: Path, kernels: ReferenceBackend
) -> None:
    source = find_source(config=write_config(tmp_path, "llama"), dtype="bfloat16")
    session = open_session("cpu", db)
    for plan in session.planner().plan_graph(capture(source, workload, "cpu").graph).unique():
        session.database.put_plan(plan.record)
    session.database.close()
    model = build_model(source, "cpu")
    args, kwargs = model.example(workload)
    result = compiled(model.module, db)(*args, **kwargs).logits
    args, again = model.example(workload)
    kwargs = {"input_ids": kwargs["input_ids"], **{name: again[name] for name in again if name != "input_ids"}}
    eager = model.module(*args, **kwargs).logits
    assert relative_error(result, eager.double()) < 0.05
    done = fuseplan.planner.stats()
    assert done.misses == done.from_model == 0 and done.fallbacks == {}
    assert done.groups_fused == done.from_database >= 5


# -- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"build_failure": "ld: no space left"}, "BuildError: ld: no space left"),
        ({"fails_in_call": True}, "first call failed: RuntimeError: illegal instruction"),
        ({"refusal": "no bfloat16"}, "cpp: no bfloat16"),
        ({"missing": "no C++ compiler found"}, "cpp: no C++ compiler found"),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_failing_back_end_costs_only_the_group(
    fault: dict[str, Any], reason: str, dynamic: bool, db: Path, monkeypatch: Any
) -> None:
    use(monkeypatch, ReferenceBackend())
    model = Block()
    inputs = torch.randn(4, 33), torch.randn(4, 33)
    if dynamic:
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
    sizes = {"s0": 4} if dynamic else {}
    store_plans(model, inputs, db, (sizes,))
    broken = ReferenceBackend(**fault)
    use(monkeypatch, broken)
    fast = compiled(model, db)
    for _ in range(2):
        for one, other in zip(fast(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(one, other)
    done = fuseplan.planner.stats()
    assert done.fallbacks == {reason: 2}
    assert (done.groups_fused, done.unfused) == (0, 2)
    assert len(broken.calls) == (2 if broken.fails_in_call else 0)  # tried once each, never again


def test_one_failing_group_leaves_the_others_fused(db: Path, kernels: ReferenceBackend, monkeypatch: Any) -> None:
    load = ReferenceBackend.load

    def picky(self: ReferenceBackend, ir: Any, config: Any, target: Any) -> Any:
        if any(type(instr).__name__ == "Reduce" for segment in ir.segments for instr in segment.body):
            raise BuildError("reductions are out of order")
        return load(self, ir, config, target)

    monkeypatch.setattr(ReferenceBackend, "load", picky)
    model = Block()
    inputs = torch.randn(4, 33), torch.randn(4, 33)
    for one, other in zip(compiled(model, db)(*inputs), model(*inputs), strict=True):
        torch.testing.assert_close(one, other)
    done = fuseplan.planner.stats()
    assert done.groups_fused == 1 and done.fallbacks == {"BuildError: reductions are out of order": 1}


def test_a_corrupt_database_is_no_obstacle(db: Path, kernels: ReferenceBackend) -> None:
    db.write_bytes(b"SQLite format 3\0" + b"\xff" * 4000)
    x = torch.randn(3, 8)
    with pytest.warns(UserWarning, match="tuning.db"):
        result = compiled(swiglu, db)(x, x)
    torch.testing.assert_close(result, swiglu(x, x))
    assert fuseplan.planner.stats().from_model == 1


def test_a_planner_that_fails_is_counted(db: Path, kernels: ReferenceBackend, monkeypatch: Any) -> None:
    def fails(self: Any, graph: Any) -> Any:
        raise ZeroDivisionError("no groups")

    monkeypatch.setattr("fuseplan.planner.plan.Planner.plan_graph", fails)
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(swiglu, db)(x, x), swiglu(x, x))
    assert fuseplan.planner.stats().fallbacks == {"planning failed: ZeroDivisionError: no groups": 1}


def test_a_kernel_never_reads_through_strides_it_was_not_built_for(db: Path, kernels: ReferenceBackend) -> None:
    x = torch.randn(4, 6)
    made: list[Any] = []

    def deferred(gm: Any, inputs: Any) -> Any:
        made.append(backend(gm, inputs, options={"db": str(db)}))
        return lambda *args: made[0](*(arg.t().contiguous().t() for arg in args))

    result = torch.compile(swiglu, backend=deferred)(x, x)
    torch.testing.assert_close(result, swiglu(x, x))
    (reason,) = fuseplan.planner.stats().fallbacks
    assert reason.startswith("first call failed: input is torch.float32 ((4, 6), (1, 4)), the kernel expects float32")


# -- what is not fused at all -----------------------------------------------------------------------------


def refusals() -> list[str]:
    assert fuseplan.planner.stats().groups_fused == 0
    return list(fuseplan.planner.stats().fallbacks)


def test_gradients_flow_and_nothing_is_fused(db: Path, kernels: ReferenceBackend) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with torch.enable_grad():
        compiled(swiglu, db)(x, x).sum().backward()
    (expected,) = torch.autograd.grad(_with_grad(x), x)
    torch.testing.assert_close(x.grad, expected)
    assert refusals() == ["gradients are enabled; call the model under torch.no_grad() or torch.inference_mode()"]


def _with_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return swiglu(x, x).sum()


def test_parameters_that_require_grad_are_fine_under_no_grad(db: Path, kernels: ReferenceBackend) -> None:
    model = Block()
    assert model.weight.requires_grad
    result, _ = compiled(model, db)(torch.randn(4, 33), torch.randn(4, 33))
    assert not result.requires_grad and fuseplan.planner.stats().groups_fused == 2


def test_inference_mode_is_fused(db: Path, kernels: ReferenceBackend) -> None:
    with torch.inference_mode():
        x = torch.randn(3, 8)
        torch.testing.assert_close(compiled(swiglu, db)(x, x), swiglu(x, x))
    assert fuseplan.planner.stats().groups_fused == 1


def test_autocast_is_left_alone(db: Path, kernels: ReferenceBackend) -> None:
    model, inputs = Block(), (torch.randn(4, 33), torch.randn(4, 33))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, expected = compiled(model, db)(*inputs), model(*inputs)
    assert result[0].dtype == expected[0].dtype == torch.bfloat16
    torch.testing.assert_close(result, expected)
    assert "autocast" in refusals()[0]


def test_inputs_that_share_memory_and_are_written_stay_unfused(db: Path, kernels: ReferenceBackend) -> None:
    def overlapping(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        part.add_(1.0)
        return (x + 1.0) * x

    mine, theirs = torch.ones(4, 3), torch.ones(4, 3)
    result = compiled(overlapping, db)(mine, mine[1:])
    torch.testing.assert_close(result, overlapping(theirs, theirs[1:]))
    assert refusals() == ["inputs share memory and the graph writes in place"]


# -- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_mis": "model"}, "unknown option 'on_mis' of backend 'fuseplan'; did you mean 'on_miss' or 'numerics'?"),
        ({"on_miss": "tun"}, "option 'on_miss' cannot be 'tun'; did you mean 'tune'?"),
        ({"numerics": "bf16"}, "option 'numerics' cannot be 'bf16'; known: fp32, eager"),
        ({"debug": "yes"}, "option 'debug' cannot be 'yes'; it is True or False"),
    ],
)
def test_unknown_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(options)
    assert str(caught.value) == message


def test_a_mistake_in_options_reaches_the_caller(db: Path) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="did you mean 'on_miss'"):
        compiled(swiglu, db, on_mis="tune")(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(ConfigError, match="mode 'max-autotune' is not supported"):
        parse_options({}, "max-autotune")


def test_debug_compares_each_kernel_in_its_first_call(
    db: Path, kernels: ReferenceBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fuseplan")
    x = torch.randn(3, 8)
    compiled(swiglu, db, debug=True)(x, x)
    (line,) = [message for message in caplog.messages if "differs from its ATen ops" in message]
    difference = float(line.rsplit(" ", 1)[1])
    assert math.isfinite(difference) and difference < 1e-6
    assert any("fused_0_silu_mul" in message for message in caplog.messages)


# -- a fresh process --------------------------------------------------------------------------------------

CHILD = """
import sys, torch, fuseplan.planner
sys.path.insert(0, sys.argv[2])
import test_dispatch
torch.manual_seed(0)
model = test_dispatch.Block()
inputs = torch.randn(4, 33), torch.randn(4, 33)
with torch.no_grad():
    result = torch.compile(model, backend="fuseplan", options={"db": sys.argv[1], "on_miss": "unfused"})(*inputs)
    torch.testing.assert_close(result, model(*inputs))
done = fuseplan.planner.stats()
print(done.from_database, done.misses, dict(done.fallbacks))
"""


def test_a_fresh_process_hits_what_was_stored(db: Path) -> None:
    session = open_session("cpu", db)
    if session.backends[0].unavailable():
        pytest.skip("no C++ compiler")
    store_plans(Block(), (torch.randn(4, 33), torch.randn(4, 33)), db, ({},))
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(db), str(Path(__file__).parent)], capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "2 0 {}", run.stderr[-2000:]
