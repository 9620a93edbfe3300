"""What the machine fails at (no room, no compiler that works) is said and is no verdict: nothing of it is stored."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples
from database_files import damage_pages
from fake_tuner import SUBJECT, tuner
from fast_tunes import count_instead_of_timing
from inline_executor import InlineExecutor
from search_fakes import FakeBackend

from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe import probe
from fuseplan.kernels.ir.backend import BuildError, Config, MachineError, Resources, Target
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.native import build
from fuseplan.kernels.native.build import Compiler, build_library
from fuseplan.planner.cli import main
from fuseplan.planner.partition.by_measurement import MeasuredRegion
from fuseplan.planner.partition.guided_loop import GuidedResult
from fuseplan.planner.tuning import session
from fuseplan.search.errors import MachineFailureError, NothingCompilesError
from fuseplan.search.store.database import Database
from fuseplan.search.workers.worker import WorkerPool

Run = Callable[..., tuple[int, str, str]]
SWIGLU = ("--pattern", "swiglu", "--shape", "3x8", "--device", "cpu", "--trials", "1", "--seconds", "0.1")


class Starved(FakeBackend):
    """Finds no room for anything that it compiles."""

    def prepare(self, ir: KernelIR, config: Config, target: Target) -> Resources:
        raise MachineError("fake: no space left on device")


def no_space() -> None:
    raise OSError(28, "No space left on device", "/full")


def wrong_kernel() -> None:
    raise BuildError("fake: syntax error")


@pytest.fixture
def db() -> Database:
    return Database("sqlite://")


def test_a_machine_that_fails_ends_the_tune_and_stores_nothing(db: Database) -> None:
    with pytest.raises(MachineFailureError, match=r"no space left on device; .*the same command goes on"):
        tuner(db, Starved()).tune(SUBJECT)
    assert not list(db.records()) and not db.trials(tuner(db).key(SUBJECT))
    assert tuner(db).tune(SUBJECT).fuse


def test_every_executor_tells_the_machines_failures_from_a_jobs() -> None:
    with WorkerPool(compilers=1) as pool:
        for executor in (InlineExecutor(), pool):
            assert executor.call(no_space, limit_s=60.0).of_machine
            assert not executor.call(wrong_kernel, limit_s=60.0).of_machine
            assert executor.call(wrong_kernel, limit_s=60.0).checked().failure


def all_fail(backend: FakeBackend) -> dict[str, str]:
    return {f"tile={tile},unroll={unroll}": "build" for tile in backend.tiles for unroll in backend.unrolls}


def test_where_nothing_compiles_there_is_no_verdict(db: Database) -> None:
    broken = FakeBackend(faults=all_fail(FakeBackend()))
    for attempt in ("tune", "screen"):
        with pytest.raises(NothingCompilesError, match=r"nothing has compiled in this tune .*syntax error"):
            getattr(tuner(db, broken), attempt)(SUBJECT)
    assert not list(db.records()) and not db.trials(tuner(db).key(SUBJECT))
    assert tuner(db).tune(SUBJECT).fuse  # a compiler that works again is asked again


def test_a_kernel_that_does_not_compile_where_others_do_is_not_fused(db: Database) -> None:
    class Some(FakeBackend):
        def prepare(self, ir: KernelIR, config: Config, target: Target) -> Resources:
            if ir.buffers[0].shape[0] == 5:
                raise BuildError("fake: five rows")
            return super().prepare(ir, config, target)

    resources = tuner(db, Some())
    assert resources.tune(SUBJECT).fuse
    record = resources.tune(replace(SUBJECT, key="five", rows=5))
    assert not record.fuse and "does not compile" in record.evidence.reason


# -- the C++ compiler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        ("kernel.cpp:1: error: expected ';'", BuildError),
        ("/tmp/x.s: fatal error: error writing: No space left on device", MachineError),
        ("g++: fatal error: Killed signal terminated program cc1plus", MachineError),
    ],
)
def test_a_compilers_complaint_is_about_the_kernel_or_the_machine(
    tmp_path: Path, says: str, kind: type[BuildError]
) -> None:
    script = tmp_path / "cc"
    script.write_text(f"#!/bin/sh\necho \"{says}\" >&2\nexit 1\n")
    script.chmod(0o700)
    with pytest.raises(kind) as caught:
        build_library("int x;", Compiler(str(script), "1", ()), tmp_path / "cache")
    assert type(caught.value) is kind


def test_a_compiler_that_is_gone_is_the_machines_failure(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be started"):
        build_library("int x;", Compiler(str(tmp_path / "gone"), "1", ()), tmp_path / "cache")


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning of a busy machine among those that are looked at."""
    monkeypatch.setattr(probe, "machine_load", lambda: probe.IDLE)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Commands whose tunes count in this process; :mod:`test_cli` has one that measures in worker processes."""
    count_instead_of_timing(monkeypatch)

    def run(*argv: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main.run([str(arg) for arg in argv])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database file that knows this machine's CPU."""
    path, identity = tmp_path / "tuning.db", current_identity("cpu")
    with Database(path) as database:
        spec = replace(samples.SPEC, identity=identity)
        database.put_device(identity.key(), json.loads(spec.to_json()))
    return path


