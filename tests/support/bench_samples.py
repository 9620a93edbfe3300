"""A session on this CPU, the case of a cell, and a row as the pattern bench writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import report_samples as samples

from fuseplan.planner.bench.patterns import PatternRow, plan_case
from fuseplan.planner.patterns.cells import cell
from fuseplan.planner.peers.contestant import Case
from fuseplan.planner.tuning.session import Session, open_session


def cpu_session(folder: Path) -> Session:
    """A session whose database, in ``folder``, has a hand-made spec for this CPU."""
    path = folder / "tuning.db"
    samples.known_machine(path)
    return open_session("cpu", path)


def case_of(session: Session, name: str, shape: str, dtype: str = "float32") -> Case:
    return plan_case(session, cell(name, shape, dtype))[0]


def row(shape: str, contestant: str, median_us: float | None, mode: str = "cold", **more: Any) -> PatternRow:
    return PatternRow(
        shape, "swiglu", contestant, mode, median_us, noise=0.01, key=f"swiglu {shape}", **{"bytes": 2e6, **more}
    )
