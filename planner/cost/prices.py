"""What a choice costs: the cost model's prediction and lower bound, and the measured time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fuseplan.costmodel.calibrate import Sample
from fuseplan.costmodel.device import DeviceSpec, Mode
from fuseplan.costmodel.nominal import nominal_us
from fuseplan.costmodel.roofline import lower_bound, predict
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Backend, Target
from fuseplan.planner.cost.running_calibration import UNFUSED, RunningCalibration
from fuseplan.planner.cost.samples import ChoiceSample
from fuseplan.planner.cost.shared_cache import SharedCache
from fuseplan.planner.graph.dataflow import DataflowGraph, Region
from fuseplan.planner.groups.candidates import Candidate, Enumeration, group_form
from fuseplan.planner.groups.choices import Choice, region_problem
from fuseplan.planner.groups.compute_graph import compute_graph_of
from fuseplan.planner.implementations.group_work import hot_inputs, kernel_work, op_work
from fuseplan.planner.implementations.subject import GroupSubject, group_subject
from fuseplan.planner.lowering.lower import Lowered, NotLowerable, lower
from fuseplan.search.store.record import TuningRecord
from fuseplan.search.tune.tuner import Tuner


class GroupBook:
    """The candidates of one static graph, lowered once: legality, work, keys and subjects.

    Args:
        graph: The graph.
        numerics: How kernels round.
        device_type: Where they run.
        dynamic: The same graph with dynamic sizes, where a legal group has to be a kernel, too.
    """

    def __init__(
        self, graph: DataflowGraph, numerics: str, device_type: str, dynamic: DataflowGraph | None = None
    ) -> None:
        self.graph = graph
        self.numerics = numerics
        self.device_type = device_type
        self.dynamic = dynamic
        self._lowered: dict[tuple[str, ...], Lowered] = {}
        self._works: dict[tuple[str, ...], Work] = {}
        self._subjects: dict[tuple[str, ...], GroupSubject] = {}
        self._singles: dict[str, Work] = {}
        self._backends: dict[tuple[str, ...], Backend | None] = {}

    def neighbours(self, region: Region) -> SharedCache:
        """What shares the cache in a region."""
        ops = ((choice.group.ops[0], self.static(choice.group)) for choice in self.unfused_choices(region))
        return SharedCache(self.graph, tuple(ops))

    def static(self, group: Candidate) -> Lowered:
        """The group's kernel with its sizes bound; errors are those of :meth:`lowered`."""
        lowered = self.lowered(group)
        return replace(lowered, ir=lowered.ir.bind(self.graph.kernel_sizes))

    def lowered(self, group: Candidate) -> Lowered:
        """The group's kernel.

        Raises:
            NotLowerable: With the reason.
        """
        if group.ops not in self._lowered:
            self._lowered[group.ops] = lower(self.graph, group.ops, self.numerics, group.outputs)
        return self._lowered[group.ops]

    def legal(self, ops: Sequence[str]) -> str | None:
        """Why ``ops`` cannot be one kernel, None when they can (the legality of the enumeration)."""
        names = tuple(ops)
        try:
            self._lowered[names] = _as_kernel(self.graph, names, self.numerics)
            if self.dynamic is not None:
                _as_kernel(self.dynamic, names, self.numerics)
        except NotLowerable as refused:
            return str(refused)
        return None

    def unfused_choices(self, region: Region) -> tuple[Choice, ...]:
        """Every compute op of a region by itself, as the ATen op it is."""
        return region_problem(self.graph, region, Enumeration((), ())).choices

    def work(self, group: Candidate) -> Work:
        """Work of the group as one kernel."""
        if group.ops not in self._works:
            lowered = self.lowered(group)
            hot = hot_inputs(self.graph, lowered.inputs)
            self._works[group.ops] = kernel_work(lowered.ir.bind(self.graph.kernel_sizes), hot)
        return self._works[group.ops]

    def backend_for(self, group: Candidate, backends: Sequence[Backend], target: Target) -> Backend | None:
        """The first of ``backends`` (always the same ones) that is here and can express the group."""
        if group.ops not in self._backends:
            ir = self.lowered(group).ir
            willing = (b for b in backends if b.unavailable() is None and b.refuse(ir, target) is None)
            self._backends[group.ops] = next(willing, None)
        return self._backends[group.ops]

    def unfused_work(self, op: str) -> Work:
        """Work of one ATen op by itself."""
        if op not in self._singles:
            self._singles[op] = op_work(self.graph, op)
        return self._singles[op]

    def subject(self, group: Candidate) -> GroupSubject:
        """The group as the search sees it."""
        if group.ops not in self._subjects:
            key = group_form(self.graph, group.ops, group.outputs).key
            self._subjects[group.ops] = group_subject(
                self.graph, group.ops, key, self.numerics, self.device_type, group.outputs
            )
        return self._subjects[group.ops]


