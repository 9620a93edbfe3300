"""What torch.compile missed is tuned from what it wrote down, and found by the next process."""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
import torch
from dispatch_samples import Block, compiled, fresh_start, relative_error, swiglu
from doc_columns import explained
from fast_tunes import count_instead_of_timing
from torch import nn

import fuseplan.planner
from fuseplan.costmodel.identity import current_identity
from fuseplan.planner.cli import main
from fuseplan.planner.errors import DeviceError
from fuseplan.planner.tuning import miss_log
from fuseplan.planner.work import extract
from fuseplan.search.errors import ReadOnlyDatabaseError
from fuseplan.search.store import connections, rows, tables
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.maintenance import prune_database, verify_database
from fuseplan.search.store.record import RecordKey
from fuseplan.search.store.rows import MISSED

HERE = current_identity("cpu")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that knows this machine's CPU, and tunes that count."""
    count_instead_of_timing(monkeypatch)
    return samples.known_machine(tmp_path / "tuning.db")


class Layers(nn.Module):
    """A block twice, with a matmul between that leads back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.back = nn.Linear(65, 33, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        for layer in self.layers:
            x, residual = layer(x, residual)
            x = self.back(x)
        return x


def restart() -> None:
    """As a fresh process has it: nothing compiled, nothing counted."""
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()


def tune(db: Path, most: int = 16) -> fuseplan.planner.api.misses.TunedMisses:
    return fuseplan.planner.tune(misses=True, db=db, most=most, trials=1, seconds=0.2, device="cpu")


def test_a_served_model_is_tuned_from_its_misses(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = Layers().eval(), torch.randn(8, 33)
    exact, eager = copy.deepcopy(model).double()(x.double()), model(x)
    compiled(model, db)(x)
    missed = fuseplan.planner.stats().misses
    frame = fuseplan.planner.misses(db, device="cpu")
    assert missed and len(frame) == missed and set(frame["tunable"]) == {"yes"}
    assert frame["place"].str.contains("layers").any()
    assert main.run(["db", "misses", "--db", str(db), "--device", "cpu"]) == 0
    assert all(label in capsys.readouterr().out for label in frame["label"][:1])

    line = f"tune --misses --db {db} --device cpu --trials 1 --seconds 0.2"
    assert main.run(line.split()) == 0
    assert f"{missed} misses have a plan now" in capsys.readouterr().out
    restart()
    result = compiled(model, db)(x)
    done = fuseplan.planner.stats()
    assert (done.misses, done.from_model) == (0, 0) and done.from_database + done.planned_unfused > 0, done
    assert relative_error(result, exact) <= max(relative_error(eager, exact) * 1.25, 1e-6)
    assert fuseplan.planner.misses(db, device="cpu").empty
    with Database(db) as database:
        assert database.capture_names(MISSED) == set() and verify_database(database) == []
    assert main.run(line.split()) == 0
    assert "no misses are logged" in capsys.readouterr().out
    assert main.run([*line.split(), "--model", "llama"]) == 2
    assert "--misses" in capsys.readouterr().err


def test_a_dynamic_size_is_tuned_at_the_size_that_was_seen(db: Path) -> None:
    def rows_only(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate, up)

    def run() -> None:
        x = torch.randn(24, 7)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(rows_only, db)(x, x), swiglu(x, x))

    run()
    assert fuseplan.planner.misses(db, device="cpu")["label"].tolist() == ["silu+mul 24x7 float32"]
    assert len(tune(db).regions) == 1
    restart()
    run()
    done = fuseplan.planner.stats()
    assert (done.misses, done.bucketed, done.from_model) == (0, 0, 0)


def test_the_most_frequent_are_tuned_first_and_the_rest_is_named(db: Path) -> None:
    for width, times in ((8, 1), (16, 3), (32, 2)):
        for _ in range(times):
            compiled(swiglu, db)(torch.randn(3, width), torch.randn(3, width))
            torch._dynamo.reset()
    found = tune(db, most=2)
    assert [(row.label.split()[1], row.count) for row in found.regions.itertuples()] == [("3x16", 3), ("3x32", 2)]
    assert found.left[["label", "count", "tunable"]].to_numpy().tolist() == [["silu+mul 3x8 float32", 1, "yes"]]
    assert "1 miss can be tuned still" in str(found)
    assert not set(found.regions.columns) - explained("misses")
    assert fuseplan.planner.misses(db, device="cpu")["label"].tolist() == ["silu+mul 3x8 float32"]


def test_reports_show_what_was_tuned_from_misses(db: Path) -> None:
    for _ in range(2):
        compiled(swiglu, db)(torch.randn(3, 8), torch.randn(3, 8))
        torch._dynamo.reset()
    (key,) = tune(db).regions["key"]
    report = fuseplan.planner.report("misses", db=db, device="cpu")
    assert report.steps["workload"].tolist() == [f"silu+mul 3x8 float32 ({key[:8]})"]
    assert report.groups[["workload", "times"]].to_numpy().tolist() == [[f"silu+mul 3x8 float32 ({key[:8]})", 1]]


def test_misses_of_one_regime_are_tuned_alone(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(swiglu, db)(torch.randn(3, 8), torch.randn(3, 8))
    with Database(db) as database:  # as a database has it that a GPU of this name shares
        (row,) = database.misses()
        database.log_misses([Missed(RecordKey(row["workload"], row["device"], "graph"), "of a graph", row["payload"])])
    found = fuseplan.planner.tune(misses=True, regime="eager", db=db, trials=1, seconds=0.2, device="cpu")
    assert found.regions[["label", "regime"]].to_numpy().tolist() == [["silu+mul 3x8 float32", "eager"]]
    assert found.left[["label", "regime"]].to_numpy().tolist() == [["of a graph", "graph"]]
    assert main.run(f"tune --misses --regime eager --db {db} --device cpu --quiet".split()) == 0
    assert "1 miss cannot be tuned by itself" in capsys.readouterr().out
    with pytest.raises(DeviceError, match="needs CUDA graphs"):
        fuseplan.planner.tune(misses=True, regime="graph", db=db, device="cpu")


def test_what_an_older_version_logged_is_listed_and_left(db: Path) -> None:
    key = RecordKey("ab" * 32, HERE.key())
    with Database(db) as database:
        missed = Missed(key, "gelu 7x13 float32", {"ops": ["aten.gelu.default"], "inputs": [], "place": ""})
        database.log_misses([missed])
    (row,) = fuseplan.planner.misses(db, device="cpu").to_dict("records")
    assert row["last_seen"] == "" and "run the model again" in row["tunable"]
    found = tune(db)
    assert found.regions.empty and len(found.left) == 1 and "1 miss cannot be tuned" in str(found)


@pytest.mark.parametrize("graph", [
    {}, {"graph": {"nodes": []}, "fresh": []}, {"graph": "no", "fresh": 3},
    {"graph": {"nodes": [{"op": "aten.exp.default", "inputs": ["x"], "outputs": ["y"], "attrs": {}}],
               "specs": {"x": [[3], "float32", [1]], "y": [[3], "float32", [1]]}, "inputs": ["x"], "outputs": ["y"],
               "order": []}, "fresh": []},
])
def test_a_graph_that_is_not_the_regions_is_refused(graph: dict[str, object], db: Path) -> None:
    compiled(swiglu, db)(torch.randn(3, 8), torch.randn(3, 8))
    with Database(db) as database:
        (name,) = database.capture_names(MISSED)
        database.put_capture(name, graph)
    found = tune(db)
    assert "cannot be used" in found.regions["outcome"][0] and len(found.left) == 1 and found.forgotten == 0
    with Database(db) as database:
        assert list(database.plans()) == []
    restart()
    compiled(swiglu, db)(torch.randn(3, 8), torch.randn(3, 8))  # writes it down once more
    assert fuseplan.planner.misses(db, device="cpu")["tunable"].tolist() == ["yes"]


def test_graphs_are_bounded_in_size_and_number(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_log, "MOST_BYTES", 100)
    compiled(swiglu, db)(torch.randn(3, 8), torch.randn(3, 8))
    monkeypatch.undo()
    count_instead_of_timing(monkeypatch)
    monkeypatch.setattr(rows, "MOST_GRAPHS", 1)
    for width in (16, 16, 32):
        torch._dynamo.reset()
        compiled(swiglu, db)(torch.randn(3, width), torch.randn(3, width))
    frame = fuseplan.planner.misses(db, device="cpu").set_index("label")
    assert "kB" in frame["tunable"]["silu+mul 3x8 float32"]
    assert frame["tunable"]["silu+mul 3x16 float32"] == "yes"
    assert "not stored" in frame["tunable"]["silu+mul 3x32 float32"]
    for _ in range(3):  # now it comes more often than the other
        torch._dynamo.reset()
        compiled(swiglu, db)(torch.randn(3, 32), torch.randn(3, 32))
    frame = fuseplan.planner.misses(db, device="cpu").set_index("label")
    assert frame["tunable"]["silu+mul 3x32 float32"] == "yes"
    assert "not stored" in frame["tunable"]["silu+mul 3x16 float32"]


def test_a_graph_of_many_regions_keeps_as_many_as_there_is_room_for(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_log, "MOST_GRAPHS", 1)
    model = Layers().eval()
    compiled(model, db)(torch.randn(8, 33))
    frame = fuseplan.planner.misses(db, device="cpu")
    assert "yes" in set(frame["tunable"])
    assert all(one == "yes" or "tune those first" in one for one in frame["tunable"])
    with Database(db) as database:
        assert len(database.capture_names(MISSED)) == 1


def test_who_wants_nothing_written_down_finds_nothing(db: Path) -> None:
    for on_miss in ("model", "unfused"):
        torch._dynamo.reset()
        options = {"db": str(db), "on_miss": on_miss, "log_misses": False}
        fast = torch.compile(swiglu, backend="fuseplan", options=options)
        with torch.no_grad():
            fast(torch.randn(3, 8), torch.randn(3, 8))
    assert fuseplan.planner.stats().misses == 2
    with Database(db) as database:
        assert database.misses() == [] and database.capture_names(MISSED) == set()


def test_pruned_misses_leave_no_graphs(db: Path) -> None:
    compiled(swiglu, db)(torch.randn(3, 8), torch.randn(3, 8))
    with Database(db) as database:
        removed = prune_database(database, misses=True)
        assert (removed["misses"], removed["captures"]) == (1, 1) and not database.capture_names(MISSED)


@pytest.mark.parametrize(("where", "name", "error"), [
    (extract, "extract", MemoryError("no room")), (tables, "open_for_writing", ReadOnlyDatabaseError("read-only")),
    (tables, "upsert", sqlite3.OperationalError("disk is full")),
])
def test_a_model_runs_whatever_becomes_of_its_misses(
    where: Any, name: str, error: Exception, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(where, name, fail)
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(swiglu, db)(x, x), swiglu(x, x))
    assert fuseplan.planner.stats().misses == 1 and fuseplan.planner.stats().fallbacks == {}
    monkeypatch.undo()
    assert fuseplan.planner.misses(db, device="cpu").empty


def test_dispatch_does_not_wait_for_who_writes_to_the_database(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    connect = sqlite3.connect

    def connecting(target: str, timeout: float, **more: object) -> sqlite3.Connection:
        if "mode=" not in target and "immutable" not in target:  # one that may write
            waits.append(timeout)
        return connect(target, timeout=timeout, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(connections.sqlite3, "connect", connecting)
    writer = connect(db)
    writer.execute("BEGIN IMMEDIATE")
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(swiglu, db)(x, x), swiglu(x, x))
    writer.rollback()
    assert waits and max(waits) <= 1.0
    assert fuseplan.planner.misses(db, device="cpu").empty


def test_what_was_missed_in_cuda_graphs_is_no_cpus_to_tune(db: Path) -> None:
    compiled(Layers().eval(), db)(torch.randn(8, 33))
    with sqlite3.connect(db) as connection:
        connection.execute("update misses set regime = 'graph'")
    frame = fuseplan.planner.misses(db, device="cpu")
    assert len(frame) and set(frame["tunable"]) == {"it is for CUDA graphs, which a CPU does not have"}
    told = str(tune(db))
    assert "tuned 0 missed regions, looked up 0 times" in told and f"{len(frame)} misses cannot be tuned" in told
