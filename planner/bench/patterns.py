"""Named patterns beside every peer, on the same tensors in one run: launched from Python, in a CUDA graph, and cold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fuseplan.costmodel.devices import is_gpu
from fuseplan.kernels.ir.backend import config_key
from fuseplan.kernels.native.overlap import span_bytes
from fuseplan.planner.bench.rows import BenchRow, Race, bench_frame, failure
from fuseplan.planner.dispatch_stats import CompileStats, Tally
from fuseplan.planner.errors import Argument, ConfigError
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.implementations.tunable_group import reference_results
from fuseplan.planner.ops.table import kind_of
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.contestant import EAGER, OURS, Case, Contestant, PeerError, make_case
from fuseplan.planner.peers.peers import PEERS, fused
from fuseplan.planner.runtime.lookup import look_up
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.work.group_work import kernel_work
from fuseplan.search.errors import counted
from fuseplan.search.store.record import now
from fuseplan.search.timing.operands import CACHE_MULTIPLE, cache_bytes, rotating_operands
from fuseplan.search.timing.timers import Operands, Run, cold_timer, timer_for
from fuseplan.search.timing.verify import errors
from fuseplan.search.workers.jobs import free_bytes

#: A device-to-device copy of as many bytes as ours moves, in the same run: what memory gives.
COPY = "copy"
#: Cells that move this much are compared with it.
LARGE_BYTES = 256e6
#: An error this many times eager's (or this many roundings of the output) is another result, not another rounding.
_WRONG = 8
#: Weights so small that it takes more copies than this to fill a cache are in a cache in every model too.
_MAX_SETS = 32


@dataclass(frozen=True)
class PatternRow(BenchRow):
    """One contestant's time for one pattern (``subject``) at one size (``workload``).

    Our plan moves ``bytes`` in so many ``kernels``; ``measured_at`` is UTC.
    """

    dtype: str = ""
    bytes: float = 0.0
    kernels: int = 0
    config: str = ""
    registers: str = ""
    measured_at: str = ""


def plan_case(session: Session, cell: Cell) -> tuple[Case, CompileStats]:
    """The case with the plan that dispatch would find for it, and what finding it was like."""
    case = make_case(cell, session.target, session.backends, session.settings.numerics)
    tally = Tally(f"bench {cell.key}")
    groups = look_up(session, case.traced.graph, "model", tally).groups
    kernels = tuple(group for group in groups if group.implementation.backends)
    return replace(case, groups=kernels), tally.snapshot()


def plan_facts(case: Case) -> dict[str, Any]:
    """What a case's plan moves and launches, as fields of the bench's rows.

    ``bytes`` are the plan's where it is one kernel, else every input and output once; ``registers`` those of a thread.
    """
    graph = case.traced.graph
    kernels = [case.kernel(group.ops).ir for group in case.groups]
    unfused = unfused_ops(graph, case.groups)
    moved_bytes = float(sum(graph.specs[name].nbytes() for name in {*graph.inputs, *graph.outputs}))
    if len(kernels) == 1 and not unfused:
        moved_bytes = kernel_work(kernels[0]).dram_bytes
    configs, registers = [], []
    for group, ir in zip(case.groups, kernels, strict=True):
        backend = group.implementation.backends[0]
        configs.append(f"{backend.name} {config_key(group.config)}")
        registers.append(backend.prepare(ir, group.config, case.target).registers)
    return {"bytes": moved_bytes, "kernels": len(kernels) + len(unfused), "config": "; ".join(configs),
            "registers": "; ".join(str(count) for count in registers if count is not None)}


def unfused_ops(graph: DataflowGraph, groups: Sequence[PlannedGroup]) -> list[str]:
    """Names of the ops outside all groups, views left out."""
    fused = {op for group in groups for op in group.ops}
    return [node.name for node in graph if kind_of(node, graph.specs) != "view" and node.name not in fused]


def plan_note(case: Case, seen: CompileStats) -> str:
    """Misses and fallbacks, so that they cannot pass for a result of the plan."""
    words = [] if case.groups else ["the plan fuses nothing"]
    words += [f"{counted(seen.misses, 'region')} by the cost model, not tuned"] if seen.misses else []
    words += [f"{count} fell back: {reason}" for reason, count in seen.fallbacks.items()]
    return "; ".join(words)


def operand_sets(case: Case, llc_bytes: int, limit_bytes: int) -> Operands:
    """Operand sets to use in turn, so that activations are where their producer left them and weights are not."""
    cold_bytes = sum(span_bytes(tensor) for tensor, hot in zip(case.inputs, case.hot, strict=True) if not hot)
    if cold_bytes * _MAX_SETS < CACHE_MULTIPLE * llc_bytes:
        return [case.inputs]
    return rotating_operands(case.inputs, case.hot, llc_bytes, limit_bytes)


@dataclass(frozen=True)
class PatternBench:
    """Times cells in ``modes`` (``"eager"``, ``"graph"``, ``"cold"``), ``seconds`` of interleaved rounds in each."""

    session: Session
    peers: Sequence[str]
    modes: Sequence[str]
    seconds: float

    def rows(self, cell: Cell) -> list[PatternRow]:
        """Rows of one cell in every mode; a contestant that fails gets rows that say why."""
        common: dict[str, Any] = {"workload": cell.size, "subject": cell.pattern, "key": cell.key, "dtype": cell.dtype}
        try:
            with torch.no_grad():
                return self._rows(cell, common)
        except Exception as error:  # such as a device without the memory: the other cells fit
            note = failure(error)
            return [PatternRow(contestant=OURS, mode=mode, note=note, **common) for mode in self.modes]
        finally:
            if self.session.target.is_gpu:
                torch.cuda.empty_cache()  # the next cell's tuning happens in another process

    def _rows(self, cell: Cell, common: Mapping[str, Any]) -> list[PatternRow]:
        target, device = self.session.target, self.session.target.device_type
        case, seen = plan_case(self.session, cell)
        facts, judge = plan_facts(case), _Judge(case)
        race, entered = Race(PatternRow, measured_at=now(), **common, **facts), dict[str, Contestant]()

        def make(name: str) -> tuple[Run, Mapping[str, Any]]:
            ours = name == OURS
            if not ours and not PEERS[name].runs_on(device):
                raise PeerError(f"{name} does not run on {device}")
            contestant = fused(case, case.groups) if ours else PEERS[name].build(case)
            error = judge.error(contestant)
            if error > judge.allowed:
                raise PeerError(f"another result: its error against float64 is {error:.1e}")
            entered[name] = contestant
            note = "; ".join(filter(None, (contestant.note, plan_note(case, seen) if ours else "")))
            return contestant.run, {"error": error, "note": note}

        race.enter((OURS, *self.peers), make)
        if is_gpu(device) and facts["bytes"] >= LARGE_BYTES:
            entered[COPY] = copy = copy_of(facts["bytes"], device)
            race.enter([COPY], lambda _: (copy.run, {"compile_s": None}))
        sets = operand_sets(case, cache_bytes(target.l2_bytes), free_bytes(device) // 4)
        own = {name: [contestant.prepare(*one) for one in sets] for name, contestant in entered.items()}
        rows: list[PatternRow] = []
        for mode in self.modes:
            timer = cold_timer(target.l2_bytes) if mode == "cold" else timer_for(device, mode)
            rows += race.rows(timer, sets, self.seconds, own)
        return rows


class _Judge:
    """Compares contestants with float64; ``allowed`` is the error that rounding explains."""

    def __init__(self, case: Case) -> None:
        graph, self._inputs = case.traced.graph, case.inputs
        self._references = reference_results(
            tuple(graph), graph.inputs, graph.outputs, case.inputs, case.target.device_type)
        eager = PEERS[EAGER].build(case)
        outputs = eager.outputs(eager.run(*case.inputs), case.inputs)
        rounding = max((torch.finfo(one.dtype).eps for one in outputs if one.is_floating_point()), default=0.0)
        self.allowed = max(_WRONG * self.error(eager), rounding)

    def error(self, contestant: Contestant) -> float:
        """Largest normwise relative error over the outputs; PeerError where one is missing, or has another shape."""
        operands = contestant.prepare(*self._inputs)
        outputs = contestant.outputs(contestant.run(*operands), operands)
        shapes = [tuple(one.shape) for one in outputs]
        wanted = [tuple(one.shape) for one in self._references]
        if shapes != wanted:
            raise PeerError(f"another result: its outputs have shapes {shapes}, not {wanted}")
        return max(errors(own, exact)[0] for own, exact in zip(outputs, self._references, strict=True))


def copy_of(moved_bytes: float, device: str) -> Contestant:
    """A copy that reads and writes ``moved_bytes`` in all."""
    source = torch.empty(int(moved_bytes) // 8, dtype=torch.int32, device=device)
    operands = (torch.empty_like(source), source)
    return Contestant(lambda target, values: target.copy_(values), lambda *inputs: operands)


class RowLog:
    """Rows of a bench in a CSV file that is complete after every cell, so that an interrupted bench keeps them.

    With ``resume`` it goes on with the rows that are there.
    """

    def __init__(self, path: Path, resume: bool = False) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.frame = _read(path) if resume and path.exists() else bench_frame([], PatternRow)
        self.add([])

    def has(self, key: str) -> bool:
        """True when ours was timed in the cell."""
        ours = self.frame[(self.frame["key"] == key) & (self.frame["contestant"] == OURS)]
        return bool(ours["median_us"].notna().any())

    def add(self, rows: Sequence[PatternRow]) -> None:
        """Append the rows of one cell; earlier rows of it (a failure, say) are replaced."""
        if rows:
            kept = self.frame[~self.frame["key"].isin([row.key for row in rows])]
            added = bench_frame(rows)
            self.frame = pd.concat([kept, added], ignore_index=True) if len(kept) else added
        whole = self._path.with_suffix(".part")
        self.frame.to_csv(whole, index=False)
        whole.replace(self._path)


def _read(path: Path) -> pd.DataFrame:
    kinds = {one.name: str(one.type) for one in fields(PatternRow)}
    numbers = [name for name, kind in kinds.items() if kind == "float | None"]
    types = {**dict.fromkeys(numbers, "float64"), **{name: "str" for name, kind in kinds.items() if kind == "str"}}
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values={name: [""] for name in numbers}, dtype=types)
    except (ValueError, pd.errors.EmptyDataError) as error:  # a ParserError and a UnicodeDecodeError are ValueErrors
        raise ConfigError("{}: {} is no result file ({}); leave it out to replace it", Argument("resume"), path,
                          error) from None
    if list(frame.columns) != list(kinds):
        raise ConfigError("{}: {} has other columns than this version writes; leave it out", Argument("resume"), path)
    return frame
