"""What fails in the torch.compile back end costs one group; what is not fused at all says why."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_samples import Block, compiled, fresh_start, store_plans, swiglu
from reference_backend import ReferenceBackend, use
from torch import nn

import fuseplan.planner
from fuseplan.kernels.ir.backend import BuildError
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.runtime.dispatch import fuseplan as backend
from fuseplan.planner.tuning.planner import Planner


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


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"build_failure": "ld: no space left"}, "BuildError: ld: no space left"),
        ({"fails_in_call": True}, "first call failed: RuntimeError: illegal instruction"),
        ({"refusal": "no bfloat16"}, "cpp: no bfloat16"),
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


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).asinh()  # what no group crosses
        return x


def test_fallbacks_and_misses_name_the_place_in_the_model(
    db: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fuseplan")
    use(monkeypatch, ReferenceBackend(fails_in_call=True))
    compiled(Layers(), db, on_miss="model")(torch.randn(4, 33))
    done, reason = fuseplan.planner.stats(), "first call failed: RuntimeError: illegal instruction"
    assert done.fallbacks == {reason: 3}
    assert done.places == {reason: "layers.*.0-1  x3"}
    assert f"3 x {reason} (layers.*.0-1  x3)" in str(done)
    failed = [text for text in caplog.messages if "runs unfused from now on" in text]
    assert [f"(layers.{at}.0-1)" in text for at, text in enumerate(failed)] == [True] * 3
    assert [text for text in caplog.messages if "no tuned plan for" in text and "(layers.*.0-1  x3)" in text]


@pytest.mark.parametrize("on_miss", ["model", "tune", "unfused"])
def test_without_a_compiler_the_first_warning_and_every_graph_say_so(
    on_miss: str, db: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fuseplan")
    use(monkeypatch, ReferenceBackend(missing="no C++ compiler found"))
    x = torch.randn(3, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for function in (swiglu, lambda one, other: swiglu(other, one)):
            torch.testing.assert_close(compiled(function, db, on_miss=on_miss)(x, x), swiglu(x, x))
    said = [str(one.message) for one in caught if "fuseplan" in str(one.message)]
    assert said == ["fuseplan fuses nothing here: cpp: no C++ compiler found"]
    assert fuseplan.planner.stats().fallbacks == {"cpp: no C++ compiler found": 2}
    assert sum("cpp: no C++ compiler found" in message for message in caplog.messages) == 2


class Calls:
    """Python functions that are entered while it is installed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, frame: Any, event: str, _: object) -> None:
        if event == "call":
            self.names.append(frame.f_code.co_name)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_group_that_failed_is_not_interpreted_afterwards(dynamic: bool, db: Path, monkeypatch: Any) -> None:
    use(monkeypatch, ReferenceBackend(fails_in_call=True))
    made: list[Any] = []

    def keeping(gm: Any, example_inputs: Any) -> Any:
        made.append(backend(gm, example_inputs, options={"db": str(db)}))
        return made[-1]

    def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        twice = torch.sigmoid(torch.cat([x, x]) * 2.0)
        return twice.view(2, x.shape[0], x.shape[1]).sum(-1), twice[x.shape[0] :]

    sizes = (5, 9) if dynamic else (5,)
    fast = torch.compile(halves, backend=keeping, dynamic=dynamic)
    for rows in sizes:
        x = torch.randn(rows, 7)
        for one, other in zip(fast(x), halves(x), strict=True):
            torch.testing.assert_close(one, other)
    done = fuseplan.planner.stats()
    assert len(made) == 1 and done.unfused > 0 and done.groups_fused == 0
    calls = Calls()
    arguments = (rows, 7, x) if dynamic else (x,)
    sys.setprofile(calls)
    try:
        made[0](*arguments)
    finally:
        sys.setprofile(None)
    # The graph's own function, one for each group that failed, and sizes that are remembered.
    groups = done.unfused
    assert len([name for name in calls.names if name != "__call__"]) <= 1 + groups + 1, calls.names


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


def test_a_corrupt_database_is_no_obstacle(
    db: Path, kernels: ReferenceBackend, caplog: pytest.LogCaptureFixture
) -> None:
    db.write_bytes(b"SQLite format 3\0" + b"\xff" * 4000)
    x = torch.randn(3, 8)
    with caplog.at_level(logging.WARNING, "fuseplan"):
        result = compiled(swiglu, db)(x, x)
    assert "tuning.db is corrupt" in caplog.text
    torch.testing.assert_close(result, swiglu(x, x))
    assert fuseplan.planner.stats().from_model == 1


