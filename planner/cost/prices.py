"""What a choice costs: the cost model's prediction and lower bound, and the measured time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from fuseplan.costmodel.calibrate import Sample
from fuseplan.costmodel.device import DeviceSpec
from fuseplan.costmodel.devices import is_cpu
from fuseplan.costmodel.roofline import lower_bound, nominal_us, predict
from fuseplan.planner.cost.running_calibration import RunningCalibration
from fuseplan.planner.graph.dataflow import Region
from fuseplan.planner.groups.candidates import Candidate, single_candidates
from fuseplan.planner.groups.regions import find_regions, region_parts, split_common, unique_regions
from fuseplan.planner.implementations.choices import Choice
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementation import Implementation, Screening
from fuseplan.planner.libraries.few_rows import FEW_ROWS
from fuseplan.planner.libraries.few_rows_attention import ROWS_ATTENTION
from fuseplan.planner.libraries.matmul_calls import PADDED, alignment
from fuseplan.search import policy
from fuseplan.search.store.record import TuningRecord
from fuseplan.search.timing.contest import Contest
from fuseplan.search.tune.tuner import Tuner


class ModelPrices:
    """Predictions and bounds in seconds; each launch costs 1 where nothing was probed."""

    def __init__(self, table: GroupTable, spec: DeviceSpec | None) -> None:
        self.table = table
        self.spec = spec
        #: Why choices do not work that were measured.
        self.failures: dict[Choice, str] = {}

    def predict_s(self, choice: Choice) -> float:
        """The price of running a choice again and again by itself."""
        way = choice.implementation
        if way.refuse(self.table, choice.group) is not None:
            return math.inf
        factor = self._slower_factor(choice.group) if choice.is_plain else 1.0
        if self.spec is None:
            return factor
        name = way.calibration(self.table, choice.group)
        return factor * predict(way.work(self.table, choice.group), self.spec, way.mode, backend=name) * 1e-6

    def _slower_factor(self, group: Candidate) -> float:
        """How many times longer ATen's call takes than it should: of a matmul on a GPU where a padded one keeps tensor
        cores busy, on a CPU where it has few rows; there of attention and of other ops, too.
        """
        if not self.table.is_anchor(group):
            return self.table.cpu_factor(group) if is_cpu(self.table.device_type) else 1.0
        op = self.table.op_group(group)
        if FEW_ROWS.surpasses(op):
            return policy.FEW_ROWS_FACTOR
        if ROWS_ATTENTION.surpasses(op):
            return policy.ROWS_ATTENTION_FACTOR
        return policy.UNALIGNED_FACTORS[alignment(op)] if PADDED.refuse(op) is None else 1.0

    def nominal_s(self, choice: Choice) -> float:
        """The price on the nominal device, which no measurement sways; infinite for what cannot run here."""
        way = choice.implementation
        if way.refuse(self.table, choice.group) is not None:
            return math.inf
        return nominal_us(way.work(self.table, choice.group), self.table.device_type, bool(way.backends)) * 1e-6

    def bound_s(self, choice: Choice) -> float:
        """No measurement of the choice comes out lower."""
        if choice.implementation.refuse(self.table, choice.group) is not None:
            return math.inf
        return self.bound_us(choice) * 1e-6

    def bound_us(self, choice: Choice) -> float:
        """What the choice cannot beat on this device; 0 where it was not probed."""
        way = choice.implementation
        return 0.0 if self.spec is None else lower_bound(way.work(self.table, choice.group), self.spec, way.mode)

    def record(self, choice: Choice) -> TuningRecord | None:
        """The tuning record that a choice rests on, if it has one."""
        return None

    def plain_us(self, choice: Choice) -> float:
        """Time of the ops of a choice that was measured, as ATen runs them."""
        return 0.0


class MeasuredPrices(ModelPrices):
    """The same bounds; times are measured, choice by choice.

    What has configurations is ranked by its default one (one compilation each); :meth:`tuned` then searches those of
    the groups that a cover uses, with little effort where a part is ``minor``.
    """

    def __init__(self, table: GroupTable, spec: DeviceSpec | None, tuner: Tuner,
                 learner: RunningCalibration | None = None, minor: bool = False) -> None:
        super().__init__(table, spec)
        self.tuner = tuner
        self.minor = minor
        self.learner = learner
        self.records: dict[tuple[str, ...], TuningRecord] = {}
        self._screened_s: dict[Choice, float] = {}

    def measure_s(self, choices: Sequence[Choice]) -> list[float]:
        new = [choice.group for choice in choices if self.untuned(choice)]
        self.tuner.precompile(self.table.subject(group) for group in new)
        return [self._measure_s(choice) for choice in choices]

    def contest(self, plain: Choice, calls: Sequence[Choice]) -> Callable[[], Contest | None]:
        """ATen's op and the libraries' calls that may run it, by name, in one interleaved run; None when that fails.

        What is returned waits for the run, and takes the times from it; a call that is wrong has none.
        """
        parts = {one.implementation.name: one.implementation.part(self.table, one.group, "", {}) for one in calls}
        run = self.tuner.contest_calls(
            self.table.subject(plain.group), {name: part.subject for name, part in parts.items()}
        )

        def result() -> Contest | None:
            if (found := run()) is None:
                return None
            for choice in (plain, *calls):
                name = choice.implementation.name
                timed = Screening(found.contest.time(name).median_us) if name in found.contest.samples else Screening(
                    None, found.failed[name])
                self._screened_s[choice] = self._noted_s(choice, timed)
            return found.contest

        return result

    def untuned(self, choice: Choice) -> bool:
        """Whether there are configurations that were not searched."""
        return bool(choice.implementation.backends) and choice.group.ops not in self.records

    def tuned(self, group: Candidate) -> TuningRecord:
        """The group's record; its time replaces the one it was ranked by."""
        if group.ops not in self.records:
            neighbours = tuple(self.records.values())
            subject = self.table.subject(group)
            self.records[group.ops] = self.tuner.tune(subject, neighbours=neighbours, minor=self.minor)
        return self.records[group.ops]

    def record(self, choice: Choice) -> TuningRecord | None:
        return self.records.get(choice.group.ops) if choice.implementation.backends else None

    def plain_us(self, choice: Choice) -> float:
        ops = set(choice.group.ops)
        plain = ((one, time_s) for one, time_s in self._screened_s.items() if one.is_plain)
        return math.fsum(time_s * 1e6 for one, time_s in plain if ops.issuperset(one.group.ops))

    def _measure_s(self, choice: Choice) -> float:
        record = self.record(choice)
        if record is None and choice not in self._screened_s:
            screened = choice.implementation.screen(self.table, choice.group, self.tuner)
            self._screened_s[choice] = self._noted_s(choice, screened)
        least = policy.ONE_OP_GAIN.on(self.table.device_type) if len(choice.group.ops) == 1 else -math.inf
        return self._screened_s[choice] if record is None else _kernel_s(record, least)

    def _noted_s(self, choice: Choice, found: Screening) -> float:
        """The time of a screening, once it is learned from; infinite where it failed."""
        if found.time_us is None:
            self.failures[choice] = found.reason
            return math.inf
        self._learn(choice, found.backend, found.time_us)
        return found.time_us * 1e-6

    def _learn(self, choice: Choice, backend: str, time_us: float) -> None:
        if self.learner is None:
            return
        way, subject = choice.implementation, self.table.subject(choice.group)
        family = "+".join(sorted({self.table.graph.op(op).op for op in choice.group.ops}))
        if self.table.is_anchor(choice.group):  # few ops, each of many sizes: others of these sizes say too much of it
            family = subject.label
        same = subject.key if way.backends or choice.is_plain else f"{subject.key} {way.name}"
        sample = Sample(way.work(self.table, choice.group), way.mode, time_us, family=family)
        self.learner.add(backend or way.calibration(self.table, choice.group), same, sample)


