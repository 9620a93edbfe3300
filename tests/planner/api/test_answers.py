"""Answers for Python users: modules and configs are tuned and explained, and shown as frames, text and HTML."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import report_samples as samples
import torch
from dispatch_samples import fresh_start
from fast_tunes import count_instead_of_timing
from model_samples import CONFIGS, write_config
from toy_models import Gated, gated

import fuseplan.planner
from fuseplan.costmodel.identity import current_identity
from fuseplan.planner.api.answer import first_screen
from fuseplan.planner.api.request import TuneRequest, asked_for
from fuseplan.planner.api.run import run_here
from fuseplan.planner.api.tune import OneModel
from fuseplan.planner.capture import aside
from fuseplan.planner.cli import main
from fuseplan.planner.errors import ConfigError, FuseplanError
from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.models.manifest import ModelArguments
from fuseplan.planner.tuning.progress import SILENT
from fuseplan.search import policy
from fuseplan.search.errors import DatabaseError
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.tune.tuner import ProgressEvent

pytestmark = pytest.mark.uncovered

HERE = current_identity("cpu")
QUICK: dict[str, Any] = {"device": "cpu", "trials": 1, "seconds": 0.2}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that knows this machine's CPU, and tunes that count."""
    count_instead_of_timing(monkeypatch)
    return samples.known_machine(tmp_path / "tuning.db")


