"""Options that name a model and its workloads, and their capture; shared by tune, explain and bench."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fuseplan.planner.cli import completion
from fuseplan.planner.cli.common import whole
from fuseplan.search.errors import plain

if TYPE_CHECKING:
    from fuseplan.planner.graph.dataflow import DataflowGraph
    from fuseplan.planner.models.sources import ModelSource
    from fuseplan.planner.models.workload import Workload
    from fuseplan.planner.tuning.graph_stream import GraphStream


class Numerics(StrEnum):
    """How intermediates inside a kernel are rounded."""

    FP32 = "fp32"
    EAGER = "eager"


class Regime(StrEnum):
    """How kernels are launched."""

    EAGER = "eager"
    GRAPH = "graph"


ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", autocompletion=completion.models,
                 help="A preset: llama, llama-3.2-1b, llama-3.1-8b, llama-3.1-70b."),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A local Hugging Face config.json (weights are random).")
]
ModuleOption = Annotated[
    str | None,
    typer.Option(
        "--module", metavar="PKG.MOD:FACTORY",
        help="Your own: FACTORY() returns (nn.Module, example inputs). Runs that code.",
    ),
]
PatternOption = Annotated[
    str | None,
    typer.Option("--pattern", metavar="NAME", autocompletion=completion.patterns,
                 help="A pattern such as swiglu, with --shape; see `plan patterns`."),
]
ShapeOption = Annotated[
    str | None, typer.Option("--shape", metavar="32x4096", help="Shape of the pattern's activations.")
]
DecodeOption = Annotated[
    str | None, typer.Option("--decode", metavar="1,8", help="Decode batch sizes: one new token per sequence.")
]
KvLenOption = Annotated[
    int | None,
    typer.Option("--kv-len", parser=whole(2), metavar="N", help="Length of the static KV cache in decode."),
]
PrefillOption = Annotated[
    str | None, typer.Option("--prefill", metavar="128,4x512", help="Prefill sizes: sequence, or batch x sequence.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="bfloat16, float16 or float32 (a --module's inputs too); by default the model's own."),
]
LayersOption = Annotated[
    int | None, typer.Option("--layers", parser=whole(1), metavar="N", help="Keep only the first N layers.")
]
RegimeOption = Annotated[
    Regime, typer.Option("--regime", help="eager: launched from Python. graph: replayed from a CUDA graph (CUDA only).")
]
PackWeightsOption = Annotated[
    bool,
    typer.Option(
        "--pack-weights",
        help="Linear ops that read one value (Q, K and V; gate and up) are one op, as with the option pack_weights.",
    ),
]
NumericsOption = Annotated[
    Numerics,
    typer.Option("--numerics", help="fp32 keeps a kernel's intermediates in fp32; eager rounds where PyTorch does."),
]


def regime_name(kind: Literal["cpu", "cuda"], regime: Regime) -> str:
    """The regime, where the device has it.

    Raises:
        DeviceError: CUDA graphs on a CPU.
    """
    if kind == "cpu" and regime is Regime.GRAPH:
        from fuseplan.planner.errors import DeviceError

        raise DeviceError("--regime graph needs CUDA graphs, which a CPU does not have; leave it out on the CPU")
    return regime.value


@dataclass(frozen=True)
class Named:
    """What the options mean: its name, and either a model with its workloads or the one graph of a pattern."""

    label: str
    kind: Literal["cpu", "cuda"]
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

    def graphs(self) -> list[tuple[str, DataflowGraph]]:
        """All graphs by workload name, captured now."""
        if self.source is None:
            return list(self.pattern)
        return capture_all(self.source, self.workloads, self.kind, self.pack_weights)


def named(
    kind: Literal["cpu", "cuda"], source: tuple[str | None, Path | None, str | None],
    pattern: tuple[str | None, str | None], workloads: tuple[str | None, int | None, str | None], dtype: str | None,
    layers: int | None, calls: bool = False, pack_weights: bool = False,
) -> Named:
    """What the options mean; nothing is captured yet.

    ``source`` is (``--model``, ``--config``, ``--module``), ``pattern`` (``--pattern``, ``--shape``), and ``workloads``
    (``--decode``, ``--kv-len``, ``--prefill``).

    Raises:
        FuseplanError: The options contradict each other, or name nothing that exists.
    """
    from fuseplan.planner.errors import ConfigError
    from fuseplan.planner.models.sources import find_source, workloads_for

    if pattern[0] is not None:
        if pack_weights or any(option is not None for option in (*source, *workloads, layers)):
            raise ConfigError("--pattern takes --shape and --dtype only; a model's options do not go with it")
        return Named(f"pattern {pattern[0]}", kind, pattern=(_pattern(pattern[0], pattern[1], dtype, kind),))
    if pattern[1] is not None:
        raise ConfigError("--shape belongs to --pattern; a model's sizes are --decode, --kv-len and --prefill")
    found = find_source(*source, kind, dtype, layers)
    return Named(found.label, kind, found, workloads_for(found, kind, *workloads, calls=calls), pack_weights)


def memory_bytes(kind: str) -> int:
    """Memory of the device; of this machine where there is no such device."""
    import torch

    if kind == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties().total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def full_dtype_name(text: str | None) -> str | None:
    """A dtype as PyTorch names it; None stays None.

    >>> full_dtype_name("bf16")
    'bfloat16'
    """
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(text, text) if text is not None else None


def _pattern(name: str, shape: str | None, dtype: str | None, kind: str) -> tuple[str, DataflowGraph]:
    from fuseplan.planner.errors import ShapeError, UnknownPatternError
    from fuseplan.planner.patterns.listing import LISTING
    from fuseplan.planner.patterns.table import PATTERNS, inputs_of, pattern_graph

    if name not in PATTERNS:
        raise UnknownPatternError(name, PATTERNS)
    if shape is None:
        found = LISTING[name]
        raise ShapeError(f"--pattern {name} needs --shape ({found.dims}), such as --shape {found.example}")
    needed = sum(spec.nbytes() for spec in inputs_of(name, shape, full_dtype_name(dtype))[2].values())
    if needed > (there := memory_bytes(kind)):
        raise ShapeError(
            f"--shape {shape}: the inputs of {name} take {needed / 2**30:,.0f} GiB, and this device has "
            f"{there / 2**30:,.0f} GiB; give a smaller one"
        )
    return shape, pattern_graph(name, shape, full_dtype_name(dtype))


def capture_all(
    source: ModelSource, workloads: tuple[Workload, ...], kind: str, pack_weights: bool = False
) -> list[tuple[str, DataflowGraph]]:
    """Name and graph of each workload (:class:`~fuseplan.planner.tuning.graph_stream.GraphStream`), all captured."""
    from fuseplan.planner.cli.common import status as doing

    found = []
    with (
        doing(f"capturing {source.label}") as status,
        stream(source, workloads, kind, pack_weights) as graphs,
    ):
        while graphs.waiting:
            status.update(f"capturing {source.label}, {graphs.waiting}")
            found += graphs.take()
    return found


def stream(
    source: ModelSource, workloads: tuple[Workload, ...], kind: str, pack_weights: bool = False
) -> GraphStream:
    """The graphs as they are captured; what is left out is said on stderr."""
    from fuseplan.planner.tuning.graph_stream import GraphStream

    def note(text: str) -> None:
        typer.echo(plain(text), err=True)

    return GraphStream(source, workloads, kind, pack_weights, note)
