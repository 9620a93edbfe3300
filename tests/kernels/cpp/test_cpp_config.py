"""The configuration space of CPU kernels: defaults are feasible, and what cannot matter is not offered."""

from __future__ import annotations

import itertools

import ir_samples as samples
import pytest

from fuseplan.kernels.cpp.config import (
    config_space,
    count_tasks,
    default_settings,
    infeasible,
    ir_bytes,
    run_settings,
    stage_bytes,
    thread_choices,
)
from fuseplan.kernels.cpp.emitter import simplified_segments
from fuseplan.kernels.ir.backend import Target
from fuseplan.kernels.ir.index import symbol

SAMPLES = [
    *samples.static_samples(), *samples.dynamic_samples(), samples.rms_norm(512, 2048, "bfloat16"),
    samples.swiglu(1, 8192), samples.swiglu(512, 8192), samples.rope(1, 512, 32, 8, 64), samples.softmax(1, 200_000),
    samples.transposed_copy(512, 300),
]


@pytest.mark.parametrize("cores", [0, 1, 2, 6, 64])
@pytest.mark.parametrize("sample", SAMPLES, ids=samples.label)
def test_the_default_is_feasible_and_names_every_tunable(sample: samples.Sample, cores: int) -> None:
    target = Target("cpu", "native", cores)
    config = default_settings(sample.ir, target)
    assert infeasible(sample.ir, config, target) is None
    assert set(config) == {tunable.name for tunable in config_space(sample.ir, target)}


def test_work_decides_the_threads() -> None:
    target = Target("cpu", "native", 16)
    threads = [default_settings(samples.rms_norm(rows, 2048).ir, target)["threads"] for rows in (1, 8, 32, 512)]
    assert threads[0] == threads[1] == 1
    assert sorted(threads) == threads
    assert threads[-1] == 16


def test_thread_choices_end_with_all_cores() -> None:
    assert [thread_choices(cores) for cores in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_what_cannot_matter_has_one_choice() -> None:
    target = Target("cpu", "native", 4)
    choices = {one.name: one.choices for one in config_space(samples.rms_norm(1, 64).ir, target)}
    assert [len(choices[name]) for name in ("threads", "rows_per_task", "col_tile", "stage")] == [1, 1, 1, 1]
    choices = {one.name: one.choices for one in config_space(samples.softmax(512, 4096).ir, target)}
    assert [len(choices[name]) for name in ("threads", "rows_per_task", "col_tile", "stage")] == [3, 3, 1, 2]
    choices = {one.name: one.choices for one in config_space(samples.broadcast_add(64, 5000).ir, target)}
    assert len(choices["col_tile"]) > 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"threads": 8}, "8 threads on 4 cores"),
        ({"threads": 4, "rows_per_task": 4}, "fewer tasks than threads"),
        ({"rows_per_task": 16}, "more rows per task than rows"),
        ({"stage": 1}, "staging needs 800000 bytes"),
    ],
)
def test_refusals_name_their_reason(changes: dict[str, int], reason: str) -> None:
    ir = samples.softmax(8, 200_000).ir
    config = {"threads": 1, "rows_per_task": 1, "col_tile": 4096, "unroll": 2, "stage": 0, "stream": 0, **changes}
    assert reason in (infeasible(ir, config, Target("cpu", "native", 4)) or "")


def test_a_tile_wider_than_the_row_is_refused_when_a_smaller_one_covers_it() -> None:
    ir, target = samples.broadcast_add(64, 3000).ir, Target("cpu", "native", 1)
    base = {"threads": 1, "rows_per_task": 1, "unroll": 2, "stage": 0, "stream": 0}
    tiles = next(one.choices for one in config_space(ir, target) if one.name == "col_tile")
    feasible = [tile for tile in tiles if infeasible(ir, {**base, "col_tile": tile}, target) is None]
    assert feasible == [1024, 4096]


def test_bytes_and_tasks_are_counted() -> None:
    # 2 fp32 reads + 1 write of 4 x 2000, and a sigmoid on each of the 8000 elements as 8 bytes of traffic.
    ir = samples.swiglu(4, 2000).ir
    assert ir_bytes(ir) == 3 * 4 * 8000 + 8 * 8000
    # The rows are 4000 elements apart in the input: 4 rows of 2 tiles.
    assert count_tasks(simplified_segments(ir), rows_per_task=1, col_tile=1024) == 8
    assert count_tasks(simplified_segments(ir), rows_per_task=3, col_tile=4096) == 2
    assert stage_bytes(simplified_segments(samples.softmax(4, 100).ir)) == 400
    assert ir_bytes(samples.rms_norm(symbol("n"), 8).ir) is None


def test_run_time_settings_follow_the_config() -> None:
    target = Target("cpu", "native", 2)
    config = {"threads": 8, "rows_per_task": 4, "col_tile": 1024, "unroll": 2, "stage": 0, "stream": 0}
    small = run_settings(samples.rms_norm(4, 64).ir, config, target)
    assert (small.threads, small.rows_per_task, small.col_tile, small.grain) == (2, 4, 1024, 0)
    assert not small.release_gil
    assert run_settings(samples.rms_norm(512, 2048).ir, config, target).release_gil
    assert run_settings(samples.rms_norm(symbol("n"), 8).ir, config, target).grain > 0


def test_streaming_is_offered_for_large_outputs_and_chosen_beyond_the_cache() -> None:
    small, large = samples.rms_norm(64, 2048).ir, samples.rms_norm(4096, 2048).ir
    for cache, expected in ((0, 0), (2**24, 1), (2**30, 0)):
        target = Target("cpu", "native", 2, l2_bytes=cache)
        assert default_settings(large, target)["stream"] == expected
        assert default_settings(small, target)["stream"] == 0
        offered = {one.name: one.choices for one in config_space(large, target)}
        assert offered["stream"] == (0, 1)
        assert {one.name: one.choices for one in config_space(small, target)}["stream"] == (0,)


def test_the_space_is_small_enough_to_enumerate() -> None:
    target = Target("cpu", "native", 16)
    for sample in SAMPLES:
        space = [one.choices for one in config_space(sample.ir, target)]
        assert len([*itertools.product(*space)]) <= 200
