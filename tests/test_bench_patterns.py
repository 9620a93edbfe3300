"""The pattern bench: which cells, on what inputs, judged how, written when, and what its tables conclude."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pandas as pd
import pytest
import report_samples as samples
import torch
from hypothesis import given

from fuseplan.costmodel.device import current_identity
from fuseplan.planner import bench_case, bench_compile, bench_patterns
from fuseplan.planner.bench import EAGER, INDUCTOR, MAX_AUTOTUNE, OURS
from fuseplan.planner.bench_case import make_inputs, operand_sets, plan_case, trace_cell
from fuseplan.planner.bench_cells import ROWS, Cell, cell, parse_sizes, sweep_cells
from fuseplan.planner.bench_log import RowLog, pattern_frame
from fuseplan.planner.bench_patterns import COPY, OURS_IN_PLACE, PatternBench, PatternRow, copy_of
from fuseplan.planner.bench_verdicts import headline_table, notes, pattern_table, pattern_verdict
from fuseplan.planner.errors import ConfigError, ShapeError, UnknownPatternError
from fuseplan.planner.patterns import PATTERNS, activations
from fuseplan.planner.peers import PEERS, Case, Contestant, Peer, PeerError
from fuseplan.planner.session import Session, open_session
from fuseplan.search.database import Database
from fuseplan.search.timers import ColdTimer


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    path = tmp_path_factory.mktemp("bench") / "tuning.db"
    identity = current_identity("cpu")
    with Database(path) as database:
        database.put_device(identity.key(), json.loads(replace(samples.SPEC, identity=identity).to_json()))
    return open_session("cpu", path)


def case_of(session: Session, name: str, shape: str, dtype: str = "float32") -> Case:
    one = cell(name, shape, dtype)
    traced, specs = trace_cell(one, "cpu")
    return plan_case(session, one, traced, tuple(specs), make_inputs(traced, specs, "cpu"))[0]


# -- cells ------------------------------------------------------------------------------------------------------


def test_the_default_sweeps_cover_the_groups_that_engines_ship() -> None:
    cells, _ = sweep_cells()
    keys = {one.key for one in cells}
    assert len(keys) == len(cells)
    for name in ("swiglu", "geglu"):
        assert {(rows, cols) for rows in ROWS for cols in (8192, 14336, 28672)} == {
            one.shape for one in cells if one.pattern == name
        }
    for name in ("add_rms_norm", "rms_norm", "layer_norm"):
        assert {one.shape[1] for one in cells if one.pattern == name} == {2048, 4096, 8192, 5120}
    heads = {one.shape for one in cells if one.pattern == "rope"}
    assert all(shape[:2] == (1, 32) and shape[-1] == 128 for shape in heads)
    assert {shape[-2] for shape in heads} == set(ROWS)
    assert max(one.shape[0] for one in cells if one.pattern == "sampling_softmax") == 512


def test_a_sweep_says_what_it_leaves_out() -> None:
    cells, left_out = sweep_cells(["causal_softmax"], (8, 4096), (512,))
    assert [one.shape for one in cells] == [(8, 512)]
    assert len(left_out) == 1 and "4096x512" in left_out[0]
    with pytest.raises(ShapeError, match="4096x512"):
        sweep_cells(["causal_softmax"], (4096,), (512,))


def test_rows_and_widths_can_be_chosen_and_names_are_checked() -> None:
    cells, _ = sweep_cells(["soft_cap", "swiglu", "soft_cap"], (1, 3), (127,), "float16")
    assert [one.key for one in cells] == [
        "soft_cap 1x127 float16", "soft_cap 3x127 float16", "swiglu 1x127 float16", "swiglu 3x127 float16"
    ]
    with pytest.raises(UnknownPatternError, match="did you mean swiglu"):
        sweep_cells(["swiglou"])
    with pytest.raises(UnknownPatternError, match="did you mean swiglu"):
        cell("swiglou", "3x8")
    assert cell("sin_chain", "10000000").dtype == PATTERNS["sin_chain"].dtype == "float32"


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6))
def test_lists_of_sizes_are_read_back(numbers: list[int]) -> None:
    assert parse_sizes(", ".join(map(str, numbers)), "--rows") == tuple(dict.fromkeys(numbers))


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1x2", "-1", "1.5", "0x8"])
def test_what_is_no_list_of_sizes_is_a_mistake(text: str) -> None:
    with pytest.raises(ConfigError, match="--rows"):
        parse_sizes(text, "--rows")


# -- cases ------------------------------------------------------------------------------------------------------


def test_rotary_tables_hold_angles_once_for_each_half(session: Session) -> None:
    case = case_of(session, "qk_norm_rope", "2x3x5x16")
    tables = dict(zip(case.names, case.inputs, strict=True))
    for name in ("cos", "sin"):
        low, high = tables[name].chunk(2, -1)
        assert torch.equal(low, high)
    torch.testing.assert_close(tables["cos"] ** 2 + tables["sin"] ** 2, torch.ones(2, 5, 16))
    assert tables["cos"].std() > 0.1


def test_divisors_are_positive_and_seeds_matter(session: Session) -> None:
    one = cell("sampling_softmax", "7x33", "float32")
    traced, specs = trace_cell(one, "cpu")
    first, second = (make_inputs(traced, specs, "cpu", seed) for seed in (0, 1))
    assert bool((first[1] > 0).all()) and bool((first[0] < 0).any())
    assert not torch.equal(first[0], second[0])


def test_weights_are_what_does_not_grow_with_the_first_size(session: Session) -> None:
    assert activations("add_rms_norm", "3x8") == {"residual", "x"}
    assert activations("rope", "1x2x3x8") == {"q", "k", "cos", "sin"}
    # Twice the queries would be more than the keys: the pattern cannot be asked.
    assert activations("causal_softmax", "3x4") == {"scores"}


def test_weights_rotate_only_where_copies_can_fill_the_cache(session: Session) -> None:
    case = case_of(session, "rms_norm", "3x128")
    assert len(operand_sets(case, llc_bytes=2**20, limit_bytes=2**30)) == 1
    sets = operand_sets(case, llc_bytes=1024, limit_bytes=2**30)
    assert len(sets) == 7  # three times 1024 bytes in weights of 512 bytes, and one more
    assert {one[0].data_ptr() for one in sets} == {case.inputs[0].data_ptr()}
    assert len({one[1].data_ptr() for one in sets}) == 7


def test_moved_bytes_are_exact(session: Session) -> None:
    def facts(name: str, shape: str) -> bench_case.PlanFacts:
        one = cell(name, shape, "float32")
        traced, specs = trace_cell(one, "cpu")
        return plan_case(session, one, traced, tuple(specs), make_inputs(traced, specs, "cpu"))[1]

    assert facts("swiglu", "3x127").bytes == 3 * 3 * 127 * 4  # gate, up, out
    assert facts("add_rms_norm", "3x127").bytes == (4 * 3 * 127 + 127) * 4  # two in, two out, and the weight
    one = facts("swiglu", "3x127")
    assert one.kernels == 1 and one.config.startswith("cpp ") and "not tuned" in one.note


def test_a_plan_that_fuses_nothing_moves_what_goes_in_and_out(session: Session) -> None:
    case = replace(case_of(session, "swiglu", "3x127"), groups=())
    facts = bench_case.plan_facts(case, bench_case.CompileStats())
    assert (facts.bytes, facts.kernels, facts.config) == (3 * 3 * 127 * 4, 2, "")
    assert facts.note == "the plan fuses nothing"


# -- rows -------------------------------------------------------------------------------------------------------


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Peers of swiglu that are right, wrong, misshapen, broken, and absent; counts of what was built."""
    built: dict[str, Any] = {}

    def peer(name: str, make: Any) -> Peer:
        def build(case: Case) -> Contestant:
            built[name] = built.get(name, 0) + 1
            made: Contestant = make(case)
            return made

        return Peer(name, "", build)

    def joined(case: Case) -> Contestant:
        def overwrite(both: torch.Tensor) -> None:
            gate, up = both.chunk(2, -1)
            gate.copy_(_swiglu(gate, up))

        return Contestant(
            overwrite, lambda gate, up: (torch.cat([gate, up], -1),),
            lambda result, operands: [operands[0].chunk(2, -1)[0]], "in place", in_place=True,
        )

    def broken(case: Case) -> Contestant:
        raise RuntimeError("no\ncompiler")

    def absent(case: Case) -> Contestant:
        raise PeerError("it is not installed")

    made = [
        PEERS[EAGER], peer("joined", joined), peer("wrong", lambda case: Contestant(lambda gate, up: gate * up)),
        peer("short", lambda case: Contestant(lambda gate, up: _swiglu(gate, up)[:1])),
        peer("broken", broken), peer("absent", absent), replace(peer("elsewhere", absent), devices=("cuda",)),
    ]
    monkeypatch.setattr(bench_patterns, "PEERS", {one.name: one for one in made})
    yield built


