"""A generated kernel as an implementation; the search picks its back end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from fuseplan.costmodel.device import Mode
from fuseplan.costmodel.devices import is_cpu
from fuseplan.costmodel.work import Work
from fuseplan.kernels.ir.backend import Backend, BuildError, Config, Target, config_key, fused_call
from fuseplan.kernels.ir.gathers import may_fail
from fuseplan.kernels.ir.in_place import ReuseOptions
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.planner.capture.normalise import Traced
from fuseplan.planner.errors import RefusedError
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.aten import run_chain, run_unfused
from fuseplan.planner.implementations.first_call import Calling, FirstCall
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.implementation import Implementation, PlannedGroup, Screening
from fuseplan.planner.lowering.lower import NotLowerable
from fuseplan.search.store.record import TuningRecord
from fuseplan.search.timing.sequence import Part
from fuseplan.search.tune.tuner import Tuner

#: Calibration of kernels with a matmul inside: theirs are bytes of weights, and tiles of tensor cores.
CONTRACTION = "contraction"


def _contracts(table: GroupTable, group: Candidate) -> bool:
    return any(segment.products for segment in table.lowered(group).ir.segments)


@dataclass(frozen=True)
class GeneratedKernel(Implementation):
    """A kernel for what lowers, compiled for ``target`` by one of ``backends``, in order of preference."""

    backends: tuple[Backend, ...] = field(default=(), compare=False, repr=False)
    target: Target = field(default=Target("cpu", "native", 1), compare=False, repr=False)
    mode: Mode = "kernel"
    name: str = "kernel"

    def by(self, backend: str) -> GeneratedKernel:
        """The same with the back end of this name before the others; KeyError without such a one."""
        ordered = sorted(self.backends, key=lambda one: one.name != backend)
        if not ordered or ordered[0].name != backend:
            raise KeyError(backend)
        return replace(self, backends=tuple(ordered))

    def backend_for(self, table: GroupTable, group: Candidate) -> Backend | None:
        """The first back end that is here and can express the group."""
        return table.backend_for(group, self.backends, self.target)

    def refuse(self, table: GroupTable, group: Candidate) -> str | None:
        if is_cpu(table.device_type) and len(group.ops) == 1 and not group.inputs:
            return "it only fills memory: on CPUs that takes as long as the memory lets it, whoever does it"
        return None if self.backend_for(table, group) is not None else "no back end can express the group here"

    def work(self, table: GroupTable, group: Candidate) -> Work:
        return table.work(group)

    def calibration(self, table: GroupTable, group: Candidate) -> str:
        backend = self.backend_for(table, group)
        if backend is None:
            return ""
        return CONTRACTION if _contracts(table, group) else backend.name

    def screen(self, table: GroupTable, group: Candidate, tuner: Tuner) -> Screening:
        trial = tuner.screen(table.subject(group))
        return Screening(trial.median_us, trial.reason, CONTRACTION if _contracts(table, group) else trial.backend)

    def part(self, table: GroupTable, group: Candidate, backend: str, config: Config) -> Part:
        subject = table.subject(group)
        return Part(subject, self.by(backend).backends[0], config, subject.operands, subject.outputs)

    def run_by(self, table: GroupTable, group: Candidate) -> str:
        return self.calibration(table, group) or self.name

    def recorded(self, table: GroupTable, group: Candidate, tuning: TuningRecord | None) -> tuple[str, Config, str]:
        key = table.subject(group).key
        if tuning is not None:
            return tuning.backend, dict(tuning.config), key
        backend = self.backend_for(table, group)
        assert backend is not None
        return backend.name, dict(backend.default_config(table.lowered(group).ir, self.target)), key

    def refuse_record(self, table: GroupTable, group: Candidate, config: Config) -> str | None:
        backend = self.backends[0]
        try:
            ir = table.lowered(group).ir
        except NotLowerable as error:
            return f"a group cannot be one kernel: {error}"
        reason = backend.refuse_config(ir, config, self.target)
        return reason and f"{backend.name} could not have chosen a group's configuration: {reason}"

    def reuse(self, table: GroupTable, group: Candidate, config: Config) -> Mapping[str, tuple[str, ...]]:
        backend, lowered = self.backends[0], table.lowered(group)
        return {
            lowered.outputs[output]: tuple(lowered.inputs[source] for source in sources)
            for output, sources in backend.reuse_options(lowered.ir, config).items()
        }

    # -- at run time ------------------------------------------------------------------------------------------

    def is_writable(self, table: GroupTable, ops: tuple[str, ...], config: Config) -> bool:
        """As at run time: where the first back end cannot, another one does with its default configuration."""
        if table.legal(ops) is not None:
            return False
        ir = table.lowered(Candidate(ops, (), ())).ir
        for backend, given in self._expressible(ir, config):
            with suppress(BuildError):
                backend.source(ir, given)
                return True
        return False

    def prepare(self, table: GroupTable, traced: Traced, group: PlannedGroup) -> FirstCall:
        if reason := self.backends[0].unavailable():
            raise RefusedError(f"{self.backends[0].name}: {reason}")
        lowered, device_type = lower_group(traced.graph, group.ops, table.numerics), self.target.device_type
        for value in (*lowered.inputs, *lowered.outputs):
            node = traced.node_of.get(value)
            fake = node.meta.get("val") if node is not None else None
            # A CPU scalar tensor in a CUDA graph stays with its ATen op.
            if isinstance(fake, torch.Tensor) and fake.device.type != device_type:
                raise RefusedError(f"the group reads a {fake.device.type} tensor; the kernel runs on {device_type}")
        ir = lowered.ir
        if any(extent == 0 for buffer in ir.outputs for extent in buffer.shape):
            raise RefusedError("a result of the group is empty")
        able = next(self._expressible(ir, group.config), None)
        if able is None:
            raise RefusedError(f"{self.backends[0].name}: {self.backends[0].refuse(ir, self.target)}")
        backend, config = able
        fails = backend.raises_outside and may_fail(ir)
        return FirstCall(
            group.label, group.ops, lowered.inputs, lowered.outputs, ir.symbols, ir.outputs, ir=ir,
            build=partial(_build, backend, ir, config, self.target), source=partial(backend.source, ir, config),
            compilation=(backend, ir, config, self.target), key=(backend.name, ir.fingerprint(), config_key(config)),
            unfused=partial(run_unfused, traced, lowered, device_type),
            outside=partial(run_chain, traced.graph, lowered, device_type) if fails else None,
        )

    def _expressible(self, ir: KernelIR, config: Config) -> Iterator[tuple[Backend, Config]]:
        """Back ends that can express a kernel: the first of all with ``config``, others with their defaults."""
        for backend in self.backends:
            if backend.unavailable() is None and backend.refuse(ir, self.target) is None:
                is_first = backend is self.backends[0]
                yield backend, config if is_first else backend.default_config(ir, self.target)


def _build(
    backend: Backend, ir: KernelIR, config: Config, target: Target, in_place: bool
) -> tuple[Calling, ReuseOptions]:
    kernel, options = backend.load(ir, config, target), backend.reuse_options(ir, config) if in_place else {}
    calling = cache(lambda reuse: fused_call(kernel, ir, dict(reuse)))
    calling(())  # what fails here costs this group alone
    return calling, options
