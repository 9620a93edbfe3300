"""Matmuls of many rows as tiles that persistent programs walk: right under the interpreter, compiled for no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from graphs import Builder
from matmul_groups import (
    activated,
    attention_inputs,
    biased,
    gated,
    halved,
    hidden,
    is_right,
    lowered_whole,
    multiplied_apart,
    residual,
    scaled_rows,
    squared,
    weights,
    with_dynamic_rows,
)
from ptx_paths import ptx_of

from fuseplan.kernels.gpu.launch import Variant, _with_memory
from fuseplan.kernels.ir.backend import SM90, BuildError
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.kernels.triton.tiles import persistent_programs
from fuseplan.planner.groups.compute_graph import lower_group

pytest.importorskip("triton")
SUPPORT = Path(__file__).parents[2] / "support"


def test_tiles_are_right_under_the_interpreter(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "interpret_matmuls.py"), str(tmp_path), "tiles"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    wrong = [one for one in found if not is_right(one)]
    assert not wrong, wrong[:5]
    kinds = {"residual", "activated", "halved", "biased", "multiplied_apart", "squared", "widened", "dynamic"}
    assert {one["group"].split()[0] for one in found} == kinds


@pytest.mark.parametrize("made", [residual, activated, halved, biased, multiplied_apart, squared])
def test_tiles_are_copied_ahead_and_multiplied_by_tensor_cores_without_spills(
    tmp_path: Path, made: Callable[..., tuple[Builder, tuple[str, ...]]]
) -> None:
    backend, (lowered, _) = TritonBackend(tmp_path), lowered_whole(*unpacked(made(1536, 2048, 64, torch.bfloat16)))
    assert backend.refuse(lowered.ir, SM90) is None
    config = backend.default_config(lowered.ir, SM90)
    assert backend.infeasible(lowered.ir, config, SM90) is None
    resources = backend.prepare(lowered.ir, config, SM90)
    assert resources.spill_bytes == 0 and (resources.shared_bytes or 0) <= 227 * 2**10  # what a program can have
    ptx = ptx_of(backend, lowered.ir, config)
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    assert not re.search(r"cp\.async\.c[ag]\.", ptx)  # no thread copies a side


def unpacked(built: tuple[Builder, tuple[str, ...]]) -> tuple[Builder, *tuple[str, ...]]:
    return built[0], *built[1]


def test_each_multiprocessor_has_one_program_at_most(tmp_path: Path) -> None:
    backend = TritonBackend(tmp_path)
    for rows, width, programs in ((129, 64, 2), (4097, 512, 132)):
        lowered, _ = lowered_whole(*unpacked(residual(rows, width, 64, torch.bfloat16)))
        config = {**backend.default_config(lowered.ir, SM90), "block_cols": 64}
        assert persistent_programs(lowered.ir, config, SM90, {}) == programs


@pytest.mark.parametrize("variant", [Variant(), Variant(wide=True), Variant(aligned=False)])
def test_a_dynamic_number_of_rows_is_an_argument(tmp_path: Path, variant: Variant) -> None:
    backend, graph = TritonBackend(tmp_path), with_dynamic_rows(2, 2048, 512, torch.bfloat16)
    ir = lower_group(graph, [node.name for node in graph]).ir
    assert backend.refuse(ir, SM90) is None
    compiled = backend._compile(ir, backend.default_config(ir, SM90), SM90, variant)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert ("cp.async.bulk.tensor" in compiled.asm["ptx"]) is variant.aligned
    few = {"block_rows": 16, "block_cols": 32, "block_inner": 128, "num_warps": 2, "num_stages": 4}
    with pytest.raises(BuildError, match="in blocks of few"):  # tuned for few rows, it would read weights many times
        backend.source(ir, few)


def cut(stride: int, first: int = 0) -> tuple[Builder, tuple[str, ...]]:
    """A projection of 16 columns of rows of ``stride``, from column ``first`` on."""
    b = Builder(x=hidden(200, inner=stride), residual=hidden(200, inner=24), **weights("w"))
    part = b("aten.slice.Tensor", "x", dim=1, start=first, end=first + 16)
    return b, (b("aten.add.Tensor", "residual", b("aten.linear.default", part, "w")),)


def of_two_types() -> tuple[Builder, tuple[str, ...]]:
    b = Builder(x=hidden(200), **weights("w", dtype=torch.float16))
    x, w = (b("aten.to.dtype", name, dtype="float32") for name in "xw")
    return b, (b("aten.relu.default", b("aten.linear.default", x, w)),)


def expanded() -> tuple[Builder, tuple[str, ...]]:
    b = Builder(x=hidden(1), residual=hidden(200, inner=24), **weights("w"))
    x = b("aten.expand.default", "x", size=[200, 16])
    return b, (b("aten.add.Tensor", "residual", b("aten.linear.default", x, "w")),)


def transposed() -> tuple[Builder, tuple[str, ...]]:
    b = Builder(x=torch.randn(16, 200).bfloat16().t(), residual=hidden(200, inner=24), **weights("w"))
    return b, (b("aten.add.Tensor", "residual", b("aten.linear.default", "x", "w")),)


@pytest.mark.parametrize(("built", "reason"), [
    (lambda: gated(200, 64, 64, torch.bfloat16), "computed"),
    (lambda: residual(200, 64, 64, torch.float32), "float32"),
    (lambda: attention_inputs(200, 64, torch.bfloat16), "3 parts"),
    (lambda: cut(20), "multiples of 16 bytes"),
    (lambda: cut(24, 4), "multiples of 16 bytes"),
    (transposed, "does not lie in rows"),
    (expanded, "same memory for all rows"),
    (of_two_types, "two types"),
    (lambda: scaled_rows(200, 64, 64, torch.bfloat16), "a factor for each row"),
])
def test_what_the_accelerator_cannot_copy_is_refused(
    tmp_path: Path, built: Callable[[], tuple[Builder, tuple[str, ...]]], reason: str
) -> None:
    lowered, _ = lowered_whole(*unpacked(built()))
    refused = TritonBackend(tmp_path).refuse(lowered.ir, SM90)
    assert refused is not None and reason in refused


def test_a_device_without_an_accelerator_has_no_tiles(tmp_path: Path) -> None:
    lowered, _ = lowered_whole(*unpacked(residual(200, 64, 64, torch.bfloat16)))
    assert "accelerator" in (TritonBackend(tmp_path).refuse(lowered.ir, replace(SM90, arch="sm_80")) or "")


def test_threads_read_memory_at_odd_addresses(tmp_path: Path) -> None:
    """It is compiled in the first call that has such an address: it must not fail then."""
    backend, (lowered, _) = TritonBackend(tmp_path), lowered_whole(*unpacked(biased(1536, 2048, 72, torch.float16)))
    config = backend.default_config(lowered.ir, SM90)
    compiled = backend._compile(lowered.ir, config, SM90, Variant(aligned=False))
    assert "wgmma.mma_async" in compiled.asm["ptx"] and "cp.async.bulk" not in compiled.asm["ptx"]
    assert compiled.metadata.global_scratch_size == 0


def test_memory_for_a_launch_leaves_the_caller_his_allocator() -> None:
    from triton.runtime import _allocation

    before, during = _allocation._allocator.get(), []
    copy_context().run(_with_memory, lambda: during.append(_allocation._allocator.get()), 0)
    assert _allocation._allocator.get() is before and during[0] is not before