def _as_kernel(graph: DataflowGraph, ops: tuple[str, ...], numerics: str) -> Lowered:
    flow = compute_graph_of(graph)
    return lower(graph, ops, numerics, flow.needed_outside(flow.position[name] for name in ops))


def fused_mode(regime: str) -> Mode:
    """How generated kernels are launched in a regime; those of a CUDA graph overlap where the device can."""
    return "overlapped" if regime == "graph" else "kernel"


class ModelPrices:
    """Predictions and lower bounds on a probed device, in seconds.

    Without a probed device every launch costs the same: the cheapest cover is then the one with the fewest kernels.
    With the region that the choices are of, a price is that of a kernel in it
    (:mod:`fuseplan.planner.cost.shared_cache`).
    """

    def __init__(self, book: GroupBook, spec: DeviceSpec | None, regime: str, backends: Sequence[Backend],
                 target: Target, region: Region | None = None) -> None:
        self.book = book
        self.spec = spec
        self.backends = backends
        self.target = target
        self.fused_mode = fused_mode(regime)
        self.unfused_mode: Mode = "graph" if regime == "graph" else "eager"
        self.region = region
        self._neighbours: SharedCache | None = None
        self._delays_us: dict[Choice, float] = {}

    def backend_for(self, group: Candidate) -> Backend | None:
        """The first back end that is here and can express the group."""
        return self.book.backend_for(group, self.backends, self.target)

    def predict_s(self, choice: Choice) -> float:
        """The price in the region."""
        return self.predict_alone_s(choice) + self.delay_us(choice) * 1e-6

    def predict_alone_s(self, choice: Choice) -> float:
        """The price of running a choice again and again by itself."""
        backend = self.backend_for(choice.group) if choice.fused else None
        if choice.fused and backend is None:
            return math.inf
        if self.spec is None:
            return 1.0
        name = backend.name if backend is not None else UNFUSED
        work, mode = self._work(choice)
        return predict(work, self.spec, mode, backend=name).time_us * 1e-6

    def delay_us(self, choice: Choice) -> float:
        """How much longer a choice takes in its region than by itself; 0 on CPUs."""
        if self.spec is None or self.region is None or self.spec.identity.device_type != "cuda":
            return 0.0
        if choice not in self._delays_us:
            if self._neighbours is None:
                self._neighbours = self.book.neighbours(self.region)
            work, mode = self._work(choice)
            self._delays_us[choice] = self._neighbours.delay_us(work, self.spec, mode, self.book.static(choice.group))
        return self._delays_us[choice]

    def _work(self, choice: Choice) -> tuple[Work, Mode]:
        """What a choice does, and how it is launched."""
        if choice.fused:
            return self.book.work(choice.group), self.fused_mode
        return self.book.unfused_work(choice.group.ops[0]), self.unfused_mode

    def nominal_s(self, choice: Choice) -> float:
        """The price on the nominal device, which no measurement sways; infinite for what cannot run here."""
        if choice.fused and self.backend_for(choice.group) is None:
            return math.inf
        work, _ = self._work(choice)
        return nominal_us(work, self.target.device_type, choice.fused) * 1e-6

    def bound_s(self, choice: Choice) -> float:
        if not choice.fused:
            return 0.0  # measured before any cover is solved
        if self.spec is None or self.backend_for(choice.group) is None:
            return math.inf if self.spec is not None else 0.0
        return lower_bound(self.book.work(choice.group), self.spec, self.fused_mode) * 1e-6


