"""What is asked for: models with their workloads, or a pattern, and how hard a tune of them searches."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import torch
from torch import nn

from fuseplan.costmodel.devices import Kind, is_cpu, is_gpu, local_kind
from fuseplan.planner.errors import Argument, ConfigError, DeviceError, ShapeError, UnknownPatternError
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.implementations.inductor import InductorAsked
from fuseplan.planner.models.build import twin
from fuseplan.planner.models.manifest import ModelArguments
from fuseplan.planner.models.sources import DTYPES, ModelSource, find_source, source_of, workloads_for
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.tuning.graph_stream import CaptureElsewhere, GraphStream
from fuseplan.planner.tuning.plans import PlanSettings
from fuseplan.planner.tuning.progress import SILENT, Progress
from fuseplan.planner.tuning.session import Session
from fuseplan.search import policy
from fuseplan.search.errors import brief
from fuseplan.search.tune.study import Studies
from fuseplan.search.tune.tuner import Budget

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: A preset's name, the path of a config.json, ``"package.module:factory"``, a Hugging Face config, or a module.
ModelLike: TypeAlias = "str | Path | nn.Module | PretrainedConfig"
Batches: TypeAlias = int | Sequence[int]
#: Lengths, or pairs of batch and length.
Prefills: TypeAlias = int | Sequence[int | tuple[int, int]]


@dataclass(frozen=True)
class Asked:
    """What is planned, and what for: its name, and either a model with its workloads or the one graph of a pattern."""

    label: str
    kind: Kind
    source: ModelSource | None = None
    workloads: tuple[Workload, ...] = ()
    pack_weights: bool = False
    pattern: tuple[tuple[str, DataflowGraph], ...] = ()
    settings: PlanSettings = field(default_factory=PlanSettings)
    #: Where its workloads are captured; None for here.
    elsewhere: CaptureElsewhere | None = None

    def is_derived(self, graph: str) -> bool:
        """Whether a model's graph, by its name, is of a call that follows from the sizes given (:func:`with_calls`)."""
        derived = [one.label for one in self.workloads if one.derived]
        return any(graph == label or graph.startswith((f"{label} part ", f"{label} packed")) for label in derived)

    def is_asked_for(self, graph: str) -> bool:
        """Whether a model's graph, by its name, is of sizes that were given."""
        return self.source is not None and not self.is_derived(graph)

    def stream(self, source: ModelSource, progress: Progress) -> GraphStream:
        """The graphs of a model, its ``source``, as they are captured from now on."""
        return GraphStream(
            source, self.workloads, self.kind, self.pack_weights, progress.note, elsewhere=self.elsewhere)

    def graphs(self, progress: Progress = SILENT) -> list[tuple[str, DataflowGraph]]:
        """All graphs by workload name, captured now."""
        if self.source is None:
            return list(self.pattern)
        with self.stream(self.source, progress) as graphs:
            return self.taken(graphs, progress)

    def taken(self, graphs: GraphStream, progress: Progress = SILENT) -> list[tuple[str, DataflowGraph]]:
        """All graphs of a stream."""
        found = []
        with progress.status(f"capturing {self.label}") as say:
            while graphs.waiting:
                say(f"capturing {self.label}, {graphs.waiting}")
                found += graphs.take()
        return found


@dataclass(frozen=True)
class HowToTune:
    """How hard to search, and what is taken from earlier searches.

    Attributes:
        trials: Configurations tried per group, over all back ends; None: 12 on CPUs, 8 on CUDA.
        seconds: Search time per group.
        job_limit: Seconds without a sign after which a job counts as hanging, beside what its calls should take; None:
            60.
        seed: That of the search and of the inputs.
        shipped: Whether the records that come with fuseplan for this device count as stored.
        again: Measure anew what is stored or shipped.
        study: Where each search is kept as an Optuna study, too: a SQLAlchemy URL or the path of a journal file.
        inductor: Ask TorchInductor for its code, of regions that leave much to ATen and of whole steps, and take it
            where it is faster. Compiling it takes seconds; ``"max-autotune"`` asks for its fastest, which takes
            minutes, and ``"off"`` for none.
    """

    trials: int | None = None
    seconds: float = 6.0
    seed: int = 0
    shipped: bool = True
    again: bool = False
    study: str | None = field(default=None, repr=False)
    job_limit: float | None = None
    inductor: InductorAsked = "default"

    def budget(self, device_type: str) -> Budget:
        """What a group may cost on a device."""
        return Budget.on(device_type, self.trials, self.seconds, self.job_limit)

    def studies(self) -> Studies | None:
        """Open the storage of the studies; :class:`StudyError` where it cannot be opened."""
        return None if self.study is None else Studies(self.study)

    def of(self, session: Session, studies: Studies | None, run: str) -> Session:
        """The session as it is searched with; ``run`` names this tune."""
        settings = replace(session.settings, inductor=self.inductor)
        return replace(
            session, shipped=self.shipped, run=run if self.again else "", studies=studies, settings=settings)


