"""30 mutated databases; ``check_database.py`` has more."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from database_mutations import DATABASES, EXPORTS, Canary, change_schema
from paths import CHECKS
from report_samples import sample_database


def test_one_change_to_a_schema_may_stand_in_the_way_of_another(tmp_path: Path) -> None:
    """In these seeds the table is gone, its column has another name, or a trigger stops the update."""
    for seed in (345, 576, 152):
        path = tmp_path / f"{seed}.db"
        with sample_database(path):
            pass
        change_schema(random.Random(seed), path, Canary(tmp_path / "executed"))


@pytest.mark.timeout(1800)
def test_no_mutated_database_breaks_anything() -> None:
    """Each mutation at least once, and in case 300 commands in processes of their own. One process runs all cases:
    each that is started imports PyTorch.
    """
    arguments = ["--seed", "296", "--count", "30", "--jobs", "1"]
    command = [sys.executable, str(CHECKS / "check_database.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "30 mutated databases" in done.stdout and " 0 failed" in done.stdout
    counted = [line[:16].strip() for line in done.stdout.splitlines()]
    assert (DATABASES.keys() | EXPORTS.keys()) <= set(counted), "there is a mutation that no case tries"
