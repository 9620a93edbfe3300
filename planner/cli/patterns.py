"""``plan patterns``: what ``--pattern`` may name."""

from __future__ import annotations

from fuseplan.planner.cli.common import print_frame


def patterns() -> None:
    """List the named patterns: small graphs that inference engines fuse by hand.

    Any of them can be tuned, explained and measured: plan tune --pattern swiglu --shape 32x4096.
    """
    import pandas as pd

    from fuseplan.planner.patterns.table import PATTERNS

    rows = [(name, found.summary, found.dims, found.example) for name, found in sorted(PATTERNS.items())]
    print_frame(pd.DataFrame(rows, columns=["pattern", "computes", "--shape is", "such as"]))
