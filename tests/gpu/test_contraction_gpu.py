"""Kernels with matmuls inside, and attention of one query position, on a GPU: right, and the same bits every time."""

from __future__ import annotations

import itertools
from pathlib import Path

import decode_attention_samples
import matmul_groups
import pytest
import torch
from quantised_groups import FORMATS, quantised

from fuseplan.kernels.ir.backend import SM90
from fuseplan.kernels.triton.backend import TritonBackend

pytestmark = pytest.mark.gpu
#: Tests that share the groups of a type: most of their time goes into compiling.
PARTS = 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_groups_are_right(tmp_path: Path, dtype: torch.dtype, part: int) -> None:
    given = itertools.islice(matmul_groups.plain_groups(dtype), part, None, PARTS)
    found = list(matmul_groups.errors(TritonBackend(tmp_path), dtype, "cuda", given))
    assert found and not [one for one in found if not matmul_groups.is_right(one)]


@pytest.mark.parametrize("name", FORMATS)
def test_linears_of_narrow_weights_are_right(tmp_path: Path, name: str) -> None:
    """At sizes where blocks hold many words and groups."""
    given = [(name, quantised(name, rows, 512, 2048, torch.bfloat16), ()) for rows in (1, 16, 128)]
    found = list(matmul_groups.errors(TritonBackend(tmp_path), torch.bfloat16, "cuda", given))
    assert found and not [one for one in found if not matmul_groups.is_right(one)]


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_tiles_of_many_rows_are_right(tmp_path: Path, dtype: torch.dtype) -> None:
    large = [
        (f"{made.__name__} of {rows} rows", *made(rows, 1280, 1088, dtype))
        for made in (matmul_groups.residual, matmul_groups.activated, matmul_groups.halved, matmul_groups.biased)
        for rows in (192, 2049)
    ]
    given = [*matmul_groups.tiled_groups(dtype), *large]
    found = list(matmul_groups.errors(TritonBackend(tmp_path), dtype, "cuda", given))
    assert found and not [one for one in found if not matmul_groups.is_right(one)]


def test_tiles_share_the_device_with_recordings_and_kernels_that_start_early(tmp_path: Path) -> None:
    """Memory for descriptors is taken anew in each launch: two kernels one after another must not share it too soon."""
    b, outputs = matmul_groups.activated(3072, 1024, 512, torch.bfloat16)
    lowered, _ = matmul_groups.lowered_whole(b, *outputs)
    backend = TritonBackend(tmp_path)
    kernel = backend.fused_callable(lowered.ir, backend.default_config(lowered.ir, SM90), SM90)
    inputs = [value.cuda() for value in b.values(lowered.inputs)]
    others = [torch.randn_like(value) for value in inputs]
    first, second = kernel(*inputs), kernel(*others)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = [kernel(*given) for _ in range(4) for given in (inputs, others)]
    for _ in range(3):
        for one in recorded:
            one.zero_()
        graph.replay()
        assert all(torch.equal(one, (first, second)[at % 2]) for at, one in enumerate(recorded))
        assert torch.equal(kernel(*inputs), first)


def test_tiles_of_a_dynamic_number_of_rows(tmp_path: Path) -> None:
    found = list(matmul_groups.dynamic_errors(TritonBackend(tmp_path), torch.bfloat16, "cuda"))
    assert found and not [one for one in found if not matmul_groups.is_right(one)]


def test_tiles_of_memory_at_odd_addresses(tmp_path: Path) -> None:
    b, outputs = matmul_groups.activated(1536, 1024, 520, torch.bfloat16)
    lowered, (expected,) = matmul_groups.lowered_whole(b, *outputs)
    backend = TritonBackend(tmp_path)
    kernel = backend.fused_callable(lowered.ir, backend.default_config(lowered.ir, SM90), SM90)
    inputs = [value.cuda() for value in b.values(lowered.inputs)]
    room = [torch.empty(value.numel() + 1, dtype=value.dtype, device="cuda") for value in inputs]
    moved = [one[1:].view(value.shape).copy_(value) for one, value in zip(room, inputs, strict=True)]
    for given in (inputs, moved, inputs):
        torch.testing.assert_close(kernel(*given).cpu().double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_one_position_is_right(dtype: torch.dtype) -> None:
    found = list(decode_attention_samples.errors(dtype, "cuda"))
    assert found and not [one for one in found if not (one["right"] and one["same"] and one["strides"])]


def test_recorded_calls_share_counters_with_those_before(tmp_path: Path) -> None:
    """A recorded call is replayed between eager ones, on another stream."""
    b, outputs = matmul_groups.residual(16, 64, 256, torch.bfloat16)
    lowered, (expected,) = matmul_groups.lowered_whole(b, *outputs)
    config = {"block_rows": 16, "block_cols": 16, "block_inner": 16, "num_warps": 1, "splits": 4}
    kernel = TritonBackend(tmp_path).fused_callable(lowered.ir, config, matmul_groups.SM90)
    inputs = [value.cuda() for value in b.values(lowered.inputs)]
    eager = kernel(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = kernel(*inputs)
    for _ in range(3):
        recorded.zero_()
        graph.replay()
        assert torch.equal(recorded, eager) and torch.equal(kernel(*inputs), eager)
    torch.testing.assert_close(eager.cpu().double(), expected, rtol=2e-2, atol=2e-2)
