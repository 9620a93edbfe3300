"""Kernels are called by what they compute, and the name follows from the kernel's content alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ir_samples as samples
import pytest

from fuseplan.kernels.cpp.backend import CppBackend
from fuseplan.kernels.ir.backend import SM90
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.ir.kernel_name import kernel_name
from fuseplan.kernels.registry import local_target
from fuseplan.kernels.triton.backend import TritonBackend

EVERY = [sample.ir for sample in samples.static_samples()]


def test_a_name_says_the_ops_in_their_order() -> None:
    assert kernel_name(samples.swiglu(4, 64).ir) == "fuseplan_sigmoid_mul"
    assert kernel_name(samples.repeat_heads(2, 4, 2, 8).ir) == "fuseplan_copy"
    assert kernel_name(samples.rms_norm(4, 64).ir).startswith("fuseplan_mul_sum_")


@pytest.mark.parametrize("ir", EVERY, ids=range(len(EVERY)))
def test_a_name_is_a_short_identifier_whatever_the_kernel(ir: KernelIR) -> None:
    name = kernel_name(ir)
    assert name.isidentifier() and len(name) <= 60 and name != "fuseplan"


def test_names_of_tensors_and_sizes_change_neither_name_nor_source() -> None:
    ir = samples.swiglu(4, 64).ir
    other = KernelIR(tuple(replace(one, name=f"layer7_{one.name}") for one in ir.buffers), ir.segments)
    triton, cpp = TritonBackend(), CppBackend()
    assert triton.source(other, triton.default_config(ir, SM90)) == triton.source(ir, triton.default_config(ir, SM90))
    target = local_target("cpu")
    assert cpp.source(other, cpp.default_config(ir, target)) == cpp.source(ir, cpp.default_config(ir, target))
    assert kernel_name(samples.swiglu(8, 128).ir) == kernel_name(ir)


def test_compiled_kernels_carry_their_name(tmp_path: Path) -> None:
    ir, backend, target = samples.swiglu(4, 64).ir, CppBackend(tmp_path), local_target("cpu")
    backend.prepare(ir, backend.default_config(ir, target), target)
    libraries = list(tmp_path.rglob("*.so"))
    assert libraries and all(kernel_name(ir).encode() in one.read_bytes() for one in libraries)
    triton = TritonBackend(tmp_path)
    assert f"def {kernel_name(ir)}(" in triton.source(ir, triton.default_config(ir, SM90))
