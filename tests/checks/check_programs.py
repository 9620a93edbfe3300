"""Random programs under fuseplan, compared with eager and with float64. Run by hand; CI runs a few (test_programs.py).

    python tests/checks/check_programs.py --count 5000 --seed 0 --jobs 16
    python tests/checks/check_programs.py --show 17          # a program, and what is wrong with it

Each program is compiled and called twice, with both numerics and, for two in five, with dynamic sizes of which two
sets are tried. Every fifth goes through ``torch.compile``, the others straight into the back end. What counts: strides,
dtypes and shared memory as eager's; numbers no further from float64 than eager's, but for what rounding alone explains;
no exception, no failed compilation, no region that could not be planned. Programs run in processes of their own, and a
crash costs one program.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from batches import Outcome, answers, in_batches, worker

#: Programs that one process runs: its libraries and caches go with it.
_BATCH = 50
_BATCH_LIMIT_S = 600
#: Every so many programs go through ``torch.compile``.
_DYNAMO = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one; they are counted up from it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--show", type=int, help="one program in full")
    parser.add_argument("--worker", nargs=2, type=int, metavar=("FIRST", "END"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _work(*options.worker)
    if options.show is not None:
        return _show(options.show)
    return _check(options.seed, options.count, options.jobs)


def _check(first: int, count: int, jobs: int) -> int:
    start = time.monotonic()
    failed, fused, done = 0, 0, 0
    reasons: Counter[str] = Counter()
    for outcome in in_batches(range(first, first + count), _BATCH, jobs, _batch):
        done += 1
        fused += outcome["fused"]
        reasons.update(outcome["fallbacks"])
        if outcome["complaints"]:
            failed += 1
            print(f"seed {outcome['seed']}: {'; '.join(outcome['complaints'])}", flush=True)
    for reason, number in reasons.most_common(12):
        print(f"  {number} x {reason}")
    dynamo = sum(seed % _DYNAMO == 0 for seed in range(first, first + count))
    print(f"{done} programs ({dynamo} through torch.compile), {fused} groups fused, {failed} failed, "
          f"{time.monotonic() - start:.0f} s")
    return 1 if failed or done != count else 0


def _batch(first: int, end: int) -> Iterator[Outcome]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def run(first: int, end: int) -> tuple[str, str]:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(first), str(end)]
        return worker(command, environment, _BATCH_LIMIT_S)

    return answers(first, end, run, lambda seed, how: {"seed": seed, "complaints": [how], "fused": 0, "fallbacks": {}})


def _work(first: int, end: int) -> int:
    from program_runs import run_program
    from programs import make_program

    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        for seed in range(first, end):
            outcome = run_program(make_program(seed), {"db": f"{folder}/tuning.db"}, seed % _DYNAMO == 0)
            print(json.dumps({
                "seed": seed, "complaints": outcome.complaints, "fused": outcome.fused,
                "fallbacks": dict(outcome.fallbacks),
            }), flush=True)
    return 0


def _show(seed: int) -> int:
    import logging

    from program_runs import run_program
    from programs import make_program

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    program = make_program(seed)
    print(program.described())
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        outcome = run_program(program, {"db": f"{folder}/tuning.db"}, seed % _DYNAMO == 0)
    print(f"{outcome.fused} groups fused; fallbacks {dict(outcome.fallbacks)}")
    print("\n".join(outcome.complaints) or "nothing to complain about")
    return 1 if outcome.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
