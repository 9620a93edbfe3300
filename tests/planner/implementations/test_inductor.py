"""TorchInductor's code for whole regions: taken where it is faster, stored, found again, no danger to a call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
import torch
from costmodel_samples import CPU
from fast_tunes import count_instead_of_timing
from graphs import Builder

from fuseplan.costmodel.identity import current_identity
from fuseplan.kernels.ir.backend import Target
from fuseplan.planner import stats, tune
from fuseplan.planner.capture.trace import record
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations import inductor
from fuseplan.planner.implementations.choices import implementations_for
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.partition.by_inductor import may_run_whole, step_groups
from fuseplan.planner.tuning.session import open_session
from fuseplan.search import policy
from fuseplan.search.store.database import Database
from fuseplan.search.store.maintenance import verify_database
from fuseplan.search.store.record import INDUCTOR, PlanRecord


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ops that no kernel of ours holds (``var_mean``, ``asinh``, ``aminmax``), and some between."""
    y = torch.tanh(x) * 2 + 1
    variance, mean = torch.var_mean(y, 0)
    z = ((y - mean) / variance.sqrt()).clamp(-3, 3)
    low, high = z.asinh().aminmax(dim=0)
    return high - low, z


def run(db: Path, x: torch.Tensor, on_miss: str = "model") -> Any:
    torch._dynamo.reset()
    call: Callable[..., Any] = torch.compile(
        statistics, backend="fuseplan", options={"db": str(db), "on_miss": on_miss}, dynamic=False)
    with torch.no_grad():
        call(x)
        return call(x)


def whole_plans(db: Path) -> list[PlanRecord]:
    return [one for one in Database(db).plans() if [group.implementation for group in one.groups] == [INDUCTOR]]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    db = tmp_path_factory.mktemp("inductor") / "tuning.db"
    with pytest.MonkeyPatch.context() as patch:
        count_instead_of_timing(patch)
        run(db, torch.randn(127, 33), "tune")
    return db


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[inductor.InductorMode]:
    """For which mode each chain was compiled, in order."""
    modes: list[inductor.InductorMode] = []

    def noted(chain: Any, specs: Any, device: str, mode: inductor.InductorMode = "default") -> Any:
        modes.append(mode)
        return compile_chain(chain, specs, device, mode)

    compile_chain = inductor.compile_chain
    monkeypatch.setattr(inductor, "compile_chain", noted)
    return modes


