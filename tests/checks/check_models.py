"""The matrix of 24 model families through ``torch.compile(backend="fuseplan")``.

Each family is a tiny random model. In fp32 and bf16, with static and with dynamic sizes: nothing raises, nothing falls
back, results are no further from float64 than eager's, nearly all ops that a kernel could take over run in one, and
every causal LM generates eager's tokens: from both kinds of cache, in batches with padding, with ``CompileConfig`` too.
In bf16 tokens may differ where rounding as eager's explains it.

    python tests/checks/check_models.py [--families llama,t5] [--dtypes fp32,bf16] [--static | --dynamic]
        [--no-generate]
                                 [--device cpu|cuda] [--interpreted] [--tune [--db FILE]] [--jobs 2]
                                 [--out results/models.md]

``--tune`` asks something else: after ``plan tune --config`` (or ``--module``) of each family at tiny sizes (hardly any
search), a fresh process misses no region in calls with and without an attention mask, and in generation; and
``plan explain`` has words for all of it.

``--interpreted`` runs kernels in an interpreter (no compiler, on a CPU): fast where only the planner is in question.
Exits with status 1 if anything is wrong. pytest does not collect it; two of its slices are tests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import family_checks as checks
import model_families as families
import torch
import transformers
from paths import SUPPORT

#: Share of coverable ops that has to run in kernels, or is left to ATen with no other to join it.
_BARS = {True: 0.95, False: 0.90}

#: Batches that are tuned and then called.
_BATCHES = (1, 3)

#: Where ``plan`` finds the families that are modules.
_ENV = {**os.environ, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

_PLAN = [sys.executable, "-m", "fuseplan.planner.cli.main"]

#: Tunes of one family, if noise hides what is faster: families that are checked side by side disturb each other.
_TRIES = 4

#: Seconds that one family may take.
_LIMIT_S = 3000


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(families.FAMILIES))
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--static", action="store_true", help="static sizes only")
    parser.add_argument("--dynamic", action="store_true", help="dynamic sizes only")
    parser.add_argument("--no-generate", action="store_true")
    parser.add_argument("--no-forward", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--interpreted", action="store_true")
    parser.add_argument("--tune", action="store_true", help="tune each family, then look for misses")
    parser.add_argument("--db", help="database of the tunes; a fresh one by default")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    given = arguments().parse_args()
    if given.worker:
        work(given)
        return
    names = given.families.split(",")
    if unknown := set(names) - set(families.FAMILIES):
        sys.exit(f"unknown families {', '.join(sorted(unknown))}; known: {', '.join(families.FAMILIES)}")
    with ThreadPoolExecutor(given.jobs) as pool, tempfile.TemporaryDirectory() as folder:
        common = [*sys.argv[1:], *([] if given.db else ["--db", str(Path(folder) / "tuning.db")])]
        rows = [row for found in pool.map(partial(in_process, common), names) for row in found]
    text = "\n".join([*headline(given.device), "", *table(rows), "", *left_out(rows), "", *summary(rows)])
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    sys.exit(any(problems(row) for row in rows))


# -- one family -------------------------------------------------------------------------------------------


def work(given: argparse.Namespace) -> None:
    """Every check of one family, a JSON line each."""
    if given.interpreted:
        interpret()
    name = given.worker
    if given.tune:
        tune_and_hit(name, given)
        return
    for dtype in given.dtypes.split(","):
        for dynamic in (False, True):
            if not given.no_forward and not (given.static if dynamic else given.dynamic):
                say(checks.check_forward(name, dtype, dynamic, given.device))
    if families.task_of(name) == "causal" and not given.no_generate:
        for dtype in given.dtypes.split(","):
            for prompt in checks.PROMPTS:
                say(checks.check_generate(name, dtype, prompt, given.device))


def tune_and_hit(name: str, given: argparse.Namespace) -> None:
    """Tune a family on the command line, and look in this process, which has compiled nothing, for what it misses."""
    own = families.task_of(name) == "own"
    batches = families.EXAMPLE[:1] if own else _BATCHES
    with tempfile.TemporaryDirectory() as folder:
        what = ["--module", f"model_families:{name.replace('-', '_')}_example"] if own else _config(Path(folder), name)
        for dtype in given.dtypes.split(","):
            common = [*what, "--dtype", dtype, "--device", given.device, "--db", given.db]
            tune = ["tune", *common, "--trials", "1", "--seconds", "0.1"]
            say(run_plan(name, dtype, tune, _TRIES))
            say(run_plan(name, dtype, ["explain", *common]))
            for row in checks.check_hits(name, dtype, given.device, batches, {"db": given.db}):
                say(row)


def run_plan(name: str, dtype: str, command: list[str], tries: int = 1) -> checks.Row:
    """``plan`` as a user runs it; again where noise left something undecided, as ``plan tune`` asks for."""
    row = checks.Row(name, dtype, f"plan {command[0]}")
    for _ in range(tries):
        done = subprocess.run([*_PLAN, *command], capture_output=True, text=True, timeout=_LIMIT_S, env=_ENV)
        if "noise hides" not in done.stderr:
            break
    if done.returncode or "is left out" in done.stderr or "noise hides" in done.stderr:
        row.problems.append(f"status {done.returncode}: {last_line(done.stderr)}")
    return row


def _config(folder: Path, name: str) -> list[str]:
    """Options that name a Hugging Face family and its sizes."""
    found = ["--config", str(families.write_family(folder, name))]
    found += ["--prefill", ",".join(f"{batch}x{checks.PROMPT}" for batch in _BATCHES)]
    if families.task_of(name) == "causal":
        found += ["--decode", ",".join(map(str, _BATCHES)), "--kv-len", str(checks.KV_LEN)]
    return found


def say(row: checks.Row) -> None:
    print("ROW " + json.dumps(row.record()), flush=True)


def interpret() -> None:
    """Let the planner's kernels be interpreted."""
    from reference_backend import ReferenceBackend

    from fuseplan.planner.tuning import session

    backend = ReferenceBackend()
    session.backends_for = lambda device_type: (backend,)