def stored_in(path: Path) -> tuple[int, int]:
    with Database(path) as database:
        return len(list(database.records())), len(list(database.plans()))


def test_a_cache_folder_that_cannot_be_written(
    plan: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = tmp_path / "occupied"
    occupied.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    status, _, err = plan("tune", *SWIGLU, "--db", file)
    assert status == 1
    assert len(complaints(err)) == 1 and "cannot write the kernel cache" in err, err
    assert stored_in(file) == (0, 0)
    occupied.unlink()
    status, out, err = plan("tune", *SWIGLU, "--db", file)
    assert status == 0 and "measured" in out, err
    assert stored_in(file)[1] == 1


@pytest.fixture
def broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that passes for a compiler and then compiles no kernel."""
    real = next(path for path in map(shutil.which, build.COMPILER_NAMES) if path is not None)
    script = tmp_path / "bin" / build.COMPILER_NAMES[0]
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\ncase "$*" in *kernel.cpp*) echo "error: no luck" >&2; exit 1;; esac\n'
                      f'exec {real} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build._search.cache_clear()
    yield
    build._search.cache_clear()


def test_a_compiler_that_fails_on_kernels(plan: Run, file: Path, broken_compiler: None) -> None:
    status, _, err = plan("tune", *SWIGLU, "--db", file)
    assert status == 1
    assert "nothing has compiled in this tune" in err and "no luck" in err, err
    assert [line for line in err.splitlines() if line.startswith("plan: error: nothing compiles here")], err
    assert stored_in(file) == (0, 0)


def test_a_tune_sets_a_corrupt_database_aside(plan: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(samples.SPEC, identity=current_identity("cpu"))
    monkeypatch.setattr(session, "probe", lambda *_, **__: spec)
    damage_pages(file)
    status, _, err = plan("tune", *SWIGLU, "--db", file)
    assert status == 0 and "is corrupt" in err and "kept as" in err, err
    assert stored_in(file)[1] and list(file.parent.glob(f"{file.name}.corrupt-*"))


@pytest.mark.parametrize("created", ["2000-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"])
def test_again_measures_what_is_stored(plan: Run, file: Path, created: str) -> None:
    assert plan("tune", *SWIGLU, "--db", file)[0] == 0
    with Database(file) as database:  # as if long ago, or by a clock that is ahead, with an answer that is not true
        for record in list(database.records()):
            database.put_record(replace(record, fuse=False, evidence=replace(record.evidence, created=created)))
        for one in list(database.plans()):
            database.put_plan(replace(one, evidence=replace(one.evidence, created=created)))
    status, out, _ = plan("tune", *SWIGLU, "--db", file)
    assert status == 0 and "nothing was measured" in out
    status, out, err = plan("tune", *SWIGLU, "--db", file, "--again")
    assert status == 0 and "nothing was measured" not in out, err
    with Database(file) as database:
        assert all(record.evidence.created != created for record in database.records())
        assert all(one.evidence.created != created for one in database.plans())


def test_a_region_that_fails_costs_only_itself(plan: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MeasuredRegion.decide

    def decide(self: MeasuredRegion) -> GuidedResult:
        if self.prices.table.graph.op(self.problem.ops[0]).op == "aten.tanh.default":
            raise ZeroDivisionError("one op too few")
        return real(self)

    monkeypatch.setattr(MeasuredRegion, "decide", decide)
    count_instead_of_timing(monkeypatch)  # on a busy machine noise would hide answers, and be complained of
    toy = ("--module", "toy_models:two_regions", "--device", "cpu", "--db", file)
    status, out, err = plan("tune", *toy, "--trials", "1", "--seconds", "0.1")
    assert status == 0, err
    assert "tanh" in err and "ZeroDivisionError: one op too few" in err and len(complaints(err)) == 1
    assert "silu+mul 3x24 float32" in out and stored_in(file)[1] == 4  # one region with three parts
    monkeypatch.undo()
    for command in (("explain", *toy), ("report", *toy[2:])):
        assert plan(*command)[0] == 0


def complaints(err: str) -> list[str]:
    """The lines of standard error that do not say how far a command is."""
    return [line for line in err.strip().splitlines() if not re.match(r"plan: \[\d+ s\] ", line)]
