"""Why each boundary of a plan is where it is: in words, and by group with its generated code. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch

from fuseplan.planner.api.answer import first_screen
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.api.request import Asked, Batches, ModelLike, Prefills, asked_for, python_arguments
from fuseplan.planner.errors import Argument, ConfigError, nearest, one_family
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.implementations.tunable_group import group_subject
from fuseplan.planner.reports import explain as words
from fuseplan.planner.reports.drawing import group_name
from fuseplan.planner.reports.frames import config_text, how_it_runs, time_of
from fuseplan.planner.reports.side_by_side import in_words, side_by_side
from fuseplan.planner.tuning.plans import GraphPlan
from fuseplan.planner.tuning.progress import SILENT, Progress
from fuseplan.planner.tuning.session import Session, open_session
from fuseplan.search.errors import plain

_SHOWN = ("workload", "group", "place", "runs", "time_us", "reason")


@dataclass(frozen=True, eq=False)
class Planned:
    """A workload with its plan, and lines that say why it is so."""

    session: Session
    workload: str
    graph: DataflowGraph
    plan: GraphPlan
    lines: tuple[str, ...]


@dataclass(frozen=True)
class KernelSource:
    """A kernel's code.

    Attributes:
        names: The letters that ``plan explain`` gives its group, one for each region.
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


@dataclass(frozen=True, eq=False)
class Explained:
    """Plans in words: ``print(explained)`` gives what ``plan explain`` prints, a notebook shows its groups.

    Attributes:
        label: What is explained.
        planned: Each workload with its plan.
    """

    label: str
    planned: tuple[Planned, ...]

    @cached_property
    def groups(self) -> pd.DataFrame:
        """One row per workload and group: where it is, what runs it, how long one use takes (us), and why."""
        rows = [
            {"workload": of.workload, "group": group.label, "place": region.place_of(group.ops),
             "ops": ", ".join(of.graph.op(name).op for name in one.group_ops(group)), "uses": region.occurrences,
             "runs": how_it_runs(group), "config": config_text(group.config), "time_us": time_of(group),
             "measured": group.measured_us is not None,
             "reason": (words.tuning_of(of.session, one, group.workload) or one.record).evidence.reason,
             "plan": one.source, "key": group.workload}
            for of in self.planned for region, one in words.distinct_regions(of.graph, of.plan)
            for group in one.record.groups
        ]
        names = ["workload", "group", "place", "ops", "uses", "runs", "config", "time_us", "measured", "reason", "plan",
                 "key"]
        return pd.DataFrame(rows, columns=names)

    def kernels(self) -> list[KernelSource]:
        """The generated kernels of all workloads, each text once, in the order of their groups."""
        found: dict[str, KernelSource] = {}
        for of in self.planned:
            session = of.session
            backends = {backend.name: backend for backend in session.backends}
            for region, one in words.distinct_regions(of.graph, of.plan):
                for number, choice in enumerate(one.record.groups):
                    if not choice.is_kernel or choice.implementation not in backends:
                        continue
                    backend, name = backends[choice.implementation], group_name(number)
                    subject = group_subject(of.graph, one.group_ops(choice), choice.workload,
                                            session.settings.numerics, session.target.device_type)
                    text = backend.source(subject.ir, choice.config)
                    known = found.get(text) or KernelSource(
                        (), choice.label, region.place_of(choice.ops), backend.name, text, backend.common(text), ())
                    names, users = dict.fromkeys((*known.names, name)), dict.fromkeys((*known.workloads, of.workload))
                    found[text] = replace(known, names=tuple(names), workloads=tuple(users))
        return list(found.values())

    def sources(self, group: str = "") -> Mapping[str, str]:
        """Generated code by group, of those with ``group`` in their labels."""
        return {one.label: one.text for one in self.kernels() if group in one.label}

    def side_by_side(self) -> Iterator[str]:
        """Lines that put the plans of several workloads side by side; none where they have nothing in common."""
        if rows := side_by_side((one.workload, region, of.record) for one in self.planned
                                for region, of in words.distinct_regions(one.graph, one.plan)):
            yield "Side by side, the region of each workload that takes most of its time, by rows of the matmul:"
            yield from in_words(rows)

    def lines(self) -> Iterator[str]:
        """The explanation in words, as the terminal has it."""
        for one in self.planned:
            yield from one.lines
            yield ""
        yield from self.side_by_side()

    def __str__(self) -> str:
        return "\n".join(plain(line) for line in self.lines())

    def _repr_html_(self) -> str:
        groups = self.groups.sort_values("time_us", ascending=False, key=lambda times: times * self.groups["uses"])
        return first_screen(f"Why {self.label} is fused so", (), None, groups, _SHOWN, str(self))


