"""Whole models through the torch.compile back end, against float64 and eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import compiled, fresh_start, llama, relative_error
from model_samples import write_config
from reference_backend import ReferenceBackend, use
from static_caches import cache_argument
from torch import nn

import fuseplan.planner
from fuseplan.planner.capture.trace import capture
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.models.workload import Workload, decode, prefill
from fuseplan.planner.tuning.session import open_session

BATCH = 2


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ReferenceBackend:
    """Interpreted kernels in place of compiled ones."""
    made = ReferenceBackend()
    use(monkeypatch, made)
    return made


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
    assert [one.dropped_masks for one in done.compiles] == [1, 0]  # of a symbolic length it is not constant
    assert done.groups_fused == done.from_model > 2 * done.compiles[0].groups_fused > 0


def test_decoding_with_a_static_cache(db: Path, kernels: ReferenceBackend) -> None:
    from transformers import StaticCache

    model = llama()

    def decode(call: Any) -> list[torch.Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=16)
        tokens = torch.tensor([[5, 9, 2], [7, 1, 1]])
        positions = torch.arange(3)
        results = []
        for _ in range(4):
            logits = call(tokens, **cache_argument(model, cache), cache_position=positions, use_cache=True).logits
            results.append(logits)
            tokens, positions = logits[:, -1:].argmax(-1), positions[-1:] + 1
        return [*results, *(layer.keys for layer in cache.layers), *(layer.values for layer in cache.layers)]

    expected, result = decode(model), decode(compiled(model, db))
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert fuseplan.planner.stats().fallbacks == {}
    assert fuseplan.planner.stats().groups_fused >= 8


@pytest.mark.parametrize(("workload", "pack_weights"), [(decode(2, 16), True), (prefill(1, 7), False)])
def test_what_was_planned_offline_is_hit_when_the_model_runs(
    workload: Workload, pack_weights: bool, db: Path, tmp_path: Path, kernels: ReferenceBackend
) -> None:
    source = find_source(config=write_config(tmp_path, "llama"), dtype="bfloat16")
    session = open_session("cpu", db)
    for plan in session.planner().plan_graph(capture(source, workload, "cpu", pack_weights)[0]).unique():
        session.database.put_plan(plan.record)
    session.database.close()
    model = build_model(source, "cpu")
    args, kwargs = model.example(workload)
    result = compiled(model.module, db, pack_weights=pack_weights)(*args, **kwargs).logits
    args, again = model.example(workload)
    kwargs = {"input_ids": kwargs["input_ids"], **{name: again[name] for name in again if name != "input_ids"}}
    eager = model.module(*args, **kwargs).logits
    assert relative_error(result, eager.double()) < 0.05
    done = fuseplan.planner.stats()
    assert done.misses == done.from_model == 0 and done.fallbacks == {}
    assert done.groups_fused == done.from_database >= 5
    assert done.merged_projections == (2 * len(model.module.model.layers) if pack_weights else 0)
