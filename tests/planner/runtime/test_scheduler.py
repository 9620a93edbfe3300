"""The hand-built door: results, caching, thresholds, explanations, and one clear error for every mistake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_backend import ReferenceBackend, use

from fuseplan.planner import FusionConfig, FusionScheduler, OpNode, SubGraph, reset_stats, stats
from fuseplan.planner.capture.subgraph import full_name
from fuseplan.planner.errors import ConfigError, FuseplanError, GraphError, ShapeError, UnknownOpError

SWIGLU = SubGraph(
    (OpNode("silu", ("gate",), ("act",)), OpNode("mul", ("act", "up"), ("out",))), ("gate", "up"), ("out",)
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    reset_stats()
    torch.manual_seed(0)
    yield


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ReferenceBackend:
    made = ReferenceBackend()
    use(monkeypatch, made)
    return made


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


def gates(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"gate": torch.randn(*shape, dtype=dtype), "up": torch.randn(*shape, dtype=dtype)}


@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (2, 3, 5), (4097,)])
def test_a_graph_runs_as_one_kernel(shape: tuple[int, ...], db: Path, kernels: ReferenceBackend) -> None:
    inputs = gates(*shape)
    scheduler = FusionScheduler(database=db)
    result = scheduler.dispatch(SWIGLU, inputs)
    torch.testing.assert_close(result, {"out": F.silu(inputs["gate"]) * inputs["up"]})
    assert len(kernels.calls) == 1
    assert scheduler.stats.groups_fused == 1 and stats().groups_fused == 1


def test_several_outputs_and_a_library_call(db: Path, kernels: ReferenceBackend) -> None:
    graph = SubGraph(
        nodes=(
            OpNode("linear", ("normal", "weight"), ("projected",)),  # any order will do
            OpNode("add", ("x", "residual"), ("hidden",)),
            OpNode("layer_norm", ("hidden", "scale"), ("normal",), {"normalized_shape": (8,)}),
            OpNode("gelu", ("projected",), ("activated",), {"approximate": "tanh"}),
            OpNode("mul", ("activated",), ("out",), {"other": 2.0}),
        ),
        input_names=("x", "residual", "scale", "weight"),
        output_names=("out", "hidden"),
    )
    sizes = {"x": (3, 8), "residual": (3, 8), "scale": (8,), "weight": (5, 8)}
    inputs = {name: torch.randn(size) for name, size in sizes.items()}
    result = FusionScheduler(database=db).dispatch(graph, inputs)
    hidden = inputs["x"] + inputs["residual"]
    normal = F.layer_norm(hidden, (8,), inputs["scale"])
    out = F.gelu(F.linear(normal, inputs["weight"]), approximate="tanh") * 2.0
    torch.testing.assert_close(result, {"out": out, "hidden": hidden})
    assert len(kernels.calls) == 2


def test_inputs_that_require_grad_give_plain_results(db: Path, kernels: ReferenceBackend) -> None:
    inputs = {name: tensor.requires_grad_() for name, tensor in gates(2, 4).items()}
    assert not FusionScheduler(database=db).dispatch(SWIGLU, inputs)["out"].requires_grad


def test_each_layout_is_planned_once(db: Path, kernels: ReferenceBackend) -> None:
    scheduler = FusionScheduler(database=db)
    for _ in range(3):
        scheduler.dispatch(SWIGLU, gates(4, 6))
    assert (len(scheduler.stats.compiles), len(kernels.calls)) == (1, 3)
    turned = {name: tensor.t() for name, tensor in gates(6, 4).items()}
    result = scheduler.dispatch(SWIGLU, turned)["out"]
    assert result.stride() == (1, 4)
    scheduler.dispatch(SWIGLU, gates(4, 6, dtype=torch.bfloat16))
    assert len(scheduler.stats.compiles) == 3
    same = SubGraph(list(SWIGLU.nodes), ["gate", "up"], ["out"])  # type: ignore[arg-type]
    scheduler.dispatch(same, gates(4, 6))
    assert len(scheduler.stats.compiles) == 3


def test_without_the_cache_every_call_plans(db: Path, kernels: ReferenceBackend) -> None:
    scheduler = FusionScheduler(FusionConfig(enable_cache=False), db)
    for _ in range(2):
        scheduler.dispatch(SWIGLU, gates(4, 6))
    assert len(scheduler.stats.compiles) == 2


@pytest.mark.parametrize(
    ("config", "fused"),
    [
        (FusionConfig(), 1),
        (FusionConfig(enable_fusion=False), 0),
        (FusionConfig(min_tensor_elements=24), 1),
        (FusionConfig(min_tensor_elements=25), 0),
        (FusionConfig(min_nodes_for_fusion=3), 0),
        (FusionConfig(debug_mode=True), 1),
    ],
)
def test_thresholds(config: FusionConfig, fused: int, db: Path, kernels: ReferenceBackend) -> None:
    inputs = gates(4, 6)
    scheduler = FusionScheduler(config, db)
    result = scheduler.dispatch(SWIGLU, inputs)["out"]
    torch.testing.assert_close(result, F.silu(inputs["gate"]) * inputs["up"])
    assert len(kernels.calls) == fused == scheduler.stats.groups_fused
    text = scheduler.explain(SWIGLU, inputs)
    assert ("fused by cpp" in text) == bool(fused)


def test_explain_names_the_groups_and_the_reason(db: Path, kernels: ReferenceBackend) -> None:
    text = FusionScheduler(database=db).explain(SWIGLU, gates(4, 6))
    assert "region silu+mul 4x6 float32: plan from model" in text
    assert "silu+mul 4x6 float32: fused by cpp {'unroll': 1}" in text
    alone = SubGraph((OpNode("matmul", ("a", "b"), ("out",)),), ("a", "b"), ("out",))
    text = FusionScheduler(database=db).explain(alone, {"a": torch.ones(2, 2), "b": torch.ones(2, 2)})
    assert text == "nothing to fuse: no two ops of the graph can share a kernel"


# -- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (OpNode("add", ("x", "y"), ("z",)), "aten.add.Tensor"),
        (OpNode("add", ("x",), ("z",), {"other": 2.0}), "aten.add.Tensor"),
        (OpNode("pow", ("x",), ("z",), {"exponent": 2}), "aten.pow.Tensor_Scalar"),
        (OpNode("pow", ("x", "y"), ("z",)), "aten.pow.Tensor_Tensor"),
        (OpNode("softmax", ("x",), ("z",), {"dim": -1}), "aten.softmax.int"),
        (OpNode("mean", ("x",), ("z",), {"dim": (-1,), "keepdim": True}), "aten.mean.dim"),
        (OpNode("rms_norm", ("x", "w"), ("z",), {"normalized_shape": (4,)}), "aten.rms_norm.default"),
        (OpNode("cat", ("x", "y", "w"), ("z",), {"dim": -1}), "aten.cat.default"),
        (OpNode("cast", ("x",), ("z",), {"dtype": "bfloat16"}), "aten.to.dtype"),
        (OpNode("transpose", ("x",), ("z",), {"dim0": 0, "dim1": 1}), "aten.transpose.int"),
        (OpNode("matmul", ("x", "y"), ("z",)), "aten.matmul.default"),
        (OpNode("where", ("c", "x", "y"), ("z",)), "aten.where.self"),
        (OpNode("swish", ("x",), ("z",)), "aten.silu.default"),
        (OpNode("aten.mul.Tensor", ("x", "y"), ("z",)), "aten.mul.Tensor"),
    ],
)
def test_short_names(node: OpNode, expected: str) -> None:
    assert full_name(node) == expected


# -- mistakes ---------------------------------------------------------------------------------------------


def one(op: str, inputs: tuple[str, ...] = ("x",), **attrs: Any) -> SubGraph:
    return SubGraph((OpNode(op, inputs, ("y",), attrs),), ("x",), ("y",))


CYCLE = SubGraph((OpNode("add", ("x", "b"), ("a",)), OpNode("mul", ("a", "x"), ("b",))), ("x",), ("b",))


@pytest.mark.parametrize(
    ("graph", "error", "message"),
    [
        (one("sillu"), UnknownOpError, "unknown op 'sillu'; did you mean silu"),
        (one("aten.silu.Tensor"), UnknownOpError, "unknown op 'aten.silu.Tensor'; did you mean aten.silu"),
        (one("silu", ("z",)), GraphError, "op silu reads 'z', which nothing produces; known values: x, y"),
        (one("add"), GraphError, "no overload of add (y) takes its operands: aten.add.Tensor:"),
        (one("silu", inplace=True), GraphError, "aten.silu.default: it has no argument 'inplace'; it takes self"),
        (one("aten.add.Tensor", other=1, beta=2), GraphError, "op aten.add.Tensor (y): it has no argument 'beta'"),
        (CYCLE, GraphError, "the graph has a cycle through a, b"),
        (SubGraph((), ("x",), ("y",)), GraphError, "output 'y' is produced by no op; known values: none"),
        (SubGraph((OpNode("silu", ("x",), ("x",)),), ("x",), ("x",)), GraphError, "value 'x' is produced twice"),
        (one("softmax", dim=5), ShapeError, "op aten.softmax.int (y) cannot take x (2, 4): Dimension out of range"),
        (
            SubGraph((OpNode("silu", ("x",), ("y", "z")),), ("x",), ("y",)),
            GraphError, "op aten.silu.default (y) has 1 results, not 2",
        ),
    ],
)
@pytest.mark.parametrize("fusion", [True, False])
def test_mistakes_are_named(
    graph: SubGraph, error: type[FuseplanError], message: str, fusion: bool, db: Path, kernels: ReferenceBackend
) -> None:
    with pytest.raises(error) as caught:
        FusionScheduler(FusionConfig(enable_fusion=fusion), db).dispatch(graph, {"x": torch.ones(2, 4)})
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"gate": torch.ones(2, 2)}, "input 'up' is missing or no tensor; the graph reads it, and was given gate"),
        ({"gate": torch.ones(2), "up": 1.0}, "input 'up' is missing or no tensor"),
        ({**gates(2, 2), "down": torch.ones(2)}, "the graph has no input 'down'; it reads gate, up"),
        ({"gate": torch.ones(2, 3), "up": torch.ones(2, 4)}, "op aten.mul.Tensor (out) cannot take act (2, 3), up"),
        ({"gate": torch.ones(2), "up": torch.ones(2, device="meta")}, "the inputs are on cpu and meta"),
    ],
)
def test_wrong_inputs_are_named(inputs: dict[str, Any], message: str, db: Path, kernels: ReferenceBackend) -> None:
    with pytest.raises(ShapeError) as caught:
        FusionScheduler(database=db).dispatch(SWIGLU, inputs)
    assert message in str(caught.value)


def test_thresholds_must_be_numbers() -> None:
    with pytest.raises(ConfigError, match=r"FusionConfig.min_tensor_elements is a number of at least 0, not -1"):
        FusionConfig(min_tensor_elements=-1)


# -- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError("disk on fire"), ConfigError("no such thing")])
def test_a_planner_that_fails_falls_back_or_raises(
    failure: Exception, db: Path, kernels: ReferenceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise failure

    monkeypatch.setattr("fuseplan.planner.runtime.scheduler.open_session", fails)
    inputs = gates(2, 6)
    scheduler = FusionScheduler(database=db)
    result = scheduler.dispatch(SWIGLU, inputs)["out"]
    torch.testing.assert_close(result, F.silu(inputs["gate"]) * inputs["up"])
    assert len(scheduler.stats.fallbacks) == 1 and str(failure) in next(iter(scheduler.stats.fallbacks))
    with pytest.raises(type(failure), match=str(failure)):
        FusionScheduler(FusionConfig(fallback_on_error=False), db).dispatch(SWIGLU, inputs)


def test_a_failing_kernel_falls_back(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ReferenceBackend(fails_in_call=True))
    inputs = gates(2, 6)
    scheduler = FusionScheduler(database=db)
    for _ in range(2):
        result = scheduler.dispatch(SWIGLU, inputs)["out"]
        torch.testing.assert_close(result, F.silu(inputs["gate"]) * inputs["up"])
    assert scheduler.stats.fallbacks == {"first call failed: RuntimeError: illegal instruction": 1}
