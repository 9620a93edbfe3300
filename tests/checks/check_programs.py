"""Programs under fuseplan, compared with eager and with float64. Run by hand; CI runs a few (test_programs.py).

    python tests/checks/check_programs.py --count 5000 --seed 0 --jobs 16
    python tests/checks/check_programs.py --count 0 --ops sigmoid,tanh    # the programs of some ops alone
    python tests/checks/check_programs.py --show 17          # a program, and what is wrong with it

First comes a program for each op that has a recipe and each dtype that it takes, fused with another op and judged to
the rounding of its results; a table at the end says how often a kernel computed each. Then come random programs. Each
of these is called twice, with both numerics and, for two in five, with dynamic sizes of which two sets are tried. Every
fifth goes through ``torch.compile``, the others straight into the back end. What counts: strides, dtypes and shared
memory as eager's; each number no further from float64 than eager's, but for what rounding alone explains of it; no
exception, no failed compilation, no region that could not be planned. Programs run in processes of their own, and a
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
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from batches import Outcome, answers, in_batches, worker

if TYPE_CHECKING:  # they take a second to import, which only the workers need
    from programs import Program

#: Programs that one process runs: its libraries and caches go with it.
_BATCH = 50
_BATCH_LIMIT_S = 1800
#: Every so many programs go through ``torch.compile``.
_DYNAMO = 5
#: Columns of the table of ops.
_SHORT = {
    "float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "f8", "int64": "i64",
    "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="random programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one; they are counted up from it")
    parser.add_argument("--ops", default=".", metavar="WORDS", help="programs of ops with this in their name: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--show", type=int, help="one program in full: a seed, or with --ops its number among those")
    parser.add_argument("--worker", nargs=3, metavar=("FIRST", "END", "OPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        first, end, words = options.worker
        return _work(int(first), int(end), words)
    if options.show is not None:
        return _show(options.show, options.ops.strip("."))
    return _check(options.seed, options.count, options.ops, options.jobs)


def _check(first: int, count: int, words: str, jobs: int) -> int:
    from op_programs import op_cases

    start = time.monotonic()
    failed, fused, done = 0, 0, 0
    reasons: Counter[str] = Counter()
    seen: Counter[tuple[str, str]] = Counter()
    cases = list(op_cases(words))
    for outcome in chain(
        in_batches(range(len(cases)), _BATCH, jobs, partial(_batch, words)),
        in_batches(range(first, first + count), _BATCH, jobs, partial(_batch, "")),
    ):
        done += 1
        fused += outcome["fused"]
        reasons.update(outcome["fallbacks"])
        seen.update((op, dtype) for op, dtype in outcome["ops"])
        if outcome["complaints"]:
            failed += 1
            print(f"{outcome['name']}: {'; '.join(outcome['complaints'])}", flush=True)
    for reason, number in reasons.most_common(12):
        print(f"  {number} x {reason}")
    wanted = {(case.op, case.dtype) for case in cases if case.refusal is None}
    print("\n".join(_coverage(wanted, seen)))
    for op, dtype in sorted(wanted - seen.keys()):
        failed += 1
        print(f"{op} of {dtype} was never fused, and nothing refuses it")
    dynamo = sum(seed % _DYNAMO == 0 for seed in range(first, first + count))
    print(f"{len(cases)} programs of ops and {done - len(cases)} random ones ({dynamo} through torch.compile), "
          f"{fused} groups fused, {failed} failed, {time.monotonic() - start:.0f} s")
    return 1 if failed or done != count + len(cases) else 0


def _coverage(wanted: Collection[tuple[str, str]], seen: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """In how many programs a kernel computed an op, by the dtype of its numbers."""
    dtypes = [dtype for dtype in _SHORT if any(dtype == one for _, one in wanted)]
    yield f"{'fused':<40}" + "".join(f"{_SHORT[dtype]:>6}" for dtype in dtypes)
    for op in dict.fromkeys(op for op, _ in sorted(wanted)):
        counts = (str(seen.get((op, dtype), 0)) if (op, dtype) in wanted else "" for dtype in dtypes)
        yield f"{op:<40}" + "".join(f"{count:>6}" for count in counts)


def _batch(words: str, first: int, end: int) -> Iterator[Outcome]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def run(first: int, end: int) -> tuple[str, str]:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(first), str(end), words]
        return worker(command, environment, _BATCH_LIMIT_S)

    lost: Outcome = {"fused": 0, "fallbacks": {}, "ops": []}
    return answers(first, end, run, lambda number, how: {"name": f"{words} {number}", "complaints": [how], **lost})


def _work(first: int, end: int, words: str) -> int:
    from program_runs import run_program

    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        for name, program, through_dynamo in _programs(first, end, words):
            outcome = run_program(program, {"db": f"{folder}/tuning.db"}, through_dynamo)
            print(json.dumps({
                "name": name, "complaints": outcome.complaints, "fused": outcome.fused,
                "fallbacks": dict(outcome.fallbacks), "ops": sorted(outcome.ops),
            }), flush=True)
    return 0


def _programs(first: int, end: int, words: str) -> Iterator[tuple[str, Program, bool]]:
    """Names, programs, and whether they go through ``torch.compile``: of ops that have ``words``, or random ones."""
    from op_programs import op_cases
    from programs import make_program

    if words:
        for case in islice(op_cases(words), first, end):
            yield f"{case.op} {case.dtype} (--ops {case.op} --show ...)", case.program, False
    else:
        for seed in range(first, end):
            yield f"seed {seed}", make_program(seed), seed % _DYNAMO == 0


def _show(number: int, words: str) -> int:
    import logging

    from program_runs import run_program

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    ((name, program, through_dynamo),) = _programs(number, number + 1, words)
    print(f"# {name}\n{program.described()}")
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        outcome = run_program(program, {"db": f"{folder}/tuning.db"}, through_dynamo)
    print(f"{outcome.fused} groups fused ({sorted(outcome.ops)}); fallbacks {dict(outcome.fallbacks)}")
    print("\n".join(outcome.complaints) or "nothing to complain about")
    return 1 if outcome.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
