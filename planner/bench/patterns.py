"""Named patterns beside every peer, on the same tensors in one run: launched from Python, in a CUDA graph, and cold."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fuseplan.planner.bench.case import PlanFacts, operand_sets, plan_case, reference_outputs
from fuseplan.planner.bench.rows import BenchRow, failure, mode_rows
from fuseplan.planner.patterns.cells import Cell
from fuseplan.planner.peers.contestant import EAGER, OURS, Case, Contestant, PeerError
from fuseplan.planner.peers.inputs import make_inputs, trace_cell
from fuseplan.planner.peers.peers import PEERS, fused
from fuseplan.planner.tuning.session import Session
from fuseplan.search.store.record import now
from fuseplan.search.timing.measure import cache_bytes
from fuseplan.search.timing.timers import ColdTimer, Run, Timer, timer_for
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
#: A peer that takes longer than this to fail, building its kernels, is not asked again about the same pattern.
_SLOW_FAILURE_S = 1.0


@dataclass(frozen=True)
class PatternRow(BenchRow):
    """One contestant's time for one pattern at one size.

    ``subject`` is the pattern, ``workload`` its shape; ``bytes`` and what follows are of our plan for the cell.

    ``bytes`` have to be moved, in ``kernels`` launches; ``measured_at`` is UTC. ``in_place`` says that the contestant
    writes results over operands. ``predicted_us`` is what the cost model says of our plan, in the mode that its plans
    are made for.
    """

    dtype: str = ""
    bytes: float = 0.0
    kernels: int = 0
    config: str = ""
    registers: str = ""
    measured_at: str = ""
    in_place: bool = False
    predicted_us: float | None = None


@dataclass(frozen=True)
class PatternBench:
    """Times cells in ``modes`` (``"eager"``, ``"graph"``, ``"cold"``), ``seconds`` of interleaved rounds in each."""

    session: Session
    peers: Sequence[str]
    modes: Sequence[str]
    seconds: float
    _timers: dict[str, Timer] = field(default_factory=dict)
    _hopeless: dict[tuple[str, str], str] = field(default_factory=dict)

    def rows(self, cell: Cell) -> list[PatternRow]:
        """Rows of one cell in every mode; a contestant that fails gets rows that say why."""
        try:
            return list(self._rows(cell))
        except Exception as error:  # such as a device without the memory: the other cells fit
            note = failure(error)
            return [
                PatternRow(cell.size, cell.pattern, OURS, mode, note=note, key=cell.key, dtype=cell.dtype)
                for mode in self.modes
            ]
        finally:
            if self.session.target.device_type == "cuda":
                torch.cuda.empty_cache()  # the next cell's tuning happens in another process

    def _rows(self, cell: Cell) -> Iterator[PatternRow]:
        device = self.session.target.device_type
        traced, specs = trace_cell(cell, device)
        with torch.no_grad():
            inputs = make_inputs(traced, specs, device)
            case, plan = plan_case(self.session, cell, traced, tuple(specs), inputs)
            common: dict[str, Any] = {"workload": cell.size, "subject": cell.pattern, "key": cell.key}
            own: dict[str, Any] = {
                "dtype": cell.dtype, "bytes": plan.bytes, "kernels": plan.kernels, "config": plan.config,
                "registers": plan.registers, "measured_at": now(),
            }
            entered = self._contestants(case, plan)
            for name, note in entered.failed.items():
                for mode in self.modes:
                    yield PatternRow(contestant=name, mode=mode, note=note, **common, **own)
            if not entered.runs:
                return
            target = case.target
            sets = operand_sets(case, cache_bytes(target.l2_bytes), free_bytes(target.device_type) // 4)
            operands = {
                name: [contestant.operands(one) for one in sets]
                for name, contestant in entered.contestants.items() if contestant.prepare is not None
            }
            for mode in self.modes:
                timer = self._timer(mode)
                rows = mode_rows(timer, entered.runs, sets, self.seconds, entered.facts, operands, **common)
                for row in rows:
                    in_place = entered.contestants[row.contestant].in_place
                    priced = row.contestant == OURS and mode == self.session.settings.regime
                    yield PatternRow(
                        **asdict(row), **own, in_place=in_place, predicted_us=plan.predicted_us if priced else None
                    )

    def _contestants(self, case: Case, plan: PlanFacts) -> _Field:
        """Everyone who computes the pattern, checked."""
        judge = _Judge(case)
        found = _Field()
        for name in (OURS, *self.peers):
            self._enter(found, judge, case, name, plan.note if name == OURS else "")
        if any(contestant.in_place for contestant in found.contestants.values()):
            self._enter(found, judge, case, OURS_IN_PLACE, plan.note)
        if case.target.device_type == "cuda" and plan.bytes >= LARGE_BYTES:
            found.add(COPY, copy_of(plan.bytes, case.target.device_type), {})
        return found

    def _enter(self, found: _Field, judge: _Judge, case: Case, name: str, plan_note: str) -> None:
        """Add a contestant, or the reason why it does not take part."""
        start = time.perf_counter()
        try:
            contestant = self._build(case, name)
            error = judge.error(contestant)
        except Exception as problem:  # whatever a peer does must not end the bench
            found.failed[name] = str(problem) if isinstance(problem, PeerError) else failure(problem)
            if name in PEERS and time.perf_counter() - start > _SLOW_FAILURE_S:
                self._hopeless[name, case.pattern] = found.failed[name]
            return
        notes = filter(None, (contestant.note, plan_note))
        facts = {"compile_s": time.perf_counter() - start, "error": error, "note": "; ".join(notes)}
        if judge.is_wrong(error):
            found.failed[name] = f"another result: its error against float64 is {error:.1e}"
            return
        found.add(name, contestant, facts)

    def _build(self, case: Case, name: str) -> Contestant:
        if name in (OURS, OURS_IN_PLACE):
            return fused(case, case.groups, in_place=name == OURS_IN_PLACE)
        if (name, case.pattern) in self._hopeless:
            raise PeerError(self._hopeless[name, case.pattern])
        if case.target.device_type not in PEERS[name].devices:
            raise PeerError(f"{name} does not run on {case.target.device_type}")
        return PEERS[name].build(case)

    def _timer(self, mode: str) -> Timer:
        """The mode's timer, made once: the cold one has a large buffer."""
        if mode not in self._timers:
            target = self.session.target
            cold = mode == "cold" and target.device_type == "cuda"
            self._timers[mode] = ColdTimer(target.l2_bytes) if cold else timer_for(target.device_type, mode)
        return self._timers[mode]


