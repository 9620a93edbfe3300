"""``plan env``: what a bug report needs, whatever is broken, and nothing private."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import report_samples as samples

from fuseplan.costmodel.identity import current_identity
from fuseplan.planner.cli import main

Found = Callable[..., dict[str, object]]


@pytest.fixture
def found(capsys: pytest.CaptureFixture[str]) -> Found:
    def run(*argv: str | Path) -> dict[str, object]:
        capsys.readouterr()
        status = main.run(["env", "--device", "cpu", "--format", "json", *map(str, argv)])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        facts = json.loads(captured.out)["environment"]
        assert isinstance(facts, dict)
        return facts

    return run


def test_versions_device_and_what_the_database_holds(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.db"
    samples.sample_database(path).close()
    facts = found("--db", path)
    assert facts["fuseplan"] == metadata.version("fuseplan") and facts["torch"] == metadata.version("torch")
    assert facts["device key"] == current_identity("cpu").key()
    assert facts["plans of this device"] == 0  # they are another device's
    other = SimpleNamespace(name="a sample", is_gpu=False, cores=2, l2_bytes=2**20, key=lambda: samples.DEVICE)
    monkeypatch.setattr("fuseplan.costmodel.identity.current_identity", lambda kind: other)
    facts = found("--db", path)
    assert (facts["plans of this device"], facts["records of this device"], facts["misses of this device"]) == (3, 3, 1)
    assert facts["probe of this device"] == samples.SPEC.measured_at


def test_it_never_fails_because_one_part_does(found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("the driver is gone\nand more")

    whole = found("--db", tmp_path / "none.db")
    path = tmp_path / "tuning.db"
    path.write_bytes(b"SQLite format 3\0" + b"junk" * 500)
    for name in ("costmodel.identity.current_identity", "kernels.native.build.required_compiler",
                 "search.store.layered.shipped_files", "search.store.record.Versions.current",
                 "planner.cli.machine.backend_rows"):
        monkeypatch.setattr(f"fuseplan.{name}", broken)
    monkeypatch.setattr("platformdirs.user_cache_dir", broken)
    monkeypatch.setattr("importlib.metadata.version", broken)
    facts = found("--db", path)
    assert {name for name in whole if not name.startswith("back end") and " of this" not in name} <= facts.keys()
    assert "not known" in str(facts["database"])
    assert all("\n" not in str(value) for value in facts.values())
    assert "the driver is gone" in str(facts["driver"]) and "python" in facts
    assert path.read_bytes().endswith(b"junk")


def test_nothing_private_is_shown(found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = json.dumps(found("--db", tmp_path / "folder" / "tuning.db"))
    assert str(tmp_path) not in text and "~/folder/tuning.db" in text
    text = json.dumps(found("--db", "postgresql://ann:secret@127.0.0.1:1/mine"))
    assert "secret" not in text and "127.0.0.1" not in text and "postgresql server" in text


def test_people_get_a_line_for_each(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.run(["env", "--device", "cpu", "--db", str(tmp_path / "none.db")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 15 and all(": " in line for line in lines)
