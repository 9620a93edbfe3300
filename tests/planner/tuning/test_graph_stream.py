"""Graphs come in order, captured in processes of their own where there are cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_samples import write_config
from worker_jobs import wait_for

from fuseplan.planner.api.request import Asked
from fuseplan.planner.capture import aside
from fuseplan.planner.capture.cache import cached_capture, capture_path
from fuseplan.planner.capture.trace import Graphs
from fuseplan.planner.cli.output.options import current
from fuseplan.planner.errors import CaptureError, ConfigError
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.models.workload import Workload, decode, generate, prefill
from fuseplan.planner.tuning import graph_stream
from fuseplan.planner.tuning.graph_stream import GraphStream
from fuseplan.search.workers.worker import Outcome

DECODE, PREFILL = decode(2, 16), prefill(1, 8)
EMPTY = DataflowGraph([], {}, [], [])


def children() -> set[int]:
    """Processes that this one has started, and that have not ended."""
    found = set[int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
            found |= {int(path.parent.name)} if int(parent) == os.getpid() and state != "Z" else set()
    return found


def test_captures_beside_each_other_are_the_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_source(config=write_config(tmp_path, "llama"), layers=1)
    impossible = Workload("forward")
    folders = [tmp_path / name / "fuseplan" / "captures" for name in ("beside", "alone")]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "beside"))
    monkeypatch.setattr(aside, "usable_cores", lambda: 1)
    with GraphStream(source, [DECODE], "cpu") as stream:
        assert stream.ready() == [] and not folders[0].exists()  # one core: it waits until somebody asks
    monkeypatch.setattr(aside, "usable_cores", lambda: 4)
    here = graph_stream.cached_capture
    monkeypatch.setattr(graph_stream, "cached_capture", lambda source, one, *rest: (
        here(source, one, *rest) if one == impossible or capture_path(source, one, "cpu").exists() else pytest.fail(
            f"{one.label} is captured here")))
    with GraphStream(source, [DECODE, PREFILL, impossible], "cpu") as stream:
        names = []
        with pytest.raises(ConfigError, match="runs in decode or prefill"):
            for name, _ in stream:
                names.append(name)
    assert names == [DECODE.label, PREFILL.label]
    with GraphStream(source, [PREFILL, DECODE], "cpu") as stream:
        assert [name for name, _ in stream.ready()] == [PREFILL.label, DECODE.label]  # from disk, without a process
        assert stream.waiting == "" and stream.ready() == [] and list(stream) == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "alone"))
    for workload in (DECODE, PREFILL):
        cached_capture(source, workload, "cpu")
    found, expected = ({one.name: one.read_text() for one in folder.iterdir()} for folder in folders)
    assert found == expected and len(found) == 2


def test_leaving_a_stream_early_ends_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(aside, "usable_cores", lambda: 4)
    source = find_source(config=write_config(tmp_path, "llama"), layers=1)
    before = children()
    with pytest.raises(KeyboardInterrupt), GraphStream(source, [DECODE, PREFILL], "cpu"):
        assert children() > before
        raise KeyboardInterrupt
    assert children() <= before


def test_processes_that_were_expected_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cores = 4
    monkeypatch.setattr(aside, "usable_cores", lambda: cores)
    before, capturers = children(), aside.Capturers()
    capturers.expect()
    expected = children() - before
    assert len(expected) == 1
    pool = capturers.take(2)
    assert pool is not None and children() - before == expected
    pool.close()
    capturers.expect()
    assert capturers.take(1) is None and children() == before  # one is captured here
    (tmp_path / "fuseplan" / "captures").mkdir(parents=True)
    capturers.expect()
    assert children() == before  # this model's may be kept
    cores = 3
    assert capturers.take(9) is None and children() == before


def test_what_is_not_there_yet_holds_back_what_comes_after_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finish = threading.Event()

    class Pool:
        def __init__(self, *args: object, **kwargs: object) -> None: ...

        def start(self) -> None: ...

        def as_completed(
            self, function: object, arguments: Iterable[tuple[Any, ...]], limit_s: float
        ) -> Iterator[tuple[int, Outcome]]:
            assert len(list(arguments)) == 2
            yield 1, Outcome()
            finish.wait()
            yield 0, Outcome()

        def close(self) -> None: ...

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(aside, "usable_cores", lambda: 4)
    monkeypatch.setattr(aside, "WorkerPool", Pool)
    monkeypatch.setattr(graph_stream, "cached_capture", lambda source, one, *rest: (EMPTY,))
    with GraphStream(find_source(), [DECODE, PREFILL], "cpu") as stream:
        assert stream.ready() == [] and stream.waiting == DECODE.label
        finish.set()
        assert stream.take() == [(DECODE.label, EMPTY)]
        wait_for(lambda: stream.ready() == [(PREFILL.label, EMPTY)])
        assert stream.waiting == ""


def test_the_first_workload_can_be_captured_before_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    captured = list[Workload]()

    def capture(source: object, workload: Workload, *rest: object) -> Graphs:
        captured.append(workload)
        return (EMPTY,)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(aside, "usable_cores", lambda: 1)
    monkeypatch.setattr(graph_stream, "cached_capture", capture)
    for take in (GraphStream.take, GraphStream.ready):
        captured.clear()
        with GraphStream(find_source(), [DECODE, PREFILL], "cpu") as stream:
            stream.begin()
            assert captured == [DECODE] and stream.waiting == DECODE.label
            assert take(stream) == [(DECODE.label, EMPTY)] and captured == [DECODE]
            assert stream.waiting == PREFILL.label
            assert list(stream) == [(PREFILL.label, EMPTY)] and stream.waiting == ""


def test_a_call_that_was_not_asked_for_is_left_out_where_the_model_does_not_take_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed: list[bool] = []

    def cached(source: object, workload: Workload, kind: str, pack_weights: bool) -> Graphs:
        packed.append(pack_weights)
        if workload.derived or workload.batch == 7:
            raise CaptureError("the model cannot be traced: [why]")
        return (EMPTY,) * workload.batch

    monkeypatch.setattr(graph_stream, "cached_capture", cached)
    monkeypatch.setattr(aside, "usable_cores", lambda: 1)
    asked = (prefill(1, 8), replace(prefill(1, 8), given="masked"), generate(1, 8), prefill(2, 8))
    assert [name for name, _ in Asked("llama", "cpu", find_source(), asked).graphs(current())] == [
        "prefill 1x8", "prefill 2x8 part 1", "prefill 2x8 part 2"
    ]
    assert "generate 1x8 is left out: the model cannot be traced: [why]" in capsys.readouterr().err
    with pytest.raises(CaptureError):
        Asked("llama", "cpu", find_source(), (prefill(7, 8),)).graphs()
    assert not any(packed)
    names = [name for name, _ in Asked("llama", "cpu", find_source(), asked[:1], pack_weights=True).graphs()]
    assert names == ["prefill 1x8 packed"] and packed[-1]
