"""A tuner whose times come from a table, and chains of ops to plan with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from graphs import Builder

from fuseplan.kernels.ir.backend import Target
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode
from fuseplan.planner.implementations.tunable_group import TunableGroup
from fuseplan.search.store.database import Database
from fuseplan.search.store.leases import Leases
from fuseplan.search.store.record import ATEN, Evidence, Measurement, RecordKey, Trial, TuningRecord, Versions, now
from fuseplan.search.timing.contest import Contest
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.time_account import TimeAccount
from fuseplan.search.workers.jobs import Calls

TARGET = Target("cpu", "native", 2)


def measured(us: float) -> Measurement:
    return Measurement(us, 0.0, 10, 5, "eager")


@dataclass
class ScriptedTuner:
    """Answers like the tuner.

    Attributes:
        fused_us: Time of a group's kernel.
        unfused_us: Time of each op by itself.
        refuses: Groups whose answer is "do not fuse".
        noisy: A factor on everything that is not measured in an interleaved run.
        library_us: Time of a library call by its name; one that is not named fails.
        together_us: What a whole sequence takes longer than its parts, by the number of kernels in it.
    """

    database: Database
    fused_us: Callable[[TunableGroup], float]
    unfused_us: float = 10.0
    refuses: Callable[[TunableGroup], bool] = lambda subject: False
    noisy: Callable[[], float] = lambda: 1.0
    library_us: Mapping[str, float] = field(default_factory=dict)
    together_us: Callable[[int], float] = lambda kernels: 0.0
    seed: int = 0
    run: str = ""
    screened: list[str] = field(default_factory=list)
    tuned: list[str] = field(default_factory=list)
    minor: list[bool] = field(default_factory=list)
    play_offs: list[tuple[int, ...]] = field(default_factory=list)
    kept: list[tuple[str, ...]] = field(default_factory=list)
    prefetched: list[str] = field(default_factory=list)
    soon: list[str] = field(default_factory=list)
    account: TimeAccount = field(default_factory=TimeAccount)

    def __post_init__(self) -> None:
        self.leases = Leases(self.database)

    def time_unfused(self, subject: TunableGroup) -> Measurement:
        return measured(self.unfused_us * self.noisy())

    def screen(self, subject: TunableGroup) -> Trial:
        self.screened.append(subject.label)
        return Trial(RecordKey(subject.key, "dev"), "cpp", {"unroll": 1}, self.fused_us(subject) * self.noisy())

    def contest_calls(
        self, plain: TunableGroup, calls: Mapping[str, TunableGroup], ops: int = 1
    ) -> Callable[[], Calls | None]:
        """Every call of a library that is right, beside ATen's op."""
        times = {ATEN: self.unfused_us} | {name: self.library_us[name] for name in calls if name in self.library_us}
        samples = {name: (time_us,) * 5 for name, time_us in times.items()}
        failed = {name: "wrong result: it is a fake" for name in calls if name not in times}
        return lambda: Calls(Contest(samples, 0.0, "eager"), failed)

    def precompile(self, subjects: Iterable[TunableGroup]) -> None:
        """There is nothing to compile."""

    def prefetch(self, subjects: Iterable[TunableGroup], minor: bool = False, spare: bool = False) -> None:
        (self.prefetched if spare else self.soon).extend(subject.label for subject in subjects)

    def prefetch_default(self, subjects: Iterable[TunableGroup]) -> None:
        self.prefetched.extend(subject.label for subject in subjects)

    def play_off(
        self, parts: Mapping[str, Part], sides: Mapping[str, Sequence[str]], kept: Collection[str] = ()
    ) -> Contest | None:
        def time_us(part: Part) -> float:
            subject = part.subject
            assert isinstance(subject, TunableGroup)
            if subject.library is not None:
                return self.library_us[subject.library.name]
            return self.unfused_us if part.backend is None else self.fused_us(subject)

        self.play_offs.append(tuple(len(names) for names in sides.values()))
        self.kept.append(tuple(kept))
        samples = {}
        for side, names in sides.items():
            kernels = sum(parts[name].backend is not None for name in names)
            samples[side] = (sum(time_us(parts[name]) for name in names) + self.together_us(kernels),) * 5
        return Contest(samples, 0.0, "eager")

    def play_off_later(
        self, parts: Mapping[str, Part], sides: Mapping[str, Sequence[str]], kept: Collection[str] = ()
    ) -> Callable[[], Contest | None]:
        return lambda: self.play_off(parts, sides, kept)

    def tune(
        self, subject: TunableGroup, neighbours: Sequence[TuningRecord] = (), minor: bool = False
    ) -> TuningRecord:
        self.tuned.append(subject.label)
        self.minor.append(minor)
        fuse = not self.refuses(subject)
        fused, unfused = self.fused_us(subject) * self.noisy(), self.unfused_us * len(compute_nodes(subject))
        record = TuningRecord(
            RecordKey(subject.key, "dev"), subject.label, fuse, "cpp", {"unroll": 2}, measured(fused),
            measured(unfused), 1 - fused / unfused, 0.1, 0.01, 1e-7, 1e-7, (), (), {}, 4, 2, 2,
            {}, Evidence(now(), Versions.current("cpu"), 0, 0.1), subject.work,
        )
        self.database.put_record(record)
        return record


def compute_nodes(subject: TunableGroup) -> list[OpNode]:
    return [node for node in subject.nodes if node.op.split(".")[1] not in ("view", "transpose", "slice")]


def chain(length: int) -> DataflowGraph:
    b = Builder(x=torch.randn(4, 8))
    value = "x"
    for number in range(length):
        value = b(("aten.exp.default", "aten.neg.default", "aten.tanh.default")[number % 3], value)
    return b.graph(value)
