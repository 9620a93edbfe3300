"""Give GPU kernels an index outside its table under Triton's interpreter, and print what they do, as JSON.

A program of its own, as :mod:`interpret_kernels` is: ``python interpret_outside.py triton FOLDER``. One object for each
kernel and config: ``right`` says that a call with indices inside passed, ``failed`` how many of ``bad`` calls did not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from graphs import Builder
from interpret_kernels import backend_under_test, configs
from ir_samples import FAR, lookups
from matmul_groups import hidden, lowered_whole, weights
from triton_interpreter import mend

from fuseplan.kernels.ir.backend import SM90, Backend, Config
from fuseplan.kernels.ir.ir import KernelIR


@dataclass(frozen=True)
class Case:
    """A kernel with its inputs, and places where numbers are put that are outside."""

    name: str
    ir: KernelIR
    symbols: Mapping[str, int]
    inputs: Callable[[], list[torch.Tensor]]
    outside: Callable[[int, int], list[torch.Tensor]]
    places: list[int]
    extent: int


def cases() -> Iterator[Case]:
    for one in lookups():
        yield Case(one.name, one.ir, one.symbols, one.inputs, one.outside, one.places, one.extent)
    for name, builder, out in matmuls():
        lowered, _ = lowered_whole(builder, out)
        at = lowered.inputs.index("at")

        def inputs(builder: Builder = builder, names: tuple[str, ...] = lowered.inputs) -> list[torch.Tensor]:
            return [one.clone() for one in builder.values(names)]

        def outside(place: int, number: int, at: int = at, inputs: Callable[[], list[torch.Tensor]] = inputs
                    ) -> list[torch.Tensor]:
            made = inputs()
            made[at].view(-1)[place] = number
            return made

        yield Case(name, lowered.ir, {}, inputs, outside, [0, 2], 5)


def matmuls() -> Iterator[tuple[str, Builder, str]]:
    """Groups around a matmul that look up what they multiply, what they add, or where they write."""
    at = torch.tensor([4, 0, 2])
    b = Builder(table=hidden(5), at=at, **weights("w"))
    yield "looked up, then multiplied", b, b("aten.linear.default", b("aten.embedding.default", "table", "at"), "w")
    b = Builder(x=hidden(3), at=at, bias=hidden(5, inner=24), **weights("w"))
    rows = b("aten.index_select.default", "bias", "at", dim=0)
    yield "multiplied, then looked up", b, b("aten.add.Tensor", b("aten.linear.default", "x", "w"), rows)
    b = Builder(x=hidden(3), at=at, cache=torch.zeros(5, 24, dtype=torch.bfloat16), **weights("w"))
    yield "written", b, b("aten.index_copy_.default", "cache", "at", b("aten.linear.default", "x", "w"), dim=0)
    b = Builder(x=hidden(3), at=at, scale=torch.rand(5, 1), **weights("w"))
    scaled = b("aten.mul.Tensor", "x", b("aten.to.dtype", b("aten.index_select.default", "scale", "at", dim=0),
                                         dtype=torch.bfloat16))
    yield "scaled row by row", b, b("aten.linear.default", scaled, "w")


def settings(backend: Backend, ir: KernelIR) -> Iterator[Config]:
    if any(segment.products for segment in ir.segments):
        yield backend.default_config(ir, SM90)
    else:
        yield from (one for one in configs(backend, ir) if backend.infeasible(ir, one, SM90) is None)


def passes(backend: Backend, case: Case, config: Config, inputs: list[torch.Tensor]) -> bool:
    outputs = [
        inputs[buffer.over] if buffer.over is not None
        else torch.zeros(buffer.shape, dtype=getattr(torch, buffer.dtype)).as_strided(buffer.shape, buffer.strides)
        for buffer in case.ir.bind(case.symbols).outputs
    ]
    try:
        backend.load(case.ir, config, SM90)(*inputs, *outputs, *case.symbols.values())
    except Exception as error:
        if "outside its table" not in str(error):
            raise
        return False
    return True


def main(name: str, cache_dir: str) -> None:
    mend()
    backend, found = backend_under_test(name, cache_dir), []
    for case in cases():
        if backend.refuse(case.ir, SM90) is not None:
            continue
        for config in settings(backend, case.ir):
            bad = [(place, number) for place in case.places for number in (-1, case.extent, FAR)]
            failed = sum(not passes(backend, case, config, case.outside(*one)) for one in bad)
            right = passes(backend, case, config, case.inputs())
            found.append({"name": case.name, "config": dict(config), "right": right, "failed": failed, "bad": len(bad)})
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
