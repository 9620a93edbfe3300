"""Many models at once: what is measured are the distinct regions of all of them, each once, and nothing twice.

Nothing is timed. The oracle for distinct regions is the set of keys that all graphs have.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import report_samples as samples
from dispatch_samples import fresh_start
from fast_tunes import count_instead_of_timing
from model_samples import CONFIGS
from paths import ROOT

import fuseplan.planner
from fuseplan.costmodel.identity import current_identity
from fuseplan.planner.api.many import Models, TunedMany, captured_model
from fuseplan.planner.cli import main
from fuseplan.planner.errors import FuseplanError
from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.models.manifest import read_manifest
from fuseplan.search.store.database import Database
from fuseplan.search.store.record import PlanRecord, RecordKey
from fuseplan.search.tune.tuner import ProgressEvent

HERE = current_identity("cpu").key()
#: A family of decoders: the second has more layers, another vocabulary and another base of its rotations.
FAMILY = """
    [defaults]
    prefill = ["2x4"]
    calls = false
    [[model]]
    config = "small"
    [[model]]
    config = "deep"
"""


class Listener:
    """Writes down which regions are announced."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def status(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        return nullcontext(lambda text: None)

    def tuning(self) -> AbstractContextManager[Listener]:
        return nullcontext(self)

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def on_graph(self, regions: Sequence[Region], undecided: Sequence[Region]) -> None: ...

    def on_region(self, workload: str, label: str, number: int, total: int) -> None:
        self.heard.append(workload)

    def on_trial(self, event: ProgressEvent) -> None: ...


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is timed, and captures are kept for one test."""
    count_instead_of_timing(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield from fresh_start()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return samples.known_machine(tmp_path / "tuning.db")


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Counter[RecordKey]:
    """How often the plan of each region, or part of one, was stored."""
    counts: Counter[RecordKey] = Counter()
    put = Database.put_plan

    def counting(self: Database, record: PlanRecord) -> None:
        counts[record.key] += 1
        put(self, record)

    monkeypatch.setattr(Database, "put_plan", counting)
    return counts


def written(folder: Path, text: str) -> Path:
    """The manifest, with configs that it may name beside it."""
    for name, more in (("small", {}), ("deep", {"num_hidden_layers": 3, "vocab_size": 257, "rope_theta": 500000.0})):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(CONFIGS["llama"] | more))
    path = folder / "models.toml"
    path.write_text(text)
    return path


def tune(manifest: Path, db: Path, **more: Any) -> TunedMany:
    return fuseplan.planner.tune(manifest=manifest, db=db, device="cpu", **more)


def keys_of(manifest: Path) -> list[set[tuple[str, str]]]:
    """For each model the keys of its regions, with how their kernels round."""
    job = Models(read_manifest(manifest), "cpu", HERE)
    return [
        {(region.key, one.asked.settings.numerics) for _, graph in one.graphs for region in find_regions(graph)}
        for one in map(captured_model, job.models)
    ]


def test_regions_are_measured_once_over_all_models(db: Path, tmp_path: Path, stored: Counter[RecordKey]) -> None:
    manifest = written(tmp_path, FAMILY)
    told = Listener()
    found = tune(manifest, db, progress=told)
    first, second = keys_of(manifest)
    assert first & second and second - first
    assert first | second <= {(one.workload, one.numerics) for one in stored} and max(stored.values()) == 1
    assert Counter(workload.partition(":")[0] for workload in told.heard) == {
        "small": len(first), "deep": len(second - first)}

    page = (ROOT / "docs" / "many-models.md").read_text()
    columns = [*found.models, *found.regions, *found.totals]
    assert not [one for one in columns if f"`{one}`" not in page]
    assert found.regions["key"].is_unique and not found.regions["stored"].any()
    assert set(zip(found.regions["key"], found.regions["numerics"], strict=True)) == first | second
    uses = Counter(
        region.key for one in map(captured_model, Models(read_manifest(manifest), "cpu", HERE).models)
        for _, graph in one.graphs for region in find_regions(graph)
    )
    assert dict(zip(found.regions["key"], found.regions["uses"], strict=True)) == uses
    table = found.models.set_index("model")
    assert table["regions"].tolist() == [len(first), len(second)]
    assert table["shared"].tolist() == [0, len(first & second)]
    assert table["measured"].tolist() == [len(first), len(second - first)] and not table["stored"].any()
    total = found.totals
    assert (total["regions"], total["distinct"]) == (len(first) + len(second), len(first | second))
    assert total["measured"] == total["distinct"] and total["failed"] == 0
    assert found.steps["workload"].tolist() == ["deep prefill 2x4", "small prefill 2x4"]
    assert table["step"].tolist() == ["prefill 2x4"] * 2 and table["saved_us"].notna().all()

    stored.clear()
    again = tune(manifest, db)
    assert not stored and again.totals["measured"] == 0 and again.totals["stored"] == len(first | second)
    assert again.regions["stored"].all() and "nothing was measured" in str(again)
    pd.testing.assert_frame_equal(again.steps, found.steps)


def test_a_model_alone_gets_the_plans_that_it_gets_among_others(db: Path, tmp_path: Path) -> None:
    tune(written(tmp_path, TOYS), db)
    other = samples.known_machine(tmp_path / "other.db")
    for name in ("gated", "two_regions", "widened"):
        fuseplan.planner.tune(f"toy_models:{name}", device="cpu", db=other)
    together, alone = (
        {plan.key: [(group.ops, group.implementation) for group in plan.groups] for plan in Database(path).plans()}
        for path in (db, other))
    assert together == alone != {}


def test_an_interrupted_tune_goes_on(
    db: Path, tmp_path: Path, stored: Counter[RecordKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = written(tmp_path, TOYS)
    put = Database.put_plan

    def interrupted(self: Database, record: PlanRecord) -> None:
        if stored.total() == 5:
            raise KeyboardInterrupt
        put(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "put_plan", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tune(manifest, db)
    finished = set(stored)
    assert len(finished) == 5
    found = tune(manifest, db)
    assert max(stored.values()) == 1 and finished < set(stored)
    decided = {key.workload for key in finished}
    assert 0 < found.totals["stored"] == len(set(found.regions["key"]) & decided)
    assert found.totals["stored"] + found.totals["measured"] == len(set.union(*keys_of(manifest)))


TOYS = """
    [[model]]
    module = "toy_models:gated"
    [[model]]
    module = "toy_models:two_regions"
    [[model]]
    module = "toy_models:widened"
