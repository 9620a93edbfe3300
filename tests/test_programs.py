"""A few of the random programs of ``check_programs.py``, through real kernels where there is a compiler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dispatch_samples import fresh_start
from program_runs import run_program
from programs import complaints, make_program

from fuseplan.kernels.cpp_build import find_compiler

SEEDS = range(7000, 7024)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield from fresh_start()


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on PATH")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_does_what_eager_does(seed: int, tmp_path: Path) -> None:
    program = make_program(seed)
    outcome = run_program(program, {"db": str(tmp_path / "tuning.db")}, through_dynamo=seed % 8 == 0)
    assert not outcome.complaints, f"{outcome.complaints}\n{program.described()}"


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
