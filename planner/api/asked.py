"""What is asked for: a model with its workloads, or a pattern, from arguments of Python."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from fuseplan.costmodel.devices import Kind, is_cpu, is_gpu, local_kind
from fuseplan.planner.api.progress import SILENT, Progress
from fuseplan.planner.errors import Argument, ConfigError, DeviceError, ShapeError, UnknownPatternError
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.models.build import twin
from fuseplan.planner.models.sources import ModelSource, find_source, source_of, workloads_for
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.tuning.graph_stream import GraphStream
from fuseplan.planner.tuning.settings import PlanSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: A preset's name, the path of a config.json, ``"package.module:factory"``, a Hugging Face config, or a module.
ModelLike: TypeAlias = "str | Path | nn.Module | PretrainedConfig"
#: Sizes: one, or several.
Batches: TypeAlias = int | Sequence[int]
#: Lengths, or pairs of batch and length.
Prefills: TypeAlias = int | Sequence[int | tuple[int, int]]


@dataclass(frozen=True)
class Asked:
    """What is planned: its name, and either a model with its workloads or the one graph of a pattern."""

    label: str
    kind: Kind
    source: ModelSource | None = None
    workloads: tuple[Workload, ...] = ()
    pack_weights: bool = False
    pattern: tuple[tuple[str, DataflowGraph], ...] = ()

    def is_asked_for(self, graph: str) -> bool:
        """Whether a model's graph, by its name, is of sizes that were given, not of what masks or ``generate()`` make
        of them.
        """
        derived = [one.label for one in self.workloads if one.derived]
        return self.source is not None and not any(
            graph == label or graph.startswith(f"{label} part ") for label in derived)

    def graphs(self, progress: Progress = SILENT) -> list[tuple[str, DataflowGraph]]:
        """All graphs by workload name, captured now."""
        if self.source is None:
            return list(self.pattern)
        return capture_all(self.source, self.workloads, self.kind, self.pack_weights, progress)


def capture_all(
    source: ModelSource, workloads: tuple[Workload, ...], kind: str, pack_weights: bool = False,
    progress: Progress = SILENT,
) -> list[tuple[str, DataflowGraph]]:
    """Name and graph of each workload (:class:`~fuseplan.planner.tuning.graph_stream.GraphStream`), all captured."""
    found = []
    with (
        progress.status(f"capturing {source.label}") as say,
        GraphStream(source, workloads, kind, pack_weights, progress.note) as graphs,
    ):
        while graphs.waiting:
            say(f"capturing {source.label}, {graphs.waiting}")
            found += graphs.take()
    return found


def of_model(
    kind: Kind, source: ModelSource, decode: str | None = None, kv_len: int | None = None, prefill: str | None = None,
    calls: bool = False, pack_weights: bool = False,
) -> Asked:
    """A model with the workloads of these sizes, written as :func:`workloads_for` reads them."""
    return Asked(source.label, kind, source, workloads_for(source, kind, decode, kv_len, prefill, calls), pack_weights)


def of_pattern(kind: Kind, name: str, shape: str | None, dtype: str | None) -> Asked:
    """A named pattern at one shape.

    Raises:
        UnknownPatternError, ShapeError: There is no such pattern, or it cannot have that shape on this device.
    """
    from fuseplan.planner.patterns.listing import LISTING
    from fuseplan.planner.patterns.table import PATTERNS, inputs_of, pattern_graph

    if name not in PATTERNS:
        raise UnknownPatternError(name, PATTERNS)
    if shape is None:
        found = LISTING[name]
        raise ShapeError("{} {} needs {} ({}), such as {} {}", Argument("pattern"), name, Argument("shape"), found.dims,
                         Argument("shape"), found.example)
    needed = sum(spec.nbytes() for spec in inputs_of(name, shape, full_dtype_name(dtype))[2].values())
    if needed > (there := memory_bytes(kind)):
        raise ShapeError("{} {}: the inputs of {} take {:,.0f} GiB, and this device has {:,.0f} GiB; give a smaller "
                         "one", Argument("shape"), shape, name, needed / 2**30, there / 2**30)
    return Asked(f"pattern {name}", kind, pattern=((shape, pattern_graph(name, shape, full_dtype_name(dtype))),))


def asked_for(
    kind: Kind, model: ModelLike | None = None, inputs: Any = None, *, pattern: str | None = None,
    shape: str | Sequence[int] | None = None, decode: Batches | None = None, kv_len: int | None = None,
    prefill: Prefills | str | None = None, dtype: str | torch.dtype | None = None, layers: int | None = None,
    calls: bool = False, pack_weights: bool = False,
) -> Asked:
    """What the arguments of Python mean; nothing is captured yet.

    Raises:
        FuseplanError: They contradict each other, or name nothing that exists.
    """
    kind_of_numbers = str(dtype).removeprefix("torch.") if dtype is not None else None
    if pattern is not None:
        given = (model, inputs, decode, kv_len, prefill, layers, pack_weights or None)
        if any(one is not None for one in given):
            raise ConfigError("pattern goes with shape and dtype only; leave out the arguments of a model")
        sizes = shape if isinstance(shape, str | None) else "x".join(map(str, shape))
        return of_pattern(kind, pattern, sizes, kind_of_numbers)
    if shape is not None:
        raise ConfigError("shape is that of a pattern; a model's sizes are decode, kv_len and prefill")
    source = _source(kind, model, inputs, kind_of_numbers, layers)
    decodes, prefills = sizes_text("decode", decode), sizes_text("prefill", prefill)
    return of_model(kind, source, decodes, kv_len, prefills, calls, pack_weights)


def _source(kind: Kind, model: ModelLike | None, inputs: Any, dtype: str | None, layers: int | None) -> ModelSource:
    if isinstance(model, nn.Module):
        if inputs is None:
            raise ConfigError("a module needs inputs: a tensor, a tuple of arguments, or a dict of keywords")
        if dtype is not None or layers is not None:
            raise ConfigError("a module has a dtype and layers of its own; leave out dtype and layers")
        own = getattr(model, "_orig_mod", model)  # what torch.compile made of it
        return ModelSource("module", type(own).__name__, made=_giving(own, inputs))
    if inputs is not None:
        raise ConfigError("inputs are those of a module; the sizes of a config are decode, kv_len and prefill")
    if model is None or isinstance(model, str | Path):
        name = str(model) if model is not None else None
        if name is not None and ":" in name and not Path(name).exists():
            return find_source(None, None, name, kind, dtype, layers)
        is_file = isinstance(model, Path) or (name is not None and (name.endswith(".json") or Path(name).exists()))
        return find_source(None if is_file else name, name if is_file else None, None, kind, dtype, layers)
    if callable(to_json := getattr(model, "to_json_string", None)):
        name = str(getattr(model, "name_or_path", "") or getattr(model, "model_type", "config"))
        checked = find_source(None, None, None, kind, dtype, layers)  # of the other arguments
        return source_of(json.loads(to_json(use_diff=False)), name, checked.dtype if dtype else None, layers)
    raise ConfigError(
        f"model is a {type(model).__name__}; give an nn.Module with inputs, a preset's name, the path of a "
        "config.json, or a Hugging Face config"
    )


def _giving(module: nn.Module, inputs: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (twin(module), inputs)


def sizes_text(name: str, sizes: Any) -> str | None:
    """Sizes as the command line writes them: ``"1,8"``, ``"512,4x2048"``."""
    if sizes is None or isinstance(sizes, str):
        return sizes
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    texts = ["x".join(map(str, one)) if isinstance(one, tuple | list) else str(one) for one in listed]
    if any(isinstance(one, bool | float) for one in listed) or not all(texts):
        raise ShapeError(f"{name}={sizes!r}: sizes are whole numbers{' or (batch, length)' * (name == 'prefill')}")
    return ",".join(texts)


def plan_settings(kind: Kind, numerics: str, regime: str) -> PlanSettings:
    """What plans are made for.

    Raises:
        ConfigError: There is no such regime, or no such numerics.
        DeviceError: CUDA graphs on a CPU.
    """
    for name, value, known in (("numerics", numerics, ("fp32", "eager")), ("regime", regime, ("eager", "graph"))):
        if value not in known:
            raise ConfigError("{} {!r} is not one of {}", Argument(name), value, ", ".join(known))
    if is_cpu(kind) and regime == "graph":
        raise DeviceError("{} graph needs CUDA graphs, which a CPU does not have; leave it out on the CPU",
                          Argument("regime"))
    return PlanSettings(numerics=numerics, regime=regime)


def memory_bytes(kind: str) -> int:
    """Memory of the device; of this machine where there is no such device."""
    if is_gpu(kind) and is_gpu(local_kind()):
        return int(torch.cuda.get_device_properties().total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def full_dtype_name(text: str | None) -> str | None:
    """A dtype as PyTorch names it; None stays None.

    >>> full_dtype_name("bf16")
    'bfloat16'
    """
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(text, text) if text is not None else None
