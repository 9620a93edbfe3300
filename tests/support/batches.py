"""Numbered cases in batches, each batch in a process of its own: a crash costs one case, and memory is given back."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

#: The answer of one case, as plain data.
Outcome = dict[str, Any]


def in_batches(cases: range, size: int, jobs: int, batch: Callable[[int, int], Iterator[Outcome]]) -> Iterator[Outcome]:
    """The outcomes of all cases, in order, ``jobs`` batches of ``size`` cases running at a time."""
    bounds = [(at, min(at + size, cases.stop)) for at in range(cases.start, cases.stop, size)]
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda one: list(batch(*one)), bounds):
            yield from found


def worker(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[str, str]:
    """What a process wrote, and how it ended if not all of its cases are answered."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment, check=False)
    except subprocess.TimeoutExpired as error:
        held = error.stdout or b""
        return held.decode() if isinstance(held, bytes) else held, f"no answer within {limit_s} s"
    last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
    return ran.stdout, f"the process died with status {ran.returncode}: {last}"


def answers(
    first: int, end: int, run: Callable[[int, int], tuple[str, str]], died: Callable[[int, str], Outcome]
) -> Iterator[Outcome]:
    """Outcomes of the cases ``first .. end - 1``.

    Args:
        first: The first case.
        end: After the last one.
        run: Runs the cases ``first .. end - 1`` in a process, which writes a line of JSON for each (:func:`worker`).
        died: The outcome of a case at which a process ended in this way; the next process begins after it.
    """
    while first < end:
        output, how = run(first, end)
        for line in output.splitlines():
            if line.startswith("{"):
                yield json.loads(line)
                first += 1
        if first < end:
            yield died(first, how)
            first += 1
