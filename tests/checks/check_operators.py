"""PyTorch's own samples of its operators under fuseplan, each between pointwise ops. Run by hand; CI runs a few.

    python tests/checks/check_operators.py --samples 3 --jobs 16
    python tests/checks/check_operators.py --ops cumsum,scatter    # operators with these words in their names
    python tests/checks/check_operators.py --kernels interpreted   # where no C++ compiler is

The samples are those of ``op_db``, with which PyTorch tests itself, in float32, bfloat16, float16, int64, uint8 and
bool, in place too where an operator can. Each is compiled by ``torch.compile(backend="fuseplan")`` and called twice.
What counts: structure, dtypes, shapes and strides as eager mode's; numbers no further from float64 than eager mode's,
rounding apart; an error where eager mode raises one; no region that could not be planned. Left out are samples to which
Dynamo alone, running eager mode's ops, gives another answer. Samples run in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from batches import Outcome, answers, in_batches, worker

_BATCH, _BATCH_LIMIT_S = 200, 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1, help="samples of each operator and dtype, at most")
    parser.add_argument("--ops", default="", metavar="WORDS", help="operators with one of these in their names: all")
    parser.add_argument("--kernels", choices=("compiled", "interpreted"), default="compiled")
    parser.add_argument("--dynamic", action="store_true", help="with dynamic sizes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--worker", nargs=2, type=int, metavar=("FIRST", "END"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    return _work(options) if options.worker else _check(options)


def _check(options: argparse.Namespace) -> int:
    from operator_samples import cases

    start = time.monotonic()
    found = cases(options.ops, range(options.samples))
    failed, fused, called = 0, 0, 0
    left: Counter[str] = Counter()
    for case, outcome in zip(found, in_batches(range(len(found)), _BATCH, options.jobs, partial(_batch, options)),
                             strict=True):
        fused += outcome["fused"]
        called += outcome["left"] is None
        left.update([outcome["left"]] if outcome["left"] else [])
        if outcome["complaints"]:
            failed += 1
            print(f"{case.name}: {'; '.join(outcome['complaints'])}", flush=True)
    for reason, number in left.most_common():
        print(f"  {number} left out: {reason}")
    operators = len({case.op.name for case in found})
    print(f"{called} samples of {operators} operators, {fused} groups fused, {failed} failed, "
          f"{time.monotonic() - start:.0f} s")
    return 1 if failed or not called else 0


def _batch(options: argparse.Namespace, first: int, end: int) -> Iterator[Outcome]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def run(first: int, end: int) -> tuple[str, str]:
        command = [sys.executable, str(Path(__file__).resolve()), "--samples", str(options.samples), "--ops",
                   options.ops, "--kernels", options.kernels, *["--dynamic"] * options.dynamic,
                   "--worker", str(first), str(end)]
        return worker(command, environment, _BATCH_LIMIT_S)

    return answers(first, end, run, lambda number, how: {"complaints": [how], "fused": 0, "left": None})


def _work(options: argparse.Namespace) -> int:
    from in_place_backend import InPlaceBackend
    from operator_samples import cases, judge

    first, end = options.worker
    kernels = InPlaceBackend()
    interpreted = mock.patch("fuseplan.planner.tuning.session.backends_for", lambda device_type: (kernels,))
    with tempfile.TemporaryDirectory(prefix="operators-") as folder:
        if options.kernels == "interpreted":
            interpreted.start()
        for case in cases(options.ops, range(options.samples))[first:end]:
            print(json.dumps(judge(case, f"{folder}/tuning.db", options.dynamic)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
