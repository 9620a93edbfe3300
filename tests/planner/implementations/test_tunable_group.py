"""What the search is given of a group: its work, its chain, its oracle, and inputs it is defined for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import Builder
from kernel_reference import run_reference
from lower_oracle import compute_ops, rms_norm
from reference_backend import ReferenceBackend
from scripted_tuner import TARGET
from torch.utils._python_dispatch import TorchDispatchMode

from fuseplan.planner.graph.dataflow import DataflowGraph, OpNode, TensorSpec
from fuseplan.planner.groups.candidates import enumerate_candidates, single_candidates
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.groups.regions import find_regions
from fuseplan.planner.implementations import tunable_group as subject_module
from fuseplan.planner.implementations.aten import ATTENTION, MATMUL, UNFUSED, AtenOp
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.group_table import GroupTable
from fuseplan.planner.implementations.sample_inputs import random_tensor
from fuseplan.planner.implementations.tunable_group import group_subject, op_group, op_subject
from fuseplan.planner.work.group_work import kernel_work, op_work


def test_work_is_counted_exactly() -> None:
    b = Builder(x=torch.randn(3, 8), w=torch.randn(8))
    value = b("aten.mul.Tensor", b("aten.softmax.int", "x", dim=-1), "w")
    graph = b.graph(value)
    work = kernel_work(lower_group(graph, compute_ops(graph)).ir)
    # x read once: 3*8*4; w once: 8*4; result written: 3*8*4.
    assert work.dram_bytes == 96 + 32 + 96
    # Three sweeps (max, sum, store); x is read again in two of them, w (per column) too: 2 * (96 + 32).
    assert work.l2_bytes == 2 * (96 + 32)
    # fp32: max 24, subtraction 24, sum 24, multiply 24 twice; sfu: exp 24, one reciprocal a row.
    assert work.flops == {"fp32": 120.0, "sfu": 27.0}
    assert work.launches == 1
    unfused = [op_work(graph, node.name) for node in graph]
    assert [part.dram_bytes for part in unfused] == [192, 96 + 32 + 96]


def test_a_kernel_makes_every_result_and_an_op_of_aten_its_own() -> None:
    b = Builder(x=torch.randn(3, 8))
    inner = b("aten.exp.default", "x")
    graph = b.graph(inner, b("aten.neg.default", inner), b("aten.sum.dim_IntList", inner, dim=[-1]))
    assert kernel_work(lower_group(graph, compute_ops(graph)).ir).more_results == 2
    assert [op_work(graph, node.name).more_results for node in graph] == [0, 0, 0]


def test_matmuls_attention_and_other_ops_have_calibrations_of_their_own() -> None:
    b = Builder(q=torch.randn(1, 2, 4, 8), k=torch.randn(1, 2, 5, 8), w=torch.randn(6, 8))
    attended = b("aten.scaled_dot_product_attention.default", "q", "k", "k", attn_mask=None, dropout_p=0.0)
    graph = b.graph(b("aten.neg.default", b("aten.linear.default", attended, "w", bias=None)))
    table = GroupTable(graph, "fp32", "cpu")
    found = {
        graph.op(one.ops[0]).op.split(".")[1]: AtenOp().calibration(table, one)
        for region in find_regions(graph) for one in single_candidates(graph, region)
    }
    assert found == {"scaled_dot_product_attention": ATTENTION, "linear": MATMUL, "neg": UNFUSED}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_on_cpus_no_kernel_only_fills_memory(device_type: str) -> None:
    b = Builder(x=torch.randn(4, 8))
    zeros = b("aten.zeros.default", size=[4, 8], dtype=torch.float32, layout=None, device=torch.device("cpu"))
    graph = b.graph(b("aten.add.Tensor", zeros, "x"), b("aten.sum.dim_IntList", zeros, dim=[-1]))
    table = GroupTable(graph, "fp32", device_type)
    kernels = GeneratedKernel((ReferenceBackend(),), TARGET)
    region = find_regions(graph)[0]
    refused = {
        tuple(graph.op(op).op.split(".")[1] for op in one.ops)
        for one in enumerate_candidates(graph, region, legal=table.legal).candidates if kernels.refuse(table, one)
    }
    assert refused == ({("zeros",)} if device_type == "cpu" else set())


def test_the_work_of_an_op_counts_the_views_that_eager_makes_for_it() -> None:
    b = Builder(x=torch.randn(3, 8), y=torch.randn(8, 3))
    turned = b("aten.unsqueeze.default", b("aten.transpose.int", "y", dim0=0, dim1=1), dim=0)
    product = b("aten.mul.Tensor", "x", turned)
    result = b("aten.add.Tensor", product, b("aten.view.default", turned, size=[3, 8]))
    graph = b.graph(result)
    views = {node.op: op_work(graph, node.name).views for node in graph if op_work(graph, node.name).launches}
    # The sum looks through all three; the product through two of them.
    assert views == {"aten.mul.Tensor": 2, "aten.add.Tensor": 3}
    subject = group_subject(graph, [product], "key")
    assert len(subject.nodes) == 1 + views["aten.mul.Tensor"]
    assert subject.work.views == 0  # one kernel makes none


def test_subject_runs_the_chain_and_the_oracle() -> None:
    b = Builder(x=torch.randn(2, 3, 8).bfloat16(), w=torch.randn(8).bfloat16())
    value = rms_norm(b, "x", "w", "bfloat16")
    graph = b.graph(value)
    subject = group_subject(graph, compute_ops(graph), "key")
    inputs = subject.make_inputs(1, "cpu")
    (eager,), (reference,) = subject.eager(*inputs), subject.reference(*inputs)
    assert reference.dtype == torch.float64
    assert 0 < (eager.double() - reference).abs().max() < 0.1
    (fused,) = run_reference(subject.ir, inputs)
    torch.testing.assert_close(fused, reference)
    assert subject.label.endswith("2x3x8 bfloat16")


@pytest.mark.parametrize(("build", "expected"), [
    (lambda b: b("aten.rsqrt.default", "x"), True),
    (lambda b: b("aten.rsqrt.default", b("aten.add.Tensor", "x", other=1e-5)), True),
    (lambda b: b("aten.pow.Tensor_Scalar", "x", exponent=0.5), True),
    (lambda b: b("aten.pow.Tensor_Scalar", "x", exponent=3), False),
    (lambda b: rms_norm(b, "x", "w", "float32"), False),
    (lambda b: b("aten.log.default", b("aten.softmax.int", "x", dim=-1)), False),
    (lambda b: b("aten.sqrt.default", b("aten.sub.Tensor", b("aten.exp.default", "x"), other=2.0)), True),
])
def test_groups_are_fed_numbers_they_are_defined_for(build: Any, expected: bool) -> None:
    b = Builder(x=torch.rand(4, 8) + 3, w=torch.ones(8))
    graph = b.graph(build(b))
    subject = group_subject(graph, compute_ops(graph), "key")
    inputs = subject.make_inputs(0, "cpu")
    assert bool((inputs[0] > 0).all()) == expected
    if expected:
        assert torch.isfinite(subject.reference(*inputs)[0]).any()
    else:
        assert torch.isfinite(subject.reference(*inputs)[0]).all()


def test_variances_are_positive() -> None:
    b = Builder(x=torch.randn(3, 4, 5), mean=torch.zeros(4), var=torch.ones(4))
    wide = b("aten.to.dtype", "var", dtype="float32")
    graph = b.graph(b("aten.batch_norm.default", "x", "mean", wide, weight=None, bias=None, training=False,
                      momentum=0.1, eps=1e-5, cudnn_enabled=True))
    subject = group_subject(graph, compute_ops(graph), "key")
    assert torch.isfinite(subject.reference(*subject.make_inputs(0, "cpu"))[0]).all()


@pytest.mark.parametrize("far", [
    lambda b: b("aten.add.Tensor", b("aten.mul.Tensor", "a", other=16), "a"),
    lambda b: b("aten.to.dtype", b("aten.mul.Tensor", b("aten.abs.default", "x"), other=1000.0), dtype="int64"),
    lambda b: b("aten.abs.default", b("aten.sub.Tensor", b("aten.mul.Tensor", "a", other=40), "a")),
])
@pytest.mark.parametrize("op", ["embedding", "index_select"])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_what_is_looked_up_by_computed_numbers_exists(far: Any, op: str, rows: int) -> None:
    b = Builder(table=torch.randn(rows, 5), a=torch.zeros(7, dtype=torch.int64), x=torch.zeros(7))
    index = far(b)
    value = b("aten.embedding.default", "table", index)
    if op == "index_select":
        value = b("aten.index_select.default", "table", index, dim=0)
    graph = b.graph(b("aten.neg.default", value))
    subject = group_subject(graph, compute_ops(graph), "key")
    for seed in range(5):
        inputs = subject.make_inputs(seed, "cpu")
        (eager,), (fused,) = subject.eager(*inputs), run_reference(subject.ir, inputs)
        torch.testing.assert_close(fused.float(), eager)


def test_whether_computed_indices_exist_is_asked_once_for_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Builder(table=torch.randn(11, 5), a=torch.zeros(7, dtype=torch.int64))
    index = b("aten.mul.Tensor", "a", other=3)
    graph = b.graph(b("aten.neg.default", b("aten.embedding.default", "table", index)))
    subject = group_subject(graph, compute_ops(graph), "key")
    asked: list[int] = []
    finds_all = subject_module.TunableGroup._finds_all
    monkeypatch.setattr(
        subject_module.TunableGroup, "_finds_all",
        lambda self, inputs: (asked.append(1), finds_all(self, inputs))[1],
    )
    first = subject.make_inputs(3, "cpu")
    count = len(asked)
    assert count > 1  # up to 21 of 11 rows: smaller numbers are tried
    for one, other in zip(first, subject.make_inputs(3, "cpu"), strict=True):
        assert torch.equal(one, other)
    assert len(asked) == count
    subject.make_inputs(4, "cpu")
    assert len(asked) > count


class Recorded(TorchDispatchMode):
    """Names the ops that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func.name().split("::")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("offset", "exists"), [(0, True), (3, True), (4, False)])