def test_a_corrupt_database_is_set_aside_in_plain_words_where_misses_are_tuned(
    db: Path, kernels: ReferenceBackend, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    db.write_bytes(b"SQLite format 3\0" + b"\xff" * 4000)
    db.write_bytes(db.read_bytes()[:68] + b"fuse" + db.read_bytes()[72:])
    x = torch.randn(3, 8)
    with caplog.at_level(logging.WARNING, "fuseplan"):
        result = compiled(swiglu, db, on_miss="tune")(x, x)
    torch.testing.assert_close(result, swiglu(x, x))
    (said,) = [one.getMessage() for one in caplog.records if "is corrupt" in one.getMessage()]
    assert "kept as" in said and ".corrupt-" in said
    assert not [one for one in recwarn if "corrupt" in str(one.message)]


def test_a_planner_that_fails_is_counted(db: Path, kernels: ReferenceBackend, monkeypatch: Any) -> None:
    def fails(self: Any, graph: Any, **options: Any) -> Any:
        raise ZeroDivisionError("no groups")

    monkeypatch.setattr("fuseplan.planner.tuning.planner.Planner.plan_graph", fails)
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(swiglu, db)(x, x), swiglu(x, x))
    assert fuseplan.planner.stats().fallbacks == {"planning failed: ZeroDivisionError: no groups": 1}


def test_a_region_that_cannot_be_planned_costs_only_itself(
    db: Path, kernels: ReferenceBackend, monkeypatch: Any
) -> None:
    decide = Planner._decide

    def fails_for_logarithms(self: Planner, graph: DataflowGraph, region: Region, *rest: Any) -> Any:
        if any(graph.op(name).op == "aten.log.default" for name in region.ops):
            raise ZeroDivisionError("no groups")
        return decide(self, graph, region, *rest)

    def two_regions(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.rrelu(x.sigmoid() * 2) @ weight.exp().log()

    monkeypatch.setattr(Planner, "_decide", fails_for_logarithms)
    x, weight = torch.randn(5, 5), torch.randn(5, 5)
    torch.testing.assert_close(compiled(two_regions, db)(x, weight), two_regions(x, weight))
    stats = fuseplan.planner.stats()
    assert stats.fallbacks == {"planning failed: ZeroDivisionError: no groups": 1}
    assert (stats.regions, stats.from_model) == (2, 1)


def test_a_reduction_to_its_own_size_unfuses_nothing(db: Path, kernels: ReferenceBackend) -> None:
    def square(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.relu() + y, x.sum(-1) + 1, (x @ y).sigmoid() * 2

    x = torch.randn(7, 7)
    for result, expected in zip(compiled(square, db)(x, x), square(x, x), strict=True):
        torch.testing.assert_close(result, expected)
    assert not fuseplan.planner.stats().fallbacks and fuseplan.planner.stats().from_model >= 2


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


def test_a_call_whose_inputs_share_memory_that_is_written_runs_unfused(db: Path, kernels: ReferenceBackend) -> None:
    def overlapping(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        part.add_(1.0)
        return (x + 1.0) * x

    mine, theirs = torch.ones(4, 3), torch.ones(4, 3)
    result = compiled(overlapping, db)(mine, mine[1:])
    torch.testing.assert_close(result, overlapping(theirs, theirs[1:]))
    (reason,) = fuseplan.planner.stats().fallbacks
    assert "share memory" in reason


def test_inputs_that_share_memory_stay_fused_where_other_memory_is_written(db: Path, kernels: ReferenceBackend) -> None:
    def shifted(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(part)
        made[1:] = torch.sigmoid(part[:-1]) * 2.0
        return (x[: part.shape[0]] + made) * torch.tanh(made)

    x = torch.randn(6, 3)
    torch.testing.assert_close(compiled(shifted, db)(x, x[2:]), shifted(x, x[2:]))
    assert fuseplan.planner.stats().fallbacks == {} and fuseplan.planner.stats().groups_fused > 0


@pytest.mark.parametrize("function", [
    lambda x: (x + 1).max(), lambda x: (x + 1).max(0), lambda x: x.t().exp().min(1, keepdim=True),
], ids=["all", "rows", "transposed"])
def test_the_largest_of_no_element_raises_as_in_eager_mode(function: Any, db: Path) -> None:
    x = torch.empty(0, 3)
    with pytest.raises((RuntimeError, IndexError)) as eager:
        function(x)
    with pytest.raises(eager.type, match=re.escape(str(eager.value))):
        compiled(function, db)(x)
