"""``generate()`` in the bench: who compiles it, what a step's time is, and what the table makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import generation as bench
import model_samples
import pytest
import report_samples as samples
import step_profile
import torch
from generation import OURS_LAUNCHED, GenerateRow, Generation, Sizes, TokenTimer
from reference_backend import ReferenceBackend

from fuseplan.planner.bench.model import dispatch_options
from fuseplan.planner.bench.rows import bench_frame
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import ModelSource, find_source
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE, OURS, PeerError
from fuseplan.planner.runtime.dispatch import fuseplan
from fuseplan.planner.tuning import session as sessions
from fuseplan.planner.tuning.session import Session

SIZES = Sizes(2, 5, 4)


def source_of(folder: Path, name: str = "llama") -> ModelSource:
    return find_source(config=model_samples.write_config(folder, name), dtype="float32")


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return source_of(tmp_path)


@pytest.fixture
def module(source: ModelSource) -> Any:
    return build_model(source, "cpu").module


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session whose kernels are interpreted, also inside ``torch.compile``."""
    monkeypatch.setattr(sessions, "backends_for", lambda device_type: (ReferenceBackend(),))
    yield sessions.open_session("cpu", tmp_path / "tuning.db")
    torch._dynamo.reset()


def compiled_by(module: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict[str, Any]]:
    """What ``torch.compile`` is asked for by a contestant's call; nothing is compiled."""
    asked: list[dict[str, Any]] = []

    def compile_(function: Any, **given: Any) -> Any:
        asked.append(given)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    run = Generation(name, module, SIZES, bench.how_compiled(name, "cpu", {"db": "tuning.db"}))
    run()
    run(1)
    return asked


# -- contestants ------------------------------------------------------------------------------------------------


def test_ours_makes_eagers_tokens_and_says_what_it_missed(session: Session, module: Any) -> None:
    rows = {row.contestant: row for row in bench.bench_generate(session, module, SIZES, (EAGER, OURS), 0.0)}
    assert list(rows) == [EAGER, OURS]
    for row in rows.values():
        assert row.tokens == bench.SAME and row.workload == "generate 2x5 + 4"
        assert row.median_us is not None and row.first_us is not None and row.first_us > 0
        assert row.floor_us is None
    assert rows[EAGER].note == "" and " misses" in rows[OURS].note


