"""Attention of one query position by our own kernel: right under the interpreter, refused where it is none of its."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from graphs import Builder, spec_of

from fuseplan.kernels.gpu import fixed as fixed_functions
from fuseplan.kernels.gpu.direct import ptx_parameter_bits
from fuseplan.kernels.gpu.launch import Variant
from fuseplan.kernels.gpu.targets import read_resources
from fuseplan.kernels.ir.backend import SM90, CompiledKernel, Resources, allocating
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode
from fuseplan.planner.groups.candidates import single_candidates
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.library_op import LibraryOp
from fuseplan.planner.implementations.tunable_group import op_group
from fuseplan.planner.libraries.attention_calls import ATTENTION_CALLS
from fuseplan.planner.libraries.decode_attention import Decode, SplitAttention, decode_of
from fuseplan.planner.libraries.library_call import OpGroup

#: What one program of compute capability 9.0 can have (CUDA C++ Programming Guide, technical specifications).
MOST_SHARED_BYTES = 227 * 2**10
SUPPORT = Path(__file__).parents[2] / "support"
ATTENTION = "aten.scaled_dot_product_attention.default"
DECODE_ATTENTION = "fuseplan.decode_attention.default"


@pytest.mark.parametrize(("samples", "count"), [("static", 54), ("paged", 81)])
def test_it_is_right_under_the_interpreter_and_repeats_itself(samples: str, count: int) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "interpret_attention.py"), samples]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == count
    wrong = [one for one in found if not (one["right"] and one["same"] and one["strides"])]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize(("changed", "reason"), [
    ({"positions": 2}, "several query positions"), ({"width": 24}, "heads are not of"),
    ({"dtype": torch.float64}, "float64"), ({"is_causal": True}, "causal"),
])
def test_what_it_does_not_run_is_refused(changed: dict[str, Any], reason: str) -> None:
    sizes = {"positions": 1, "width": 16, "dtype": torch.float32, "is_causal": False, **changed}
    query = torch.randn(1, 4, sizes["positions"], sizes["width"], dtype=sizes["dtype"])
    b = Builder(q=query, k=torch.randn(1, 4, 9, sizes["width"], dtype=sizes["dtype"]))
    graph = b.graph(b(ATTENTION, "q", "k", "k", is_causal=sizes["is_causal"]))
    group = op_group(graph, [node.name for node in graph], graph.outputs, "cuda")
    assert reason in (SplitAttention().refuse(group) or "")


@pytest.mark.parametrize("kind", [None, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 64])
def test_it_takes_addresses_alone_and_keeps_its_numbers_in_registers(batch: int, kind: torch.dtype | None) -> None:
    pytest.importorskip("triton")
    caches = {name: torch.empty(batch, 8, 1024, 128, dtype=torch.bfloat16) for name in ("k", "v")}
    mask = {} if kind is None else {"mask": torch.ones(batch, 1, 1, 1024, dtype=kind)}
    b = Builder(q=torch.empty(batch, 32, 1, 128, dtype=torch.bfloat16), **caches, **mask)
    graph = b.graph(b(ATTENTION, "q", *caches, *mask, enable_gqa=True))
    found = decode_of(op_group(graph, [node.name for node in graph], graph.outputs, "cuda"))
    assert isinstance(found, Decode)
    fixed, numbers = SplitAttention().kernel(found, (32 * 128, 128), SM90)
    compiled = fixed.compiled(SM90, Variant())
    assert ptx_parameter_bits(compiled.asm["ptx"])[:7] == (64,) * 7
    if kind is None:  # a mask that is no range is looked at in a loop of its own, which spills a little
        assert read_resources(compiled).spill_bytes == 0
    # Partial results of every split, where a head has several.
    assert (numbers > 1) == (fixed.programs > 8 * batch)


@pytest.mark.parametrize(("dtype", "width"), [
    (torch.float32, 16), (torch.float32, 128), (torch.bfloat16, 64), (torch.bfloat16, 256), (torch.float16, 256),
])
@pytest.mark.parametrize("kind", [None, torch.bool])
@pytest.mark.parametrize("batch", [1, 48])
def test_its_blocks_fit_a_multiprocessor(
    dtype: torch.dtype, width: int, kind: torch.dtype | None, batch: int
) -> None:
    """Also where there is one program on each multiprocessor, which has more threads then."""
    pytest.importorskip("triton")
    mask = {} if kind is None else {"mask": torch.ones(batch, 1, 1, 640, dtype=kind)}
    keys = torch.empty(batch, 2, 640, width, dtype=dtype)
    b = Builder(q=torch.empty(batch, 4, 1, width, dtype=dtype), k=keys, **mask)
    graph = b.graph(b(ATTENTION, "q", "k", "k", *mask, enable_gqa=True))
    found = decode_of(op_group(graph, [node.name for node in graph], graph.outputs, "cuda"))
    assert isinstance(found, Decode)
    compiled = SplitAttention().kernel(found, (4 * width, width), SM90)[0].compiled(SM90, Variant())
    assert compiled.metadata.shared <= MOST_SHARED_BYTES


def paged(page: int, mask: bool = False, cap: float | None = None, **changes: Any) -> OpGroup:
    """A call over pages that lie row by row; ``changes`` are those of its sizes and type."""
    sizes = {"batch": 16, "blocks": 1024 // page, "heads": 32, "width": 128, "dtype": torch.bfloat16, **changes}
    batch, blocks, heads, width = (sizes[name] for name in ("batch", "blocks", "heads", "width"))
    rows = torch.empty(batch * blocks, page, 8, width, dtype=sizes["dtype"]).transpose(1, 2)
    given = {
        "q": torch.zeros(batch, heads, 1, width, dtype=sizes["dtype"]), "k": rows, "v": rows.clone(),
        "t": torch.zeros(batch, blocks, dtype=sizes.get("index", torch.int32)),
    } | ({"m": torch.ones(batch, 1, 1, blocks * page, dtype=torch.bool)} if mask else {})
    specs = {name: spec_of(one) for name, one in given.items()} | {"out": spec_of(given["q"])}
    attrs = {"scale": sizes.get("scale"), "cap": cap, **({} if mask else {"attn_mask": None})}
    return OpGroup(OpNode(DECODE_ATTENTION, tuple(given), ("out",), attrs), tuple(given), ("out",), specs, "cuda")


@pytest.mark.parametrize(("page", "batch"), [(1, 16), (16, 4), (16, 16), (16, 64), (48, 16), (64, 64), (256, 4)])
def test_pages_of_all_sizes_are_read_ahead(page: int, batch: int) -> None:
    """Blocks of keys are on their way while others are multiplied, wherever they lie, and nothing spills."""
    pytest.importorskip("triton")
    found = decode_of(paged(page, batch=batch))
    assert isinstance(found, Decode)
    compiled = SplitAttention().kernel(found, (32 * 128, 128), SM90)[0].compiled(SM90, Variant())
    assert ptx_parameter_bits(compiled.asm["ptx"])[:8] == (64,) * 8
    resources = read_resources(compiled)
    assert resources.spill_bytes == 0
    block_bytes = 64 * 128 * 2
    # Numbers of pages that are a block of their own are copied ahead as well, which takes stages from the keys.
    assert resources.shared_bytes >= (2 if page == 1 else 6) * block_bytes


@pytest.mark.parametrize(("dtype", "width", "page", "cap"), [
    (torch.bfloat16, 256, 48, None), (torch.bfloat16, 256, 64, 50.0), (torch.float32, 128, 16, 50.0),
])
def test_blocks_of_pages_fit_a_multiprocessor(
    dtype: torch.dtype, width: int, page: int, cap: float | None
) -> None:
    pytest.importorskip("triton")
    found = decode_of(paged(page, mask=True, cap=cap, dtype=dtype, width=width))
    assert isinstance(found, Decode)
    compiled = SplitAttention().kernel(found, (32 * width, width), SM90)[0].compiled(SM90, Variant())
    assert compiled.metadata.shared <= MOST_SHARED_BYTES


@pytest.mark.parametrize(("changed", "reason"), [
    ({"width": 24}, "heads are not of"), ({"dtype": torch.float64}, "float64"), ({"scale": -1.0}, "not positive"),
    ({"cap": 0.0}, "not positive"), ({"index": torch.int16}, "not listed by integers"),
])
def test_pages_that_it_does_not_read_are_refused(changed: dict[str, Any], reason: str) -> None:
    assert reason in (SplitAttention().refuse(paged(16, **changed)) or "")
    assert SplitAttention().refuse(paged(16, mask=True, cap=50.0)) is None
    for call in ATTENTION_CALLS:
        assert call.refuse(paged(16)) == "it is no call of attention"


@pytest.mark.parametrize("numerics", ["fp32", "eager"])
@pytest.mark.parametrize("cap", [None, 50.0])
def test_capped_scores_are_not_rounded_on_the_way(numerics: str, cap: float | None) -> None:
    """Where every rounding of ATen's ops is asked for, they run a chain that caps scores."""
    group = paged(16, cap=cap)
    table = GroupTable(DataflowGraph([group.node], group.specs, group.inputs, group.outputs), numerics, "cuda")
    (region,) = find_regions(table.graph)
    (candidate,) = single_candidates(table.graph, region)
    reason = LibraryOp(SplitAttention(), SplitAttention().name).refuse(table, candidate)
    assert (reason is None) == (cap is None or numerics == "fp32"), reason


