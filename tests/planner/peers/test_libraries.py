"""Libraries that build kernels on first use are asked beforehand, once a pattern, without holding up the others."""

from __future__ import annotations

import threading

import pytest

from fuseplan.planner.patterns.cells import Cell, cell
from fuseplan.planner.peers.libraries import LibraryBuilds
from fuseplan.planner.peers.peers import FLASHINFER, LIGER

CELLS = [cell("swiglu", "1x64"), cell("swiglu", "8x64"), cell("rms_norm", "1x64"), cell("swiglu", "16x64")]


def test_each_pattern_is_built_once_with_its_first_cell() -> None:
    built: list[tuple[str, Cell]] = []
    with LibraryBuilds("cuda", (LIGER, FLASHINFER), 1, lambda name, one: built.append((name, one))) as builds:
        builds.start(CELLS)
        builds.start(CELLS)
        for pattern in ("swiglu", "rms_norm", "never started"):
            builds.wait(pattern)
        assert built == [(FLASHINFER, CELLS[0]), (FLASHINFER, CELLS[2])]


def test_waiting_for_one_pattern_does_not_wait_for_another() -> None:
    release = threading.Event()

    def build(name: str, one: Cell) -> None:
        if one.pattern == "swiglu":
            assert release.wait(60)

    with LibraryBuilds("cuda", (FLASHINFER,), 2, build) as builds:
        builds.start(CELLS)
        builds.wait("rms_norm")  # returns although swiglu is still being built
        release.set()
        builds.wait("swiglu")


def test_what_cannot_be_built_is_left_for_the_bench_to_meet() -> None:
    def fail(name: str, one: Cell) -> None:
        raise RuntimeError("no nvcc")

    with LibraryBuilds("cuda", (FLASHINFER,), 2, fail) as builds:
        builds.start(CELLS)
        builds.wait("swiglu")


@pytest.mark.parametrize(
    "device, peers, processes", [("cpu", (FLASHINFER,), 2), ("cuda", (LIGER,), 2), ("cuda", (FLASHINFER,), 0)]
)
def test_nothing_is_built_where_nobody_needs_it(device: str, peers: tuple[str, ...], processes: int) -> None:
    def never(name: str, one: Cell) -> None:
        raise AssertionError

    with LibraryBuilds(device, peers, processes, never) as builds:
        builds.start(CELLS)
        builds.wait("swiglu")


def test_an_unfinished_build_does_not_hold_up_the_end() -> None:
    builds = LibraryBuilds("cuda", (FLASHINFER,), 1)
    with builds:
        builds.start(CELLS[:1])  # its process starts up, or fails without a GPU; closing it ends the thread
