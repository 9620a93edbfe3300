"""The bench: statistics from hand-made samples, contestants that are right, peers that fail, files that can be read."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import group_bench
import pandas as pd
import pytest
import report_samples as samples
import torch

from fuseplan.planner.bench import evidence
from fuseplan.planner.bench import model as bench_model
from fuseplan.planner.bench import rows as bench
from fuseplan.planner.bench.rows import BenchRow
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.models.workload import Workload, decode
from fuseplan.planner.patterns.table import pattern_graph
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, OURS
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.timers import Operands, Run, Sampler, Timer


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return open_session("cpu", samples.known_machine(tmp_path / "tuning.db"))


# -- statistics -------------------------------------------------------------------------------------------------


def test_rows_of_a_contest() -> None:
    contest = Contest({OURS: (2.0, 1.0, 3.0, 2.0, 2.0), EAGER: (4.0, 5.0, 6.0, 4.0, 4.0)}, 0.02, "eager")
    ours, eager = bench.times_of(contest, OURS), bench.times_of(contest, EAGER)
    assert (ours["median_us"], ours["p20_us"], ours["p80_us"], ours["rounds"]) == (2.0, 2.0, 3.0, 5)
    assert ours["gain"] is None
    # Paired differences 2, 4, 3, 2, 2: median 2, over eager's median 4.
    assert eager["gain"] == pytest.approx(0.5) and eager["noise"] == 0.02


def _race(runs: dict[str, Run], facts: dict[str, dict[str, object]] | None = None) -> bench.Race[BenchRow]:
    race = bench.Race(BenchRow, workload="w", subject="s")
    race.enter(runs, lambda name: (runs[name], (facts or {}).get(name, {})))
    return race


def _frame() -> pd.DataFrame:
    def row(subject: str, contestant: str, median_us: float | None, gain: float | None = None) -> BenchRow:
        return BenchRow("decode 1", subject, contestant, "eager", median_us, gain=gain, noise=0.05, key=subject)

    return bench.bench_frame([
        row("a", OURS, 2.0), row("a", EAGER, 8.0, 0.75), row("a", INDUCTOR, 1.0, -1.0),
        row("b", OURS, 2.0), row("b", EAGER, 1.96, -0.02), row("b", INDUCTOR, None),
    ])


def test_comparison_puts_contestants_side_by_side() -> None:
    table = bench.comparison(_frame()).set_index("subject")
    assert table.loc["a", ["fuseplan_us", "eager_us", "vs_eager", "vs_inductor"]].tolist() == [2.0, 8.0, 4.0, 0.5]
    assert table.loc["b", "vs_eager"] == pytest.approx(0.98)
    assert pd.isna(table.loc["b", "vs_inductor"])


def test_verdict_counts_losses_beyond_noise_only() -> None:
    eager, inductor = bench.verdict(_frame(), "groups")
    assert eager == "groups: 1.98x eager (geometric mean of 2); 0 slower beyond noise"
    assert inductor == "groups: 0.50x inductor (geometric mean of 1); 1 slower beyond noise"


class _Counting(Timer):
    """A virtual clock on which every contestant takes what it says; one cannot be prepared."""

    regime = "graph"

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        time_us = run()
        if time_us is None:
            raise RuntimeError("not capturable")
        return lambda: float(str(time_us))


def test_a_contestant_that_fails_leaves_the_others_in_the_race() -> None:
    runs: dict[str, Run] = {OURS: lambda: 2.0, EAGER: lambda: 8.0, INDUCTOR: lambda: None}
    facts: dict[str, dict[str, object]] = {OURS: {"error": 0.5}, INDUCTOR: {"note": "compiled"}}
    rows = _race(runs, facts).rows(_Counting(), [()], 0.0)
    assert [row.contestant for row in rows] == [OURS, EAGER, INDUCTOR]
    assert [row.median_us for row in rows] == [2.0, 8.0, None]
    assert [row.mode for row in rows] == ["graph"] * 3
    assert (rows[0].error, rows[1].gain) == (0.5, 0.75)
    assert rows[2].note == "RuntimeError: not capturable"
    only = _race({INDUCTOR: lambda: None}).rows(_Counting(), [()], 0.0)
    assert [row.note for row in only] == ["RuntimeError: not capturable"]


def test_nobody_but_eager_always_follows_the_same_neighbour() -> None:
    order: list[str] = []

    class Watching(Timer):
        regime = "graph"

        def prepare(self, run: Run, operands: Operands) -> Sampler:
            name = str(run())

            def sample() -> float:
                order.append(name)
                return 1.0

            return sample

    runs: dict[str, Run] = {name: lambda name=name: name for name in (OURS, EAGER, INDUCTOR, "liger")}  # type: ignore
    _race(runs).rows(Watching(), [()], 0.0)
    before = [Counter(previous for previous, name in pairwise(order) if name == who) for who in runs if who != EAGER]
    assert all(max(seen.values()) < 0.75 * seen.total() for seen in before), before


@pytest.mark.parametrize("names", [(OURS, EAGER, INDUCTOR), (OURS, EAGER, INDUCTOR, "twin")])
@pytest.mark.parametrize(("seconds", "samples"), [(0.0, 3), (60.0, 30)])  # two rounds each: of 7, and of 61
def test_who_ran_before_does_not_decide_which_cluster_a_median_is_of(
    names: tuple[str, ...], seconds: float, samples: int
) -> None:
    """After eager everything takes 14 us, after anything else 12.5: the first and the last contestant have one such
    neighbour each, and the mean of both is the answer."""
    last = ""

    class AfterEager(Timer):
        regime = "cold"

        def prepare(self, run: Run, operands: Operands) -> Sampler:
            name = str(run())

            def sample() -> float:
                nonlocal last
                found = 100.0 if name == EAGER else 14.0 if last == EAGER else 12.5
                last = name
                return found

            return sample

    runs: dict[str, Run] = {name: lambda name=name: name for name in names}  # type: ignore
    rows = _race(runs).rows(AfterEager(), [()], seconds)
    times = {row.contestant: row.median_us for row in rows}
    assert times[OURS] == times[names[-1]] == 13.25 and times[EAGER] == 100.0
    assert {row.rounds for row in rows} == {samples}


def test_a_single_round_is_kept() -> None:
    single = Contest({OURS: (2.0,), EAGER: (3.0,)}, 0.01, "graph").both_ways()
    assert single.samples == {OURS: (2.0,), EAGER: (3.0,)}
    three = Contest({OURS: (2.0, 4.0, 9.0)}, 0.01, "graph").both_ways()
    assert three.samples == {OURS: (3.0,)}


def test_busy_machine_is_said() -> None:
    assert evidence.quietness({"load_average": 0.5}) == []
    assert "not to be trusted" in evidence.quietness({"load_average": 1e4})[0]


# -- evidence ---------------------------------------------------------------------------------------------------


def test_results_can_be_read_back(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["plan", "bench", "--model", "toy"])
    facts = evidence.environment(session, "toy")
    assert facts["command"] == ["bench", "--model", "toy"]
    assert facts["device"]["cores"] == torch.get_num_threads()
    assert facts["versions"]["torch"] == version("torch")
    written = evidence.write_results(tmp_path / "out", "toy", {"groups": _frame()}, facts, ["all well"])
    assert [path.name for path in written] == ["toy-groups.csv", "toy-groups.md", "toy-groups.json"]
    assert pd.read_csv(written[0])["median_us"].tolist()[:5] == [2.0, 8.0, 1.0, 2.0, 1.96]
    text = written[1].read_text()
    assert "* all well" in text and "| a |" in text.replace("decode 1 | a", "| a")
    assert json.loads(written[2].read_text()) == facts


def test_commit_is_empty_outside_a_repository(tmp_path: Path) -> None:
    assert evidence.commit(tmp_path) == ""


def test_file_and_folder_names() -> None:
    assert evidence.folder_name("cuda-nvidia-h200-f15dd9b4c7e2") == "nvidia-h200"
    assert evidence.file_name("/models/my llama:2L") == "models-my-llama-2L"


# -- groups -----------------------------------------------------------------------------------------------------


def _groups(session: Session, name: str, shape: str) -> list[group_bench.BenchGroup]:
    graph = pattern_graph(name, shape, "float32")
    plan = session.planner().plan_graph(graph)
    return group_bench.fused_groups(session, [(shape, graph, plan), (f"again {shape}", graph, plan)])


def test_every_contestant_of_a_group_computes_the_same(session: Session) -> None:
    (group,) = _groups(session, "add_rms_norm", "3x127")
    assert group.workload == "3x127"
    rows = {row.contestant: row for row in group_bench.bench_group(session, group, (EAGER,), ("eager",), 0.0)}
    assert rows.keys() == {OURS, EAGER}
    for row in rows.values():
        assert row.median_us is not None and row.median_us > 0
        assert row.error is not None and row.error < 1e-6
        assert row.key == group.choice.workload


def test_inductor_kernel_is_right(session: Session) -> None:
    (group,) = _groups(session, "swiglu", "3x17")
    inputs = group.subject.make_inputs(0, "cpu")
    with torch.no_grad():
        outputs = group_bench.inductor_callable(group.subject.chain, inputs, max_autotune=False)(*inputs)
    reference = group.subject.reference(*inputs)
    torch.testing.assert_close(next(iter(outputs)).double(), reference[0], rtol=1e-5, atol=1e-6)


def test_a_peer_that_fails_gets_a_row_with_the_reason(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no\nkernel")

    monkeypatch.setattr(group_bench, "inductor_callable", fail)
    (group,) = _groups(session, "swiglu", "3x17")
    rows = {row.contestant: row for row in group_bench.bench_group(session, group, (EAGER, INDUCTOR), ("eager",), 0.0)}
    assert rows[INDUCTOR].median_us is None and rows[INDUCTOR].note == "RuntimeError: no kernel"
    assert rows[OURS].gain is None and rows[EAGER].gain is not None


# -- models -----------------------------------------------------------------------------------------------------


def test_every_contestant_of_a_model_computes_the_same(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = bench_model._compiled

    def fail(session: Session, model: object, name: str) -> object:
        if name == INDUCTOR:
            raise RuntimeError("no compiler")
        return compiled(session, model, name)

    monkeypatch.setattr(bench_model, "_compiled", fail)
    model = build_model(find_source(module="toy_models:gated"), "cpu")
    made = bench_model.bench_model(session, model, Workload("forward"), (EAGER, INDUCTOR), ("eager",), 0.0)
    rows = {row.contestant: row for row in made}
    assert rows[OURS].error is not None and rows[OURS].error < 1e-6
    assert rows[EAGER].error == 0.0
    assert "1 by the model, 1 miss" in rows[OURS].note
    assert rows[INDUCTOR].note == "RuntimeError: no compiler"


def test_cache_is_put_back_before_it_is_full() -> None:
    calls: list[int] = []

    class Layer:
        cumulative_length = torch.zeros(1)

    cache = SimpleNamespace(layers=[Layer()])

    def call(past_key_values: SimpleNamespace) -> None:
        past_key_values.layers[0].cumulative_length += 1
        calls.append(int(past_key_values.layers[0].cumulative_length))

    forward = partial(call, past_key_values=cache)
    sample = bench_model.ForwardTimer("cpu", decode(1, 16)).prepare(forward, [()])
    for _ in range(5):
        sample()
    # Half full is 8 of 16; whatever the speed of this machine, the cache never overflows.
    assert max(calls) <= 16 and min(calls) == 9


def test_first_tensor_finds_the_logits() -> None:
    logits = torch.ones(2)
    assert bench_model.first_tensor({"ids": torch.ones(1, dtype=torch.int64), "logits": logits}) is logits
    with pytest.raises(ValueError, match="no floating-point tensor"):
        bench_model.first_tensor((1, None))
