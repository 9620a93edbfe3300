"""``pack_weights=True`` through the torch.compile back end: equal results, one packing, and right whatever follows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start, llama, relative_error
from reference_backend import ReferenceBackend, use
from static_caches import cache_argument
from torch import nn

import fuseplan.planner
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.graph.merged_linear import as_one
from fuseplan.planner.runtime.options import parse_options


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> ReferenceBackend:
    """Interpreted kernels in place of compiled ones."""
    made = ReferenceBackend()
    use(monkeypatch, made)
    return made


class Gated(nn.Module):
    """Gate, up and down, of odd sizes."""

    def __init__(self, width: int = 33, inner: int = 65, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    @property
    def is_packed(self) -> bool:
        return as_one([self.gate.weight, self.up.weight]) is not None


def check(fast: Any, model: nn.Module, x: torch.Tensor) -> None:
    """No less exact than eager mode."""
    exact = copy.deepcopy(model).double()(x.double())
    found, eager = fast(x), model(x)
    assert found.dtype == eager.dtype and found.shape == eager.shape and found.stride() == eager.stride()
    assert relative_error(found, exact) <= relative_error(eager, exact) * 1.5 + 1e-7


def merged() -> list[int]:
    return [one.merged_projections for one in fuseplan.planner.stats().compiles]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_sizes_that_change(bias: bool, dtype: torch.dtype, mode: Any, db: Path) -> None:
    model = Gated(bias=bias).to(dtype)
    fast = compiled(model, db, pack_weights=True)
    with mode():
        for shape in ((2, 5, 33), (2, 7, 33), (3, 9, 33), (1, 1, 33)):
            check(fast, model, torch.randn(shape, dtype=dtype))
            assert model.is_packed
    assert set(merged()) == {1} and fuseplan.planner.stats().fallbacks == {} == fuseplan.planner.stats().notes
    assert f"{sum(merged())} groups of linear ops as one" in str(fuseplan.planner.stats())


def test_nothing_is_moved_unless_asked(db: Path) -> None:
    model = Gated()
    check(compiled(model, db), model, torch.randn(2, 33))
    assert not model.is_packed and merged() == [0]


def test_llama_decodes_as_eagerly_and_all_graphs_share_one_packing(db: Path) -> None:
    from transformers import StaticCache

    model = llama()
    plain = copy.deepcopy(model)
    names = list(model.state_dict())

    def decode(call: Any) -> list[torch.Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=16)
        tokens, positions, results = torch.tensor([[5, 9, 2], [7, 1, 1]]), torch.arange(3), []
        for _ in range(4):
            logits = call(tokens, **cache_argument(model, cache), cache_position=positions, use_cache=True).logits
            results.append(logits)
            tokens, positions = logits[:, -1:].argmax(-1), positions[-1:] + 1
        return [*results, *(layer.keys for layer in cache.layers), *(layer.values for layer in cache.layers)]

    fast = compiled(model, db, pack_weights=True)
    for one, other in zip(decode(fast), decode(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    places = [one.data_ptr() for one in model.parameters()]
    assert as_one([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
    assert as_one([mlp.gate_proj.weight, mlp.up_proj.weight]) is not None
    assert len(merged()) >= 2 and set(merged()) == {2}  # prefill and decode
    fast(torch.tensor([[3, 1, 4, 1, 5]]), use_cache=False)
    assert [one.data_ptr() for one in model.parameters()] == places
    assert list(model.state_dict()) == names
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    assert sum(storages.values()) == sum(one.nbytes for one in plain.parameters())


def test_a_packed_llama_is_saved_and_loaded(db: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model, tokens = llama(), torch.tensor([[3, 1, 4, 1, 5]])
    compiled(model, db, pack_weights=True)(tokens)
    model.save_pretrained(tmp_path / "saved")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_tied_and_shared_weights_stay(db: Path) -> None:
    tied = Gated()
    tied.up.weight = tied.gate.weight
    check(compiled(tied, db, pack_weights=True), tied, torch.randn(2, 33))
    assert merged() == [0] and any("used in several places" in one for one in fuseplan.planner.stats().notes)
    torch._dynamo.reset()
    shared = Gated()
    other = nn.Parameter(shared.up.weight.data)  # another model's, in the same memory
    x = torch.randn(2, 33)
    fast = compiled(shared, db, pack_weights=True)
    check(fast, shared, x)
    assert merged() == [0, 0] and any("shares its memory" in one for one in fuseplan.planner.stats().notes)
    other.zero_()
    assert not fast(x).any()


def test_parameters_that_change_after_compiling(db: Path) -> None:
    model, x = Gated(), torch.randn(3, 33)
    fast = compiled(model, db, pack_weights=True)
    check(fast, model, x)
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)  # in place
    assert model.is_packed
    check(fast, model, x)
    model.up.weight.data = torch.randn(65, 33)  # elsewhere: packed anew in the next call
    check(fast, model, x)
    model.gate.weight = nn.Parameter(torch.randn(65, 33))
    check(fast, model, x)
    model.load_state_dict({name: torch.randn_like(value) for name, value in state.items()}, assign=True)
    check(fast, model, x)
    model.up.weight.data = torch.randn(70, 33)[5:]  # part of a larger tensor: it runs as two products
    check(fast, model, x)
    assert not model.is_packed


def test_a_cast_model_is_compiled_and_packed_again(db: Path) -> None:
    model = Gated()
    fast = compiled(model, db, pack_weights=True)
    check(fast, model, torch.randn(3, 33))
    model.to(torch.bfloat16)
    assert not model.is_packed
    check(fast, model, torch.randn(3, 33, dtype=torch.bfloat16))
    assert model.is_packed and merged() == [1, 1]


def test_a_copy_of_a_compiled_model_is_its_own(db: Path) -> None:
    model, x = Gated(), torch.randn(3, 33)
    check(compiled(model, db, pack_weights=True), model, x)
    twin = copy.deepcopy(model)
    twin.up.weight.mul_(2)
    check(compiled(twin, db, pack_weights=True), twin, x)
    check(model, model, x)
    assert twin.up.weight.untyped_storage().data_ptr() != model.up.weight.untyped_storage().data_ptr()


def test_layers_that_share_a_compiled_graph_are_all_packed(db: Path) -> None:
    layers, x = [Gated() for _ in range(3)], torch.randn(3, 33)
    for one in layers:
        one.compile(backend="fuseplan", options={"db": str(db), "pack_weights": True})
    for _ in range(2):
        for one in layers:
            found = one(x)
            exact = one.down(F.silu(one.gate(x)) * one.up(x))
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    assert all(one.is_packed for one in layers)
    assert merged() == [1]


def test_it_is_true_or_false() -> None:
    assert parse_options({"pack_weights": True}).pack_weights and not parse_options(None).pack_weights
    with pytest.raises(ConfigError, match=r"pack_weights.*True or False"):
        parse_options({"pack_weights": "q"})