def _kernel_s(record: TuningRecord, least: float) -> float:
    """Time of a record's kernel; infinite where it is not to be used, or does not gain ``least``."""
    if record.fused is None or not (record.undecided or (record.fuse and record.gain > least)):
        return math.inf
    return record.fused.median_us * 1e-6


def part_shares(table: GroupTable, aten: Implementation) -> Mapping[str, float]:
    """By the key of each part of a region, or of a piece: its share of the graph's time, all occurrences together.

    Times are ATen's on the nominal device, so that tunes agree. A graph cut out of another one has the shares of that.
    """
    if table.graph.shares:
        return table.graph.shares
    prices, seconds = ModelPrices(table, None), defaultdict[str, float](float)

    def count(region: Region, times: int, known: Collection[str] = ()) -> None:
        for part in region_parts(table.graph, region):
            if part.key not in known:
                singles = single_candidates(table.graph, part)
                seconds[part.key] += times * math.fsum(prices.nominal_s(Choice(one, aten)) for one in singles)

    distinct = [(one[0], len(one)) for one in unique_regions(find_regions(table.graph)).values()]
    for region, times in distinct:
        count(region, times)
    total_s, whole = math.fsum(seconds.values()), frozenset(seconds)
    for region, times in distinct:
        for piece in split_common(table.graph, region):
            count(piece, times, whole)
    return {key: part_s / total_s for key, part_s in seconds.items()} if total_s > 0 else {}