@dataclass
class _Field:
    """Who takes part in a cell, and why the others do not."""

    contestants: dict[str, Contestant] = field(default_factory=dict)
    facts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> dict[str, Run]:
        return {name: contestant.run for name, contestant in self.contestants.items()}

    def add(self, name: str, contestant: Contestant, facts: Mapping[str, Any]) -> None:
        self.contestants[name] = contestant
        self.facts[name] = facts


class _Judge:
    """Compares contestants with float64 and with what eager makes of it."""

    def __init__(self, case: Case) -> None:
        self._inputs = case.inputs
        self._references = reference_outputs(case)
        eager = PEERS[EAGER].build(case)
        self._eager_error = self.error(eager)
        outputs = eager.outputs(eager.run(*case.inputs), case.inputs)
        self._rounding = max((torch.finfo(one.dtype).eps for one in outputs if one.is_floating_point()), default=0.0)

    def error(self, contestant: Contestant) -> float:
        """Largest normwise relative error over the outputs.

        Raises:
            PeerError: An output is missing, or has another shape.
        """
        operands = contestant.operands(self._inputs)
        outputs = contestant.outputs(contestant.run(*operands), operands)
        shapes = [tuple(one.shape) for one in outputs]
        wanted = [tuple(one.shape) for one in self._references]
        if shapes != wanted:
            raise PeerError(f"another result: its outputs have shapes {shapes}, not {wanted}")
        return max(errors(own, exact)[0] for own, exact in zip(outputs, self._references, strict=True))

    def is_wrong(self, error: float) -> bool:
        """True when rounding cannot explain an error."""
        allowed = max(_WRONG * self._eager_error, self._rounding)
        return not error <= allowed and not math.isinf(self._eager_error)


def copy_of(moved_bytes: float, device: str) -> Contestant:
    """A copy that reads and writes ``moved_bytes`` in all."""
    source = torch.empty(int(moved_bytes) // 8, dtype=torch.int32, device=device)
    operands = (torch.empty_like(source), source)
    return Contestant(lambda target, values: target.copy_(values), lambda *inputs: operands)
