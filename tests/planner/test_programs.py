"""A few of the random programs of ``check_programs.py``, through real kernels where there is a compiler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compilers import find_compiler
from dispatch_samples import fresh_start
from op_programs import OpCase, op_cases
from op_samples import BAGS
from program_judging import complaints
from program_runs import run_program
from programs import Input, Program, Step, make_program

from fuseplan.planner.ops.table import OPS

#: The last ones pass through several dtypes, or sum what cancels.
SEEDS = (*range(7000, 7009), 315, 833, 2866, 3735)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on PATH")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_does_what_eager_does(seed: int, tmp_path: Path) -> None:
    program = make_program(seed)
    outcome = run_program(program, {"db": str(tmp_path / "tuning.db")}, through_dynamo=seed % 8 == 0)
    assert not outcome.complaints, f"{outcome.complaints}\n{program.described()}"


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on PATH")
@pytest.mark.parametrize("case", list(op_cases("aten.sigmoid,aten.index_copy,aten.max.dim")),
                         ids=lambda case: f"{case.op} {case.dtype}")
def test_an_op_is_fused_and_rounds_once(case: OpCase, tmp_path: Path) -> None:
    outcome = run_program(case.program, {"db": str(tmp_path / "tuning.db")}, through_dynamo=False)
    assert not outcome.complaints, f"{outcome.complaints}\n{case.program.described()}"
    assert ((case.op, case.dtype) in outcome.ops) == (case.refusal is None)


def test_every_op_has_programs() -> None:
    cases = list(op_cases())
    fused = [case for case in cases if case.refusal is None]
    respelled = {case.op for case in cases if str(case.refusal).endswith("when it is planned")}
    assert {case.op for case in cases} == {name for name, op in OPS.items() if op.is_fusible} - BAGS
    assert {case.op for case in cases} == {case.op for case in fused} | respelled
    floats = {case.dtype for case in fused if case.op == "aten.sigmoid.default"}
    assert {"float64", "float32", "bfloat16", "float16"} <= floats


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_result_a_little_too_large_is_noticed(dtype: torch.dtype) -> None:
    """Not by the largest error, which half a unit in the last place of some element hides."""
    name = str(dtype).removeprefix("torch.")
    (case,) = [one for one in op_cases("aten.sigmoid.default") if one.dtype == name]
    (x0,) = arguments = case.program.arguments(0)
    right = (x0.double().sigmoid() * 2).to(dtype)
    assert not complaints(case.program, 0, [right], arguments)
    (complaint,) = complaints(case.program, 0, [(x0.double().sigmoid() * 2 * 1.0005).to(dtype)], arguments)
    assert "elements are off" in complaint


def test_a_wrong_element_does_not_hide_behind_a_large_one() -> None:
    program = made_of("x0 * 1000.0")
    (result,) = program.function()(*program.arguments(0))
    at = int(result.abs().argmin())
    result.reshape(-1)[at] *= 1.0001
    assert not is_excused(program, result)


def test_a_seed_gives_one_program_whatever_ran_before() -> None:
    first = make_program(11)
    random.seed(3)
    torch.manual_seed(5)
    assert make_program(11) == first
    for one, other in zip(first.arguments(0), make_program(11).arguments(0), strict=True):
        assert torch.equal(one, other)


def test_eager_is_excused_and_a_wrong_number_is_not() -> None:
    found = 0
    for seed in range(12):
        program = make_program(seed)
        arguments = program.arguments(0)
        results = list(program.function()(*arguments))
        assert not complaints(program, 0, results, arguments)
        number = next((at for at, one in enumerate(results) if one.is_floating_point() and one.numel()), None)
        if number is not None:
            results[number] = results[number].clone()
            results[number].reshape(-1)[-1:] += 1.0
            wrong = complaints(program, 0, results, arguments)
            found += any("off" in text or "shares memory" in text or " is torch" in text for text in wrong)
    assert found >= 6


def made_of(*texts: str, dtypes: tuple[str, ...] = ("F32", "F64")) -> Program:
    """A program of statements on ``x0``, ``x1``; it returns the last one's value."""
    inputs = tuple(Input((5, 33), dtype, "plain") for dtype in dtypes)
    steps = tuple(Step(f"v{number}", f"v{number} = {text}", True) for number, text in enumerate(texts))
    return Program(0, inputs, steps, (steps[-1].target,), ({}, {}), False, "fp32")


def is_excused(program: Program, result: torch.Tensor) -> bool:
    return not complaints(program, 0, [result], program.arguments(0))


def off(program: Program, roundings: float, of: torch.dtype = torch.float32) -> torch.Tensor:
    """Eager's result with its largest number off by so many roundings of a dtype."""
    (result,) = program.function()(*program.arguments(0))
    at = int(result.abs().argmax())
    flat = result.clone().reshape(-1)
    flat[at] *= 1 + roundings * torch.finfo(of).eps
    return flat.reshape(result.shape)


@pytest.mark.parametrize("texts", [
    ("(x0 * 1.25).to(F64)",), ("x0 * 1.25", "v0.to(F64)"), ("x1.float() * 1.25", "v0.double()"),
    ("x1 * (x1.float() + 3)",),
])
def test_the_dtype_a_value_passed_through_says_what_rounding_excuses(texts: tuple[str, ...]) -> None:
    program = made_of(*texts)
    assert is_excused(program, off(program, 1))
    assert not is_excused(program, off(program, 4))


def test_the_rounding_of_one_value_excuses_no_other() -> None:
    program = made_of("(x0 * 1.25).to(F64)", "x0.to(F16)", "x1 * 1.25")
    assert is_excused(program, off(program, 2.0**-30))
    assert not is_excused(program, off(program, 2.0**-26))


def test_a_cast_too_many_is_no_rounding() -> None:
    program = made_of("(x0 * 1.25).to(F64)")
    (x0, _) = program.arguments(0)
    assert not is_excused(program, (x0 * 1.25).half().double())
    assert not is_excused(program, (x0.bfloat16() * 1.25).double())
    half = made_of("(x0 * 1.25).to(F16)", "v0.to(F64) * 3")
    assert is_excused(half, (x0 * 1.25).half().double() * 3)
    assert not is_excused(half, off(half, 4, torch.float16))


def test_sums_may_run_in_any_order_and_leave_nothing_out() -> None:
    program = made_of("torch.cat([x0 * 100, x0 * -100, x0], -1)", "v0.sum(-1)")
    (x0, _) = program.arguments(0)
    terms = torch.cat([x0 * 100, x0 * -100, x0], -1)
    one_by_one = torch.zeros(5)
    for term in terms.unbind(-1):
        one_by_one = one_by_one + term
    assert is_excused(program, one_by_one)
    assert not is_excused(program, terms[:, :-1].sum(-1))
