"""The columns that ``docs/report.md`` explains, by the frame that they are of."""

from __future__ import annotations

import re

from paths import ROOT

#: What the table of columns that several frames have is called there.
COMMON = "Column"


def explained(frame: str) -> set[str]:
    """Columns of a frame, by its name in the head of a table; those that several frames have are among them."""
    section = (ROOT / "docs" / "report.md").read_text().partition("\n## Columns\n")[2]
    found = set[str]()
    for table in re.split(r"\n\n", section):
        head, *rows = table.strip().splitlines()
        of = head.strip("| ").partition(" | ")[0]
        if of == COMMON or f"`{frame}`" in of:
            found.update(name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0]))
    return found
