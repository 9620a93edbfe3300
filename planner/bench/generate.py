"""Hugging Face's ``generate()`` end to end: eager, what it compiles by itself, and our back end through its door.

Contestants take turns in one process, round by round.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import pandas as pd
import torch

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.bench.generation import (
    OURS_LAUNCHED,
    Generation,
    Sizes,
    TokenTimer,
    first_difference,
    how_compiled,
    step_bytes,
)
from fuseplan.planner.bench.model import dispatch_note
from fuseplan.planner.bench.rows import BenchRow, Race, failure
from fuseplan.planner.dispatch_stats import reset_stats, stats, total
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE, OURS
from fuseplan.planner.peers.peers import without_chatter
from fuseplan.planner.tuning.session import Session, stored_spec
from fuseplan.search import policy
from fuseplan.search.timing.timers import Run

#: Tokens of a call that are as eager's.
SAME = "as eager's"
#: What stands below the table.
LEGEND = (
    "Times are medians over interleaved rounds. `ms_token` is that of a decode step, between its 20th and 80th "
    "percentile: a call of all tokens less one of the first, by the steps in between. `vs_inductor` is the time of "
    "what Hugging Face compiles by itself over it, `x_floor` how many times reading the weights it takes. `first_ms` "
    "is a call that makes one token."
)


@dataclass(frozen=True)
class GenerateRow(BenchRow):
    """One contestant's ``generate()``; ``median_us`` and its percentiles are of a decode step.

    Attributes:
        first_us: Median time of a call that makes one token, where everything is compiled.
        floor_us: Time to read the weights that every step reads, at the device's measured bandwidth.
        tokens: ``"as eager's"``, or the first that is another one.
    """

    first_us: float | None = None
    floor_us: float | None = None
    tokens: str = ""


def dispatch_options(session: Session) -> dict[str, Any]:
    """What our back end is told, besides whether to record CUDA graphs."""
    return {
        "db": session.database.url.render_as_string(hide_password=False), "numerics": session.settings.numerics,
    }


def floor_us(session: Session, module: Any) -> float | None:
    """Microseconds to read once what every decode step reads, at measured bandwidth.

    None where the device was not probed, here or where shipped records come from, or where tokens choose the weights.
    """
    spec, moved = session.spec or stored_spec(session.store, session.device), step_bytes(module)
    return None if spec is None or moved is None else moved / spec.bandwidth.gbps(moved) / 1e3


def bench_generate(
    session: Session, module: Any, sizes: Sizes, names: Sequence[str], seconds: float
) -> list[GenerateRow]:
    """Rows of one batch size in interleaved rounds. A contestant that fails gets a row that says why.

    Nothing that was compiled before is kept: a second batch size would make sizes dynamic for everyone. Whatever a call
    does again is in its times, such as recording CUDA graphs anew for a cache that lies elsewhere.
    """
    common: dict[str, Any] = {"workload": sizes.label, "subject": "generate", "key": sizes.label}
    forget(session.target.device_type)
    race, entered = Race(GenerateRow, **common, floor_us=floor_us(session, module)), dict[str, Generation]()
    expected: list[torch.Tensor] = []
    compiled: dict[str, slice] = {}  # which of the graphs that went through our back end are whose
    reset_stats()

    def make(name: str) -> tuple[Run, Mapping[str, Any]]:
        how = how_compiled(name, session.target.device_type, dispatch_options(session))
        run, before = Generation(name, module, sizes, how), len(stats().compiles)
        with without_chatter() if name == MAX_AUTOTUNE else nullcontext():
            tokens = run()
        if name == EAGER:
            expected.append(tokens)
        entered[name] = run
        if name in (OURS, OURS_LAUNCHED):
            compiled[name] = slice(before, len(stats().compiles))
        return run, {"tokens": _comparison(tokens, expected)}

    # Dynamo counts everybody's graphs of one function together, and would leave those of the last uncompiled.
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit * len(names)):
        for name in names:
            race.enter(name, partial(make, name))
        try:
            timer = TokenTimer(session.target.device_type)
            # Eager's calls take longest, so the noise is that of ours.
            rows = race.rows(timer, [()], seconds, twice=OURS, min_rounds=policy.TOKEN_ROUNDS)
        except Exception as error:  # such as a device without the memory: the other sizes fit
            return [GenerateRow(contestant=name, mode="eager", note=failure(error), **common) for name in names]
        # Not before the rounds are over: a kernel may fail, and a moved cache be recorded anew, in any of them.
        notes = {name: dispatch_note(total(stats().compiles[graphs])) for name, graphs in compiled.items()}
        first_us = {name: median(run.first_us) for name, run in entered.items() if run.first_us}
        return [
            replace(_noted(row, notes.get(row.contestant, "")), first_us=first_us.get(row.contestant)) for row in rows
        ]


def _comparison(tokens: torch.Tensor, expected: Sequence[torch.Tensor]) -> str:
    if not expected:
        return ""
    at = first_difference(tokens, expected[0])
    return SAME if at is None else f"another from token {at} on"


def _noted(row: GenerateRow, note: str) -> GenerateRow:
    return replace(row, note="; ".join(filter(None, (row.note, note))))


def forget(device_type: str) -> None:
    """Drop what was compiled, and give back the memory of what nobody holds any more."""
    torch._dynamo.reset()
    gc.collect()
    if is_gpu(device_type):
        torch.cuda.empty_cache()


def generate_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A line per workload and contestant, in milliseconds a token.

    ``vs_inductor`` is the time of Hugging Face's own default over this one's, ``x_floor`` this one over the time to
    read the weights. Columns that nobody has are left out.
    """
    default = frame[frame["contestant"] == INDUCTOR].set_index("workload")["median_us"]
    table = pd.DataFrame({
        "workload": frame["workload"],
        "contestant": frame["contestant"],
        "ms_token": frame["median_us"] / 1e3,
        "p20": frame["p20_us"] / 1e3,
        "p80": frame["p80_us"] / 1e3,
        "rounds": frame["rounds"],
        "vs_inductor": frame["workload"].map(default) / frame["median_us"],
        "x_floor": frame["median_us"] / frame["floor_us"],
        "first_ms": frame["first_us"] / 1e3,
        "tokens": frame["tokens"],
    })
    return table.dropna(axis="columns", how="all")


def generate_verdict(frame: pd.DataFrame) -> list[str]:
    """Sentences: ours beside the others, the floor, and what is to be known of single rows."""
    lines = []
    for workload, rows in frame.groupby("workload", sort=False):
        times = rows.set_index("contestant")["median_us"].dropna()
        floor_ms = rows["floor_us"].max() / 1e3
        if floor_ms > 0:
            lines.append(f"{workload}: reading the weights takes {floor_ms:.3g} ms a token at measured bandwidth")
        for name in (OURS, OURS_LAUNCHED):
            others = [f"{times[one] / times[name]:.2f}x {one}" for one in times.index if name in times and one != name]
            lines += [f"{workload}: {name} is {', '.join(others)}"] if others else []
    noted = frame[frame["note"] != ""].to_dict("records")
    return lines + [f"{row['contestant']}, {row['workload']}: {row['note']}" for row in noted]