def explain(
    model: ModelLike | None = None, inputs: Any = None, *, pattern: str | None = None,
    shape: str | Sequence[int] | None = None, workload: str | None = None, decode: Batches | None = None,
    kv_len: int | None = None, prefill: Prefills | str | None = None, dtype: str | torch.dtype | None = None,
    layers: int | None = None, pack_weights: bool = False, numerics: Literal["fp32", "eager"] = "fp32",
    regime: Literal["eager", "graph"] = "eager", device: str = "auto", db: str | Path | None = None,
) -> Explained:
    """Say what of a model is fused, what is not, and why each boundary is where it is. Nothing is measured.

    The arguments are those of :func:`~fuseplan.planner.api.tune.tune`. What was never tuned is planned by the cost
    model.

    Args:
        workload: Only workloads whose name contains this.

    Raises:
        FuseplanError: The arguments cannot be used, or the model cannot be captured.
    """
    with one_family():
        kind = device_kind(device)
        asked = asked_for(kind, python_arguments(
            model, inputs, pattern=pattern, shape=shape, decode=decode, kv_len=kv_len, prefill=prefill, dtype=dtype,
            layers=layers, calls=False, pack_weights=pack_weights, numerics=numerics, regime=regime))
        planned = explained(asked, db, workload)
        return Explained(asked.label, tuple(planned))


def explained(
    asked: Asked, db: str | Path | None, workload: str | None = None, progress: Progress = SILENT
) -> Iterator[Planned]:
    """Each workload as soon as it is planned."""
    graphs = asked.graphs(progress)
    session = open_session(asked.kind, db, asked.settings, mode="inspect")
    chosen = [(name, graph) for name, graph in graphs if workload is None or workload in name]
    if not chosen:
        names = [name for name, _ in graphs]
        close = nearest(workload or "", names) or names
        raise ConfigError(f"no workload is called {workload!r}; there are {', '.join(close)}")
    for name, graph in chosen:
        failures: list[str] = []
        plan = session.dispatcher().plan_graph(graph, on_failure=words.note_failure(graph, failures))
        lines = (*words.explain_plan(session, name, graph, plan), *failures)
        yield Planned(session, name, graph, plan, lines)


def called(kernels: Sequence[KernelSource], wanted: str) -> list[KernelSource]:
    """The kernels that ``wanted`` names: a letter, else part of a label or a place, or ``all``; else a ConfigError."""
    if not kernels:
        raise ConfigError("no group of these workloads runs a generated kernel, so there is no source to show")
    chosen = list(kernels) if wanted == "all" else [one for one in kernels if wanted.upper() in one.names]
    if not chosen and wanted.strip():
        chosen = [one for one in kernels if wanted.lower() in f"{one.label}\n{one.place}".lower()]
    if not chosen:
        labels = list(dict.fromkeys(one.label for one in kernels))
        close = nearest(wanted, labels) or labels[:3]
        raise ConfigError("{} {!r}: no generated kernel is called so; try {}, or all", Argument("source"), wanted,
                          ", ".join(close))
    return chosen
