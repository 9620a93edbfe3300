"""300 mutated databases; ``check_database.py`` has more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1800)
def test_no_mutated_database_breaks_anything() -> None:
    command = [sys.executable, str(Path(__file__).parent / "check_database.py"), "--count", "300"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "300 mutated databases" in done.stdout and " 0 failed" in done.stdout
