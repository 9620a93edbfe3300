"""The cost model against its bars, on kernels and shapes left out of the fit, from what a database has stored.

Nothing is measured. ``--out`` writes every measured choice with its work and its predictions, so that a refit needs no
device.

    python tests/checks/check_accuracy.py --device h200 --regime graph --out results/nvidia-h200/llama-graph-samples.csv
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from held_out import SPLITS, load_samples, phases, regret_frame, sample_frame, verdict_frame

from fuseplan.planner.api.report import open_layers, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", help="tuning database; default: the user's own")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or a part of the name of a device with records")
    parser.add_argument("--regime", choices=("eager", "graph"))
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, help="CSV of all samples")
    options = parser.parse_args()
    data = report(options.model, device=options.device, regime=options.regime, db=options.db).data
    if data.spec is None:
        sys.exit("this device was never probed, so nothing can be predicted; run `plan probe`")
    database, _ = open_layers(options.db, options.device)
    regions = [one for one in load_samples(database, data.device, options.regime) if one.key in data.plans]
    frame = sample_frame(regions, data.spec, phases(data))
    print(verdict_frame(regions, frame).to_string(index=False))
    for column, what in SPLITS.items():
        print(f"\nFollowing the model, {what} left out of the fit")
        print(regret_frame(regions, frame, column).drop(columns="key").to_string(index=False))
    if options.out is not None:
        frame.to_csv(options.out, index=False)


if __name__ == "__main__":
    main()
