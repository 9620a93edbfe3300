"""The ATen ops that a probe times: real ones, under the names that works are priced by."""

from __future__ import annotations

import pytest
import torch

from fuseplan.costmodel.probe.cpu import _calls, time_aten_calls
from fuseplan.costmodel.probe.timing import UNLIMITED, TimeBudget, TimedCall


class SizeTimer:
    """Runs each call once, and claims a microsecond for every element of its result."""

    def prepare(self, call: TimedCall, limit_us: float):  # type: ignore[no-untyped-def]
        result = call()
        assert isinstance(result, torch.Tensor)
        return lambda limit_us: [float(result.numel())]


def test_each_thread_of_several_has_a_share() -> None:
    points = time_aten_calls(SizeTimer(), 2, UNLIMITED)["aten.neg.default.float32"].points
    assert [size for size, _ in points] == [64.0, 2.0**15, 2.0**16, 2.0**18]


def test_every_op_is_timed_at_three_sizes() -> None:
    found = time_aten_calls(SizeTimer(), 1, UNLIMITED)
    assert {len(times.points) for times in found.values()} == {3}
    sizes = (64.0, 2.0**15, 2.0**17)
    for name in ("aten.mul.Tensor.float32", "aten.reshape.default.bfloat16", "aten.arange.default.int64"):
        assert found[name].points == tuple((size, size) for size in sizes)
    assert found["aten.mean.dim.float32"].points == ((64.0, 1.0), (2.0**15, 16.0), (2.0**17, 64.0))  # a number a row


def test_without_time_large_sizes_are_left_out() -> None:
    now_s = 0.0

    class SlowTimer(SizeTimer):
        def prepare(self, call: TimedCall, limit_us: float):  # type: ignore[no-untyped-def]
            nonlocal now_s
            now_s += 1.0
            return super().prepare(call, limit_us)

    budget = TimeBudget(50.0, lambda: now_s)
    found = time_aten_calls(SlowTimer(), 1, budget)
    assert 0 < len(found) <= 51
    assert all(times.points[0][0] == 64.0 for times in found.values())
    assert all(len(times.points) == 1 for times in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_are_those_of_ops_with_a_type(dtype: torch.dtype) -> None:
    for name, call in _calls(4096, dtype).items():
        _, op, overload, kind, *number = name.split(".")
        assert hasattr(getattr(torch.ops.aten, op), overload)
        assert isinstance(getattr(torch, kind), torch.dtype)
        assert number in ([], ["number"], ["one"])
        assert isinstance(call(), torch.Tensor)
