"""Options that name a model and its workloads, and their capture; shared by tune, explain and bench."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fuseplan.planner.cli.common import whole

if TYPE_CHECKING:
    from fuseplan.planner.graph.dataflow import DataflowGraph
    from fuseplan.planner.models.sources import ModelSource
    from fuseplan.planner.models.workload import Workload


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
    typer.Option("--model", metavar="NAME", help="A preset: llama, llama-3.2-1b, llama-3.1-8b, llama-3.1-70b."),
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
    typer.Option("--pattern", metavar="NAME", help="A pattern such as swiglu, with --shape; see `plan patterns`."),
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


def named_graphs(
    kind: Literal["cpu", "cuda"], source: tuple[str | None, Path | None, str | None],
    pattern: tuple[str | None, str | None], workloads: tuple[str | None, int | None, str | None], dtype: str | None,
    layers: int | None, calls: bool = False, pack_weights: bool = False,
) -> tuple[str, list[tuple[str, DataflowGraph]]]:
    """Name of what the options mean, and its graphs by workload name.

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
        return _pattern(pattern[0], pattern[1], dtype, kind)
    if pattern[1] is not None:
        raise ConfigError("--shape belongs to --pattern; a model's sizes are --decode, --kv-len and --prefill")
    found = find_source(*source, kind, dtype, layers)
    asked = workloads_for(found, kind, *workloads, calls=calls)
    return found.label, capture_all(found, asked, kind, pack_weights)


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


def _pattern(name: str, shape: str | None, dtype: str | None, kind: str) -> tuple[str, list[tuple[str, DataflowGraph]]]:
    from fuseplan.planner.errors import ShapeError, UnknownPatternError
    from fuseplan.planner.patterns.table import PATTERNS, inputs_of, pattern_graph

    if name not in PATTERNS:
        raise UnknownPatternError(name, PATTERNS)
    if shape is None:
        found = PATTERNS[name]
        raise ShapeError(f"--pattern {name} needs --shape ({found.dims}), such as --shape {found.example}")
    needed = sum(spec.nbytes() for spec in inputs_of(name, shape, full_dtype_name(dtype))[2].values())
    if needed > (there := memory_bytes(kind)):
        raise ShapeError(
            f"--shape {shape}: the inputs of {name} take {needed / 2**30:,.0f} GiB, and this device has "
            f"{there / 2**30:,.0f} GiB; give a smaller one"
        )
    graph = pattern_graph(name, shape, full_dtype_name(dtype))
    return f"pattern {name}", [(shape, graph)]


def capture_all(
    source: ModelSource, workloads: tuple[Workload, ...], kind: str, pack_weights: bool = False
) -> list[tuple[str, DataflowGraph]]:
    """Name and graph of each workload; a model that breaks into several graphs gets numbered names.

    With packed weights the names say so: reports then have both.

    Calls that were not asked for, but follow from those that were, are left out where a model does not take them.
    """
    from fuseplan.planner.capture.cache import cached_capture, capture_beside
    from fuseplan.planner.cli.common import console
    from fuseplan.planner.errors import CaptureError
    from fuseplan.search.workers.worker import usable_cores

    found = []
    with console(stderr=True).status(f"capturing {source.label}") as status:
        capture_beside(source, workloads, kind, usable_cores(), None, pack_weights)
        for workload in workloads:
            status.update(f"capturing {source.label}, {workload.label}")
            try:
                graphs = cached_capture(source, workload, kind, None, pack_weights).graphs
            except CaptureError as error:
                if not workload.derived:
                    raise
                console(stderr=True).print(f"{workload.label} is left out: {error}", markup=False)
                continue
            for number, graph in enumerate(graphs, 1):
                name = workload.label + (" packed" if pack_weights else "")
                if len(graphs) > 1:
                    name += f" part {number}"
                found.append((name, graph))
    return found
