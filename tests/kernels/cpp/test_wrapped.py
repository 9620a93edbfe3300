"""Loads whose columns wrap around, or go back: flips and rolls of every type, at sizes that no vector divides."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.cpp.emitter import simplified_segments
from fuseplan.kernels.ir.backend import Target
from fuseplan.kernels.ir.ops import torch_dtype
from fuseplan.planner.lowering.lower import lower

REASON = CppBackend().unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
TARGET = Target("cpu", "native", 2)
TYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int8", "bool")
SHAPES = [(3, 1), (5, 3), (2, 127), (3, 1000), (3, 4097), (1, 20_011)]
MOVES = [("flip", {"dims": [1]}), ("flip", {"dims": [0, 1]}), ("roll", {"shifts": [3], "dims": [1]}),
         ("roll", {"shifts": [-40], "dims": [1]}), ("roll", {"shifts": [1, 2], "dims": [0, 1]}),
         ("roll", {"shifts": [5], "dims": []})]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> CppBackend:
    return CppBackend(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("op", "attributes"), MOVES, ids=str)
def test_every_element_comes_to_its_place(
    backend: CppBackend, dtype: str, op: str, attributes: dict[str, list[int]]
) -> None:
    for shape in SHAPES:
        x = torch.randint(0, 100, shape)
        x = x % 3 == 0 if dtype == "bool" else x.to(torch_dtype(dtype))
        b = Builder(x=x)
        moved = b(f"aten.{op}.default", "x", **attributes)
        ir = lower(b.graph(moved), [node.name for node in b.nodes], "fp32", (moved,)).ir
        made = backend.fused_callable(ir, backend.default_config(ir, TARGET), TARGET)(x)
        assert torch.equal(made, getattr(torch, op)(x, *attributes.values())), shape


@pytest.mark.parametrize("shape", [(64, 1000), (1, 9000)])
def test_a_roll_is_two_runs(shape: tuple[int, int]) -> None:
    b = Builder(x=torch.zeros(shape))
    for attributes in ({"shifts": [3], "dims": [1]}, {"shifts": [5], "dims": []}):
        moved = b("aten.roll.default", "x", **attributes)
        ir = lower(b.graph(moved), [b.nodes[-1].name], "fp32", (moved,)).ir
        loads = [load for segment in simplified_segments(ir) for load in segment.loads]
        assert len(loads) > 1 and not any("%" in load.index.render(str) for load in loads), attributes
