"""The torch.compile back end: results against eager with mutation, aliases and odd layouts; options."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start, swiglu
from reference_backend import ReferenceBackend, use

import fuseplan.planner
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.runtime.dispatch import fuseplan as backend
from fuseplan.planner.runtime.lookup import GraphLookup
from fuseplan.planner.runtime.options import parse_options


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


def overwrites_unseen(x: torch.Tensor, y: torch.Tensor) -> Any:
    """A kernel holds the first write; the second one is of no use, and must not bring the first one back."""
    made = x / (y.abs() + 1)
    made.sub_(made @ y.t() @ x)
    result = F.silu(made + y)
    made.add_(made)
    return result


FUNCTIONS = [
    mutates_between, overwrites_unseen, writes_through_a_view, returns_aliases, several_outputs, unread_write,
    skips_ahead, swiglu,
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


REARRANGED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "movedim": lambda x: x.movedim(1, -1), "moveaxis": lambda x: torch.moveaxis(x, (0, 1), (2, 0)),
    "swapaxes": lambda x: x.swapaxes(0, -1), "swapdims": lambda x: x.swapdims(1, 2),
    "tensor_split": lambda x: x.tensor_split(2, -1)[1], "at indices": lambda x: x.tensor_split([1, 3], -1)[1],
    "hsplit": lambda x: x.hsplit(2)[1], "ravel": torch.ravel, "tile": lambda x: x.tile(1, 2, 1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", REARRANGED)
def test_what_only_rearranges_splits_no_group(
    name: str, dynamic: bool, db: Path, kernels: ReferenceBackend
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return REARRANGED[name](x * 2).sin() + 1

    x = torch.randn(3, 4, 5)
    result, expected = compiled(function, db, dynamic=dynamic)(x), function(x)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()
    stats = fuseplan.planner.stats()
    assert (stats.regions, stats.groups_fused) == (1, 1) and stats.fallbacks == {}


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


# -- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_mis": "model"}, "unknown option 'on_mis' of backend 'fuseplan'; did you mean 'on_miss'?"),
        ({"misses": True}, "unknown option 'misses' of backend 'fuseplan'; did you mean 'log_misses' or 'on_miss'?"),
        ({"on_miss": "tun"}, "option 'on_miss' cannot be 'tun'; did you mean 'tune'?"),
        ({"on_miss": None}, "option 'on_miss' cannot be None; known: model, measure, unfused, tune"),
        ({"numerics": "bf16"}, "option 'numerics' cannot be 'bf16'; known: fp32, eager"),
        ({"debug": "yes"}, "option 'debug' cannot be 'yes'; it is True or False"),
        ({"decode_attention": 1}, "option 'decode_attention' cannot be 1; it is True, False or None"),
        *(({"db": db}, f"option 'db' cannot be {db!r}; it is the path of a file, a SQLAlchemy URL as text, or None")
          for db in (3, ["a"], b"a", "", " ", True)),
    ],
)
def test_unknown_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(options)
    assert str(caught.value) == message


def test_an_option_whose_name_is_no_text_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 1 of backend 'fuseplan'; known: db, on_miss"):
        parse_options({1: 2})  # type: ignore[dict-item]


@pytest.mark.parametrize("db", ["a.db", Path("a.db"), "sqlite:///a.db", None])
def test_a_database_is_named_by_a_path_or_a_url(db: Any) -> None:
    assert parse_options({"db": db}).db == (None if db is None else str(db))


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no database is named, this test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def test_a_mistake_in_options_reaches_the_caller(db: Path) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="did you mean 'on_miss'"):
        compiled(swiglu, db, on_mis="tune")(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"unknown mode .*: default, reduce-over"):
        torch.compile(swiglu, backend="fuseplan", mode="reduce-overheads")(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("mode", "cuda_graphs", "on_miss"),
    [
        ("default", False, "model"),
        ("reduce-overhead", True, "model"),
        ("max-autotune", True, "tune"),
        ("max-autotune-no-cudagraphs", False, "tune"),
    ],
)
def test_modes_of_torch_compile_are_understood(
    mode: str, cuda_graphs: bool, on_miss: str, own_folder: None, kernels: ReferenceBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up: list[Any] = []
    graphed: list[Any] = []

    def look_up(session: Any, graph: Any, on_miss: Any, tally: Any) -> GraphLookup:
        looked_up.append(on_miss)
        return GraphLookup()

    def keep(call: Any, *args: Any) -> Any:
        graphed.append(args)
        return call

    monkeypatch.setattr("fuseplan.planner.runtime.dispatch.look_up", look_up)
    monkeypatch.setattr("fuseplan.planner.runtime.dispatch.graphed", keep)
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(swiglu, backend="fuseplan", mode=mode)(x, x), swiglu(x, x))
    assert (len(graphed), looked_up) == (cuda_graphs, [on_miss])


def test_options_win_over_the_mode() -> None:
    parsed = parse_options({"on_miss": "unfused"}, "max-autotune")
    assert (parsed.on_miss, parsed.cuda_graphs) == ("unfused", True)


def test_generate_compiles_with_a_compile_config_as_hugging_face_makes_it(
    own_folder: None, kernels: ReferenceBackend
) -> None:
    from transformers import CompileConfig

    config = CompileConfig(backend="fuseplan", dynamic=False, fullgraph=True)
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(swiglu, **config.to_dict())(x, x), swiglu(x, x))
    assert fuseplan.planner.stats().groups_fused == 1


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
