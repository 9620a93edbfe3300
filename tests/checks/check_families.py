"""Model families of whole packages under ``torch.compile(backend="fuseplan")``, untuned: what runs in fused code.

    python tests/checks/check_families.py [--packages transformers,timm] [--families llama,bert] [--every 4]
        [--kernels compiled|interpreted] [--limit 120] [--out FILE]

Interpreted kernels compute in float64, and so are no judge of what a model makes of angles that it rounds to float32.

Each family is tiny and random (see ``tests/support/package_families.py``), is called in eager mode and through our back
end, and where that is not all well and one graph, through ``torch.compile(backend="eager")``. It ends in a row: an
exception, a wrong result (further from float64 than eager mode's, rounding apart), more graphs than Dynamo alone makes,
what could not be planned, and the share of its memory-bound ops in fused code. Those are all that do work but matmuls,
convolutions, attention, random numbers and what has a size that depends on data: sorts, scans, pools and writes at
indices count, too. Needs ``os.fork``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
import torch.utils._pytree as pytree
from family_checks import watching
from package_families import PACKAGES, Arguments, Build, families

import fuseplan.planner
from fuseplan.planner.errors import failure_reason

#: Relative errors below this are the order of sums.
_TINY, _LIMIT = 3e-5, 1.1
_BAR = 0.98

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", default=",".join(PACKAGES))
    parser.add_argument("--families", default="", help="names, without their packages; all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one family in N")
    parser.add_argument("--kernels", choices=("compiled", "interpreted"), default="compiled")
    parser.add_argument("--limit", type=int, default=180, metavar="SECONDS", help="for one family")
    parser.add_argument("--out", type=Path, help="one line of JSON for each family; what it has is not run again")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # and no thread yet, which a fork would lose
    known = json_lines(given.out)
    wanted = set(filter(None, given.families.split(",")))
    chosen = {name: build for name, build in list(families(given.packages.split(",")).items())
              if not wanted or name.split("/")[1] in wanted}
    chosen = dict(list(chosen.items())[:: given.every])
    rows = [row for row in known if row["family"] in chosen]
    done = {row["family"] for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in chosen if name not in done]:
            row = in_child(name, chosen[name], f"{folder}/tuning.db", given)
            rows.append(row)
            print(told(row), file=sys.stderr, flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print("\n".join([*table(rows), "", *left_out(rows), "", *reasons(rows), "", summary(rows)]))
    return int(any(row["problems"] for row in rows))


def json_lines(path: Path | None) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


# -- one family --------------------------------------------------------------------------------------------


def in_child(name: str, build: Build, db: str, given: argparse.Namespace) -> Row:
    """The row of a family, made in a fork: the packages are imported once, and a crash costs one family."""
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(given.limit)
        row: Row = {"family": name, "problems": []}
        try:
            if given.kernels == "interpreted":
                interpret()
            judge(row, build, db)
        except BaseException as error:
            row["problems"].append(f"the check failed: {failure_reason(error)}")  # type: ignore[arg-type]
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(row))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    how = f"no answer within {given.limit} s" if os.WTERMSIG(status) == signal.SIGALRM else f"died, status {status}"
    found: Row = json.loads(text) if text else {"family": name, "problems": [how]}
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def interpret() -> None:
    """Let the planner's kernels be interpreted."""
    from reference_backend import ReferenceBackend

    from fuseplan.planner.tuning import session

    backend = ReferenceBackend()
    session.backends_for = lambda device_type: (backend,)


def judge(row: Row, build: Build, db: str) -> None:
    """Fill in the row of one family."""
    try:
        model, arguments = build()
    except Exception as error:
        row["left"] = f"cannot be built: {error}"
        return
    row["class"] = type(getattr(model, "model", model)).__name__ if "/" in row["family"] else ""
    with torch.no_grad():
        plain = [called(model, arguments) for _ in range(2)]
        if any(not torch.equal(*pair) for pair in zip(*plain, strict=True) if not pair[0].isnan().any()):
            row["left"] = "eager mode has another answer each time"
            return
        fuseplan.planner.reset_stats()
        with watching() as graphs:
            ours, row["graphs"] = compiled(model, arguments, backend="fuseplan", options={"db": db})
        stats = fuseplan.planner.stats()
        if not isinstance(ours, Exception):
            compare(row, exact(model, arguments), plain[0], ours)
        if isinstance(ours, Exception) or row["problems"] or row["graphs"] > 1:
            by_dynamo, row["dynamo"] = compiled(model, arguments, backend="eager")
            if isinstance(by_dynamo, Exception):
                row["left"] = f"Dynamo alone fails: {failure_reason(by_dynamo)}"
                return
            row["problems"] = []
            if isinstance(ours, Exception):
                row["problems"].append(f"exception: {failure_reason(ours)}")
                return
            compare(row, exact(model, arguments), by_dynamo, ours)
            if row["graphs"] > row["dynamo"]:
                row["problems"].append(f"{row['graphs']} graphs, Dynamo alone {row['dynamo']}")
    row["fallbacks"] = dict(stats.fallbacks)
    row["faults"] = {note: count for note, count in stats.notes.items() if "fault of fuseplan" in note}
    row["groups"], row["by_inductor"] = stats.groups_fused, stats.whole_by_inductor
    counts = [graph.memory_bound for graph in graphs]
    row["ops"], row["fused"] = sum(one.ops for one in counts), sum(one.fused for one in counts)
    row["alone"] = sum(one.alone for one in counts)
    row["unfused"] = dict(sum((Counter(one.left) for one in counts), Counter()))


def called(model: Callable[..., Any], arguments: Arguments) -> list[torch.Tensor]:
    """Tensors that a call returns."""
    torch.manual_seed(2)
    given = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, arguments)
    return [leaf for leaf in pytree.tree_leaves(model(**given)) if isinstance(leaf, torch.Tensor)]