#: Missed regions that one tune takes where nobody says how many.
MOST_MISSES = 16


@dataclass(frozen=True)
class TuneRequest:
    """A tune that is asked for; ConfigError where its arguments contradict each other.

    Attributes:
        given: The model or pattern; of ``misses`` only the regime counts.
        manifest: The path of a manifest, instead.
        misses, most: Whether missed regions are tuned instead, and how many (:data:`MOST_MISSES` by default).
        db: The tuning database; None for the user's own.
    """

    kind: Kind
    given: ModelArguments = field(default_factory=ModelArguments)
    manifest: str | Path | None = None
    misses: bool = False
    most: int | None = None
    how: HowToTune = field(default_factory=HowToTune)
    db: str | Path | None = None

    def __post_init__(self) -> None:
        how = self.how
        if (how.trials is not None and how.trials < 1) or not how.seconds > 0 or (
                self.most is not None and self.most < 1):
            raise ConfigError("{} and {} are at least 1, and {} are more than 0",
                              *map(Argument, ("trials", "most", "seconds")))
        if how.inductor not in (known := get_args(InductorAsked)):
            raise ConfigError("{} {!r} is not one of {}", Argument("inductor"), how.inductor, ", ".join(known))
        if how.job_limit is not None and not how.job_limit >= policy.LEAST_JOB_LIMIT_S:
            raise ConfigError("{} is at least {:g} seconds, not {}", Argument("job_limit"), policy.LEAST_JOB_LIMIT_S,
                              how.job_limit)
        if self.manifest is not None and (self.misses or self.given != ModelArguments()):
            raise ConfigError("{} names models with all that belongs to them; leave out what belongs to one model",
                              Argument("manifest"))
        if self.most is not None and not self.misses:
            raise ConfigError("{} belongs to {}", Argument("most"), Argument("misses"))
        if self.misses and self.given.given():
            raise ConfigError("{} tunes what was missed; leave out what names a model", Argument("misses"))
        if self.misses and self.given.regime is not None:
            plan_settings(self.kind, "fp32", self.given.regime)


def asked_for(kind: Kind, given: ModelArguments) -> Asked:
    """What some arguments mean, nothing captured yet; a FuseplanError where they contradict each other."""
    dtype = str(given.dtype).removeprefix("torch.") if given.dtype is not None else None
    settings = plan_settings(kind, given.numerics, given.regime or "eager")
    if given.pattern is not None:
        more = [name for name in given.given() if name not in ("pattern", "shape", "dtype")]
        if more := [*map(Argument, more), *([Argument("pack_weights")] if given.pack_weights else [])]:
            raise ConfigError("{} takes {} and {} only: leave out " + " and ".join("{}" for _ in more),
                              Argument("pattern"), Argument("shape"), Argument("dtype"), *more)
        shape = given.shape if isinstance(given.shape, str | None) else "x".join(map(str, given.shape))
        return replace(_of_pattern(kind, given.pattern, shape, dtype and DTYPES.get(dtype, dtype)), settings=settings)
    if given.shape is not None:
        raise ConfigError("{} belongs to {}; a model's sizes are {}, {} and {}",
                          *map(Argument, ("shape", "pattern", "decode", "kv_len", "prefill")))
    if given.at_hand is None and given.inputs is None:
        source = find_source(given.model, given.config, given.module, kind, dtype, given.layers)
    else:
        source = _source_at_hand(kind, given, dtype)
    sizes = _sizes_text("decode", given.decode), given.kv_len, _sizes_text("prefill", given.prefill)
    workloads = workloads_for(source, kind, *sizes, given.calls)
    return Asked(source.label, kind, source, workloads, given.pack_weights, settings=settings)


