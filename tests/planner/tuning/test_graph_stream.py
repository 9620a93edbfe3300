"""Graphs come in order, captured in processes of their own where there are cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from model_samples import write_config
from worker_jobs import wait_for

from fuseplan.planner.api.request import Asked
from fuseplan.planner.capture.cache import cached_capture
from fuseplan.planner.capture.trace import Graphs
from fuseplan.planner.cli.output.options import current
from fuseplan.planner.errors import CaptureError, ConfigError
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.models.sources import find_source
from fuseplan.planner.models.workload import Workload, decode, generate, prefill
from fuseplan.planner.tuning import graph_stream
from fuseplan.planner.tuning.graph_stream import GraphStream

DECODE, PREFILL = decode(2, 16), prefill(1, 8)
EMPTY = DataflowGraph([], {}, [], [])


def interrupt(processes: set[BaseProcess]) -> None:
    """As a terminal's Ctrl-C, whatever they are at. Until Python has begun, it would end them without a word."""

    def minds(process: BaseProcess) -> bool:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        masks = [line.split()[1] for line in lines if line.startswith(("SigBlk:", "SigCgt:"))]
        return any(int(one, 16) & (1 << (signal.SIGINT - 1)) for one in masks)

    for process in processes:
        wait_for(lambda process=process: minds(process))  # type: ignore[misc]
        os.kill(process.pid or 0, signal.SIGINT)


def test_captures_beside_each_other_are_the_captures_and_silent_when_interrupted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find_source(config=write_config(tmp_path, "llama"), layers=1)
    impossible = Workload("forward")
    folders = [tmp_path / name / "fuseplan" / "captures" for name in ("beside", "alone")]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "beside"))
    monkeypatch.setattr(graph_stream, "usable_cores", lambda: 1)
    with GraphStream(source, [DECODE], "cpu") as stream:
        assert stream.ready() == [] and not folders[0].exists()  # one core: it waits until somebody asks
    monkeypatch.setattr(graph_stream, "usable_cores", lambda: 4)
    before = set(multiprocessing.active_children())
    mine = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with GraphStream(source, [DECODE, PREFILL, impossible], "cpu") as stream:
        names = []
        interrupt(set(multiprocessing.active_children()) - before)
        with pytest.raises(ConfigError, match="runs in decode or prefill"):
            for name, _ in stream:
                names.append(name)
                interrupt(set(multiprocessing.active_children()) - before)
    signal.signal(signal.SIGINT, mine)
    assert "Traceback" not in capfd.readouterr().err
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
    monkeypatch.setattr(graph_stream, "usable_cores", lambda: 4)
    source = find_source(config=write_config(tmp_path, "llama"), layers=1)
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt), GraphStream(source, [DECODE, PREFILL], "cpu"):
        assert len(set(multiprocessing.active_children()) - before) == 2
        raise KeyboardInterrupt
    assert set(multiprocessing.active_children()) <= before


def test_what_is_not_there_yet_holds_back_what_comes_after_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there: set[Workload] = set()

    class Pool:
        def __init__(self, *args: object, **kwargs: object) -> None: ...

        def submit(self, function: object, source: object, workload: Workload, *rest: object) -> Any:
            class Job:
                def done(self) -> bool:
                    return workload in there

            return Job()

        def shutdown(self, **how: object) -> None: ...

    def wait_for(jobs: Sequence[Any]) -> None:
        there.add(DECODE)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(graph_stream, "usable_cores", lambda: 4)
    monkeypatch.setattr(graph_stream, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(graph_stream, "wait", wait_for)
    monkeypatch.setattr(graph_stream, "cached_capture", lambda source, one, *rest: (EMPTY,))
    with GraphStream(find_source(), [DECODE, PREFILL], "cpu") as stream:
        there.add(PREFILL)
        assert stream.ready() == [] and stream.waiting == DECODE.label
        assert stream.take() == [(DECODE.label, EMPTY)]
        assert stream.ready() == [(PREFILL.label, EMPTY)] and stream.waiting == ""


def test_the_first_workload_can_be_captured_before_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    captured = list[Workload]()

    def capture(source: object, workload: Workload, *rest: object) -> Graphs:
        captured.append(workload)
        return (EMPTY,)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(graph_stream, "usable_cores", lambda: 1)
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
    monkeypatch.setattr(graph_stream, "usable_cores", lambda: 1)
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
