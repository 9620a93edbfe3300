"""Options that name a model and its workloads, and their capture; shared by tune, explain and bench."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fuseplan.planner.graph import DataflowGraph
    from fuseplan.planner.models import ModelSource
    from fuseplan.planner.workload import Workload


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
        "--module", metavar="PKG.MOD:FACTORY", help="Your own: FACTORY() returns (nn.Module, example inputs)."
    ),
]
DecodeOption = Annotated[
    str | None, typer.Option("--decode", metavar="1,8", help="Decode batch sizes: one new token per sequence.")
]
KvLenOption = Annotated[
    int | None, typer.Option("--kv-len", metavar="N", help="Length of the static KV cache in decode.")
]
PrefillOption = Annotated[
    str | None, typer.Option("--prefill", metavar="128,4x512", help="Prefill sizes: sequence, or batch x sequence.")
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="bfloat16, float16 or float32; the model's own by default.")
]
LayersOption = Annotated[
    int | None, typer.Option("--layers", metavar="N", help="Keep only the first N layers.")
]
RegimeOption = Annotated[
    Regime, typer.Option("--regime", help="eager: launched from Python. graph: replayed from a CUDA graph (CUDA only).")
]
NumericsOption = Annotated[
    Numerics,
    typer.Option("--numerics", help="fp32 keeps a kernel's intermediates in fp32; eager rounds where PyTorch does."),
]


def capture_all(source: ModelSource, workloads: tuple[Workload, ...], kind: str) -> list[tuple[str, DataflowGraph]]:
    """Name and graph of each workload; a model that breaks into several graphs gets numbered names."""
    from fuseplan.planner.capture import capture
    from fuseplan.planner.cli_common import console

    found = []
    with console(stderr=True).status("capturing") as status:
        for workload in workloads:
            status.update(f"capturing {source.label}, {workload.label}")
            graphs = capture(source, workload, kind).graphs
            for number, graph in enumerate(graphs, 1):
                name = workload.label if len(graphs) == 1 else f"{workload.label} part {number}"
                found.append((name, graph))
    return found
