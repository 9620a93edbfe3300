"""One mutated database in use: a small model dispatched from it, and every ``plan db`` command and report on it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import report_samples
import torch
import torch.nn.functional as F
import typer
from database_expected import MOVED, all_impossible, misjudged, moved, rows_of
from database_mutations import DATABASES, EXPORTS, Canary
from database_writers import gpu_records, sources_of
from search_records import tuning
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

import fuseplan.planner
from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.work import Work
from fuseplan.planner.capture.normalise import normalise
from fuseplan.planner.capture.trace import trace_predispatch
from fuseplan.planner.cli import main
from fuseplan.planner.runtime.dispatch import fuseplan as backend
from fuseplan.planner.runtime.logs import SAID
from fuseplan.planner.tuning import summary
from fuseplan.planner.tuning.session import open_session
from fuseplan.search.errors import DatabaseError
from fuseplan.search.store import maintenance
from fuseplan.search.store.database import Database, Missed
from fuseplan.search.store.record import RecordKey, Trial, Versions

#: Every so many cases run some commands in processes of their own, and write the HTML report.
_APART = 100
_PAGE = 10


#: Built once: Typer reads every command's signature again for each call, which takes longer than the commands.
main.app = typer.main.get_command(main.app)  # type: ignore[assignment]


@dataclass(frozen=True)
class Outcome:
    """What became of one mutated database.

    Attributes:
        seed: Its number.
        mutation: What was done to it.
        served: ``"served"`` (a group ran from it), ``"quarantined"`` (a row or a plan was refused), ``"unread"`` (the
            whole could not be read) or ``"ignored"`` (nothing of it was asked for, or it is not there any more).
        sound: Whether ``plan db verify`` found nothing.
        complaints: What is wrong; empty when nothing is.
    """

    seed: int
    mutation: str
    served: str
    sound: bool
    complaints: tuple[str, ...]


# -- the model, and the database that a tune of it would leave ----------------------------------------------------


def small(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, RMSNorm, projections, SwiGLU."""
    hidden = residual + x
    normal = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    return F.silu(F.linear(normal, gate)) * F.linear(normal, up), hidden


def arguments() -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=made) for shape in ((5, 33), (5, 33), (33,), (65, 33), (65, 33)))