@pytest.fixture
def sampled(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "sampled.db"
    samples.sample_database(path).close()
    return {"db": path, "device_key": samples.DEVICE, "device": "cpu"}


class Fragment(HTMLParser):
    """What a fragment holds: tags, attributes, and text. It fails where tags are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.given: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.given += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def check_that_it_is_alone(self) -> None:
        assert self.tags.isdisjoint(("script", "style", "link", "img", "iframe", "html", "body"))
        assert not [name for name, _ in self.given if name in ("src", "href", "id", "class") or name.startswith("on")]
        assert not any("url(" in value for _, value in self.given)


def test_a_users_module_is_tuned_reported_and_left_alone(db: Path, tmp_path: Path) -> None:
    model, x = gated()
    model.train()
    held = model.state_dict(keep_vars=True)
    before = {name: (value, value.data_ptr(), value.clone()) for name, value in held.items()}
    tuned = fuseplan.planner.tune(model, x, db=db, **QUICK)
    for name, value in model.state_dict(keep_vars=True).items():
        known, place, content = before[name]
        assert value is known and value.data_ptr() == place and torch.equal(value, content)
    assert model.training
    assert tuned.steps["workload"].tolist() == ["forward"] and set(tuned.groups["source"]) <= {"measured", "stored"}
    assert "measured" in set(tuned.groups["source"])
    assert len(str(tuned).splitlines()) == len([*tuned.lines(), *tuned.warnings]) > 3
    screen = Fragment(tuned._repr_html_())
    screen.check_that_it_is_alone()
    assert "Gated" in screen.text and all(label in screen.text for label in tuned.groups["group"])

    again = fuseplan.planner.tune(model, x, db=db, **QUICK)
    assert again.result is not None and again.result.measured == 0 and "nothing was measured" in str(again)
    report = fuseplan.planner.report("Gated", device="cpu", db=db)
    pd.testing.assert_frame_equal(report.steps, tuned.steps)
    assert set(report.groups["key"]) >= set(tuned.groups["key"]) != set()
    page = report.to_html(tmp_path / "new" / "page.html").read_text()
    assert page.startswith("<!doctype html>") and all(label in page for label in report.groups["group"])

    explained = fuseplan.planner.explain(model, x, db=db, device="cpu")
    fused = explained.groups[explained.groups["runs"].str.contains("kernel")]
    assert set(fused["group"]) == set(explained.sources()) and set(explained.groups["plan"]) == {"database"}
    assert set(fused["key"]) <= set(tuned.groups["key"]) and fused["reason"].str.len().min() > 0
    assert all(code.strip() for code in explained.sources().values()) and not explained.sources("no such group")
    Fragment(explained._repr_html_()).check_that_it_is_alone()


class Listener:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    @contextmanager
    def status(self, what: str) -> Iterator[Callable[[str], None]]:
        self.heard.append(what)
        yield self.heard.append

    @contextmanager
    def tuning(self) -> Iterator[Listener]:
        self.heard.append("tuning begins")
        yield self
        self.heard.append("tuning ends")

    def note(self, text: str) -> None:
        self.heard.append(text)

    def warn(self, text: str) -> None:
        self.heard.append(text)

    def on_graph(self, regions: Sequence[Region], undecided: Sequence[Region]) -> None:
        self.heard.append(f"{len(regions)} regions, {len(undecided)} undecided")

    def on_region(self, workload: str, label: str, number: int, total: int) -> None:
        self.heard.append(f"{workload}: {number} of {total}")

    def on_trial(self, event: ProgressEvent) -> None:
        self.heard += [event.label, f"{event.phase}: {event.label}"]


def test_who_asks_is_told_what_is_done(db: Path) -> None:
    told = Listener()
    tuned = fuseplan.planner.tune(pattern="swiglu", shape=(3, 8), db=db, progress=told, **QUICK)
    begins, ends = told.heard.index("tuning begins"), told.heard.index("tuning ends")
    assert {"3x8: 1 of 1", "1 regions, 1 undecided", *tuned.groups["group"]} <= set(told.heard[begins:ends])


def test_the_headline_counts_the_groups_of_the_table_above_it(db: Path) -> None:
    for shape in ((3, 8), (2, 8), (3, 4)):
        tuned = fuseplan.planner.tune(pattern="swiglu", shape=shape, db=db, **QUICK)
        assert len(tuned.groups) == 1 and "of 1 group is fused" in str(tuned)


def test_a_linear_that_a_librarys_call_runs_is_in_the_table_and_not_fused(db: Path) -> None:
    """Without AVX-512 ATen runs it, and there is no group."""
    tuned = fuseplan.planner.tune(torch.nn.Linear(1024, 1024).eval(), torch.ones(1, 1024), db=db, **QUICK)
    groups = [group for _, region in tuned.result.distinct() for group in region.record.groups]
    called = [group.implementation for group in groups if not group.is_plain]
    assert tuned.groups["backend"].tolist() == called and set(tuned.groups["answer"]) <= {"library call"}
    assert ("1 op by a library's call" if called else "no group has been tuned") in str(tuned)
    assert " fused" not in str(tuned)


@pytest.mark.parametrize("again_s", [math.inf, 0.0])
def test_on_a_cpu_the_first_step_is_timed_before_the_second_workload_is_captured(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again_s: float
) -> None:
    """At the end steps are timed again whose times are older than a limit."""
    monkeypatch.setattr(policy, "STEP_AGAIN_S", again_s)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(aside, "usable_cores", lambda: 1)
    told = Listener()
    sizes: dict[str, Any] = {"decode": 2, "kv_len": 16, "prefill": [(2, 4)], "layers": 1, "calls": False}
    fuseplan.planner.tune(write_config(tmp_path, "llama"), **sizes, db=db, progress=told, **QUICK)
    names = ["decode 2 @ 16", "prefill 2x4"]
    heard = [f"{phase}: {name}" for name in names for phase in ("capture", "step", "step done")][1:]
    again = [f"step: {name}" for name in names] if again_s == 0 else []
    assert [one for one in told.heard if one in heard] == heard + again


def test_what_was_tuned_is_what_the_compiled_module_looks_up(db: Path) -> None:
    model, x = gated()
    fuseplan.planner.tune(model.eval(), (x,), db=db, **QUICK)
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    with torch.no_grad():
        torch.compile(model, backend="fuseplan", options={"db": str(db)})(x)
    assert fuseplan.planner.stats().misses == 0 and fuseplan.planner.stats().regions > 0


def test_a_config_object_its_file_and_the_command_line_are_one_model(
    db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaConfig

    path = write_config(tmp_path, "llama")
    entries = {name: value for name, value in CONFIGS["llama"].items() if name != "model_type"}
    sizes: dict[str, Any] = {"decode": 2, "kv_len": 16, "prefill": [(2, 4)], "layers": 1, "device": "cpu", "db": db}
    of_file = fuseplan.planner.explain(path, **sizes)
    of_object = fuseplan.planner.explain(LlamaConfig(**entries), dtype=torch.bfloat16, **sizes)
    assert list(dict.fromkeys(of_file.groups["workload"])) == ["decode 2 @ 16", "prefill 2x4"]
    pd.testing.assert_frame_equal(of_file.groups, of_object.groups)
    line = f"explain --config {path} --decode 2 --kv-len 16 --prefill 2x4 --layers 1 --device cpu --db {db}"
    assert main.run(line.split()) == 0
    assert capsys.readouterr().out.strip() == str(of_file).strip()


def test_a_report_says_what_the_command_line_says(sampled: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    report = fuseplan.planner.report(against=sampled["db"], **sampled)
    where = ["--db", str(sampled["db"]), "--device-key", samples.DEVICE]
    assert main.run(["report", *where, "--against", str(sampled["db"])]) == 0
    said = capsys.readouterr().out.splitlines()
    assert set(str(report).splitlines()) <= set(said)
    assert len(report.group_changes) and (report.step_changes["change_us"] == 0).all()
    assert (report.saved["saved_us"].diff().dropna() <= 0).all() or report.saved["workload"].nunique() > 1
    assert report.misses["count"].tolist() == [1]
    screen = Fragment(report._repr_html_())
    screen.check_that_it_is_alone()
    assert any(name in screen.text for name in report.steps["workload"])


def test_nothing_stored_is_obeyed_by_a_notebook() -> None:
    bad = "<img src=x onerror=alert(1)>\"'"
    frame = pd.DataFrame([[bad, None, 1.5]], columns=["group", "place", "speedup"])
    screen = Fragment(first_screen(bad, [bad], None, frame, ("group", "place", "speedup"), bad))
    screen.check_that_it_is_alone()
    assert screen.text.count(bad) == 4


NO_MODEL = object()


@pytest.mark.parametrize(("call", "words"), [
    (lambda p, db: p.tune("lama", db=db), ["unknown model 'lama'", "did you mean llama"]),
    (lambda p, db: p.tune(Gated(), db=db), ["inputs"]),
    (lambda p, db: p.tune(Gated(), torch.ones(3, 16), dtype="bfloat16", db=db), ["dtype"]),
    (lambda p, db: p.tune(NO_MODEL, db=db), ["object", "nn.Module"]),
    *((lambda p, db, call=call: getattr(p, call)(lambda x: x * 2, (torch.ones(3),)),
       ["first argument, model, is an nn.Module", "function <lambda>", "an nn.Module whose forward calls it"])
      for call in ("tune", "explain")),
    (lambda p, db: p.explain(torch.relu), ["first argument", "function relu", "forward calls it"]),
    (lambda p, db: p.tune(Gated, (torch.ones(3),), db=db), ["first argument", "class Gated", "instance"]),
    (lambda p, db: p.tune(3, (torch.ones(3),), db=db), ["first argument, model, is an nn.Module", "not 3, a int"]),
    (lambda p, db: p.tune("llama", torch.ones(3), db=db), ["inputs"]),
    (lambda p, db: p.tune("missing/config.json", db=db), ["missing/config.json"]),
    (lambda p, db: p.tune(decode=0, db=db), ["decode", "'0'"]),
    (lambda p, db: p.tune(decode=[1.5], db=db), ["decode", "1.5"]),
    (lambda p, db: p.tune(decode=1, kv_len=1, db=db), ["kv_len"]),
    (lambda p, db: p.tune(prefill=[(4, "x")], db=db), ["prefill"]),
    (lambda p, db: p.tune(layers=99, decode=1, device="cpu", db=db), ["layers", "99"]),
    (lambda p, db: p.tune(dtype="int3", db=db), ["dtype", "int3"]),
    (lambda p, db: p.tune(pattern="swiglou", shape="3x8", db=db), ["swiglou", "swiglu"]),
    (lambda p, db: p.tune(pattern="swiglu", db=db), ["shape"]),
    (lambda p, db: p.tune(shape=(3, 8), db=db), ["shape", "pattern"]),
    (lambda p, db: p.tune(misses=True, model="llama", db=db), ["misses"]),
    (lambda p, db: p.tune(pattern="swiglu", shape=(3, 8), trials=0, db=db), ["trials"]),
    (lambda p, db: p.tune(pattern="swiglu", shape=(3, 8), numerics="exact", db=db), ["numerics", "exact"]),
    (lambda p, db: p.tune(pattern="swiglu", shape=(3, 8), regime="graph", device="cpu", db=db), ["regime"]),
    (lambda p, db: p.tune(pattern="swiglu", shape=(3, 8), device="tpu", db=db), ["device", "tpu"]),
    (lambda p, db: p.tune(pattern="swiglu", shape=(3, 8), device="cpu", db="/proc/nowhere/t.db"), ["/proc/nowhere"]),
    (lambda p, db: p.explain(pattern="swiglu", shape=(3, 8), workload="nine", db=db), ["nine", "3x8"]),
    (lambda p, db: p.report("gpt9", device="h200", db=db), ["gpt9", "`fuseplan.tune()`"]),
    (lambda p, db: p.report(device="b200", db=db), ["b200", "h200"]),
    (lambda p, db: p.report(device="h200", db=db).step_changes, ["against"]),
    (lambda p, db: p.misses(device="tpu", db=db), ["tpu"]),
])
def test_mistakes_are_named_in_a_python_users_words(call: Any, words: list[str], db: Path) -> None:
    with pytest.raises(FuseplanError) as caught:
        call(fuseplan.planner, db)
    said = str(caught.value)
    assert "--" not in said and "`plan " not in said and len(said.splitlines()) == 1, said
    for word in words:
        assert word in said, said


def test_a_faulty_config_is_told_before_a_device_is_probed(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(CONFIGS["llama"] | {"hidden_size": "wide"}))
    model = OneModel(asked_for("cuda", ModelArguments(config=path, decode=1, kv_len=16)))
    unprobed: Any = SimpleNamespace(spec=None)
    with pytest.raises(ConfigError, match="hidden_size"):
        model.batches(unprobed, SILENT, TimeAccount())


def test_a_database_that_cannot_be_written_is_told_before_anything_is_captured() -> None:
    given, account = ModelArguments(model="llama", decode=1, kv_len=16), TimeAccount()
    with pytest.raises(DatabaseError, match="/proc/nowhere"):
        run_here(TuneRequest("cpu", given, db="/proc/nowhere/t.db"), lambda *_: OneModel(asked_for("cpu", given)),
                 SILENT, account)
    assert "capturing" not in account.spent()


@pytest.mark.parametrize("module", ["fuseplan", "fuseplan.planner"])
def test_the_names_load_nothing_before_they_are_used(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module} as p; dir(p); print([m for m in ('torch', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]"


def test_the_package_has_the_planners_names() -> None:
    names = {"tune", "report", "explain", "misses", "stats", "reset_stats"}
    assert names <= set(fuseplan.planner.__all__)
    assert all(getattr(fuseplan, name) is getattr(fuseplan.planner, name) for name in names)
    assert {*names, "__version__"} == set(dir(fuseplan)) and fuseplan.__version__ == version("fuseplan")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fuseplan.no_such_name
