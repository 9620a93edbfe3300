"""The cost model against its bars, on kernels and shapes left out of the fit, from the stored plans of a model.

Nothing is measured; the model is captured again. ``--out`` writes every measured choice with its work and its
predictions, so that a refit needs no device.

    python tests/checks/check_accuracy.py --model llama-3.1-8b --device h200 --regime graph --out samples.csv
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from held_out import SPLITS, phases, regret_frame, sample_frame, stored_samples, verdict_frame

from fuseplan.costmodel.devices import is_cpu, kind_of_key
from fuseplan.kernels.ir.backend import SM90
from fuseplan.kernels.registry import local_target
from fuseplan.planner.api.report import open_layers, report
from fuseplan.planner.api.request import asked_for
from fuseplan.planner.models.manifest import ModelArguments
from fuseplan.planner.tuning.session import session_on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", help="tuning database; default: the user's own")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or a part of the name of a device with records")
    parser.add_argument("--regime", choices=("eager", "graph"), default="eager")
    parser.add_argument("--model", help="a preset; its layers, and sizes as `plan tune` takes them")
    parser.add_argument("--layers", type=int)
    for name in ("decode", "prefill"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--kv-len", type=int)
    parser.add_argument("--out", type=Path, help="CSV of all samples")
    options = parser.parse_args()
    data = report(options.model, device=options.device, regime=options.regime, db=options.db).data
    if data.spec is None:
        sys.exit("this device was never probed, so nothing can be predicted; run `plan probe`")
    database, key = open_layers(options.db, options.device)
    kind = kind_of_key(key)
    asked = asked_for(kind, ModelArguments(
        options.model, decode=options.decode, kv_len=options.kv_len, prefill=options.prefill, layers=options.layers,
        regime=options.regime))
    session = session_on(key, local_target(kind) if is_cpu(kind) else SM90, database.user, asked.settings)
    regions = stored_samples(session.dispatcher(), [graph for _, graph in asked.graphs()])
    frame = sample_frame(regions, data.spec, phases(data))
    print(verdict_frame(regions, frame).to_string(index=False))
    for column, what in SPLITS.items():
        print(f"\nFollowing the model, {what} left out of the fit")
        print(regret_frame(regions, frame, column).drop(columns="key").to_string(index=False))
    if options.out is not None:
        frame.to_csv(options.out, index=False)


if __name__ == "__main__":
    main()
