"""The generated code of a plan's kernels: each text once, with the workloads that use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fuseplan.planner.errors import Argument, ConfigError, nearest
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.implementations.tunable_group import group_subject
from fuseplan.planner.reports.drawing import group_name
from fuseplan.planner.reports.explain import distinct_regions
from fuseplan.planner.tuning.plans import GraphPlan
from fuseplan.planner.tuning.session import Session

#: Stands for every kernel.
ALL = "all"


@dataclass(frozen=True)
class KernelSource:
    """A kernel's code.

    Attributes:
        names: The letters that ``plan explain`` gives its group, one for each region.
        label, place: Of its group.
        text: All of it; ``common`` are the parts that other kernels have, too: includes and helpers.
    """

    names: tuple[str, ...]
    label: str
    place: str
    backend: str
    text: str
    common: tuple[str, ...]
    workloads: tuple[str, ...]

    @property
    def language(self) -> str:
        """As highlighters call it."""
        return "cpp" if self.backend == "cpp" else "python"

    def own_text(self) -> str:
        """The text without what other kernels have, too."""
        text = self.text
        for part in self.common:
            text = text.replace(f"{part}\n\n\n", "", 1) if f"{part}\n\n\n" in text else text.replace(part, "", 1)
        return text


def kernel_sources(
    session: Session, planned: Iterable[tuple[str, DataflowGraph, GraphPlan]]
) -> list[KernelSource]:
    """The kernels of several workloads, in the order of their groups."""
    backends = {backend.name: backend for backend in session.backends}
    found: dict[str, KernelSource] = {}
    for workload, graph, plan in planned:
        for region, one in distinct_regions(graph, plan):
            for number, choice in enumerate(one.record.groups):
                if not choice.is_kernel or choice.implementation not in backends:
                    continue
                backend, name = backends[choice.implementation], group_name(number)
                subject = group_subject(
                    graph, one.group_ops(choice), choice.workload, session.settings.numerics, session.target.device_type
                )
                text = backend.source(subject.ir, choice.config)
                known = found.get(text) or KernelSource(
                    (), choice.label, region.place_of(choice.ops), backend.name, text, backend.common(text), ())
                names, users = dict.fromkeys((*known.names, name)), dict.fromkeys((*known.workloads, workload))
                found[text] = replace(known, names=tuple(names), workloads=tuple(users))
    return list(found.values())


def called(kernels: Sequence[KernelSource], wanted: str) -> list[KernelSource]:
    """The kernels that ``wanted`` names: a letter, else part of a label or a place, or ``all``.

    Raises:
        ConfigError: There is none.
    """
    if not kernels:
        raise ConfigError("no group of these workloads runs a generated kernel, so there is no source to show")
    chosen = list(kernels) if wanted == ALL else [one for one in kernels if wanted.upper() in one.names]
    if not chosen and wanted.strip():
        chosen = [one for one in kernels if wanted.lower() in f"{one.label}\n{one.place}".lower()]
    if not chosen:
        labels = list(dict.fromkeys(one.label for one in kernels))
        close = nearest(wanted, labels) or labels[:3]
        raise ConfigError("{} {!r}: no generated kernel is called so; try {}, or all", Argument("source"), wanted,
                          ", ".join(close))
    return chosen
