"""A graph whose step TorchInductor's code was faster at runs by that, as plain ``torch.compile`` has it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
import torch
from fast_tunes import count_instead_of_timing
from torch import fx, nn

from fuseplan.planner import explain, stats, tune
from fuseplan.planner.implementations import inductor
from fuseplan.planner.tuning.whole_step import stored_steps
from fuseplan.search.store.database import Database


class Counter(nn.Module):
    """Fuses, multiplies, draws random numbers, and writes to a state and to its input; looks up if there is a table."""

    def __init__(self, table: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 33) if table else nn.Linear(2, 33)
        self.linear = nn.Linear(33, 9)
        self.register_buffer("state", torch.zeros(3, 9))
        self.state: torch.Tensor

    def forward(self, which: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        found = self.linear(torch.nn.functional.gelu(self.table(which)) * 2)
        self.state.add_(found)
        seen.mul_(3)
        return found.tanh() + self.state + torch.rand(3, 9)


def inputs(table: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([1, 16, 3]) if table else torch.linspace(-1, 1, 6).view(3, 2), torch.ones(5)


@pytest.fixture
def model() -> Counter:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Counter().eval()


class Masked(nn.Module):
    """Attention whose mask is causal, and is made in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.linear(x).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return nn.functional.gelu(found) * 2


def won(path: Path) -> None:
    """Say that TorchInductor won all steps of a database."""
    with Database(path, "write") as database:
        for key, step in stored_steps(database).items():
            told = replace(step, planned_us=50.0, inductor_us=40.0, by_inductor=True)
            database.put_capture(f"step/{key}", asdict(told))


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with the plan of either model, and steps that Inductor won."""
    path = samples.known_machine(tmp_path_factory.mktemp("inductor") / "tuning.db")
    with pytest.MonkeyPatch.context() as patch:
        count_instead_of_timing(patch)
        for table in (False, True):
            tune(Counter(table).eval(), inputs(table), device="cpu", db=path)
    won(path)
    assert any(one.best_us == 40.0 for one in stored_steps(Database(path)).values())
    return path


def check(model: Counter, db: Path, table: bool = False, **options: Any) -> None:
    """Two calls, each with eager's result, state and change of its input."""
    torch._dynamo.reset()
    twin = Counter(table).eval()
    twin.load_state_dict(model.state_dict())
    call = torch.compile(model, backend="fuseplan", options={"db": str(db), **options}, dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            (ours, seen), (theirs, expected) = inputs(table), inputs(table)
            torch.manual_seed(1)
            result = call(ours, seen)
            torch.manual_seed(1)
            torch.testing.assert_close(result, twin(theirs, expected))
            torch.testing.assert_close(model.state, twin.state)
            torch.testing.assert_close(seen, expected)


def test_dispatch_leaves_the_graph_to_it(model: Counter, db: Path) -> None:
    check(model, db)
    assert stats().whole_by_inductor == 1 and not stats().groups_fused and not stats().misses
    assert "1 graph as a whole by TorchInductor's code" in str(stats())


def test_what_was_timed_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is timed as it is rewritten: attention without its mask, which is constant."""
    model, x = Masked().eval(), torch.randn(2, 5, 16)
    path = samples.known_machine(tmp_path / "tuning.db")
    with pytest.MonkeyPatch.context() as patch:
        count_instead_of_timing(patch)
        tune(model, (x,), device="cpu", db=path)
    won(path)
    compile_graph, compiled = inductor.compile_graph, list[fx.GraphModule]()

    def spied(module: fx.GraphModule, *args: Any) -> Any:
        compiled.append(module)
        return compile_graph(module, *args)

    monkeypatch.setattr(inductor, "compile_graph", spied)
    torch._dynamo.reset()
    call = torch.compile(model, backend="fuseplan", options={"db": str(path)}, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x))
    (module,) = compiled
    (attention,) = (node for node in module.graph.nodes if "scaled_dot_product" in str(node.target))
    assert len(attention.all_input_nodes) == 3


def test_a_plan_for_eagers_roundings_does_not(model: Counter, db: Path) -> None:
    check(model, db, numerics="eager")
    assert not stats().whole_by_inductor


def test_a_graph_that_looks_up_is_not_left_to_it(db: Path) -> None:
    """Whatever a database says: an index outside the table has to fail as in eager mode."""
    model = Counter(table=True).eval()
    check(model, db, table=True)
    assert stats().from_database and not stats().whole_by_inductor
    call = torch.compile(model, backend="fuseplan", options={"db": str(db)}, dynamic=False)
    with torch.no_grad(), pytest.raises(IndexError):
        call(torch.tensor([1, 17, 3]), torch.ones(5))


def test_a_compiler_that_fails_leaves_the_plan(model: Counter, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(inductor, "compile_graph", fail)
    check(model, db)
    assert stats().from_database and not stats().whole_by_inductor
    assert not stats().fallbacks and any("no compiler today" in reason for reason in stats().notes)


def test_it_is_explained(model: Counter, db: Path) -> None:
    assert "TorchInductor's code of the whole graph runs it: 40 us a step" in str(
        explain(model, inputs(), device="cpu", db=db))
