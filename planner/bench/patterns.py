"""Named patterns beside every peer, on the same tensors in one run: launched from Python, in a CUDA graph, and cold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.bench.case import operand_sets, plan_case, plan_facts, plan_note, reference_outputs
from fuseplan.planner.bench.rows import BenchRow, Race, bench_frame, failure
from fuseplan.planner.errors import Argument, ConfigError
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.contestant import EAGER, OURS, Case, Contestant, PeerError
from fuseplan.planner.peers.peers import PEERS, fused
from fuseplan.planner.tuning.session import Session
from fuseplan.search.store.record import now
from fuseplan.search.timing.measure import cache_bytes
from fuseplan.search.timing.timers import Run, cold_timer, timer_for
from fuseplan.search.timing.verify import errors
from fuseplan.search.workers.jobs import free_bytes

#: Ours with results in the memory of activations, as dispatch runs a group in which they die. It takes part where a
#: peer works so.
OURS_IN_PLACE = f"{OURS} in place"
#: A device-to-device copy of as many bytes as ours moves, in the same run: what memory gives.
COPY = "copy"
#: Cells that move this much are compared with it.
LARGE_BYTES = 256e6
#: An error this many times eager's (or this many roundings of the output) is another result, not another rounding.
_WRONG = 8


@dataclass(frozen=True)
class PatternRow(BenchRow):
    """One contestant's time for one pattern (``subject``) at one size (``workload``).

    ``bytes`` have to be moved, in ``kernels`` launches of our plan for the cell; ``measured_at`` is UTC. ``in_place``
    says that the contestant writes results over operands.
    """

    dtype: str = ""
    bytes: float = 0.0
    kernels: int = 0
    config: str = ""
    registers: str = ""
    measured_at: str = ""
    in_place: bool = False


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

        def enter(name: str) -> None:
            def make() -> tuple[Run, Mapping[str, Any]]:
                contestant = _contestant(case, name)
                error = judge.error(contestant)
                if error > judge.allowed:
                    raise PeerError(f"another result: its error against float64 is {error:.1e}")
                entered[name] = contestant
                notes = (contestant.note, plan_note(case, seen) if name in (OURS, OURS_IN_PLACE) else "")
                note = "; ".join(filter(None, notes))
                return contestant.run, {"error": error, "note": note, "in_place": contestant.in_place}

            race.enter(name, make)

        for name in (OURS, *self.peers):
            enter(name)
        if any(contestant.in_place for contestant in entered.values()):
            enter(OURS_IN_PLACE)
        if is_gpu(device) and facts["bytes"] >= LARGE_BYTES:
            entered[COPY] = copy = copy_of(facts["bytes"], device)
            race.enter(COPY, lambda: (copy.run, {"compile_s": None}))
        sets = operand_sets(case, cache_bytes(target.l2_bytes), free_bytes(device) // 4)
        own = {
            name: [contestant.operands(one) for one in sets]
            for name, contestant in entered.items() if contestant.prepare is not None
        }
        rows: list[PatternRow] = []
        for mode in self.modes:
            timer = cold_timer(target.l2_bytes) if mode == "cold" else timer_for(device, mode)
            rows += race.rows(timer, sets, self.seconds, own)
        return rows


def _contestant(case: Case, name: str) -> Contestant:
    if name in (OURS, OURS_IN_PLACE):
        return fused(case, case.groups, in_place=name == OURS_IN_PLACE)
    if not PEERS[name].runs_on(case.target.device_type):
        raise PeerError(f"{name} does not run on {case.target.device_type}")
    return PEERS[name].build(case)


class _Judge:
    """Compares contestants with float64; ``allowed`` is the error that rounding explains."""

    def __init__(self, case: Case) -> None:
        self._inputs, self._references = case.inputs, reference_outputs(case)
        eager = PEERS[EAGER].build(case)
        outputs = eager.outputs(eager.run(*case.inputs), case.inputs)
        rounding = max((torch.finfo(one.dtype).eps for one in outputs if one.is_floating_point()), default=0.0)
        self.allowed = max(_WRONG * self.error(eager), rounding)

    def error(self, contestant: Contestant) -> float:
        """Largest normwise relative error over the outputs; PeerError where one is missing, or has another shape."""
        operands = contestant.operands(self._inputs)
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

    With ``resume`` it goes on with the rows that are there, if their columns are those of this version; otherwise they
    are replaced.
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
