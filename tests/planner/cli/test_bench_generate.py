"""``plan bench generate``: what it refuses, what it writes, and what an interrupted run keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import model_samples
import pandas as pd
import pytest
import torch
from reference_backend import ReferenceBackend

from fuseplan.planner.bench import generate as bench
from fuseplan.planner.bench.generate import GenerateRow, Sizes
from fuseplan.planner.cli import main
from fuseplan.planner.cli.bench.topics import results_name, sizes_of, tune_command
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.peers.contestant import EAGER, OURS
from fuseplan.planner.tuning import session as sessions

Run = Callable[..., tuple[int, str, str]]
_SMALL = ("--batch", "1,2", "--prompt", "5", "--new-tokens", "3", "--dtype", "float32", "--seconds", "0.01")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``plan bench generate`` on a CPU whose kernels are interpreted; results go to ``out``."""
    monkeypatch.setattr(sessions, "backends_for", lambda device_type: (ReferenceBackend(),))

    def run(*argv: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        common = ("--device", "cpu", "--db", tmp_path / "tuning.db", "--out", tmp_path / "out")
        status = main.run(["bench", "generate", *map(str, (*argv, *common))])
        torch._dynamo.reset()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.parametrize("argv, words", [
    (["--module", "toy_models:gated"], "takes no --module"),
    (["--decode", "1", "--kv-len", "8", "--prefill", "8"], "takes no --decode, --kv-len, --prefill"),
    (["--pattern", "swiglu"], "takes no --pattern"),
    (["--peers", "eager"], "takes no --peers"),
    (["--regime", "eager"], "takes no --regime"),
    (["--trials", "3"], "takes no --trials"),
    (["--batch", "0"], "'0' is no positive size"),
    (["--batch", ","], "--batch is empty"),
    (["--new-tokens", "1"], "--new-tokens"),
    (["--prompt", "131072"], "only 131072 positions"),
    (["--model", "gpt9"], "unknown model 'gpt9'"),
])
def test_mistakes_are_one_line(plan: Run, argv: list[str], words: str) -> None:
    status, _, err = plan(*argv)
    assert status == 2 and len(err.strip().splitlines()) == 1 and words in err, err


@pytest.mark.parametrize("option", ["--batch=1", "--prompt=5", "--new-tokens=3"])
def test_other_topics_take_none_of_its_options(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main.run(["bench", "model", option, "--device", "cpu"]) == 2
    assert f"`plan bench model` takes no --{option[2:].partition('=')[0]}" in capsys.readouterr().err


def test_an_encoder_is_refused(plan: Run, tmp_path: Path) -> None:
    status, _, err = plan("--config", model_samples.write_config(tmp_path, "bert"))
    assert status == 2 and "bert is no decoder that generates tokens by itself" in err


def test_tokens_are_timed_and_published(plan: Run, tmp_path: Path) -> None:
    config = model_samples.write_config(tmp_path, "llama")
    status, out, err = plan("--config", config, *_SMALL, "--no-inductor")
    assert status == 0, err
    rows = pd.read_csv(tmp_path / "out" / "llama-1-2x5-3-generate.csv")
    labels = ["generate 1x5 + 3", "generate 2x5 + 3"]
    assert [*zip(rows["workload"], rows["contestant"], strict=True)] == [
        (label, name) for label in labels for name in (EAGER, OURS)]
    assert rows["median_us"].notna().all() and set(rows["tokens"]) == {bench.SAME}
    assert "plan tune --config config.json" in out
    page = (tmp_path / "out" / "llama-1-2x5-3-generate.md").read_text()
    assert "| workload | contestant | ms_token |" in page and bench.LEGEND in page
    assert json.loads((tmp_path / "out" / "llama-1-2x5-3-generate.json").read_text())["model"] == "llama 1,2x5+3"


def test_an_interrupted_run_keeps_the_sizes_that_are_done(
    plan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(session: object, module: object, sizes: Sizes, names: list[str], seconds: float) -> list[GenerateRow]:
        if sizes.batch == 2:
            raise KeyboardInterrupt
        common = {"workload": sizes.label, "subject": "generate", "mode": "eager"}
        return [GenerateRow(contestant=name, median_us=4.0, **common) for name in names]

    monkeypatch.setattr(bench, "bench_generate", rows)
    status, _, _ = plan("--config", model_samples.write_config(tmp_path, "llama"), *_SMALL)
    assert status == 130
    kept = pd.read_csv(tmp_path / "out" / "llama-1-2x5-3-generate.csv")
    assert kept["workload"].tolist() == ["generate 1x5 + 3"] * 3
    assert kept["contestant"].tolist() == ["eager", "inductor", "fuseplan"]  # max-autotune is asked for by name


def test_the_whole_model_is_meant_unless_layers_are_given() -> None:
    source = find_source(model="llama-3.1-8b")
    sizes = sizes_of(source, None, None, None)
    assert [one.label for one in sizes] == ["generate 1x512 + 128", "generate 16x512 + 128"]
    assert results_name(source, sizes) == "llama-3.1-8b"
    assert results_name(source, sizes[1:]) == "llama-3.1-8b 16x512+128"
    options = "--decode 1,16 --kv-len 639 --prefill 1x512,16x512"
    assert tune_command(source, sizes, "cpu") == f"plan tune --model llama-3.1-8b --dtype bfloat16 {options}"
    assert tune_command(source, sizes, "cuda").endswith(f"{options} --regime graph, and the same without it")
