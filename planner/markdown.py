"""Tables as GitHub shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fuseplan.search.errors import plain


def markdown_text(columns: Iterable[str], rows: Iterable[Sequence[Any]], numeric: Sequence[bool]) -> str:
    """A GitHub-flavoured Markdown table; numbers to the right with three decimals, ``|`` escaped."""
    lines = [
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join("---:" if right else "---" for right in numeric) + " |",
    ]
    lines += ["| " + " | ".join(map(_markdown_cell, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _markdown_cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 1e6 else f"{value:.4g}"
    return plain(str(value)).replace("|", "\\|").replace("<", "&lt;")