class MeasuredPrices(ModelPrices):
    """The same bounds; times are measured, kernel by kernel: what they cost each other is the model's price.

    Groups are ranked by their default configuration (one compilation each); :meth:`tuned` then searches the
    configurations of the groups that a cover uses.
    """

    def __init__(self, book: GroupBook, spec: DeviceSpec | None, regime: str, backends: Sequence[Backend],
                 target: Target, tuner: Tuner, learner: RunningCalibration | None = None,
                 region: Region | None = None) -> None:
        super().__init__(book, spec, regime, backends, target, region)
        self.tuner = tuner
        self.learner = learner
        self.records: dict[tuple[str, ...], TuningRecord] = {}
        self.failures: dict[tuple[str, ...], str] = {}
        self._screened_s: dict[Choice, float] = {}
        #: What was measured, for reports to judge the model by.
        self.samples: dict[Choice, ChoiceSample] = {}

    def measure_s(self, choices: Sequence[Choice]) -> list[float]:
        fused = [choice.group for choice in choices if choice.fused and choice.group.ops not in self.records]
        self.tuner.precompile(self.book.subject(group) for group in fused)
        return [self._measure_s(choice) for choice in choices]

    def tuned(self, group: Candidate) -> TuningRecord:
        """The group's record; its time replaces the one it was ranked by."""
        if group.ops not in self.records:
            neighbours = tuple(self.records.values())
            self.records[group.ops] = self.tuner.tune(self.book.subject(group), neighbours=neighbours)
        return self.records[group.ops]

    def _measure_s(self, choice: Choice) -> float:
        record = self.records.get(choice.group.ops) if choice.fused else None
        if record is None and choice not in self._screened_s:
            self._screened_s[choice] = self._screen_s(choice)
        alone_s = self._screened_s[choice] if record is None else fused_s(record)
        return alone_s + self.delay_us(choice) * 1e-6

    def _screen_s(self, choice: Choice) -> float:
        subject = self.book.subject(choice.group)
        if not choice.fused:
            op = choice.group.ops[0]
            time_us = self.tuner.time_unfused(subject).median_us
            self._learn(UNFUSED, choice, Sample(self.book.unfused_work(op), self.unfused_mode, time_us))
            return time_us * 1e-6
        trial = self.tuner.screen(subject)
        if trial.median_us is None:
            self.failures[choice.group.ops] = trial.reason
            return math.inf
        self._learn(trial.backend, choice, Sample(subject.work, self.fused_mode, trial.median_us))
        return trial.median_us * 1e-6

    def _learn(self, name: str, choice: Choice, sample: Sample) -> None:
        ops = sorted({self.book.graph.op(op).op for op in choice.group.ops})
        sample = replace(sample, family="+".join(ops))
        subject = self.book.subject(choice.group)
        self.samples[choice] = ChoiceSample(
            (), choice.fused, name, subject.label, sample.family, subject.key, sample.mode, sample.work,
            sample.measured_us, self.delay_us(choice),
        )
        if self.learner is not None:
            self.learner.add(name, sample)


def fused_s(record: TuningRecord) -> float:
    """Time of a record's kernel; infinite for "do not fuse": other groups, or single ops, cover its ops then."""
    if record.fused is None or not (record.fuse or record.undecided):
        return math.inf
    return record.fused.median_us * 1e-6