def _graph() -> fx.GraphModule:
    """A graph that calls the model: the back end traces through it, as through a graph of Dynamo's."""
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(f"x{number}") for number in range(5))
    graph.output(graph.call_function(small, inputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def make_database(folder: Path) -> None:
    """``tuning.db`` and its export ``export.jsonl`` in ``folder``: what a tune of the model and a miss would leave."""
    path = folder / "tuning.db"
    context = TracingContext(FakeTensorMode())
    with torch.no_grad(), tracing(context):
        graph = normalise(trace_predispatch(_graph(), arguments())).graph
    report_samples.known_machine(path)
    session = open_session("cpu", path)
    database, versions = session.database, Versions.current("cpu")
    plans = session.planner().plan_graph(graph).regions
    for plan in plans:
        database.put_plan(plan.record)
        key = plan.record.key
        work = Work({"fp32": 9.0}, 99.0, launches=1)
        for group in plan.record.groups:
            if group.is_kernel:
                own = replace(key, workload=group.workload)
                sound = tuning(key=own, label=group.label, config=dict(group.config), work=work)
                database.put_record(replace(sound, evidence=replace(sound.evidence, versions=versions)))
                database.log_trial(Trial(own, "cpp", dict(group.config), 5.0), versions)
    for record, trial in gpu_records():
        database.put_record(record)
        database.log_trial(trial, record.evidence.versions)
    planned = [(plan.region, plan.record) for plan in plans]
    summary.store_summary(database, summary.summarise("small", "forward", graph, planned))
    missed = Missed(RecordKey("f" * 64, session.device), "gelu 7x13 float32", {"ops": ["aten.gelu.default"]})
    database.log_misses([missed])
    database.close()
    assert main.run(["db", "export", str(folder / "export.jsonl"), "--db", str(path)]) == 0


# -- one case -----------------------------------------------------------------------------------------------------


def run_case(seed: int, made: Path, folder: Path) -> Outcome:
    """Mutate a copy of what :func:`make_database` left in ``made`` and use it in ``folder``, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    path, exported, canary = folder / "tuning.db", folder / "export.jsonl", Canary(folder / "executed")
    kinds = DATABASES | EXPORTS
    name = rng.choices(list(kinds), [weight for _, weight in kinds.values()])[0]
    shutil.copy(made / "export.jsonl", exported)
    shutil.copy(made / "tuning.db", path)
    complaints: list[str] = []
    nothing_to_serve = False
    if name in EXPORTS:
        path.unlink()
        kinds[name][0](rng, exported, canary)
        complaints += _import(exported, made / "export.jsonl", path)
    else:
        before = rows_of(made / "tuning.db")
        assert before is not None
        expected = kinds[name][0](rng, path, canary)
        complaints += misjudged(before, path, expected, [(one.table, one.what) for one in _problems(path)])
        nothing_to_serve = all_impossible(before, path, expected, "plan_records")
    complaints += sources_of(path, canary)
    served, wrong = _dispatch(path)
    complaints += wrong
    if served == "served" and nothing_to_serve:
        complaints.append("a plan was served, and none that is stored can have been written here")
    sound, wrong = _commands(seed, path, folder)
    complaints += wrong
    if seed % _PAGE == 0:
        complaints += round_trip(made, folder)
    if canary.file.exists():
        complaints.append("stored text was executed")
    return Outcome(seed, name, served, sound, tuple(complaints))


def _import(exported: Path, sound: Path, path: Path) -> list[str]:
    """Import a mutated export into a new database: whole, or not at all where its bytes are not those that it says."""
    status, printed = _run(["db", "import", str(exported), "--db", str(path)])
    wrong = _judged(["db", "import"], status, printed, (0, 2))
    found, lines = rows_of(path), exported.read_bytes().splitlines()
    there = 0 if found is None else sum(len(found[table]) for table in MOVED)
    if status != 0:
        return wrong + ([f"an import that was refused left {there} rows"] if there else [])
    names = {json.dumps(_identity(json.loads(line)), sort_keys=True) for line in lines[1:-1]}
    if there != len(names):
        wrong.append(f"of {len(names)} records and captures, {there} are there after an import")
    if hashlib.sha256(b"".join(line + b"\n" for line in lines[:-1])).hexdigest().encode() not in lines[-1]:
        wrong.append("an export with another checksum was imported")
    if exported.read_bytes() == sound.read_bytes() and there < 1:
        wrong.append("nothing was imported")
    return wrong


def _identity(item: Mapping[str, Any]) -> list[Any]:
    """What two lines of an export have in common where they are of one row."""
    kind = next(name for name in ("tuning_record", "plan_record", "capture", "device") if name in item)
    return [kind, item[kind]["key"] if isinstance(item[kind], dict) else item[kind]]


def round_trip(made: Path, folder: Path) -> list[str]:
    """What is lost where the sound database's export is imported into a new one."""
    path = folder / "imported.db"
    wrong = _command(["db", "import", str(made / "export.jsonl"), "--db", str(path)], (0,))
    one, other = rows_of(made / "tuning.db"), rows_of(path)
    if one is None or other is None or moved(one) != moved(other):
        wrong.append("an export that was imported into a new database is not the same")
    return wrong


@contextlib.contextmanager
def _warned() -> Iterator[list[logging.LogRecord]]:
    """What dispatch warns of meanwhile."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = found.append  # type: ignore[method-assign]
    logger = logging.getLogger("fuseplan")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _dispatch(path: Path) -> tuple[str, list[str]]:
    """Compile and run the model from the database; how much of that came from it."""
    fuseplan.planner.reset_stats()
    given = arguments()
    SAID.clear()
    with _warned() as said, torch.no_grad():
        try:
            with tracing(TracingContext(FakeTensorMode())):
                call = backend(_graph(), given, options={"db": str(path)})
            results, expected = call(*given), small(*given)
        except Exception as error:
            return "raised", [f"dispatch: {type(error).__name__}: {error}"]
    stats = fuseplan.planner.stats()
    wrong = [
        f"output {at} differs" for at, (one, other) in enumerate(zip(results, expected, strict=True))
        if one.stride() != other.stride() or not torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    ]
    if not stats.regions:
        wrong.append(f"the whole graph runs unfused: {dict(stats.fallbacks)}")
    messages = [one.getMessage() for one in said]
    if any(not message.isprintable() for message in [*messages, *stats.fallbacks]):
        wrong.append("a message holds what a terminal obeys")
    if stats.quarantined or any("damaged row" in message for message in messages):
        return "quarantined", wrong
    if any("going on without it" in message for message in messages):
        return "unread", wrong
    return "served" if stats.from_database else "ignored", wrong


def _commands(seed: int, path: Path, folder: Path) -> tuple[bool, list[str]]:
    """Every command on the database: whether it was sound, and what is wrong."""
    backup, where = folder / "backup.jsonl", ["--db", str(path)]
    backup.write_text("a good backup")
    report = ["report", "--device-key", current_identity("cpu").key(), *where]
    wrong: list[str] = []
    commands = [
        ["db", "ls", *where], ["db", "misses", "--device", "cpu", *where],
        ["db", "show", "silu", *where], ["db", "export", str(backup), *where],
        report, [*report, "--format", "markdown"], [*report, "--model", "small"], ["report", "accuracy", *report[1:]],
    ]
    if seed % _PAGE == 0:
        commands.append([*report, "--format", "html", "--out", str(folder / "report.html")])
    for command in commands:
        wrong += _command(command)
    kept = backup.read_text()
    if kept != "a good backup" and '"trailer"' not in kept.splitlines()[-1]:
        wrong.append("export left a damaged backup")
    sound = not _problems(path)
    wrong += _command(["db", "verify", *where], (0,) if sound else (2,))
    if seed % _APART == 0:
        wrong += _apart(["db", "verify", *where], (0,) if sound else (2,)) + _apart(["db", "ls", *where])
    status, printed = _run(["db", "prune", *where])
    wrong += _judged(["db", "prune"], status, printed, (0, 2))
    left = [problem for problem in _problems(path) if problem.cure.startswith(maintenance.PRUNE)]
    if left and status == 0:
        wrong.append(f"prune left {left[0]}")
    wrong += _command(["db", "import", str(folder / "backup.jsonl"), *where])
    return sound, wrong


def _problems(path: Path) -> list[maintenance.Problem]:
    try:
        with Database(path, "inspect") as database:
            return maintenance.verify_database(database)
    except DatabaseError as error:
        return [maintenance.Problem("file", "", str(error))]


def _command(arguments: list[str], allowed: tuple[int, ...] = (0, 2)) -> list[str]:
    return _judged(arguments, *_run(arguments), allowed)


def _run(arguments: list[str]) -> tuple[int, str]:
    """A command within this process: its status, 1 where it raises, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = main.run(arguments)
        except BaseException as error:
            return 1, f"{type(error).__name__}: {error}"
    return status, printed.getvalue()


def _apart(arguments: list[str], allowed: tuple[int, ...] = (0, 2)) -> list[str]:
    command = [sys.executable, "-m", "fuseplan.planner.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return _judged(arguments, done.returncode, done.stdout + done.stderr, allowed)


def _judged(arguments: list[str], status: int, printed: str, allowed: tuple[int, ...]) -> list[str]:
    found = []
    if status not in allowed:
        found.append(f"plan {_short(arguments)} ended with status {status}: {printed.strip()[-200:]!r}")
    if "Traceback" in printed:
        found.append(f"plan {_short(arguments)} printed a traceback")
    if not all(line.isprintable() for line in re.split("[\n\t]", printed)):
        found.append(f"plan {_short(arguments)} printed what a terminal obeys")
    return found


def _short(arguments: list[str]) -> str:
    return " ".join(word for word in arguments if not word.startswith(("/", "--db", "--device-key", "cpu-")))


def outcomes(first: int, end: int, made: Path, folder: Path) -> Iterator[dict[str, object]]:
    """The outcomes of the cases ``first .. end - 1`` as JSON objects."""
    for seed in range(first, end):
        yield asdict(run_case(seed, made, folder))
