"""Cases that die cost themselves alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial

from batches import Outcome, answers, in_batches, worker

CODE = """
import os, sys
for case in range(int(sys.argv[1]), int(sys.argv[2])):
    if case in (3, 8): os.abort()
    print(f'{{"case": {case}}}', flush=True)
"""


def batch(limit_s: float, first: int, end: int) -> Iterator[Outcome]:
    return answers(
        first, end, lambda *bounds: worker([sys.executable, "-c", CODE, *map(str, bounds)], os.environ, limit_s),
        lambda case, how: {"case": case, "how": how},
    )


def test_every_case_has_one_outcome_in_order() -> None:
    found = list(in_batches(range(1, 10), 4, 3, partial(batch, 1e6)))
    assert [one["case"] for one in found] == list(range(1, 10))
    died = "the process died with status -6: no message"
    assert {one["case"]: one["how"] for one in found if "how" in one} == {3: died, 8: died}


def test_a_batch_that_hangs_costs_its_cases_alone() -> None:
    found = list(in_batches(range(5, 7), 1, 1, partial(batch, 0)))
    assert [one["how"] for one in found] == ["no answer within 0 s"] * 2
