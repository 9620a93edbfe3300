"""What ``check_checks.py`` plants, and one of its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from check_checks import judged, misplaced, planted
from list_slow import slow_rows, times
from planted_bugs import BUGS

#: A row whose check takes seconds.
QUICK = "the dtype is no part of a workload's key"


def test_every_bug_has_its_place_in_the_code() -> None:
    assert misplaced(BUGS) == []
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 20
    assert len({bug.file for bug in BUGS}) >= 12, "bugs of many kinds"


def test_what_cannot_be_planted_is_said() -> None:
    (bug,) = [one for one in BUGS if one.name == QUICK]
    assert "stands 0 times" in misplaced([replace(bug, old="no such text")])[0]
    assert misplaced([replace(bug, new="def (")]) != []
    with pytest.raises(ValueError, match="stands 2 times"):
        planted(bug.old * 2, bug)


@pytest.mark.uncovered
@pytest.mark.timeout(900)
def test_planted_bugs_are_noticed_and_harmless_ones_are_not(tmp_path: Path) -> None:
    (bug,) = [bug for bug in BUGS if bug.name == QUICK]
    harmless = replace(bug, name="no bug", new=bug.old)
    found = {name: verdict for name, _, _, verdict, _ in judged([bug, harmless], 1, tmp_path)}
    assert found == {"(none)": "passes", "no bug": "NOT", QUICK: "noticed"}


def test_slow_cases_are_listed_one_by_one_where_most_of_a_function_is_quick(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    taken = {"one": 0.1, "all[a]": 2.0, "all[b c]": 0.5, "all[d]": 0.2, "few[a]": 0.2, "few[b]": 0.2, "few[c]": 1.0}
    cases = (f'<testcase classname="tests.room.test_it" name="test_{name}" time="{s}"/>' for name, s in taken.items())
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert slow_rows(times(report)) == ["2.7 tests/room/test_it.py::test_all", "1.0 tests/room/test_it.py::test_few[c]"]
