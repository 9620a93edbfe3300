"""Many processes that write to one database at once: nothing is lost, and nobody sees an error."""

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
