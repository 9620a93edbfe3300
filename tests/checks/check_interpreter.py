"""Every sample of a GPU kernel with every configuration, under Triton's interpreter against float64: minutes.

    python tests/checks/check_interpreter.py

pytest runs the same programs with one configuration of each sample, or two. Exits with status 1 where one is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from matmul_groups import is_right
from paths import SUPPORT


def rows(program: str, *arguments: str) -> list[dict[str, Any]]:
    """What a program says of each sample and configuration."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", str(SUPPORT / program), *arguments, "--all"]
        command = [folder if word == "FOLDER" else word for word in command]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SUPPORT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{program}: {done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def main() -> int:
    wrong, count = [], 0
    for backend in ("triton", "ninetoothed"):
        found = rows("interpret_kernels.py", backend, "FOLDER")
        wrong += [(backend, row) for row in found if not row["error"] <= 1.0]
        count += len(found)
    for which in ((), ("tiles",)):
        found = rows("interpret_matmuls.py", "FOLDER", *which)
        wrong += [("matmuls", row) for row in found if not is_right(row)]
        count += len(found)
    for what, row in wrong:
        print(what, json.dumps(row))
    print(f"{count} kernels, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
