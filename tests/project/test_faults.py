"""One of each of two faults of ``check_faults.py``: a kill at a random moment, and a compiler that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_faults import TUNE, attempt, template


@pytest.mark.parametrize("name", ["kill", "failing compiler"])
def test_a_fault_loses_nothing_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    _, wrong = attempt(name, tmp_path / "place", template(tmp_path), TUNE.split(), 0)
    assert wrong == []