def in_process(common: Sequence[str], name: str) -> list[dict[str, Any]]:
    """The rows of one family; one that died has a row that says so."""
    command = [sys.executable, __file__, *common, "--worker", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        output = done.stdout
        died = f"exit status {done.returncode}: {last_line(done.stderr)}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        output, died = (error.stdout or b"").decode(), f"not finished after {_LIMIT_S} s"
    rows = [json.loads(line.removeprefix("ROW ")) for line in output.splitlines() if line.startswith("ROW ")]
    if died:
        rows.append(checks.Row(name, "", "worker", problems=[died]).record())
    wrong = sum(bool(problems(row)) for row in rows)
    print(f"{name}: {len(rows)} checks, {wrong} not passed", file=sys.stderr, flush=True)
    return rows


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


# -- the table --------------------------------------------------------------------------------------------


def problems(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row, too little coverage included."""
    found = list(row["problems"])
    coverage, bar = row["coverage"], _BARS[families.is_transformer(row["family"])]
    if coverage["fused"] + coverage["alone"] < bar * coverage["coverable"]:
        found.append(f"less than {bar:.0%} fused")
    return found


def headline(device: str) -> list[str]:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return [f"{name}; {versions}, Python {platform.python_version()}"]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| family | dtype | check | fused | alone | error | eager's | misses | problems |", "|" + " --- |" * 9]
    for row in rows:
        coverage = row["coverage"]
        fused = [f"{coverage['fused']} of {coverage['coverable']}", str(coverage["alone"])]
        errors = [f"{row[name]:.1e}" if row[name] is not None else "" for name in ("error", "eager")]
        cells = [row["family"], row["dtype"], row["check"], *fused, *errors, str(row["misses"])]
        lines.append("| " + " | ".join([*cells, _verdict(row)]) + " |")
    return lines


def _verdict(row: dict[str, Any]) -> str:
    fine = "other tokens, as good as eager's" if row["excused"] else "-"
    return "; ".join(problems(row)).replace("|", "/") or fine


def left_out(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The ops that stay outside kernels, most frequent first, with the families that have them."""
    counts: dict[str, int] = {}
    where: dict[str, set[str]] = {}
    for row in rows:
        for op, count in row["coverage"]["left"].items():
            counts[op] = counts.get(op, 0) + count
            where.setdefault(op, set()).add(row["family"])
    lines = ["| op not fused | times | families |", "| --- | --- | --- |"]
    frequent = sorted(counts, key=lambda op: -counts[op])
    return [*lines, *(f"| {op} | {counts[op]} | {', '.join(sorted(where[op]))} |" for op in frequent)]


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    fused, coverable, alone = (sum(row["coverage"][name] for row in rows) for name in ("fused", "coverable", "alone"))
    wrong = sum(bool(problems(row)) for row in rows)
    share = (
        f"{fused} of {coverable} coverable ops fused ({fused / max(coverable, 1):.1%}), {alone} of the others alone: "
        "no other op can join them, and they count as well placed"
    )
    return [f"{len(rows)} checks of {len({row['family'] for row in rows})} families, {wrong} not passed; {share}"]


if __name__ == "__main__":
    main()