def test_everyone_gets_a_row_and_only_who_is_right_a_time(session: Session, rivals: dict[str, Any]) -> None:
    names = (EAGER, "joined", "wrong", "short", "broken", "absent", "elsewhere")
    found = PatternBench(session, names, ("eager",), 0.0).rows(cell("swiglu", "3x127", "float32"))
    rows = {row.contestant: row for row in found}
    assert len(found) == len(rows) == 9
    # A peer works in place, so ours is to do so, too; C++ kernels cannot.
    assert rows["joined"].in_place and not rows[EAGER].in_place
    assert rows[OURS_IN_PLACE].note == "no result can lie in the memory of an activation"
    for name in (OURS, EAGER, "joined"):
        assert rows[name].median_us is not None and rows[name].error is not None and rows[name].error < 1e-6
    assert rows["joined"].note == "in place" and rows["joined"].gain is not None
    said = {name: rows[name].note for name in ("wrong", "short", "broken", "absent", "elsewhere")}
    assert said["wrong"].startswith("another result: its error")
    assert said["short"] == "another result: its outputs have shapes [(1, 127)], not [(3, 127)]"
    assert said["broken"] == "RuntimeError: no compiler"
    assert said["absent"] == "it is not installed"
    assert said["elsewhere"] == "elsewhere does not run on cpu"
    assert all(rows[name].median_us is None for name in said)
    for row in found:
        assert (row.subject, row.workload, row.key) == ("swiglu", "3x127", "swiglu 3x127 float32")
        assert (row.dtype, row.bytes, row.kernels) == ("float32", 3 * 3 * 127 * 4, 1)


