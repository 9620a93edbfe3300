"""Which shared libraries this process has in its memory."""

from __future__ import annotations

from pathlib import Path


def mapped(folder: Path) -> set[str]:
    """Names of the libraries below a folder that are mapped (Linux)."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if len(line.split(maxsplit=5)) == 6}
    return {path.name for path in paths if path.is_relative_to(folder) and ".so" in path.suffixes}
