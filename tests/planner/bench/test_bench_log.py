"""The file that the pattern bench writes as it goes on."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from bench_samples import row

from fuseplan.planner.bench.patterns import RowLog
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.peers.contestant import EAGER, OURS


def test_rows_are_in_the_file_as_soon_as_they_are_added(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cells.csv"
    log = RowLog(path)
    log.add([row("1x8", OURS, 2.0), row("1x8", EAGER, None, note="no, \"never\"")])
    assert pd.read_csv(path)["contestant"].tolist() == [OURS, EAGER]
    log.add([])
    log.add([row("3x8", OURS, None)])
    assert len(pd.read_csv(path)) == 3
    assert log.has("swiglu 1x8") and not log.has("swiglu 3x8") and not log.has("swiglu 9x8")
    resumed = RowLog(path, resume=True)
    assert resumed.has("swiglu 1x8")
    pd.testing.assert_frame_equal(resumed.frame, log.frame, check_dtype=False)
    resumed.add([row("3x8", OURS, 4.0)])  # it had failed before
    assert pd.read_csv(path)["median_us"].tolist()[-1] == 4.0 and len(pd.read_csv(path)) == 3
    assert len(RowLog(path).frame) == 0 and len(pd.read_csv(path)) == 0


def test_another_versions_file_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="other columns"):
        RowLog(path, resume=True)
    path.write_text("")
    with pytest.raises(ConfigError, match="no result file"):
        RowLog(path, resume=True)
