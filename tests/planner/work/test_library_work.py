"""Work of matmuls, attention and cache writes, against loops that count every product and every byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fuseplan.costmodel.work import Work
from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.work.group_work import op_work

SDPA = "aten.scaled_dot_product_attention.default"


def spec(shape: tuple[int, ...], dtype: str = "bfloat16", strides: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec.contiguous(shape, dtype) if strides is None else TensorSpec(shape, dtype, strides)


def work_of(op: str, inputs: Mapping[str, TensorSpec], out: TensorSpec, **attrs: object) -> Work:
    node = OpNode(op, tuple(inputs), ("out",), attrs)
    return op_work(DataflowGraph([node], {**inputs, "out": out}, inputs, ["out"]), "out")


def addresses(layout: TensorSpec) -> set[int]:
    """Every element's place in memory."""
    places = itertools.product(*(range(int(size)) for size in layout.shape))
    return {sum(at * int(stride) for at, stride in zip(place, layout.strides, strict=True)) for place in places}


def attended(queries: int, keys: int, causal: bool) -> Iterator[tuple[int, int]]:
    return ((row, key) for row in range(queries) for key in range(keys) if not causal or key <= row)


@pytest.mark.parametrize(
    ("op", "shapes", "out", "products"),
    [
        ("aten.linear.default", ((3, 5, 7), (11, 7)), (3, 5, 11), 3 * 5 * 11 * 7),
        ("aten.linear.default", ((5, 7), (11, 7), (11,)), (5, 11), 5 * 11 * 7),
        ("aten.mm.default", ((5, 7), (7, 11)), (5, 11), 5 * 11 * 7),
        ("aten.addmm.default", ((11,), (5, 7), (7, 11)), (5, 11), 5 * 11 * 7),
        ("aten.bmm.default", ((2, 5, 7), (2, 7, 3)), (2, 5, 3), 2 * 5 * 3 * 7),
        ("aten.matmul.default", ((2, 5, 7), (7, 3)), (2, 5, 3), 2 * 5 * 3 * 7),
        ("fuseplan.merged_linear.default", ((5, 7), (11, 7), (3, 7)), (5, 14), 5 * 14 * 7),
    ],
)
@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", "bf16_matmul"), ("float32", "fp32_matmul")])
def test_products_count_two_and_operands_once(
    op: str, shapes: tuple[tuple[int, ...], ...], out: tuple[int, ...], products: int, dtype: str, unit: str
) -> None:
    inputs = {f"x{number}": spec(shape, dtype) for number, shape in enumerate(shapes)}
    found = work_of(op, inputs, spec(out, dtype))
    size = 2 if dtype == "bfloat16" else 4
    assert found.flops == {unit: 2.0 * products}
    assert found.dram_bytes == size * sum(len(addresses(one)) for one in (*inputs.values(), spec(out, dtype)))
    assert found.written_bytes == size * len(addresses(spec(out, dtype)))
    assert found.launches == 1
    assert found.call == f"{op}.{dtype}"


@given(
    batch=st.integers(1, 2), heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]), queries=st.integers(1, 5),
    keys=st.integers(1, 6), width=st.integers(1, 4), causal=st.booleans(), expanded=st.booleans(),
)
def test_attention_counts_what_it_attends_to(
    batch: int, heads: tuple[int, int], queries: int, keys: int, width: int, causal: bool, expanded: bool
) -> None:
    many, few = heads
    shared = spec((batch, few, keys, width))
    if expanded and few == 1:  # repeated for every query head by a stride of zero
        shared = spec((batch, many, keys, width), strides=(keys * width, 0, width, 1))
    query = spec((batch, many, queries, width))
    found = work_of(SDPA, {"q": query, "k": shared, "v": shared}, query, is_causal=causal, enable_gqa=many != few)
    pairs = sum(1 for _ in attended(queries, keys, causal)) * batch * many
    assert found.flops == {"bf16_matmul": 2.0 * pairs * 2 * width, "sfu": float(pairs)}
    seen = {key for _, key in attended(queries, keys, causal)}
    kept = len(addresses(shared)) * len(seen) // keys  # keys that no position sees are not read
    assert found.dram_bytes == pytest.approx(2.0 * (2 * len(addresses(query)) + 2 * kept))


def test_masks_are_read_as_they_lie() -> None:
    query, key = spec((2, 4, 3, 8)), spec((2, 4, 5, 8))
    plain = work_of(SDPA, {"q": query, "k": key, "v": key}, query)
    for mask, nbytes in (
        (spec((2, 1, 3, 5), "bool"), 30), (spec((2, 4, 3, 5), "bfloat16"), 240),
        (spec((2, 4, 3, 5), "float32", (0, 0, 5, 1)), 60),
    ):
        masked = work_of(SDPA, {"q": query, "k": key, "v": key, "mask": mask}, query)
        assert masked.dram_bytes - plain.dram_bytes == nbytes
        assert masked.flops == plain.flops