def test_hugging_faces_config_is_heeded_on_a_cpu(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = compiled_by(module, monkeypatch, INDUCTOR)
    assert (own["backend"], own["mode"], own["options"]) == ("inductor", "reduce-overhead", None)


def test_max_autotune_is_a_mode_of_it(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = compiled_by(module, monkeypatch, MAX_AUTOTUNE)
    assert (own["backend"], own["mode"]) == ("inductor", "max-autotune")


def test_ours_comes_through_the_same_door(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (ours,) = compiled_by(module, monkeypatch, OURS)
    assert (ours["backend"], ours["mode"]) == (fuseplan, None)
    assert ours["options"] == {"db": "tuning.db", "cuda_graphs": False}


def test_eager_compiles_nothing(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_by(module, monkeypatch, EAGER) == []


def test_on_a_gpu_hugging_face_decides_and_ours_has_graphs() -> None:
    assert bench.contestants("cuda") == (EAGER, INDUCTOR, MAX_AUTOTUNE, OURS, OURS_LAUNCHED)
    assert bench.contestants("cpu") == (EAGER, INDUCTOR, MAX_AUTOTUNE, OURS)
    assert bench.how_compiled(INDUCTOR, "cuda", {}) == {}
    graphs = [bench.how_compiled(name, "cuda", {})["compile_config"].options for name in (OURS, OURS_LAUNCHED)]
    assert graphs == [{"cuda_graphs": True}, {"cuda_graphs": False}]


def test_contestants_share_parameters_and_nothing_that_is_compiled(module: Any) -> None:
    one, other = (Generation(EAGER, module, SIZES, {"disable_compile": True}) for _ in range(2))
    one.model._compiled_call = None
    assert "_compiled_call" not in vars(other.model) and "_compiled_call" not in vars(module)
    assert [*map(id, one.model.parameters())] == [*map(id, module.parameters())]


def test_no_token_ends_a_sequence(module: Any) -> None:
    module.generation_config.eos_token_id = list(range(131))
    run = Generation(EAGER, module, SIZES, {"disable_compile": True})
    assert run().shape == (2, 4) and run(1).shape == (2, 1)
    assert module.generation_config.eos_token_id == list(range(131))
    ended = module.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=4, do_sample=False)
    assert ended.shape[1] == 6  # it would have ended at once


def test_who_compiles_nothing_is_no_contestant(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(module), "get_compiled_call", lambda self, config: self.__call__)
    run = Generation(OURS, module, SIZES, bench.how_compiled(OURS, "cpu", {}))
    with pytest.raises(PeerError, match="compiles nothing of llama"):
        run()


def test_a_contestant_that_fails_gets_a_row_with_the_reason(
    session: Session, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def how(name: str, device_type: str, options: object) -> dict[str, Any]:
        if name == INDUCTOR:
            raise RuntimeError("no\ncompiler")
        return {"disable_compile": True}

    monkeypatch.setattr(bench, "how_compiled", how)
    rows = {row.contestant: row for row in bench.bench_generate(session, module, SIZES, (EAGER, INDUCTOR), 0.0)}
    assert rows[INDUCTOR].note == "RuntimeError: no compiler" and rows[INDUCTOR].median_us is None
    assert rows[EAGER].median_us is not None


def test_rounds_that_fail_cost_no_other_sizes(session: Session, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, run: object, operands: object) -> Any:
        def sample() -> float:
            raise RuntimeError("out of memory")

        return sample

    monkeypatch.setattr(TokenTimer, "prepare", fail)
    (row,) = bench.bench_generate(session, module, SIZES, (EAGER,), 0.0)
    assert row.note == "RuntimeError: out of memory" and row.median_us is None


def test_sizes_that_cannot_be_asked_for(tmp_path: Path, source: ModelSource) -> None:
    bench.check_sizes(source, Sizes(1, 100, 29))  # the last token has no position: it is never read
    with pytest.raises(ConfigError, match="only 128 positions"):
        bench.check_sizes(source, Sizes(1, 100, 30))
    with pytest.raises(ConfigError, match="no decoder"):
        bench.check_sizes(source_of(tmp_path, "bert"), SIZES)


# -- times --------------------------------------------------------------------------------------------------------


class Scripted(Generation):
    """A prompt takes five virtual seconds, and each token after the first two."""

    now = 0.0

    def __post_init__(self) -> None:
        self.made: list[int] = []

    def __call__(self, new: int | None = None, streamer: Any = None) -> torch.Tensor:
        new = self.sizes.new if new is None else new
        self.made.append(new)
        Scripted.now += 5.0 + 2.0 * (new - 1)
        return torch.zeros(self.sizes.batch, new)


def test_a_step_is_what_is_left_without_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, run = TokenTimer("cpu"), Scripted(EAGER, None, SIZES, {})
    monkeypatch.setattr(timer, "clock", lambda: Scripted.now)
    sample = timer.prepare(run, [()])
    assert [sample(), sample()] == [2e6, 2e6]
    assert run.first_us == [5e6, 5e6] and run.made == [4, 4, 1, 4, 1]


def test_the_first_token_that_differs() -> None:
    tokens = torch.tensor([[4, 5, 6], [7, 8, 9]])
    assert bench.first_difference(tokens, tokens.clone()) is None
    assert bench.first_difference(tokens, torch.tensor([[4, 5, 6], [7, 0, 0]])) == 2


# -- where a step's time goes ------------------------------------------------------------------------------------


def test_device_time_is_of_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "_busy_us", lambda call: 70.0 + 10.0 * call().shape[1])
    run = Scripted(EAGER, None, Sizes(1, 5, 100), {})
    assert step_profile.device_step_us(run) == pytest.approx(10.0)
    assert run.made == [33, 1]
    monkeypatch.setattr(step_profile, "_busy_us", lambda call: 0.0)
    assert step_profile.device_step_us(run) is None


def test_what_the_host_does_in_a_step_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, us: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(elapsed_us=lambda: us))

    seen = [event("aten::mm", 50.0)]
    seen += [event("TorchDynamo Cache Lookup", 6.0), event("Torch-Compiled Region: 0/0", 12.0)] * 3
    monkeypatch.setattr(step_profile, "_profiled", lambda call, activity: call() is not None and seen)
    run = Scripted(OURS, None, SIZES, {})
    assert step_profile.host_step_us(run) == (6.0, 12.0)  # three steps after the first token
    assert run.made == [4]
    del seen[1:]
    assert step_profile.host_step_us(run) is None


def test_compiled_calls_are_profiled_on_a_cpu(session: Session, module: Any) -> None:
    run = Generation(OURS, module, SIZES, bench.how_compiled(OURS, "cpu", dispatch_options(session)))
    run()
    found = step_profile.host_step_us(run)
    assert found is not None and min(found) > 0


def test_spans_that_overlap_count_once() -> None:
    assert step_profile.covered_us([(5.0, 6.0), (0.0, 4.0), (1.0, 2.0)]) == 5.0
    assert step_profile.covered_us([]) == 0.0


# -- the floor ----------------------------------------------------------------------------------------------------


def test_a_step_reads_everything_but_the_table_of_embeddings(module: Any) -> None:
    whole = sum(one.nbytes for one in module.parameters())
    assert bench.step_bytes(module) == whole - module.get_input_embeddings().weight.nbytes
    module.set_output_embeddings(module.get_input_embeddings())  # of the same size as the head that is gone
    assert bench.step_bytes(module) == whole - module.get_input_embeddings().weight.nbytes


def test_the_floor_is_at_measured_bandwidth(session: Session, module: Any, tmp_path: Path) -> None:
    assert bench.floor_us(session, module) is None  # never probed
    moved = bench.step_bytes(module)
    assert moved is not None
    probed = replace(session, spec=samples.SPEC)
    assert bench.floor_us(probed, module) == pytest.approx(moved / samples.SPEC.bandwidth.gbps(moved) / 1e3)
    experts = build_model(source_of(tmp_path, "mixtral"), "cpu").module
    assert bench.floor_us(probed, experts) is None


# -- the table ----------------------------------------------------------------------------------------------------


def row(contestant: str, median_us: float | None, **given: Any) -> GenerateRow:
    return GenerateRow("generate 1x512 + 128", "generate", contestant, "eager", median_us, **given)


def test_the_table_is_in_milliseconds_beside_hugging_faces_own() -> None:
    frame = bench_frame([
        row(EAGER, 24e3, floor_us=4e3, first_us=30e3, tokens=bench.SAME),
        row(INDUCTOR, 6e3, floor_us=4e3, first_us=31e3, tokens=bench.SAME),
        row(OURS, 5e3, floor_us=4e3, first_us=30e3),
        row(OURS_LAUNCHED, None, note="RuntimeError: no"),
    ])
    table = bench.generate_table(frame).set_index("contestant")
    assert table["ms_token"].tolist()[:3] == [24.0, 6.0, 5.0]
    assert table["vs_inductor"].tolist()[:3] == [0.25, 1.0, 1.2] and table["vs_inductor"].isna()[OURS_LAUNCHED]
    assert table["x_floor"].tolist()[:3] == [6.0, 1.5, 1.25]
    assert table.loc[OURS, "first_ms"] == 30.0
    assert "p20" not in table  # nobody has it
    assert bench.generate_verdict(frame) == [
        "generate 1x512 + 128: reading the weights takes 4 ms a token at measured bandwidth",
        "generate 1x512 + 128: fuseplan is 4.80x eager, 1.20x inductor",
        "fuseplan launched, generate 1x512 + 128: RuntimeError: no",
    ]


def test_without_hugging_faces_own_there_is_nothing_to_compare_with() -> None:
    table = bench.generate_table(bench_frame([row(EAGER, 24e3), row(OURS, 5e3)]))
    assert "vs_inductor" not in table and table["ms_token"].tolist() == [24.0, 5.0]


def test_a_model_without_a_table_of_embeddings_reads_all_it_has() -> None:
    weights = [torch.zeros(3), torch.zeros(5)]
    plain = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace()), parameters=lambda: iter(weights),
        get_input_embeddings=lambda: None, get_output_embeddings=lambda: None,
    )
    assert bench.step_bytes(plain) == 32