def test_layers_share_a_kernel_and_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of one size may run at the same time, each on a stream of its own."""
    made: list[int] = []
    counters: list[torch.Tensor] = []

    class Kernel(CompiledKernel):
        resources = Resources()

        def __init__(self, *_: Any) -> None:
            made.append(id(self))

        def __call__(self, *tensors: torch.Tensor) -> None:
            raise AssertionError("calls go through fused")

        def fused(self, *how: Any) -> Any:
            """As of a GPU's kernel, the call does not keep the kernel."""
            return allocating(lambda *tensors: counters.append(tensors[-2]), *how, {})

    monkeypatch.setattr(fixed_functions, "loaded_kernel", Kernel)
    # What this test makes stays in it.
    monkeypatch.setattr(fixed_functions, "_LOADED", WeakValueDictionary())
    b = Builder(q=torch.randn(1, 4, 1, 16), k=torch.randn(1, 2, 65, 16))
    graph = b.graph(b(ATTENTION, "q", "k", "k", enable_gqa=True))
    group = op_group(graph, [node.name for node in graph], graph.outputs, "cuda")
    calls = [SplitAttention().build(group) for _ in range(2)]
    for call in calls:
        call(*(b.tensors[value] for value in group.inputs))
        call(*(b.tensors[value] for value in group.inputs))
    assert len(made) == 1
    first, again, other, _ = (one.data_ptr() for one in counters)
    assert first == again != other
    del call, calls  # with its last call the kernel goes
    gc.collect()
    assert not fixed_functions._LOADED
