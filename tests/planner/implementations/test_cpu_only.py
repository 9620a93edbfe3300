"""Ops that only kernels for CPUs have are in no group on a GPU, and other ops still are."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder

from fuseplan.kernels.ir.backend import Target
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.implementations.group_table import GroupTable


@pytest.mark.parametrize(("op", "attrs", "spelled"), [
    ("aten.remainder.Scalar", {}, "fmod"),
    ("aten.div.Scalar_mode", {"rounding_mode": "floor"}, "floordiv"),
    ("aten.div.Scalar_mode", {"rounding_mode": "trunc"}, "truncdiv"),
])
def test_no_kernel_for_gpus_rounds_quotients(op: str, attrs: dict[str, str], spelled: str) -> None:
    """Quotients are not exactly rounded there: a whole one may be rounded down to the number before it."""
    b = Builder(x=torch.randn(3, 127))
    twice = b("aten.add.Tensor", "x", "x")
    left = b(op, twice, other=0.75, **attrs)
    graph = b.graph(b("aten.relu.default", left))
    names = tuple(node.name for node in b.nodes)
    on_cpu, on_gpu = (GroupTable(graph, "fp32", device) for device in ("cpu", "cuda"))
    assert on_cpu.legal(names) is None
    assert "only kernels for CPUs" in str(on_gpu.legal(names))
    assert on_gpu.legal(names[:1]) is None and on_gpu.kernel(Candidate((left,), (), ())) is None
    ir = on_cpu.lowered(Candidate(names, (), ())).ir
    assert spelled in str(TritonBackend().refuse(ir, Target("cuda", "sm_90", 132)))
