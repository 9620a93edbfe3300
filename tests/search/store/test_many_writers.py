"""Many processes that write to one database, or take leases from it, at once: nothing is lost, nobody sees an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_64_processes_lose_nothing(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    where = str(tmp_path / "tuning.db") if kind == "sqlite" else request.getfixturevalue("server").url()
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "many_writers.py"), where], capture_output=True, text=True, check=False,
        timeout=600, env=os.environ | {"PYTHONWARNINGS": "error::UserWarning"},
    )
    print(done.stdout)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_processes_that_take_keys_in_any_order(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    where = str(tmp_path / "tuning.db") if kind == "sqlite" else request.getfixturevalue("server").url()
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "many_leases.py"), where, "8", "6"], capture_output=True, text=True,
        check=False, timeout=600, env=os.environ | {"PYTHONWARNINGS": "error::UserWarning"},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
