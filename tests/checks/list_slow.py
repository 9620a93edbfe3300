"""Write ``tests/slow.txt``, the cases that ``make check`` leaves out, from the times of a whole run.

    make test                                       # on an idle machine; leaves build/tests.xml
    python tests/checks/list_slow.py build/tests.xml

A case is slow when it takes more than 0.3 s with its fixtures. A function is listed as a whole when at least half of
its cases are slow. The seconds also say which files parallel test runs begin with.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

MOST_S = 0.3
SLOW = Path(__file__).parents[1] / "slow.txt"


def times(report: Path) -> dict[str, float]:
    """Seconds of each case of a report in JUnit's format, by pytest's name for it."""
    return {
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": float(case.attrib["time"])
        for case in ET.parse(report).iter("testcase")
    }


def slow_rows(seconds: Mapping[str, float]) -> list[str]:
    """The lines of the list: seconds, and the name of a case or of a function."""
    functions: dict[str, dict[str, float]] = {}
    for case, taken in seconds.items():
        functions.setdefault(case.partition("[")[0], {})[case] = taken
    found = {}
    for function, cases in functions.items():
        slow = {case: taken for case, taken in cases.items() if taken > MOST_S}
        found |= {function: sum(cases.values())} if 2 * len(slow) >= len(cases) else slow
    return [f"{taken:.1f} {name}" for name, taken in sorted(found.items())]


if __name__ == "__main__":
    SLOW.write_text("".join(f"{row}\n" for row in slow_rows(times(Path(sys.argv[1])))))