def test_who_fails_slowly_is_not_asked_again(
    session: Session, rivals: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = PatternBench(session, ("broken", "absent"), ("eager",), 0.0)
    for limit_s in (0.0, 1e9):
        monkeypatch.setattr(bench_patterns, "_SLOW_FAILURE_S", limit_s)
        for shape in ("1x8", "3x8"):
            rows = {row.contestant: row for row in bench.rows(cell("swiglu", shape, "float32"))}
            assert rows["broken"].note == "RuntimeError: no compiler"
        assert rivals["broken"] == 1  # once with every failure slow, and remembered after
    PatternBench(session, ("broken",), ("eager",), 0.0).rows(cell("swiglu", "3x8", "float32"))
    assert rivals["broken"] == 2


def test_a_cell_that_cannot_be_made_leaves_the_others_in_the_bench(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("64 GiB are too many")

    monkeypatch.setattr(bench_patterns, "make_inputs", fail)
    (only,) = PatternBench(session, (EAGER,), ("eager",), 0.0).rows(cell("swiglu", "3x8", "float32"))
    assert (only.contestant, only.median_us, only.note) == (OURS, None, "MemoryError: 64 GiB are too many")
    assert only.key == "swiglu 3x8 float32"


def test_a_copy_moves_as_many_bytes() -> None:
    contestant = copy_of(4096.0, "cpu")
    target, source = contestant.operands(())
    assert target.numel() * 4 + source.numel() * 4 == 4096
    source.fill_(7)
    contestant.run(target, source)
    assert bool((target == 7).all())


# -- the cold timer ---------------------------------------------------------------------------------------------


class _Clock:
    """Events on a clock that moves only when the timed call says so."""

    now_ms = 0.0

    def event(self) -> Any:
        clock = self

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = clock.now_ms

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        return Event()


def test_cold_calls_meet_an_overwritten_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuseplan.search.timers._MIN_FLUSH_BYTES", 4096)
    clock = _Clock()
    timer = ColdTimer(l2_bytes=2048, device="cpu", event=clock.event)
    assert timer._buffer.numel() * 4 == 4 * 2048
    seen: list[tuple[int, bool]] = []

    def run(operand: torch.Tensor) -> None:
        seen.append((int(operand), not bool(timer._buffer.any())))
        timer._buffer.fill_(1)  # what was in the cache is used up
        clock.now_ms += 8.0 if int(operand) == 2 else 0.25

    operands = [(torch.tensor(number),) for number in range(3)]
    sample = timer.prepare(run, operands)
    warm = len(seen)
    assert sample(0) == 250.0  # the median
    calls = seen[warm:]
    assert all(flushed for _, flushed in calls)
    assert [number for number, _ in calls] == [0, 1, 2, 0]  # a millisecond of calls of 250 us


# -- compiling beforehand ---------------------------------------------------------------------------------------


def test_without_inductor_nothing_is_compiled_beforehand() -> None:
    with bench_compile.InductorPool("cpu", (EAGER, "liger"), 4) as pool:
        assert pool.compile([cell("swiglu", "3x8")]) == [] and pool._pool is None
    with bench_compile.InductorPool("cpu", (EAGER, INDUCTOR), 0) as pool:
        assert pool.compile([cell("swiglu", "3x8")]) == [] and pool._pool is None


def test_what_fails_beforehand_is_said() -> None:
    with bench_compile.InductorPool("cpu", (MAX_AUTOTUNE,), 1) as pool:
        (said,) = pool.compile([Cell("no_such_pattern", (3, 8), "float32")])
    assert said.startswith("no_such_pattern 3x8 float32: UnknownPatternError")


def test_timing_a_configuration_waits_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    lock = tmp_path / "lock"

    def bench(self: Any, launcher: str) -> bool:
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    monkeypatch.setattr(heuristics.CachingAutotuner, "bench", bench)
    assert heuristics.CachingAutotuner.bench(None, "x") is False
    bench_compile._take_turns(str(lock))
    bench_compile._take_turns(str(lock))  # a process compiles many cells
    assert heuristics.CachingAutotuner.bench(None, "x") is True


# -- the log ----------------------------------------------------------------------------------------------------


def row(shape: str, contestant: str, median_us: float | None, mode: str = "cold", **more: Any) -> PatternRow:
    return PatternRow(
        shape, "swiglu", contestant, mode, median_us, noise=0.01, key=f"swiglu {shape}", **{"bytes": 2e6, **more}
    )


def test_rows_are_in_the_file_as_soon_as_they_are_added(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cells.csv"
    log = RowLog(path)
    log.add([row("1x8", OURS, 2.0), row("1x8", EAGER, None, note="no, \"never\"")])
    assert pd.read_csv(path)["contestant"].tolist() == [OURS, EAGER]
    log.add([])
    log.add([row("3x8", OURS, None)])
    assert len(pd.read_csv(path)) == 3
    assert log.has("swiglu 1x8") and not log.has("swiglu 3x8") and not log.has("swiglu 9x8")
    resumed = RowLog(path, resume=True)
    assert resumed.has("swiglu 1x8")
    pd.testing.assert_frame_equal(resumed.frame, log.frame, check_dtype=False)
    resumed.add([row("3x8", OURS, 4.0)])  # it had failed before
    assert pd.read_csv(path)["median_us"].tolist()[-1] == 4.0 and len(pd.read_csv(path)) == 3
    assert len(RowLog(path).frame) == 0 and len(pd.read_csv(path)) == 0


def test_another_versions_file_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="other columns"):
        RowLog(path, resume=True)
    path.write_text("")
    with pytest.raises(ConfigError, match="no result file"):
        RowLog(path, resume=True)


# -- verdicts ---------------------------------------------------------------------------------------------------


def frame() -> pd.DataFrame:
    large = {"bytes": 400e6, "registers": "32", "config": "triton num_warps=4", "kernels": 1}
    return pattern_frame([
        row("1x8", OURS, 2.0), row("1x8", EAGER, 8.0), row("1x8", INDUCTOR, 2.5), row("1x8", "liger", None, note="off"),
        row("9x8", OURS, 100.0, p20_us=88.0, p80_us=101.5, **large), row("9x8", EAGER, 300.0, **large),
        row("9x8", INDUCTOR, 90.0, **large), row("9x8", COPY, 93.0, **large),
        row("1x8", OURS, 1.0, "graph"), row("1x8", EAGER, 4.0, "graph"), row("1x8", INDUCTOR, 1.0, "graph"),
    ])


def test_large_cells_in_a_graph_are_held_against_the_faster_copy() -> None:
    large = {"bytes": 400e6}
    rows = [
        row("9x8", OURS, 100.0, "graph", **large), row("9x8", COPY, 150.0, "graph", **large),
        row("9x8", OURS, 104.0, **large), row("9x8", COPY, 95.0, **large),
    ]
    shares = pattern_table(pattern_frame(rows)).set_index("mode")["copy_share"]
    assert shares["graph"] == 0.95 and shares["cold"] == pytest.approx(95 / 104)
    slower = [*rows[:3], row("9x8", COPY, 160.0, **large)]
    assert pattern_table(pattern_frame(slower)).set_index("mode")["copy_share"].to_dict() == {
        "graph": 1.5, "cold": pytest.approx(160 / 104)
    }


def test_each_cell_is_held_against_its_best_peer() -> None:
    table = pattern_table(frame()).set_index(["mode", "shape"])
    small = table.loc[("cold", "1x8")]
    assert (small["best_peer"], small["vs_best"], small["gbps"]) == (INDUCTOR, 1.25, 1000.0)
    assert pd.isna(small["copy_share"]) and pd.isna(small["liger_us"])
    large = table.loc[("cold", "9x8")]
    assert (large["vs_best"], large["copy_share"], large["mb"]) == (0.9, 0.93, 400.0)
    assert f"{COPY}_us" not in table.columns
    assert list(table.columns[1:3]) == [f"{OURS}_us", f"{EAGER}_us"]


def test_peers_that_work_in_place_are_held_against_ours_that_does() -> None:
    def cell_of(shape: str, own: float | None, *, liger: float = 4.0) -> list[PatternRow]:
        return [
            row(shape, OURS, 3.0), row(shape, INDUCTOR, 3.3), row(shape, "flashinfer", 2.1, in_place=True),
            row(shape, "liger", liger, in_place=True),
            *([] if own is None else [row(shape, OURS_IN_PLACE, own, in_place=True)]),
        ]

    rows = pattern_frame([*cell_of("1x8", 2.0), *cell_of("2x8", 1.5), *cell_of("3x8", None), *cell_of("4x8", 3.0)])
    table = pattern_table(rows).set_index("shape")
    assert list(table.columns[2:5]) == [f"{OURS}_us", f"{OURS_IN_PLACE}_us", f"{INDUCTOR}_us"]
    found = {shape: (one["best_peer"], round(one["vs_best"], 3)) for shape, one in table.iterrows()}
    assert found["1x8"] == ("flashinfer", 1.05)  # 2.1 over 2.0; TorchInductor's 3.3 over 3.0 is better
    assert found["2x8"] == (INDUCTOR, 1.1)
    assert found["3x8"] == ("flashinfer", 0.7)  # where ours cannot work in place, it is held against that all the same
    assert found["4x8"] == ("flashinfer", 0.7)
    assert table["vs_in_place"].round(3).tolist() == [1.05, 1.4, 0.7, 0.7]
    assert any("0.70x flashinfer (3.00 against 2.10 us" in line for line in pattern_verdict(rows))


def test_calls_in_place_stay_finite_however_often_they_are_repeated() -> None:
    """The residual grows by a normalised row each time, until bfloat16 rounds the growth away."""
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((8, 256), (8, 256), (256,)))
    for _ in range(5000):
        residual += x
        wide = residual.float()
        x = wide.mul(wide.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()).bfloat16() * weight
    assert bool(residual.isfinite().all()) and bool(x.isfinite().all())


def test_the_verdict_answers_the_bars() -> None:
    lines = pattern_verdict(frame())
    assert lines[0] == (
        "cold: 1.061x the best peer (geometric mean of 2 cells), worst 0.90x; 1 under 0.97x"
    )
    assert "cold, swiglu: 1.061x (2 cells), worst 0.90x" in lines
    assert "cold: 1 cells move 256 MB or more, at 93.0% to 93.0% of a copy's bandwidth; 1 under 94%" in lines
    assert "graph: 1.000x the best peer (geometric mean of 1 cells), worst 1.00x; 0 under 0.97x" in lines
    assert lines[-1] == (
        "lost: cold, swiglu 9x8: 0.90x inductor (100.00 [88.00 to 101.50] against 90.00 us, noise 1.0%); "
        "400.00 MB at 4000 GB/s, 1 kernels, 32 registers, triton num_warps=4"
    )
    assert sum(line.startswith("lost") for line in lines) == 1


def test_cells_without_ours_or_without_peers_are_shown_and_not_judged() -> None:
    rows = pattern_frame([row("1x8", OURS, None, note="broken"), row("1x8", EAGER, 1.0), row("2x8", OURS, 3.0)])
    table = pattern_table(rows).set_index("shape")
    assert pd.isna(table.loc["1x8", "vs_best"]) and pd.isna(table.loc["2x8", "vs_best"])
    assert pattern_verdict(rows) == [] and pattern_verdict(rows.iloc[:0]) == []


def test_notes_are_said_once_for_each_pattern() -> None:
    many = pattern_frame([row(f"{n}x8", "liger", None, mode, note="off") for n in (1, 2) for mode in ("cold", "graph")])
    assert notes(many) == ["liger, swiglu (2 sizes): off"]
    assert notes(frame()) == ["liger, swiglu (1x8): off"]


def test_headlines_are_gains_over_eager() -> None:
    table = headline_table(frame(), {"swiglu 1x8": "claimed 3x"}).set_index(["mode", "shape"])
    small = table.loc[("cold", "1x8")]
    assert (small["said"], small[f"{OURS}_x"], small[f"{INDUCTOR}_x"]) == ("claimed 3x", 4.0, 3.2)
    assert table.loc[("cold", "9x8"), "said"] == ""