def test_no_matmul_is_run_to_see_whether_a_cache_has_the_places_that_are_written(offset: int, exists: bool) -> None:
    b = Builder(cache=torch.zeros(2, 9, 4), x=torch.randn(2, 6, 3), w=torch.randn(4, 3), start=torch.zeros(1).long())
    places = b("aten.add.Tensor", b("aten.arange.default", end=6, dtype="int64"), "start")
    written = b("aten.linear.default", "x", "w", bias=None)
    graph = b.graph(b("aten.index_copy_.default", "cache", places, written, dim=1))
    subject = group_subject(graph, compute_ops(graph), "key")
    given = {"start": torch.tensor([offset])}
    inputs = [given.get(name, torch.zeros_like(b.tensors[name])) for name in subject.inputs]
    with Recorded() as recorded:
        assert subject._finds_all(inputs) is exists
    assert "index_copy_" in recorded.ops and not {"linear", "mm", "addmm", "matmul"} & set(recorded.ops)
    assert all(not one.any() for name, one in zip(subject.inputs, inputs, strict=True) if name != "start")


def test_single_elements_have_plain_strides_in_what_a_library_call_is_timed_on() -> None:
    """Attention's result for one token, transposed: odd strides there make ATen's matmul repeat its weight."""
    specs = {
        "x": TensorSpec((64, 1, 4), "float32", (4, 1, 1)), "w": TensorSpec.contiguous((3, 4), "float32"),
        "y": TensorSpec.contiguous((64, 1, 3), "float32"),
    }
    node = OpNode("aten.linear.default", ("x", "w"), ("y",), {"bias": None})
    graph = DataflowGraph([node], specs, ("x", "w"), ("y",))
    group = op_group(graph, ("y",), ("y",), "cpu")
    assert group.specs["x"].strides == (4, 4, 1)
    subject = op_subject(graph, group, "key")
    x, w = subject.make_inputs(0, "cpu")
    assert x.stride() == (4, 4, 1)
    torch.testing.assert_close(subject.eager(x, w)[0], torch.nn.functional.linear(x, w))
    torch.testing.assert_close(subject.reference(x, w)[0].float(), torch.nn.functional.linear(x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int8, torch.bool])
