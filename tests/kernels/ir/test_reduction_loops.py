"""Passes over a row: every phase can run with what earlier phases left behind, and nothing is missing or dead."""

from __future__ import annotations

from collections.abc import Mapping

import ir_samples as samples
import pytest
from long_folds import lowered_fold

from fuseplan.kernels.ir.ir import Apply, Reduce, Segment, operands
from fuseplan.kernels.ir.reduction_loops import Phase, centred_sums, rescaled_sums, schedule, sweeps

SEGMENTS = [
    pytest.param(segment, id=f"{samples.label(sample)}-{number}")
    for sample in samples.static_samples()
    for number, segment in enumerate(sample.ir.segments)
]


def simulate(segment: Segment, phases: tuple[Phase, ...], beside: Mapping[int, int] | None = None) -> set[int]:
    """Walk the phases as an emitter does; returns the stores done. Fails when a value is used before it exists.

    Reductions in ``beside`` read what the one they map to reads.
    """
    per_row = segment.per_row
    row_values: set[int] = set()
    staged: set[int] = set()
    stored: set[int] = set()
    for phase in phases:
        for value in phase.rows:
            assert value not in row_values
            assert row_values.issuperset(operands(segment.body[value]))
            row_values.add(value)
        assert all(segment.stores[n].value in row_values for n in phase.row_stores)
        assert staged.issuperset(phase.reads)
        here = row_values | set(phase.reads)
        for value in phase.elements:
            assert not per_row[value]
            assert here.issuperset(operands(segment.body[value]))
            here.add(value)
        assert here.issuperset(segment.stores[n].value for n in phase.stores)
        for value in phase.reductions:
            assert operands(segment.body[(beside or {}).get(value, value)])[0] in here
        staged.update(phase.stages)
        assert set(phase.stages) <= set(phase.elements)
        row_values.update(phase.reductions)
        stored.update(phase.stores, phase.row_stores)
    return stored


@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize("segment", SEGMENTS)
def test_every_phase_runs_on_what_earlier_ones_left(segment: Segment, stage: bool) -> None:
    phases = schedule(segment, stage)
    assert simulate(segment, phases) == set(range(len(segment.stores)))
    assert sorted(value for phase in phases for value in phase.reductions) == [
        value for value, instr in enumerate(segment.body) if isinstance(instr, Reduce)
    ]


def test_softmax_takes_three_passes_and_stages_the_exponential() -> None:
    segment = samples.softmax(2, 8).ir.segments[0]
    exponential = next(
        value for value, instr in enumerate(segment.body) if isinstance(instr, Apply) and instr.op == "exp"
    )
    recomputed = schedule(segment)
    assert [len(phase.reductions) for phase in recomputed] == [1, 1, 0]
    assert exponential in recomputed[2].elements
    staged = schedule(segment, stage=True)
    assert staged[1].stages == (exponential,) == staged[2].reads
    assert exponential not in staged[2].elements


@pytest.mark.parametrize("name", ["normalised", "normalised across"])
def test_a_variance_is_folded_in_the_pass_of_its_mean(name: str) -> None:
    (segment,) = lowered_fold(name, 1031).ir.segments
    total, squares = (value for value, instr in enumerate(segment.body) if isinstance(instr, Reduce))
    assert centred_sums(segment) == {squares: total}
    phases = schedule(segment, centre=True)
    assert [phase.reductions for phase in phases] == [(total, squares), ()]
    assert simulate(segment, phases, centred_sums(segment)) == {0}
    assert (sweeps(segment), sweeps(segment, centre=True)) == (3, 2)


def test_softmax_takes_two_passes_where_its_sum_is_rescaled() -> None:
    segment = samples.softmax(2, 8, causal=True).ir.segments[0]
    top, total = (value for value, instr in enumerate(segment.body) if isinstance(instr, Reduce))
    assert rescaled_sums(segment) == {total: top}
    first, last = schedule(segment, rescale=True)
    assert first.reductions == (top, total)
    applied = [segment.body[value] for value in first.elements]
    assert all(instr.op != "exp" for instr in applied if isinstance(instr, Apply))
    assert simulate(segment, (first, last), {total: top}) == {0}


@pytest.mark.parametrize("change", ["other element", "minimum", "no exponential", "rounded"])
def test_only_a_sum_of_what_its_own_maximum_shifts_is_rescaled(change: str) -> None:
    buffers = [samples.contiguous("x", "float32", (2, 8)), samples.contiguous("y", "float32", (2, 8), True)]
    b = samples.Body(buffers, (2,), 8)
    r, c = b.at
    x = b.load("x", (r, c))
    top = b.reduce("min" if change == "minimum" else "max", b("neg", x) if change == "other element" else x)
    shifted = b("sub", x, top)
    power = shifted if change == "no exponential" else b("exp", shifted)
    power = b.round(power, "bfloat16") if change == "rounded" else power
    b.store("y", (r, c), b("div", power, b.reduce("sum", power)))
    segment = b.segment()
    assert rescaled_sums(segment) == {}
    assert schedule(segment, rescale=True) == schedule(segment)


def test_a_plain_load_is_never_staged() -> None:
    phases = schedule(samples.rms_norm(2, 8).ir.segments[0], stage=True)
    assert all(not phase.stages for phase in phases)


def test_a_store_joins_the_pass_that_evaluates_its_value() -> None:
    phases = schedule(samples.early_store(2, 8).ir.segments[0])
    assert [phase.stores for phase in phases] == [(0, 1), ()]
    assert phases[-1].row_stores == (2,)
    assert not phases[-1].reductions and not phases[-1].stores


def test_dead_values_are_dropped() -> None:
    segment = samples.rms_norm(2, 8).ir.segments[0]
    dead = Segment(segment.rows, segment.cols, (*segment.body, Reduce("float32", "max", 0)), segment.stores)
    assert schedule(dead) == schedule(segment)
