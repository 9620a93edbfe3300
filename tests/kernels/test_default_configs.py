"""Every kernel is well formed, and its default configuration is in its own space, for every back end and target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import ir_samples as samples
import pytest
import torch
from decoder_layers import HELD, MODELS, Layers, Sizes, example
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_groups import groups, lowered_whole
from model_families import build, inputs
from recipe_samples import recipe_samples
from well_formed import validate

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import Backend, Target, gpu_target, misfit
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.planner.capture.trace import record
from fuseplan.planner.graph.dataflow import DataflowGraph, bind_graph
from fuseplan.planner.groups.candidates import enumerate_candidates
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.groups.regions import find_regions, is_anchor, region_parts, unique_regions
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.lowering.lower import NotLowerable
from fuseplan.planner.patterns.listing import LISTING
from fuseplan.planner.patterns.table import pattern_graph

pytestmark = pytest.mark.uncovered  # many cases of code that other tests cover

BACKENDS: list[Callable[[Path], Backend]] = [CppBackend, TritonBackend, NinetoothedBackend]
ON_CPU = [Target("cpu", "native", cores, l2_bytes=2**25) for cores in (1, 7, 64)]
ON_GPU = [
    replace(gpu_target(arch, cores, 50 * 2**20), in_graph=in_graph)
    for arch, cores, in_graph in (
        ("sm_75", 40, False), ("sm_80", 108, True), ("sm_90", 132, False), ("sm_90", 132, True), ("sm_90", 1, False),
        ("sm_120", 170, True), ("gfx942", 304, False),
    )
]
#: Makes a kernel of a number of rows and of columns.
SHAPED = [
    samples.rms_norm, samples.softmax, samples.swiglu, samples.add_rms_norm, samples.row_statistics, samples.quantised,
    samples.broadcast_add, samples.transposed_copy, samples.layer_norm, samples.clamped,
]


def check(backend: Backend, ir: KernelIR) -> int:
    """The targets for which the back end takes the kernel: on each the default is a choice of the space."""
    validate(ir)
    targets = [target for target in (*ON_CPU, *ON_GPU) if backend.refuse(ir, target) is None]
    for target in targets:
        default = backend.default_config(ir, target)
        wrong = misfit(default, backend.tunables(ir, target)) or misfit(default, backend.parameters, complete=False)
        assert wrong is None, f"{backend.name}, {target.arch}, {target.cores} cores: {dict(default)}: {wrong}"
    return len(targets)


@pytest.fixture(params=BACKENDS, ids=lambda maker: maker.name)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    made: Backend = request.param(tmp_path)
    return made


@cache
def kernels() -> dict[str, KernelIR]:
    """Of every sample, and of groups around matmuls."""
    found = {samples.label(one): one.ir
             for one in (*samples.static_samples(), *samples.dynamic_samples(), *recipe_samples())}
    for dtype in (torch.bfloat16, torch.float32):
        found |= {f"{name} {dtype}": lowered_whole(b, *outputs)[0].ir for name, b, outputs in groups(dtype)}
    return found


def test_of_every_sample(backend: Backend) -> None:
    assert sum(check(backend, ir) for ir in kernels().values()) > 100


@pytest.mark.parametrize("make", [CppBackend, TritonBackend, NinetoothedBackend], ids=lambda maker: maker.name)
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPED), st.integers(0, 22), st.integers(0, 17), st.integers(-1, 1))
def test_of_any_shape(make: Callable[..., Backend], kernel: Callable[..., samples.Sample], rows: int, cols: int,
                      beside: int) -> None:
    check(make(), kernel(max(1, 2**rows + beside), max(1, 2**cols - beside)).ir)


@pytest.mark.parametrize("cols", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("rows", [1000, 100_000, 3_000_000])
def test_of_many_narrow_rows(backend: Backend, rows: int, cols: int) -> None:
    """A row that few elements make: many of them fill a block."""
    for kernel in (samples.softmax, samples.rms_norm):
        check(backend, kernel(rows, cols).ir)


def group_kernels(graph: DataflowGraph) -> Iterator[KernelIR]:
    """The kernels of a graph's groups, and the same with its dynamic sizes."""
    bound = bind_graph(graph)
    table = GroupTable(bound, "fp32", "cpu")
    for regions in unique_regions(find_regions(bound)).values():
        for part in region_parts(bound, regions[0]):
            if is_anchor(bound, part):
                continue
            for group in enumerate_candidates(bound, part, table.legal, 40, 20).candidates:
                yield table.lowered(group).ir
                if graph.symbols:
                    try:
                        yield lower_group(graph, group.ops).ir
                    except NotLowerable:
                        continue


@cache
def pattern_kernels() -> list[KernelIR]:
    return [ir for name, words in LISTING.items() for ir in group_kernels(pattern_graph(name, words.example))]


def test_of_every_named_pattern(backend: Backend) -> None:
    assert sum(check(backend, ir) for ir in pattern_kernels()) > 100


def layer_graph(sizes: Sizes, length: int) -> DataflowGraph:
    module, call = Layers(sizes, 1).to(torch.bfloat16), example(sizes, 1, 2, length, "cpu", torch.bfloat16, HELD - 1)
    return record(module, call, {})[0].graph


@pytest.mark.parametrize("length", [1, 9])
def test_of_a_decoder_layer(length: int) -> None:
    irs = list(group_kernels(layer_graph(MODELS["tiny"], length)))
    for backend in (CppBackend(), TritonBackend(), NinetoothedBackend()):
        assert sum(check(backend, ir) for ir in irs) > 20


@pytest.mark.parametrize("family", ["mamba2", "deepseek-v3"])
def test_of_a_model(family: str) -> None:
    torch._dynamo.reset()
    irs = [ir for trace in record(build(family), (), inputs(family, 2, 41)) for ir in group_kernels(trace.graph)]
    for backend in (CppBackend(), TritonBackend(), NinetoothedBackend()):
        assert sum(check(backend, ir) for ir in irs) > 20