def test_rows_of_a_large_tensor_differ_and_are_as_random_as_of_a_small_one(dtype: torch.dtype) -> None:
    large = random_tensor(TensorSpec.contiguous((1100, 4096), str(dtype)[6:]), torch.Generator().manual_seed(0))
    small = random_tensor(TensorSpec.contiguous((127, 4096), str(dtype)[6:]), torch.Generator().manual_seed(0))
    assert len(torch.unique(large, dim=0)) == 1100
    for measure in (torch.mean, torch.std):
        assert float(measure(large.double())) == pytest.approx(float(measure(small.double())), rel=0.02, abs=0.02)
    assert torch.equal(large[:127], small)  # what fits is made as it was


@pytest.mark.parametrize("batch", [1, 3])
def test_a_picture_with_channels_last_is_one_for_a_convolution_alone(batch: int) -> None:
    """A single picture's own stride says nothing in a trace, but ATen asks it which layout the picture has."""
    picture = torch.randn(batch, 5, 4, 6).permute(0, 3, 1, 2)
    b = Builder(x=picture, w=torch.randn(8, 6, 3, 3))
    graph = b.graph(b("aten.conv2d.default", "x", "w", bias=None, stride=[1, 1]))
    graph.specs["x"] = replace(graph.specs["x"], strides=(6 if batch == 1 else 120, 1, 24, 6))
    subject = op_subject(graph, op_group(graph, [node.name for node in graph], graph.outputs, "cpu"), "key")
    x, w = subject.make_inputs(0, "cpu")
    (result,) = subject.eager(x, w)
    assert result.stride() == torch.nn.functional.conv2d(picture, torch.randn(8, 6, 3, 3)).stride()
    assert result.is_contiguous(memory_format=torch.channels_last) and not result.is_contiguous()


