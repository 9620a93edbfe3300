"""Compile beforehand, in parallel processes, what peers run in `plan bench patterns`.

    python tests/checks/compile_peers.py --device cuda                     # all sweeps
    python tests/checks/compile_peers.py --device cuda --pattern swiglu --rows 1,32 --peers inductor

TorchInductor and FlashInfer keep what they compile in their own caches on disk, where the bench finds it.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from compile_ahead import compile_ahead

from fuseplan.planner.patterns.cells import parse_sizes, sweep_cells
from fuseplan.planner.peers.peers import peer_names
from fuseplan.search.workers.worker import usable_cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--pattern", action="append", default=[], help="this pattern; repeatable")
    parser.add_argument("--rows", help="as in plan bench patterns")
    parser.add_argument("--cols")
    parser.add_argument("--dtype")
    parser.add_argument("--peers")
    parser.add_argument("--processes", type=int, default=usable_cores())
    options = parser.parse_args()
    sizes = parse_sizes(options.rows, "rows"), parse_sizes(options.cols, "cols")
    cells, _ = sweep_cells(options.pattern, *sizes, options.dtype)
    peers = peer_names(options.peers, options.device)
    with compile_ahead(options.device, peers, options.processes) as compile_cells:
        for pattern, group in groupby(cells, lambda cell: cell.pattern):
            print(pattern, flush=True)
            for failure in compile_cells(list(group)):
                print(f"    failed: {failure}", flush=True)


if __name__ == "__main__":
    main()