def compiled(model: torch.nn.Module, arguments: Arguments, **how: Any) -> tuple[Any, int]:
    """Results of the second call, or the error, and of how many graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fast = torch.compile(model, **how)
    try:
        called(fast, arguments)
        found: Any = called(fast, arguments)
    except Exception as error:
        found = error
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def exact(model: torch.nn.Module, arguments: Arguments) -> list[torch.Tensor] | None:
    """Results in float64; None where the model does not know that."""
    def wide(one: torch.Tensor) -> torch.Tensor:
        return one.double() if one.is_floating_point() else one

    try:
        return called(copy.deepcopy(model).double(), pytree.tree_map_only(torch.Tensor, wide, arguments))
    except Exception:
        return None


def compare(row: Row, true: list[torch.Tensor] | None, plain: Any, ours: Any) -> None:
    """Say what is wrong with our results, beside those of eager mode, or of Dynamo with eager mode's ops."""
    row["exact"] = true is not None and [one.shape for one in true] == [one.shape for one in plain]
    reference = true if row["exact"] else plain
    layouts = [[(one.dtype, one.shape, one.stride()) for one in results] for results in (plain, ours)]
    if layouts[0] != layouts[1]:
        row["problems"].append("wrong: results are laid out in another way")
        return
    row["eager"] = distance(reference, plain)
    row["error"] = distance(reference, ours)
    if not row["error"] <= max(_LIMIT * row["eager"], _TINY):
        row["problems"].append(f"wrong: error {row['error']:.1e}, eager mode's {row['eager']:.1e}")


def distance(reference: Any, results: Any) -> float:
    """Of results from others, relative to these; infinite where one is finite and the other not."""
    wrong = total = 0.0
    for true, one in zip(reference, results, strict=True):
        known = torch.isfinite(true)
        if not torch.equal(known, torch.isfinite(one)):
            return float("inf")
        wrong += float((one.double() - true.double())[known].pow(2).sum())
        total += float(true.double()[known].pow(2).sum())
    return float((wrong / total) ** 0.5) if total else wrong


# -- the tables --------------------------------------------------------------------------------------------


def told(row: Row) -> str:
    """One line for people."""
    if "left" in row:
        return f"{row['family']}: left out, {row['left']}"
    share = f"{row['fused']} of {row['ops']}" if "ops" in row else "?"
    return f"{row['family']}: {share}, {row['seconds']} s; {'; '.join(row['problems'])} {row.get('fallbacks') or ''}"


def table(rows: Sequence[Row]) -> list[str]:
    lines = ["| family | class | graphs | fused | alone | share, with alone | error | eager's | problems |",
             "|" + " --- |" * 9]
    for row in [row for row in rows if "left" not in row]:
        cells = [row["family"], row.get("class", ""), str(row.get("graphs", ""))]
        counted = "ops" in row
        shares = f"{share(row):.0%}, {placed(row):.0%}" if counted else ""
        cells += [f"{row['fused']} of {row['ops']}", str(row["alone"]), shares] if counted else [""] * 3
        cells += [f"{row[name]:.0e}" if name in row else "" for name in ("error", "eager")]
        lines.append(f"| {' | '.join([*cells, '; '.join(row['problems']).replace('|', '/') or '-'])} |")
    return lines


def share(row: Row) -> float:
    """Of memory-bound ops in fused code."""
    return float(row["fused"] / row["ops"]) if row["ops"] else 1.0


def placed(row: Row) -> float:
    """The same, where an op that no other can join also counts: a kernel of one op saves no launch."""
    return float((row["fused"] + row["alone"]) / row["ops"]) if row["ops"] else 1.0


def left_out(rows: Sequence[Row]) -> list[str]:
    """The ops that no fused code runs although others could join them, in most families first."""
    counts, where = Counter[str](), Counter[str]()
    for row in rows:
        counts.update(row.get("unfused", {}))
        where.update(row.get("unfused", {}).keys())
    frequent = sorted(counts, key=lambda op: (-where[op], -counts[op], op))
    lines = ["| op that no fused code runs | families | times |", "| --- | --- | --- |"]
    return [*lines, *(f"| {op} | {where[op]} | {counts[op]} |" for op in frequent)]


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why families, or groups, are not fused."""
    where: dict[str, list[str]] = {}
    for row in rows:
        found = [*row.get("fallbacks", {}), *row.get("faults", {})]
        for reason in found or ([f"(left out) {row['left'][:160]}"] if "left" in row else []):
            where.setdefault(reason, []).append(row["family"])
    frequent = sorted(where, key=lambda reason: (-len(where[reason]), reason))
    lines = ["| reason | families |", "| --- | --- |"]
    return [*lines, *(f"| {reason} | {len(where[reason])}: {', '.join(where[reason][:4])} |".replace("\n", " ")
                      for reason in frequent)]


def summary(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if "left" not in row]
    counted = [row for row in judged if "ops" in row]
    fused, ops, alone = (sum(row[name] for row in counted) for name in ("fused", "ops", "alone"))
    found = Counter(problem.split(":")[0] for row in judged for problem in row["problems"])
    return (f"{len(judged)} families judged, {len(rows) - len(judged)} left out; problems {dict(found)}; {fused} of "
            f"{ops} memory-bound ops in fused code ({fused / max(ops, 1):.1%}), {alone} more could join no other "
            f"({(fused + alone) / max(ops, 1):.1%}); {sum(share(row) >= _BAR for row in counted)} families at "
            f"{_BAR:.0%} or more, {sum(placed(row) >= _BAR for row in counted)} with those")


if __name__ == "__main__":
    sys.exit(main())