def test_a_mask_that_batches_share_hides_some_last_keys() -> None:
    mask = torch.ones(1, 1, 1, 16, dtype=torch.bool).expand(3, 1, 1, 16)
    b = Builder(q=torch.randn(3, 2, 1, 8), k=torch.randn(3, 2, 16, 8), mask=mask)
    graph = b.graph(b("aten.scaled_dot_product_attention.default", "q", "k", "k", "mask"))
    subject = op_subject(graph, op_group(graph, [node.name for node in graph], graph.outputs, "cpu"), "key")
    made = dict(zip(subject.inputs, subject.make_inputs(0, "cpu"), strict=True))["mask"]
    assert made.stride()[0] == 0 and torch.equal(made, (torch.arange(16) < 14).expand(3, 1, 1, 16))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("heads", [1, 2])
def test_masks_that_heads_share_hide_some_last_keys(dtype: torch.dtype, heads: int) -> None:
    mask = torch.randn(3, heads, 1, 16).to(dtype)
    b = Builder(q=torch.randn(3, 2, 1, 8), k=torch.randn(3, 2, 16, 8), mask=mask)
    graph = b.graph(b("aten.scaled_dot_product_attention.default", "q", "k", "k", "mask"))
    group = op_group(graph, [node.name for node in graph], graph.outputs, "cpu")
    subject = op_subject(graph, group, "key")
    made = dict(zip(subject.inputs, subject.make_inputs(0, "cpu"), strict=True))["mask"]
    shown = made if dtype == torch.bool else made == 0.0
    if heads == 1:
        assert torch.equal(shown, (torch.arange(16) < 14).expand(3, 1, 1, 16))
        assert dtype == torch.bool or bool((made[~shown] == -torch.inf).all())
    else:  # numbers of their own, as positional biases are
        assert shown.unique(dim=0).shape[0] > 1 or dtype != torch.bool
        assert dtype == torch.bool or not bool(shown.any())


@pytest.mark.parametrize(("dtype", "rows"), [(torch.int64, 1000), (torch.int32, 9), (torch.uint8, 1000)])
def test_one_index_alone_is_within_its_table(dtype: torch.dtype, rows: int) -> None:
    b = Builder(table=torch.randn(rows, 8), place=torch.tensor([3], dtype=dtype))
    graph = b.graph(b("aten.embedding.default", "table", b("aten.to.dtype", "place", dtype="int64")))
    subject = group_subject(graph, [node.name for node in graph], "lookup")
    (place,) = (one for one in subject.make_inputs(0, "cpu") if one.dtype == dtype)
    assert 0 <= int(place) < rows
    if dtype != torch.uint8:  # bytes have all their numbers
        assert int(place) == rows - 1 - rows // 8


@pytest.mark.parametrize(("count", "table"), [(40, (2, 4)), (5, (2, 4)), (8, (2, 4)), (2, (1, 1))])
@pytest.mark.parametrize("masked", [False, True])
def test_the_pages_of_a_cache_are_each_read_once(count: int, table: tuple[int, int], masked: bool) -> None:
    """A pool may be larger than what a call reads; more pages than it has are read twice."""
    batch, blocks = table
    pages = {name: torch.randn(count, 4, 2, 8).transpose(1, 2) for name in ("k", "v")}
    mask = {"m": torch.ones(batch, 1, 1, 4 * blocks, dtype=torch.bool)} if masked else {}
    b = Builder(q=torch.randn(batch, 2, 1, 8), **pages, t=torch.zeros(table, dtype=torch.int32), **mask)
    out = b("fuseplan.decode_attention.default", "q", "k", "v", "t", *mask, **({} if mask else {"attn_mask": None}))
    graph = b.graph(out)
    subject = op_subject(graph, op_group(graph, [node.name for node in graph], [out], "cpu"), "key")
    made = dict(zip(subject.inputs, subject.make_inputs(0, "cpu"), strict=True))
    read = min(count, batch * blocks)
    assert made["k"].shape == made["v"].shape == (read, 2, 4, 8) and made["k"].stride() == pages["k"].stride()
    assert made["t"].unique().tolist() == list(range(read)) and made["t"].dtype == torch.int32
    if masked:
        hidden = 4 * blocks // 8
        assert made["m"].sum(-1).flatten().tolist() == [4 * blocks - hidden] * batch
    inputs = [made[name] for name in subject.inputs]
    torch.testing.assert_close(subject.eager(*inputs)[0].double(), subject.reference(*inputs)[0], rtol=1e-5, atol=1e-5)
