"""What a comparison of ``generate()`` refuses, what it writes, and what an interrupted run keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import generation
import model_samples
import pandas as pd
import pytest
import torch
from generation import GenerateRow, Sizes, results_name, sizes_of, tune_command
from reference_backend import ReferenceBackend

from fuseplan.planner.errors import ConfigError, FuseplanError
from fuseplan.planner.models.sources import ModelSource, find_source
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, OURS
from fuseplan.planner.tuning import session as sessions
from fuseplan.planner.tuning.session import Session


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """On a CPU whose kernels are interpreted."""
    monkeypatch.setattr(sessions, "backends_for", lambda device_type: (ReferenceBackend(),))
    yield sessions.open_session("cpu", tmp_path / "tuning.db")
    torch._dynamo.reset()


def small(tmp_path: Path, kind: str = "llama") -> ModelSource:
    return find_source(config=str(model_samples.write_config(tmp_path, kind)), dtype="float32", device_type="cpu")


@pytest.mark.parametrize("batch, prompt, new, words", [
    ("0", None, None, "batch: '0' is no positive size"),
    (",", None, None, "batch is empty"),
    (None, 131072, None, "only"),
])
def test_sizes_that_no_model_takes_are_refused(
    tmp_path: Path, batch: str | None, prompt: int | None, new: int | None, words: str
) -> None:
    with pytest.raises(FuseplanError, match=words):
        sizes_of(small(tmp_path), batch, prompt, new)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bert is no decoder that generates tokens by itself"):
        sizes_of(small(tmp_path, "bert"), "1", 5, 3)


def test_tokens_are_timed_and_published(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = small(tmp_path)
    sizes = sizes_of(source, "1,2", 5, 3)
    generation.measure(session, source, sizes, (EAGER, OURS), 0.01, tmp_path / "out")
    start = "llama-1-2x5-3-generate"
    rows = pd.read_csv(tmp_path / "out" / f"{start}.csv")
    labels = ["generate 1x5 + 3", "generate 2x5 + 3"]
    assert [*zip(rows["workload"], rows["contestant"], strict=True)] == [
        (label, name) for label in labels for name in (EAGER, OURS)]
    assert rows["median_us"].notna().all() and set(rows["tokens"]) == {generation.SAME}
    assert "plan tune --config config.json" in capsys.readouterr().out
    page = (tmp_path / "out" / f"{start}.md").read_text()
    assert "| workload | contestant | ms_token |" in page and generation.LEGEND in page
    assert json.loads((tmp_path / "out" / f"{start}.json").read_text())["model"] == "llama 1,2x5+3"


def test_an_interrupted_run_keeps_the_sizes_that_are_done(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(session: object, module: object, sizes: Sizes, names: list[str], seconds: float) -> list[GenerateRow]:
        if sizes.batch == 2:
            raise KeyboardInterrupt
        common = {"workload": sizes.label, "subject": "generate", "mode": "eager"}
        return [GenerateRow(contestant=name, median_us=4.0, **common) for name in names]

    monkeypatch.setattr(generation, "bench_generate", rows)
    source = small(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        sizes = sizes_of(source, "1,2", 5, 3)
        generation.measure(session, source, sizes, (EAGER, INDUCTOR, OURS), 0.01, tmp_path / "out")
    kept = pd.read_csv(tmp_path / "out" / "llama-1-2x5-3-generate.csv")
    assert kept["workload"].tolist() == ["generate 1x5 + 3"] * 3


def test_the_whole_model_is_meant_unless_layers_are_given() -> None:
    source = find_source(model="llama-3.1-8b")
    sizes = sizes_of(source, None, None, None)
    assert [one.label for one in sizes] == ["generate 1x512 + 128", "generate 16x512 + 128"]
    assert results_name(source, sizes) == "llama-3.1-8b"
    assert results_name(source, sizes[1:]) == "llama-3.1-8b 16x512+128"
    options = "--decode 1,16 --kv-len 639 --prefill 1x512,16x512"
    assert tune_command(source, sizes, "cpu") == f"plan tune --model llama-3.1-8b --dtype bfloat16 {options}"
    assert tune_command(source, sizes, "cuda").endswith(f"{options} --regime graph, and the same without it")
