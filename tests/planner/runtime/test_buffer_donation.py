"""Memory of dead intermediates: who may be overwritten, and results that are the same bits with and without."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_functions import compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from in_place_backend import InPlaceBackend
from paths import ROOT, SUPPORT
from reference_backend import use
from step_programs import STEP, Step, program
from torch import nn

import fuseplan.planner
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.runtime.options import parse_options

Tensors = tuple[torch.Tensor, ...]
KERNELS = InPlaceBackend()


def reused(function: Callable[..., Any], *shapes: tuple[int, ...], **how: Any) -> int:
    """Results in operands; the function is called three times and must give what eager gives."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    tally = Tally()
    call = compiled(function, inputs, KERNELS, tally, **how)
    with torch.no_grad():
        expected = function(*[tensor.clone() for tensor in inputs])
        for _ in range(3):
            given_ = [tensor.clone() for tensor in inputs]
            results = call(*given_)
            for result, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(result, wanted)
            assert all(torch.equal(one, own) for one, own in zip(given_, inputs, strict=True))
    assert tally.snapshot().fallbacks == {}
    return tally.snapshot().in_place


def add_norm(x: torch.Tensor, residual: torch.Tensor) -> Tensors:
    hidden = x + residual
    return hidden, hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)


# -- who may be overwritten -------------------------------------------------------------------------------------


def test_results_of_library_calls_and_of_kernels_die_in_the_group_that_reads_them() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        hidden, normal = add_norm(x @ w, x @ w.t())  # both products die here
        return add_norm(normal @ w, hidden)  # the product, and what the kernel before made

    assert reused(run, (3, 4), (4, 4)) == 4
    assert reused(run, (3, 4), (4, 4), in_place=False) == 0


def test_arguments_and_results_keep_their_memory() -> None:
    assert reused(lambda x, y: add_norm(x, y), (3, 4), (3, 4)) == 0

    def returned(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        product = x @ w
        return product, torch.tanh(product * 2) + 1

    assert reused(returned, (3, 4), (4, 4)) == 0

    def returned_view(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        product = x @ w
        return product[1:], torch.tanh(product * 2) + 1

    assert reused(returned_view, (3, 4), (4, 4)) == 0


def test_what_is_read_later_keeps_its_memory() -> None:
    def later(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        product = x @ w
        normal = torch.tanh(product * 2) + 1
        return (torch.tanh(product @ w + normal @ w),)

    def later_view(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        product = x @ w
        view = product.t()
        normal = torch.tanh(product * 2) + 1
        return (view @ normal,)

    # Of the first, only the last sum writes over one of its two products.
    assert reused(later, (4, 4), (4, 4)) == 1
    assert reused(later_view, (4, 4), (4, 4)) == 0


def test_dropout_in_inference_gives_its_operand_back_whatever_the_trace_says() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        product = x @ w
        same = F.dropout(product, 0.1, training=False)
        normal = torch.tanh(product * 2) + 1
        return (same @ normal,)

    assert reused(run, (4, 4), (4, 4)) == 0


def test_views_of_arguments_are_arguments() -> None:
    def run(x: torch.Tensor) -> Tensors:
        flat = x.view(3, 4)
        return (torch.tanh(flat * 2) + 1,)

    assert reused(run, (12,)) == 0


def test_what_is_written_in_place_may_still_die() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        product = x @ w
        product[0].fill_(2.0)
        return (torch.tanh(product * 2) + 1,)

    assert reused(run, (3, 4), (4, 4)) <= 1


@settings(max_examples=80, deadline=None)
@given(steps=st.lists(STEP, min_size=2, max_size=9))
def test_any_program_gives_the_same_bits_with_and_without(steps: list[Step]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, 4), torch.randn(4, 4)]
    calls = [compiled(program(steps), inputs, KERNELS, Tally(), in_place=how) for how in (True, False)]
    held: list[list[Tensors]] = []
    for _ in range(3):
        given_ = [[tensor.clone() for tensor in inputs] for _ in calls]
        results = [call(*own) for call, own in zip(calls, given_, strict=True)]
        held.append([(one, other) for pair in (results, given_) for one, other in zip(*pair, strict=True)])
        assert all(torch.equal(one, other) for pairs in held for one, other in pairs)  # earlier calls' as well


# -- freed memory -----------------------------------------------------------------------------------------------

CALLS = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch
from compiled_functions import compiled
from fuseplan.planner.dispatch_stats import Tally

def wide(x, w):
    parts = [x @ w, x @ w.neg(), x.neg() @ w, x @ w.abs(), x.abs() @ w]  # 4 MB each, alive together
    return tuple(part.sum() for part in parts)

given = [torch.randn(1024, 4), torch.randn(4, 1024)]
call = compiled(wide, given, None, Tally())
faults = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call(*given)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have rules of their own")
def test_calls_get_the_memory_that_calls_before_freed() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", CALLS, str(SUPPORT)]
    done = subprocess.run(command, env=kept, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert sum(map(int, done.stdout.split()[-12:])) < 3000  # of 4 KiB: twelve calls use 20 MB each


# -- dispatch ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Projection, add, norm, projection: what dies in a decoder layer."""

    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.first, self.second = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        hidden, normal = add_norm(self.first(x), residual)
        return add_norm(self.second(normal * self.weight), hidden)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dynamic", [False, True])
def test_dispatch_gives_the_same_bits_with_and_without(
    dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = InPlaceBackend()
    use(monkeypatch, kernels)
    model = Block().to(torch.bfloat16)
    inputs = [torch.randn(5, 33, dtype=torch.bfloat16) for _ in range(2)]
    found: dict[bool, list[Tensors]] = {}
    for in_place in (True, False):
        torch._dynamo.reset()
        fuseplan.planner.reset_stats()
        options = {"db": str(tmp_path / "tuning.db"), "in_place": in_place}
        call = torch.compile(model, backend="fuseplan", dynamic=dynamic, options=options)
        found[in_place] = [tuple(one.clone() for one in call(*inputs)) for _ in range(3)]
        assert (fuseplan.planner.stats().in_place > 0) == in_place
        assert fuseplan.planner.stats().fallbacks == {}
    assert kernels.taken
    for one, other in zip(found[True], found[False], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.usefixtures("fresh")
def test_a_kernel_that_fails_leaves_its_operands_to_the_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, InPlaceBackend(fails_in_call=True))
    model = Block()
    inputs = [torch.randn(5, 33) for _ in range(2)]
    call = torch.compile(model, backend="fuseplan", options={"db": str(tmp_path / "tuning.db")})
    for _ in range(2):
        for one, other in zip(call(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(one, other)
    assert fuseplan.planner.stats().unfused == 2


@pytest.mark.usefixtures("fresh")
def test_debug_compares_calls_in_place_on_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, InPlaceBackend())
    model = Block()
    inputs = [torch.randn(5, 33) for _ in range(2)]
    options = {"db": str(tmp_path / "tuning.db"), "debug": True}
    call = torch.compile(model, backend="fuseplan", options=options)
    with caplog.at_level(logging.INFO, "fuseplan"):
        for _ in range(2):
            for one, other in zip(call(*inputs), model(*inputs), strict=True):
                torch.testing.assert_close(one, other)
    lines = [text for text in caplog.messages if "in place differs" in text]
    assert lines and all(float(text.split()[-1]) < 1e-4 for text in lines)


def test_the_option_is_on_and_can_be_switched_off() -> None:
    assert parse_options({}).in_place and not parse_options({"in_place": False}).in_place
    with pytest.raises(Exception, match="option 'in_place' cannot be 'no'; it is True or False"):
        parse_options({"in_place": "no"})
