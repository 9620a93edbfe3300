"""Gains over eager that are often quoted, beside ours: the cells, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd

from fuseplan.planner.bench.rows import median_table
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE, OURS

#: By pattern, shape and dtype, what it is said to gain over eager.
CLAIMS: Mapping[tuple[str, str, str], str] = MappingProxyType({
    ("pointwise_chain", "1024x1024", "float32"): "claimed 4.71x",
    ("sin_chain", "10000000", "float32"): "claimed 2.89x",
    ("swiglu", "32x4096", "bfloat16"): "target 2.5x",
    ("add_rms_norm", "32x4096", "bfloat16"): "target 2.4x",
})


def headline_table(frame: pd.DataFrame, claims: Mapping[str, str]) -> pd.DataFrame:
    """One line per cell and mode: gains of ours and of TorchInductor over eager; ``claims`` are by cell key."""
    rivals = [name for name in (INDUCTOR, MAX_AUTOTUNE) if name in set(frame["contestant"])]
    cells = ["subject", "workload", "mode", "key"]
    times = median_table(frame, cells).reset_index()
    table = times[cells].rename(columns={"subject": "pattern", "workload": "shape"})
    table["said"] = table.pop("key").map(claims).fillna("")
    for name in (OURS, *rivals):
        table[f"{name}_x"] = times[EAGER] / times[name] if EAGER in times else None
    for name in (EAGER, OURS, *rivals):
        table[f"{name}_us"] = times.get(name)
    return table
