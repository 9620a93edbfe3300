"""Tuning as a function: capture, plan, measure what is not stored yet, store it, and say what came of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, overload

import pandas as pd
import torch

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.api.answer import TuneAnswer, first_screen
from fuseplan.planner.api.device import device_kind
from fuseplan.planner.api.many import Models, TunedMany
from fuseplan.planner.api.misses import LoggedMisses, TunedMisses
from fuseplan.planner.api.report import GROUP_SPARE, GROUPS_FIRST, Report
from fuseplan.planner.api.request import (
    MOST_MISSES,
    Asked,
    Batches,
    HowToTune,
    ModelLike,
    Prefills,
    TuneRequest,
    asked_for,
    python_arguments,
)
from fuseplan.planner.api.run import Ran, Runner, Wanted, outcome, run_here
from fuseplan.planner.errors import PlanError, one_family
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.implementations.inductor import InductorAsked
from fuseplan.planner.models.manifest import read_manifest
from fuseplan.planner.models.sources import hf_config
from fuseplan.planner.reports import frames, step_words
from fuseplan.planner.reports.document import Table, table_of
from fuseplan.planner.tuning.graph_stream import CaptureElsewhere
from fuseplan.planner.tuning.progress import SILENT, Progress
from fuseplan.planner.tuning.recheck import recheck_verdict
from fuseplan.planner.tuning.session import Session
from fuseplan.planner.tuning.tune import Batch, TuneResult
from fuseplan.search.store.record import PlanRecord
from fuseplan.search.tune.time_account import TimeAccount

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Tuned(TuneAnswer, Report):
    """What a tune did: a :class:`~fuseplan.planner.api.report.Report` of the sizes that were asked for.

    Attributes:
        label: What was tuned.
        result: The plans of each workload, and what was measured for them.
        decided: The groups of these plans, as :attr:`groups` gives them; those measured now say so in ``source``.
        noises: Relative noise of each group that was measured now.
    """

    label: str
    result: TuneResult
    decided: pd.DataFrame
    noises: tuple[float, ...]

    @property
    def groups(self) -> pd.DataFrame:
        """One row per distinct group of the plans; ``source`` is ``measured``, ``stored`` or ``shipped``.

        Ops that a library's call runs are among them; lone ops that ATen runs are not, where no kernel was tuned.
        """
        return self.decided

    def tables(self) -> Iterator[Table]:
        yield table_of(self.groups, "groups", f"{self.label} on {self.data.device}", shown="talk", spare=GROUP_SPARE,
                       keep=("workload", "group", "speedup"))
        yield table_of(self.steps, "steps", "Steps", shown="files")

    def step_lines(self) -> Iterator[str]:
        if self.result.distinct():
            yield from step_words.step_lines(self.data)

    def course(self) -> Iterator[str]:
        if not self.result.distinct():
            yield "nothing was tuned: only ATen can run these ops; `plan explain` says why"
            return
        yield frames.headline(self.groups)
        yield outcome(self.result)
        if self.noises:
            yield f"noise of what was measured: {median(self.noises):.1%} in the median, {max(self.noises):.1%} at most"
        if self.result.rechecked:
            yield recheck_verdict(self.result.rechecked)
        yield f"stored in {self.result.session.database.where}"

    def _repr_html_(self) -> str:
        lines = [outcome(self.result)] if self.result.distinct() else []
        lines += [f"Warning: {one}" for one in self.warnings]
        groups = self.groups.sort_values("speedup", ascending=False)
        return first_screen(f"{self.label} on {self.data.device}", lines, self.data, groups, GROUPS_FIRST)


@overload
def tune(
    model: ModelLike | None = None, inputs: Any = None, *, pattern: str | None = None,
    shape: str | Sequence[int] | None = None, decode: Batches | None = None, kv_len: int | None = None,
    prefill: Prefills | str | None = None, dtype: str | torch.dtype | None = None, layers: int | None = None,
    calls: bool = True, pack_weights: bool = False, misses: Literal[False] = False, most: int | None = None,
    numerics: Literal["fp32", "eager"] = "fp32", regime: Literal["eager", "graph"] | None = None,
    trials: int | None = None, seconds: float = 6.0, seed: int = 0, shipped: bool = True, again: bool = False,
    study: str | None = None, job_limit: float | None = None, inductor: InductorAsked = "default", device: str = "auto",
    db: str | Path | None = None, progress: Progress | None = None,
) -> Tuned: ...


@overload
def tune(
    *, manifest: str | Path, trials: int | None = None, seconds: float = 6.0, seed: int = 0, shipped: bool = True,
    again: bool = False, study: str | None = None, job_limit: float | None = None, inductor: InductorAsked = "default",
    device: str = "auto", db: str | Path | None = None, progress: Progress | None = None,
) -> TunedMany: ...


@overload
def tune(
    *, misses: Literal[True], most: int | None = None, regime: Literal["eager", "graph"] | None = None,
    trials: int | None = None, seconds: float = 6.0, seed: int = 0, job_limit: float | None = None,
    inductor: InductorAsked = "default", device: str = "auto", db: str | Path | None = None,
    progress: Progress | None = None,
) -> TunedMisses: ...


def tune(
    model: ModelLike | None = None, inputs: Any = None, *, pattern: str | None = None,
    shape: str | Sequence[int] | None = None, decode: Batches | None = None, kv_len: int | None = None,
    prefill: Prefills | str | None = None, dtype: str | torch.dtype | None = None, layers: int | None = None,
    calls: bool = True, pack_weights: bool = False, misses: bool = False, most: int | None = None,
    manifest: str | Path | None = None, numerics: Literal["fp32", "eager"] = "fp32",
    regime: Literal["eager", "graph"] | None = None, trials: int | None = None, seconds: float = 6.0, seed: int = 0,
    shipped: bool = True, again: bool = False, study: str | None = None, job_limit: float | None = None,
    inductor: InductorAsked = "default", device: str = "auto", db: str | Path | None = None,
    progress: Progress | None = None,
) -> Tuned | TunedMisses | TunedMany:
    """Plan a model's fusion, tune it on this device, and store the result, as ``plan tune`` does.

    What is stored already is not measured again. An interrupted call goes on where it was when it is made again.

    >>> fuseplan.tune(model, torch.randn(4, 256))  # doctest: +SKIP
    >>> fuseplan.tune("llama-3.2-1b", decode=(1, 8), kv_len=1024, prefill=[512, (4, 512)])  # doctest: +SKIP
    >>> fuseplan.tune(manifest="models.toml")  # doctest: +SKIP

    Args:
        model: An ``nn.Module`` with ``inputs``, a preset's name (``"llama-3.2-1b"``), the path of a ``config.json``, a
            Hugging Face config, or ``"package.module:factory"``. The preset ``llama`` without any.
        inputs: Example inputs of a module: a tensor, a tuple of arguments, or a dict of keywords. The module is copied
            without its tensors and otherwise left alone; tune it in the mode in which it will run (``model.eval()``).
        pattern, shape: One of the named patterns instead, such as ``"swiglu"``, and the shape of its activations.
        decode: Sequences that are decoded at once: one new token each.
        kv_len: Length of the static KV cache in decoding.
        prefill: Lengths of whole sequences, or pairs (sequences, length): ``[512, (4, 512)]``.
        dtype: Of the weights of a config, or of a pattern; a config's own by default.
        layers: Keep only the first layers of a config.
        calls: Also plan calls of these sizes with an attention mask, position ids or embeddings, those that want the
            last logits alone, and what Hugging Face's ``generate()`` makes of them.
        pack_weights: Plan for the option of that name: linear ops that read one value are one op.
        misses: Tune the regions that this database lists as missed, in place of a model.
        manifest: The path of a TOML file with models that are tuned together, in place of a model.
        most: Of misses: how many regions, those that were missed most often first; 16 by default.
        numerics: ``"fp32"`` keeps a kernel's intermediates in fp32; ``"eager"`` rounds where PyTorch does.
        regime: ``"eager"`` for launches from Python (the default), ``"graph"`` for replay in a CUDA graph. Of misses
            only those that were launched so; without it all of them.
        trials, seconds, seed, shipped, again, study, job_limit, inductor: See
            :class:`~fuseplan.planner.api.request.HowToTune`.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        db: The tuning database, a file or a SQLAlchemy URL; None for the user's own.
        progress: Told what is done meanwhile (:class:`~fuseplan.planner.tuning.progress.Progress`); None for nobody.

    Raises:
        FuseplanError: The arguments cannot be used, the model cannot be captured, the machine fails, or nothing of it
            could be planned. What was finished is stored.
    """
    with one_family():
        request = TuneRequest(
            device_kind(device),
            python_arguments(
                model, inputs, pattern=pattern, shape=shape, decode=decode, kv_len=kv_len, prefill=prefill, dtype=dtype,
                layers=layers, calls=calls, pack_weights=pack_weights, numerics=numerics, regime=regime),
            manifest, misses, most, HowToTune(trials, seconds, seed, shipped, again, study, job_limit, inductor), db)
        (found,) = tune_request(request, progress if progress is not None else SILENT)
        if isinstance(found, Tuned) and found.failure:
            raise PlanError("; ".join((found.failure, *found.warnings[:1])))
        return found


def tune_request(
    request: TuneRequest, progress: Progress = SILENT, account: TimeAccount | None = None, runner: Runner = run_here
) -> list[Tuned] | list[TunedMany] | list[TunedMisses]:
    """What came of a request on each device that tunes it; the time it takes is booked in ``account``."""
    account = account if account is not None else TimeAccount()
    manifest = read_manifest(request.manifest) if request.manifest is not None else None
    asked = asked_for(request.kind, request.given) if manifest is None and not request.misses else None

    def wanted_on(device: str, elsewhere: CaptureElsewhere | None = None) -> Wanted:
        if manifest is not None:
            return Models(manifest, request.kind, device, elsewhere)
        if asked is not None:
            return OneModel(replace(asked, elsewhere=elsewhere))
        return LoggedMisses(request.given.regime, request.most or MOST_MISSES)

    ran = runner(request, wanted_on, progress, account)
    with account.spend("reporting"):
        found = [wanted.answer(one) for wanted, one in ran]
    logger.info("%s", account.line())
    return found


class OneModel:
    """A model or a pattern: one batch, whose graphs come as they are captured where that disturbs nothing."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._graphs: Iterable[tuple[str, DataflowGraph]] = ()

    def capture(self, stack: ExitStack, progress: Progress, account: TimeAccount) -> None:
        asked = self.asked
        if asked.source is None:
            self._graphs = asked.pattern
            return
        self._graphs = stream = stack.enter_context(asked.stream(asked.source, progress))
        if is_gpu(asked.kind):
            return
        with account.spend("capturing"):
            if stream.is_aside:  # it would disturb what is measured
                self._graphs = asked.taken(stream, progress)
            else:
                with progress.status(f"capturing {asked.label}, {stream.waiting}"):
                    stream.begin()

    def batches(self, session: Session, progress: Progress, account: TimeAccount) -> Sequence[Batch]:
        asked, source = self.asked, self.asked.source
        if session.spec is None and source is not None and (source.kind == "config" or source.layers is not None):
            hf_config(source)  # a faulty one is told before the device is probed; a preset has no faults
        return [Batch(
            self._graphs, asked.settings, lambda name: (asked.label, name), asked.is_asked_for, asked.is_derived)]

    def answer(self, ran: Ran) -> Tuned:
        """What came of it, as a report."""
        ((_, result),) = ran.results
        session, name = result.session, self.asked.label
        warnings, failure = ran.complaints()
        data = frames.ReportData(session.device, name, session.spec, {}, {})
        if result.distinct():
            data = frames.load_report(replace(session, run="").store, session.device, session.spec, name)
        planned, how = {one.workload for one in result.plans}, session.settings
        own = [one for one in data.workloads if one.workload in planned and one.regime == how.regime
               and one.numerics == how.numerics]
        shown = frames.group_frame(replace(data, workloads=tuple(own)))
        measured = _tuned_groups(result.decided())
        shown = shown.assign(source=shown["source"].mask(shown["key"].isin(measured), "measured"))
        noises = tuple(record.unfused.noise for record in data.records.values() if record.key.workload in measured)
        chosen = tuple(one for one in own if self.asked.is_asked_for(one.workload))
        return Tuned(replace(data, workloads=chosen), label=name, result=result, decided=shown, noises=noises,
                     warnings=warnings, failure=failure)


def _tuned_groups(records: Sequence[PlanRecord]) -> set[str]:
    """The groups that plans run or reject, by the keys of :func:`~fuseplan.planner.reports.frames.group_frame`."""
    groups = [one.workload or one.label for record in records for one in record.groups]
    return {*groups, *(one.workload for record in records for one in record.rejected)} - {""}