def check(results: Any, x: torch.Tensor) -> None:
    for got, want in zip(results, statistics(x.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_a_region_that_leaves_much_to_aten_is_stored_as_inductors(tuned: Path) -> None:
    (plan,) = whole_plans(tuned)
    assert plan.planned_us < plan.unfused_us
    assert plan.groups[0].measured_us == plan.planned_us
    assert sum(len(one.ops) for one in plan.rejected if one.implementation != "aten")  # the kernels that lost
    assert verify_database(Database(tuned)) == []


def test_it_is_found_again_and_right(tuned: Path) -> None:
    before, x = stats().from_database, torch.randn(127, 33)
    check(run(tuned, x), x)
    assert stats().from_database == before + 1


def test_a_compiler_that_fails_costs_the_region_alone(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(inductor, "compile_chain", fail)
    x = torch.randn(127, 33)
    check(run(tuned, x), x)
    assert any("no compiler today" in reason for reason in stats().fallbacks)


def test_code_that_is_wrong_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_chain = inductor.compile_chain

    def slightly_off(*args: Any) -> Any:
        call = compile_chain(*args)
        return lambda *inputs: [one * 1.0005 for one in call(*inputs)]

    monkeypatch.setattr(inductor, "compile_chain", slightly_off)
    count_instead_of_timing(monkeypatch)
    x = torch.randn(127, 33)
    check(run(tmp_path / "tuning.db", x, "tune"), x)
    assert not whole_plans(tmp_path / "tuning.db")
    assert any("wrong result" in one.evidence.reason for one in Database(tmp_path / "tuning.db").plans())


def test_a_record_with_a_configuration_is_refused(tuned: Path, tmp_path: Path) -> None:
    (plan,) = whole_plans(tuned)
    forged = replace(plan, groups=(replace(plan.groups[0], config={"mode": "fastest"}),))
    database = Database(tmp_path / "forged.db")
    database.put_plan(forged)
    before, x = stats().from_database, torch.randn(127, 33)
    check(run(tmp_path / "forged.db", x, "unfused"), x)
    assert stats().from_database == before


@pytest.mark.parametrize("probed", [True, False])
def test_untuned_it_runs_where_the_cost_model_knows_the_device(
    probed: bool, tmp_path: Path, compiled: list[inductor.InductorMode]
) -> None:
    database, identity = Database(tmp_path / "tuning.db"), current_identity("cpu")
    if probed:
        database.put_device(identity.key(), json.loads(replace(CPU, identity=identity).to_json()))
    x = torch.randn(4097, 127)
    check(run(tmp_path / "tuning.db", x), x)
    assert len(compiled) == probed


def test_what_it_may_not_run() -> None:
    b = Builder(x=torch.randn(127, 33), index=torch.zeros(3, dtype=torch.int64))
    summed = b("aten.asinh.default", b("aten.tanh.default", "x"))
    graph = b.graph(b("aten.exp.default", summed), b("aten.index_select.default", "x", "index", dim=0))
    named = {node.op.split(".")[1]: node.name for node in graph}

    def refusal(numerics: str, *ops: str) -> str:
        names = tuple(named[op] for op in ops)
        group = Candidate(names, (), compute_graph_of(graph).outputs_of(names))
        return inductor.InductorCode().refuse(GroupTable(graph, numerics, "cpu"), group) or ""

    assert not refusal("fp32", "tanh", "asinh", "exp")
    assert "more bits" in refusal("eager", "tanh", "asinh", "exp")
    assert "outside its table" in refusal("fp32", "exp", "index_select")
    assert "single op" in refusal("fp32", "asinh")
    graph.rounds = frozenset([summed])  # a cast that the program can see: its code may keep more bits
    assert "rounds" in refusal("fp32", "tanh", "asinh", "exp")


@pytest.mark.parametrize(("op", "on_gpu"), [("index_select", False), ("gather", True), ("embedding", True)])
def test_on_gpus_it_may_look_up_what_it_asserts_as_eager_mode(op: str, on_gpu: bool) -> None:
    """On CPUs it raises another error; of ``index_select`` it takes negative numbers from the end."""
    few = torch.zeros(3, dtype=torch.int64)
    b = Builder(x=torch.randn(127, 33), index=few[:, None].repeat(1, 33), few=few)
    found = {"index_select": lambda: b("aten.index_select.default", "x", "few", dim=0),
             "gather": lambda: b("aten.gather.default", "x", "index", dim=0),
             "embedding": lambda: b("aten.embedding.default", "x", "few")}[op]()
    graph = b.graph(b("aten.exp.default", b("aten.tanh.default", found)))
    names = tuple(node.name for node in graph)
    group = Candidate(names, (), compute_graph_of(graph).outputs_of(names))
    for device_type, may in (("cpu", False), ("cuda", on_gpu)):
        reason = inductor.InductorCode().refuse(GroupTable(graph, "fp32", device_type), group)
        assert (reason is None) is may
        assert may_run_whole(graph, device_type) is may


class Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize("asked", ["default", "off"])
def test_a_tune_without_it_compiles_none_of_its_code(
    asked: inductor.InductorAsked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    compiled: list[inductor.InductorMode]
) -> None:
    most = policy.MOST_OPS_OF_A_STEP
    count_instead_of_timing(monkeypatch)
    monkeypatch.setattr(policy, "MOST_OPS_OF_A_STEP", most)
    db = samples.known_machine(tmp_path / "tuning.db")
    found = tune(Function(statistics), torch.randn(127, 33), device="cpu", db=db, inductor=asked)
    assert bool(compiled) == (asked != "off") == bool(whole_plans(db)) == ("torch.compile" in str(found))


@pytest.mark.parametrize(("asked", "told"), [("default", True), ("off", False)])
def test_a_tune_says_that_the_program_has_other_settings(
    asked: inductor.InductorAsked, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchao sets them when it quantises a model."""
    count_instead_of_timing(monkeypatch)
    db = samples.known_machine(tmp_path / "tuning.db")
    with torch._inductor.config.patch(coordinate_descent_tuning=True):
        found = tune(Function(statistics), torch.randn(127, 33), device="cpu", db=db, inductor=asked)
    assert any("coordinate_descent_tuning" in one for one in found.warnings) is told
    again = tune(Function(statistics), torch.randn(126, 33), device="cpu", db=db, inductor=asked)
    assert not any("coordinate_descent_tuning" in one for one in again.warnings)


def test_its_fastest_code_is_taken_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[inductor.InductorMode]
) -> None:
    """In contests, in the record, and when a plan runs: the mode is stored."""
    count_instead_of_timing(monkeypatch)
    db, x = samples.known_machine(tmp_path / "tuning.db"), torch.randn(127, 33)
    tune(Function(statistics), x, device="cpu", db=db, inductor="max-autotune")
    (plan,) = whole_plans(db)
    assert plan.groups[0].config == {"mode": "max-autotune"} and verify_database(Database(db)) == []
    assert set(compiled) == {"max-autotune"}
    compiled.clear()
    check(run(db, x), x)
    assert compiled == ["max-autotune"] and not stats().misses


def test_a_mode_that_it_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fastest.*default, max-autotune, off"):
        tune(Function(statistics), torch.randn(3, 3), device="cpu", inductor="fastest")  # type: ignore[call-overload]


def around(x: torch.Tensor) -> torch.Tensor:
    """The same, with a way past ``kthvalue``, which no compiler's code holds here."""
    y = torch.tanh(x) * 2
    variance, mean = torch.var_mean(y, 0)
    z = ((y - mean) / variance.sqrt() + y.aminmax(dim=0).max).clamp(-3, 3)
    both = (z.asinh() + torch.kthvalue(z, 3, 1, True).values) * 0.5
    variance, mean = torch.var_mean(both, 0)
    return both.aminmax(dim=0).max + variance.sqrt() + mean


def test_a_region_that_something_runs_in_the_middle_of_is_left_to_it_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[inductor.InductorMode]
) -> None:
    count_instead_of_timing(monkeypatch)
    db, x = samples.known_machine(tmp_path / "tuning.db"), torch.randn(127, 33)
    tune(Function(around), x, device="cpu", db=db)
    (plan,) = [one for one in Database(db).plans() if INDUCTOR in [group.implementation for group in one.groups]]
    assert len(plan.groups) == 2 and sum(group.measured_us for group in plan.groups) == pytest.approx(plan.planned_us)
    compiled.clear()
    before = stats().from_database
    torch._dynamo.reset()
    call = torch.compile(Function(around), backend="fuseplan", options={"db": str(db)}, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(call(x).double(), around(x.double()), rtol=1e-5, atol=1e-5)
    assert len(compiled) == 2 and stats().from_database == before + 2 and not stats().misses


def test_what_is_compiled_ahead_is_found_in_torchinductors_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole step's code, compiled by another process of a tune meanwhile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(31, 17)
    graph = record(around, (x,), {})[0].graph
    table, ways = GroupTable(graph, "fp32", "cpu"), implementations_for("eager", (), Target("cpu", "x86_64", 2))
    regions = find_regions(graph)
    ((taken, group),) = step_groups(table, regions, [], ways)
    assert taken == list(range(len(regions)))
    subject = ways.inductor.subject(table, group)
    counts = torch._dynamo.utils.counters
    for is_found in (False, True):
        counts.clear()
        inductor.compile_ahead(subject)
        assert (counts["inductor"]["fxgraph_cache_hit"] + counts["aot_autograd"]["autograd_cache_hit"] > 0) is is_found


def test_a_prediction_is_no_measurement(tmp_path: Path) -> None:
    database, identity = Database(tmp_path / "tuning.db"), current_identity("cpu")
    database.put_device(identity.key(), json.loads(replace(CPU, identity=identity).to_json()))
    graph = record(statistics, (torch.randn(4097, 127),), {})[0].graph
    plan = open_session("cpu", str(tmp_path / "tuning.db"), mode="read").planner().plan_graph(
        graph, regions=find_regions(graph))
    (made,) = [one.record for one in plan.regions if one.record.groups[0].implementation == INDUCTOR]
    assert made.groups[0].measured_us is None and made.groups[0].predicted_us == made.planned_us
    assert made.measured == 0 and not any("measured" in one.reason for one in made.rejected)
