"""Random programs of pointwise ops, views and in-place writes: run with their regions fused, and op by op."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from library_samples import sample
from reference_backend import ReferenceBackend
from step_programs import CPU, STEP, NothingStored, Step, program
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuseplan.kernels.ir.backend import SM90, Backend, Target
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.planner.capture.normalise import normalise
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.errors import RefusedError, failure_reason
from fuseplan.planner.graph.dataflow import OpNode
from fuseplan.planner.groups.compute_graph import lower_group
from fuseplan.planner.implementations.aten import run_ops
from fuseplan.planner.implementations.first_call import FirstCall, check_layouts
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.implementations.library_op import LibraryOp
from fuseplan.planner.libraries.matmul_calls import MergedCall
from fuseplan.planner.runtime import executor
from fuseplan.planner.runtime.executor import executable
from fuseplan.planner.tuning.planner import Planner
from fuseplan.search.workers.compilers import Compilation


class Refuses(ReferenceBackend):
    """A back end that cannot express any kernel."""

    name = "refuses"

    def refuse(self, ir: KernelIR, target: Target) -> str | None:
        return "not this one"


def fused(
    function: Callable[..., Any], inputs: list[torch.Tensor], tally: Tally, backend: Backend | None = None,
    others: tuple[Backend, ...] = (), target: Target = CPU,
) -> Callable[..., Any]:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs]
        module = make_fx(function, pre_dispatch=True)(*fakes)
    traced = normalise(module)
    planner = Planner(NothingStored(), None, "test", CPU, (ReferenceBackend(),))
    kernels = GeneratedKernel((backend or ReferenceBackend(), *others), CPU)
    plans = [
        PlannedGroup(plan.group_ops(choice), kernels, choice.config)
        for plan in planner.plan_graph(traced.graph).regions
        for choice in plan.record.groups
        if choice.is_kernel
    ]
    return executable(traced, plans, target, tally)


@settings(max_examples=80, deadline=None)
@given(st.lists(STEP, min_size=2, max_size=9))
@example([*[("add", 0, 0)] * 4, ("silu", 1, 0), ("add", 0, 0), ("copy_", 1, 0), ("copy_", 0, 6)])  # each needs both
@example([  # by way of an opaque op
    ("add_", 0, 6), ("copy", 4, 7), ("write_row", 3, 6), ("copy", 4, 7), ("copy", 5, 0), ("silu", 1, 6), ("cast", 0, 4),
    ("softmax", 6, 3), ("mul_", 2, 0), ("add_", 2, 1), ("copy_", 3, 5), ("copy_", 7, 6),
])
@example([("copy_", 0, 0), *[("mul_", 0, 0)] * 4])  # the 16th power doubles a relative error four times
def test_writes_keep_their_place(steps: list[Step]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, 4), torch.randn(4, 4)]
    mine, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    tally = Tally()
    call = fused(program(steps), inputs, tally)
    for one, other in zip((*call(*mine), *mine), (*program(steps)(*theirs), *theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert tally.snapshot().fallbacks == {}


def test_the_programs_above_do_fuse_across_writes() -> None:
    steps: list[Step] = [("silu", 0, 0), ("mul", 2, 1), ("add_", 0, 0), ("softmax", 3, 0), ("add", 5, 1)]
    tally = Tally()
    inputs = [torch.randn(3, 4), torch.randn(4, 4)]
    fused(program(steps), inputs, tally)
    assert tally.snapshot().groups_fused == 1 and tally.snapshot().fallbacks == {}


def test_a_group_that_its_back_end_cannot_express_runs_on_another() -> None:
    inputs, tally = [torch.randn(3, 4)], Tally()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)

    call = fused(function, inputs, tally, Refuses(), (Refuses(), ReferenceBackend()))
    torch.testing.assert_close(call(*inputs), function(*inputs))
    assert tally.snapshot().groups_fused == 1 and tally.snapshot().fallbacks == {}
    call = fused(function, inputs, tally, Refuses(), (Refuses(),))
    torch.testing.assert_close(call(*inputs), function(*inputs))
    assert tally.snapshot().groups_fused == 1 and tally.snapshot().fallbacks == {"refuses: not this one": 1}


def test_workers_compile_kernels_of_a_gpu_from_the_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[KernelIR] = []
    loaded: list[KernelIR] = []

    class Compilers:
        @staticmethod
        def compile_ahead(wanted: list[Compilation]) -> None:
            assert not loaded
            sent.extend(ir for _, ir, _, _ in wanted)

    class Loads(ReferenceBackend):
        def load(self, ir: KernelIR, *rest: Any) -> Any:
            loaded.append(ir)
            return super().load(ir, *rest)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(((x * 2).exp() @ y).relu() @ y, -1) - 1

    monkeypatch.setattr(executor, "COMPILERS", Compilers)
    inputs, tally = [torch.randn(4, 4), torch.randn(4, 4)], Tally()
    call = fused(function, inputs, tally, Loads(), target=SM90)
    torch.testing.assert_close(call(*inputs), function(*inputs))
    assert len(sent) == 2 and sent == loaded[::-1]


def test_layouts_are_compared_where_they_matter() -> None:
    with FakeTensorMode():
        module = make_fx(lambda x, y: torch.relu(x) + y, pre_dispatch=True)(torch.ones(3, 1), torch.ones(3, 4))
    graph = normalise(module).graph
    ir = lower_group(graph, [node.name for node in graph]).ir
    first = [buffer.shape for buffer in ir.inputs].index((3, 1))
    x, y = torch.ones(3, 1), torch.ones(3, 4)

    def given_(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a, b] if first == 0 else [b, a]

    check_layouts(ir, given_(x, y))
    check_layouts(ir, given_(x.as_strided((3, 1), (1, 7)), y))  # the stride of a dimension of one element is free
    for a, b in ((x, y.t().contiguous().t()), (x, y.double()), (x.expand(3, 4), y), (x[:2], y), (x[:, 0], y)):
        with pytest.raises(RefusedError, match="the kernel expects float32"):
            check_layouts(ir, given_(a, b))


def test_reasons_are_one_line() -> None:
    assert failure_reason(RuntimeError("a\nb")) == "RuntimeError: a"
    assert failure_reason(RuntimeError()) == "RuntimeError"
    assert failure_reason(RefusedError("too small")) == "too small"


def test_atens_op_takes_over_from_a_library_call_that_fails() -> None:
    """Not for the first call alone."""
    made = sample(OpNode("aten.mm.default", ("x", "w"), ("y",)), {"x": torch.randn(3, 5), "w": torch.randn(5, 7)})
    calls: list[int] = []

    def failing(*inputs: torch.Tensor) -> torch.Tensor:
        calls.append(len(inputs))
        raise RuntimeError("no such kernel image")

    def calling(reuse: object) -> Callable[..., torch.Tensor]:
        return failing

    tally, namespace = Tally(), dict[str, Any]()
    group = PlannedGroup(("y",), LibraryOp(MergedCall("merged.one", True), "merged.one"))
    call = FirstCall(
        "call", group.ops, made.group.inputs, made.group.outputs, build=lambda in_place: (calling, {}),
        unfused=partial(run_ops, [made.group.node], made.group.inputs, made.group.outputs, "cpu"), key="y",
    )
    call.calling, call.reuse_options = call.build(True)
    call.bind(namespace, "call", {}, partial(group.implementation.give_up, group, tally))
    group.implementation.count(group, tally)
    assert tally.snapshot().library_calls == 1
    for _ in range(2):
        torch.testing.assert_close(namespace["call"](*made.operands), made.eager())
    assert calls == [2] and tally.snapshot().library_calls == 0
    assert list(tally.snapshot().notes) == ["merged.one: first call failed: RuntimeError: no such kernel image"]