"""
BLOCKS = """
    [[model]]
    module = "toy_models:gated"
    [[model]]
    module = "toy_models:broken"
    [[model]]
    module = "toy_models:widened"
    [[model]]
    pattern = "swiglu"
    shape = "3x24"
    dtype = ["float32", "bfloat16"]
    [[model]]
    module = "toy_models:gated"
    name = "as PyTorch rounds"
    numerics = "eager"
    [[model]]
    model = "llama-3.1-8b"
    devices = ["no such device"]
    [[model]]
    model = "llama-3.1-8b"
    regime = "graph"
"""


def test_a_model_that_fails_costs_only_itself(
    db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = written(tmp_path, BLOCKS)
    argv = ["tune", "--manifest", str(manifest), "--device", "cpu", "--db", str(db), "--format", "json"]
    assert main.run(argv) == 1
    out, err = capsys.readouterr()
    answer = json.loads(out)
    rows = answer["models"]
    assert [row["outcome"].partition(":")[0] for row in rows] == [
        "tuned", "not captured", "tuned", "tuned", "tuned", "tuned", "left out", "left out"]
    assert {row["model"] for row in rows} >= {"pattern swiglu:float32", "pattern swiglu:bfloat16", "as PyTorch rounds"}
    assert "no weights here" in err and "1 of 6 models cannot be captured" in err and "Traceback" not in err
    assert "it is for no such device" in err and "CUDA graphs" in err
    keys = keys_of(manifest)
    distinct = set.union(*keys)
    (total,) = answer["totals"]
    assert (total["models"], total["distinct"]) == (6, len(distinct))
    assert total["measured"] == len(distinct) == len(answer["regions"])
    assert f"regions: {sum(map(len, keys))} in all models, {len(distinct)} distinct, 0 stored" in err
    assert {row["numerics"] for row in answer["regions"]} == {"fp32", "eager"}
    own = [len(one - set().union(*keys[:at])) for at, one in enumerate(keys)]
    assert [row["measured"] for row in rows][:6] == own
    assert main.run([*argv[:-2], "--quiet"]) == 1  # what cannot be captured is tried again
    assert "not captured" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "words"), [
    ("[[model]]\nconfig = 'small'\n[[model]]\nconfig = 'small/config.json'", ["model 2", "model 1 (small)"]),
    ("[[model]]\nconfig = 'nowhere'", ["model 1 (nowhere)", "No such file"]),
    ("[[model]]\nmodel = 'lama'", ["model 1 (lama)", "did you mean llama"]),
    ("[[model]]\nconfig = 'small'\nprefill = 'long'", ["model 1 (small)", "prefill", "'long'"]),
    ("[[model]]\nconfig = 'small'\nname = 'one'\n[[model]]\nconfig = 'deep'\nname = 'one'", ["called one", "a name"]),
    ("[[model]]\npattern = 'swiglu'", ["model 1 (swiglu)", "needs shape"]),
    ("[[model]]\nmodel = 'llama'\ndevices = ['h900']", ["no model is for this device", HERE, "h900"]),
])
def test_what_cannot_be_asked_for_is_said_before_anything_is_captured(
    tmp_path: Path, db: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    manifest = written(tmp_path, text)
    assert main.run(["tune", "--manifest", str(manifest), "--device", "cpu", "--db", str(db), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "models.toml" in said and "--" not in said
    assert not [word for word in words if word not in said], said
    with pytest.raises(FuseplanError, match=r"models\.toml"):
        tune(manifest, db)


@pytest.mark.parametrize("more", [
    "--model llama", "--decode 1", "--misses", "--no-calls", "--pack-weights", "--regime graph", "--numerics eager",
])
def test_a_models_options_do_not_go_with_a_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    manifest = written(tmp_path, FAMILY)
    assert main.run(["tune", "--manifest", str(manifest), "--device", "cpu", *more.split()]) == 2
    assert "--manifest" in capsys.readouterr().err
