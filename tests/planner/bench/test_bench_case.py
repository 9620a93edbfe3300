"""The inputs, the operands and the plan of one cell of the pattern bench."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_samples import case_of, cpu_session

from fuseplan.planner.bench.patterns import operand_sets, plan_case, plan_facts, plan_note
from fuseplan.planner.dispatch_stats import CompileStats
from fuseplan.planner.patterns.cells import cell
from fuseplan.planner.patterns.table import activations
from fuseplan.planner.peers.contestant import make_inputs, trace_cell
from fuseplan.planner.tuning.session import Session


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return cpu_session(tmp_path_factory.mktemp("bench"))


def test_rotary_tables_hold_angles_once_for_each_half(session: Session) -> None:
    case = case_of(session, "qk_norm_rope", "2x3x5x16")
    tables = dict(zip(case.names, case.inputs, strict=True))
    for name in ("cos", "sin"):
        low, high = tables[name].chunk(2, -1)
        assert torch.equal(low, high)
    torch.testing.assert_close(tables["cos"] ** 2 + tables["sin"] ** 2, torch.ones(2, 5, 16))
    assert tables["cos"].std() > 0.1


def test_divisors_are_positive_and_seeds_matter(session: Session) -> None:
    one = cell("sampling_softmax", "7x33", "float32")
    traced, specs = trace_cell(one, "cpu")
    first, second = (make_inputs(traced, specs, "cpu", seed) for seed in (0, 1))
    assert bool((first[1] > 0).all()) and bool((first[0] < 0).any())
    assert not torch.equal(first[0], second[0])


def test_calls_in_place_stay_finite_however_often_they_are_repeated() -> None:
    """The residual grows by a normalised row each time, until bfloat16 rounds the growth away."""
    traced, specs = trace_cell(cell("add_rms_norm", "8x256", "bfloat16"), "cpu")
    assert list(specs) == ["residual", "x", "weight"]
    residual, x, weight = make_inputs(traced, specs, "cpu")
    for _ in range(5000):
        residual, x = traced.module.forward(residual, x, weight)
    assert bool(residual.isfinite().all()) and bool(x.isfinite().all())


def test_weights_are_what_does_not_grow_with_the_first_size(session: Session) -> None:
    assert activations("add_rms_norm", "3x8") == {"residual", "x"}
    assert activations("rope", "1x2x3x8") == {"q", "k", "cos", "sin"}
    # Twice the queries would be more than the keys: the pattern cannot be asked.
    assert activations("causal_softmax", "3x4") == {"scores"}


def test_weights_rotate_only_where_copies_can_fill_the_cache(session: Session) -> None:
    case = case_of(session, "rms_norm", "3x128")
    assert len(operand_sets(case, llc_bytes=2**20, limit_bytes=2**30)) == 1
    sets = operand_sets(case, llc_bytes=1024, limit_bytes=2**30)
    assert len(sets) == 7  # three times 1024 bytes in weights of 512 bytes, and one more
    assert {one[0].data_ptr() for one in sets} == {case.inputs[0].data_ptr()}
    assert len({one[1].data_ptr() for one in sets}) == 7


def test_moved_bytes_are_exact(session: Session) -> None:
    case, seen = plan_case(session, cell("swiglu", "3x127", "float32"))
    facts = plan_facts(case)
    assert facts["bytes"] == 3 * 3 * 127 * 4  # gate, up, out
    assert facts["kernels"] == 1 and facts["config"].startswith("cpp ") and "not tuned" in plan_note(case, seen)
    # Two in, two out, and the weight.
    assert plan_facts(case_of(session, "add_rms_norm", "3x127"))["bytes"] == (4 * 3 * 127 + 127) * 4


def test_a_plan_that_fuses_nothing_moves_what_goes_in_and_out(session: Session) -> None:
    case = replace(case_of(session, "swiglu", "3x127"), groups=())
    facts = plan_facts(case)
    assert (facts["bytes"], facts["kernels"], facts["config"]) == (3 * 3 * 127 * 4, 2, "")
    assert plan_note(case, CompileStats()) == "the plan fuses nothing"