def _of_pattern(kind: Kind, name: str, shape: str | None, dtype: str | None) -> Asked:
    """A named pattern at one shape."""
    from fuseplan.planner.patterns.listing import LISTING
    from fuseplan.planner.patterns.table import PATTERNS, inputs_of, pattern_graph

    if name not in PATTERNS:
        raise UnknownPatternError(name, PATTERNS)
    if shape is None:
        found = LISTING[name]
        raise ShapeError("{} {} needs {} ({}), such as {} {}", Argument("pattern"), name, Argument("shape"), found.dims,
                         Argument("shape"), found.example)
    needed = sum(spec.nbytes() for spec in inputs_of(name, shape, dtype)[2].values())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if is_gpu(kind) and is_gpu(local_kind()):
        there = int(torch.cuda.get_device_properties().total_memory)
    if needed > there:
        raise ShapeError("{} {}: the inputs of {} take {:,.0f} GiB, and this device has {:,.0f} GiB; give a smaller "
                         "one", Argument("shape"), shape, name, needed / 2**30, there / 2**30)
    return Asked(f"pattern {name}", kind, pattern=((shape, pattern_graph(name, shape, dtype)),))


def python_arguments(model: ModelLike | None, inputs: Any, **others: Any) -> ModelArguments:
    """What ``model`` and ``inputs`` of Python's functions mean, beside other arguments."""
    if not isinstance(model, str | Path):
        return ModelArguments(at_hand=model, inputs=inputs, **others)
    name, exists = str(model), Path(model).exists()
    if ":" in name and not exists:
        return ModelArguments(module=name, inputs=inputs, **others)
    if isinstance(model, Path) or name.endswith(".json") or exists:
        return ModelArguments(config=Path(model), inputs=inputs, **others)
    return ModelArguments(model=name, inputs=inputs, **others)


def _source_at_hand(kind: Kind, given: ModelArguments, dtype: str | None) -> ModelSource:
    """The source of a module with inputs, or of a Hugging Face config object."""
    model, inputs = given.at_hand, given.inputs
    if isinstance(model, nn.Module):
        if inputs is None:
            raise ConfigError("a module needs inputs: a tensor, a tuple of arguments, or a dict of keywords")
        if dtype is not None or given.layers is not None:
            raise ConfigError("a module has a dtype and layers of its own; leave out dtype and layers")
        own = getattr(model, "_orig_mod", model)  # what torch.compile made of it
        return ModelSource("module", type(own).__name__, made=lambda: (twin(own), inputs))
    to_json: Any = getattr(model, "to_json_string", None)
    if model is not None and (isinstance(model, type) or not callable(to_json)):
        raise ConfigError(_no_model(model))
    if inputs is not None:
        raise ConfigError("inputs are those of a module; the sizes of a config are decode, kv_len and prefill")
    name = str(getattr(model, "name_or_path", "") or getattr(model, "model_type", "config"))
    checked = find_source(None, None, None, kind, dtype, given.layers)  # of the other arguments
    return source_of(json.loads(to_json(use_diff=False)), name, checked.dtype if dtype else None, given.layers)


def _no_model(given: object) -> str:
    """What is wrong with a first argument that is no model, and for a function how to make it one."""
    wanted = ("the first argument, model, is an nn.Module with inputs, a preset's name, the path of a config.json, "
              "or a Hugging Face config")
    if isinstance(given, type):
        return f"{wanted}, not the class {given.__name__}; give an instance of it"
    if callable(given):
        what = f"function {name}" if (name := getattr(given, "__name__", "")) else f"callable {type(given).__name__}"
        return f"{wanted}, not the {what}; wrap it: an nn.Module whose forward calls it"
    return f"{wanted}, not {brief(given)}, a {type(given).__name__}"


def _sizes_text(name: str, sizes: Any) -> str | None:
    """Sizes as the command line writes them: ``"1,8"``, ``"512,4x2048"``."""
    if sizes is None or isinstance(sizes, str):
        return sizes
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    texts = ["x".join(map(str, one)) if isinstance(one, tuple | list) else str(one) for one in listed]
    if any(isinstance(one, bool | float) for one in listed) or not all(texts):
        raise ShapeError(f"{name}={sizes!r}: sizes are whole numbers{' or (batch, length)' * (name == 'prefill')}")
    return ",".join(texts)


def plan_settings(kind: Kind, numerics: str, regime: str) -> PlanSettings:
    """The settings that plans are made for; FuseplanError where a name is unknown, or a CPU has no CUDA graphs."""
    for name, value, known in (("numerics", numerics, ("fp32", "eager")), ("regime", regime, ("eager", "graph"))):
        if value not in known:
            raise ConfigError("{} {!r} is not one of {}", Argument(name), value, ", ".join(known))
    if is_cpu(kind) and regime == "graph":
        raise DeviceError("{} graph needs CUDA graphs, which a CPU does not have; leave it out on the CPU",
                          Argument("regime"))
    return PlanSettings(numerics=numerics, regime=regime)