def test_a_cache_write_moves_the_rows_alone() -> None:
    cache, rows = spec((2, 8, 1024, 64)), spec((2, 8, 3, 64))
    found = work_of("aten.index_copy_.default", {"c": cache, "i": spec((3,), "int64"), "r": rows}, cache, dim=2)
    nbytes = 2 * 8 * 3 * 64 * 2
    assert found.dram_bytes == 2 * nbytes + 3 * 8
    assert found.written_bytes == nbytes
    assert found.flops == {}


def test_weights_are_cold_and_what_was_just_made_is_not() -> None:
    specs = {"x": spec((4, 8)), "a": spec((4, 8)), "w": spec((16, 8)), "out": spec((4, 16))}
    nodes = [OpNode("aten.neg.default", ("x",), ("a",)), OpNode("aten.linear.default", ("a", "w"), ("out",))]
    found = op_work(DataflowGraph(nodes, specs, ["x", "w"], ["out"]), "out")
    assert found.cold_bytes == 16 * 8 * 2


@pytest.mark.parametrize(("count", "blocks", "read"), [(20, 4, 8), (5, 4, 5), (1, 1, 1)])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_attention_reads_the_pages_of_its_table_once(count: int, blocks: int, read: int, cap: float | None) -> None:
    """However many pages the pool has: ``read`` of them, of keys and of values. None where they are copied first."""
    query, pages = spec((2, 6, 1, 8)), spec((count, 3, 16, 8), strides=(384, 8, 24, 1))
    table, mask = spec((2, blocks), "int32"), spec((2, 1, 1, 16 * blocks), "bool")
    inputs = {"q": query, "k": pages, "v": pages, "t": table, "m": mask}
    found = work_of("fuseplan.decode_attention.default", inputs, query, cap=cap)
    pairs = 2 * 6 * 16 * blocks
    assert found.flops["bf16_matmul"] == 2.0 * pairs * 16
    assert found.flops["sfu"] == (pairs if cap is None else 4.0 * pairs)
    page_bytes = 3 * 16 * 8 * 2
    assert found.dram_bytes == 2 * read * page_bytes + 2 * 2 * 6 * 8 * 2 + 2 * blocks * 4 + 2 * 16 * blocks
    assert found.launches == 1 and found.call == "fuseplan.decode_attention.default.bfloat16"


def test_attention_of_a_static_cache_is_the_work_of_pytorchs() -> None:
    query, key = spec((2, 4, 1, 8)), spec((2, 2, 5, 8))
    inputs = {"q": query, "k": key, "v": key}
    found = work_of("fuseplan.decode_attention.default", inputs, query, block_table=None, attn_mask=None)
    pytorch = work_of(SDPA, inputs, query, enable_gqa=True)
    assert (found.flops, found.dram_bytes) == (pytorch.flops, pytorch.dram_bytes)


@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", "bf16_matmul"), ("float32", "fp32_matmul")])
@pytest.mark.parametrize(("sizes", "window", "given"), [
    ((2, 6, 9), (4, 6, 3), {}),
    ((2, 6, 9, 8), (4, 6, 3, 3), {"stride": [2, 1]}),
    ((2, 6, 9, 8), (12, 1, 3, 3), {"groups": 6, "dilation": [2, 2]}),
    ((2, 6, 9, 8), (4, 3, 1, 1), {"groups": 2}),
    ((2, 6, 5, 9, 8), (4, 6, 1, 3, 3), {"padding": [0, 1, 1]}),
    ((2, 6, 9, 8), (6, 4, 3, 3), {"stride": [2, 2], "transposed": True}),
    ((2, 6, 9, 8), (4, 6, 3, 3), {}),  # float32 may take Winograd's products
])
def test_convolutions_count_as_pytorch_counts_them(
    sizes: tuple[int, ...], window: tuple[int, ...], given: dict[str, Any], dtype: str, unit: str
) -> None:
    rank = len(sizes) - 2
    names = {"stride": [1] * rank, "padding": [0] * rank, "dilation": [1] * rank, "transposed": False,
             "output_padding": [0] * rank, "groups": 1} | given
    with FlopCounterMode(display=False) as counted:
        x, w = (torch.empty(one, device="meta", dtype=getattr(torch, dtype)) for one in (sizes, window))
        result = torch.ops.aten.convolution.default(x, w, None, *names.values())
    fewer = 4 if dtype == "float32" and window[2:] == (3, 3) and not given else 1
    found = work_of("aten.convolution.default", {"x": spec(sizes, dtype), "w": spec(window, dtype)},
                    spec(tuple(result.shape), dtype), **names)
    assert found.flops == {unit: counted.get_total_flops() / fewer}
