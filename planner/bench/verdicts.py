"""What the rows of a pattern bench say: one line per cell and mode, and sentences that answer the bars."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd

from fuseplan.planner.bench.patterns import COPY, LARGE_BYTES
from fuseplan.planner.bench.rows import median_table
from fuseplan.planner.peers.contestant import OURS
from fuseplan.planner.reports.frames import geometric_mean
from fuseplan.search.errors import counted

#: A cell this far behind the best peer is listed.
LOST = 0.97
#: Share of copy bandwidth that large cells should have.
_COPY_SHARE = 0.94


def pattern_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One line per cell and mode: everyone's median, the best peer, what ours moves per second.

    ``vs_best`` is the best peer's time over ours. ``copy_share`` is the time of a copy of as many bytes over ours. In
    CUDA graphs the fastest copy of any mode counts, since graphs copy some sizes at two thirds of the speed.
    """
    cells = ["subject", "workload", "mode", "key"]
    times = median_table(frame, cells).assign(**{} if COPY in set(frame["contestant"]) else {COPY: math.nan})
    ours, copy_us = times[OURS] if OURS in times else times[COPY] * math.nan, times.pop(COPY)
    copy_us = copy_us.mask(times.index.get_level_values("mode") == "graph", copy_us.groupby("key").transform("min"))
    peers = times.drop(columns=OURS, errors="ignore")
    best = [str(row.idxmin()) if row.notna().any() else "" for _, row in peers.iterrows()]
    moved_bytes = frame.groupby(cells)["bytes"].max().reindex(times.index)
    times = times[sorted(times, key=lambda name: name != OURS)].add_suffix("_us")
    table = times.assign(best_peer=best, vs_best=peers.min(axis=1) / ours, mb=moved_bytes / 1e6,
                         gbps=moved_bytes / ours / 1e3, copy_share=copy_us / ours)
    table = table.rename_axis(columns=None).reset_index().drop(columns="key")
    return table.rename(columns={"subject": "pattern", "workload": "shape"})


def pattern_verdict(frame: pd.DataFrame) -> list[str]:
    """Sentences: ours against the best peer in each mode and pattern, every lost cell, large cells against a copy."""
    if frame.empty:
        return []
    table = pattern_table(frame)
    lines: list[str] = []
    for mode, judged in table[table["vs_best"].notna()].groupby("mode", sort=False):
        ratios = judged["vs_best"]
        cells = counted(len(judged), "cell")
        lines.append(f"{mode}: {geometric_mean(ratios):.3f}x the best peer (geometric mean of {cells}), worst "
                     f"{ratios.min():.2f}x; {(ratios < LOST).sum()} under {LOST:.2f}x")
        for name, one in judged.groupby("pattern", sort=False)["vs_best"]:
            cells = counted(len(one), "cell")
            lines.append(f"{mode}, {name}: {geometric_mean(one):.3f}x ({cells}), worst {one.min():.2f}x")
        share = judged.loc[judged["mb"] >= LARGE_BYTES / 1e6, "copy_share"].dropna()
        if len(share):
            moving = counted(len(share), "cell moves", "cells move")
            lines.append(
                f"{mode}: {moving} {LARGE_BYTES / 1e6:.0f} MB or more, at {share.min():.1%} to "
                f"{share.max():.1%} of a copy's bandwidth; {(share < _COPY_SHARE).sum()} under {_COPY_SHARE:.0%}"
            )
    return lines + _losses(frame, table)


def _losses(frame: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Every lost cell with what explains it; times with their 20th and 80th percentile."""
    timed = frame[frame["median_us"].notna()].to_dict("records")
    facts = {(row["subject"], row["workload"], row["mode"], row["contestant"]): row for row in timed}
    lines = []
    for row in table[table["vs_best"] < LOST].to_dict("records"):
        cell = (row["pattern"], row["shape"], row["mode"])
        own, peer = facts[*cell, OURS], facts[*cell, row["best_peer"]]
        words = [f"{row['mb']:.2f} MB at {row['gbps']:.0f} GB/s", counted(int(own["kernels"]), "kernel")]
        words += [f"{own['registers']} registers"] if own["registers"] else []
        words += [own["config"]] if own["config"] else []
        lines.append(
            f"lost: {row['mode']}, {row['pattern']} {row['shape']}: {row['vs_best']:.2f}x {row['best_peer']} ("
            f"{_spread(own)} against {_spread(peer)} us, noise {own['noise']:.1%}); {', '.join(words)}"
        )
    return lines


def _spread(row: Mapping[Hashable, Any]) -> str:
    known = pd.notna(row["p20_us"]) and pd.notna(row["p80_us"])
    return f"{row['median_us']:.2f}" + (f" [{row['p20_us']:.2f} to {row['p80_us']:.2f}]" if known else "")


def notes(frame: pd.DataFrame) -> list[str]:
    """What was special about each contestant, once for each pattern."""
    said = frame[frame["note"].astype(bool)]
    lines = []
    for (contestant, subject, note), part in said.groupby(["contestant", "subject", "note"], sort=False):
        sizes = list(dict.fromkeys(part["workload"]))
        where = sizes[0] if len(sizes) == 1 else counted(len(sizes), "size")
        lines.append(f"{contestant}, {subject} ({where}): {note}")
    return lines
