"""The kernels' code for people: each text once, named as ``plan explain`` names its group, without what is common."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples
from ir_samples import static_samples

from fuseplan.kernels.ir.backend import BuildError, Target
from fuseplan.kernels.registry import backends_for
from fuseplan.planner.api.explain import Explained, KernelSource, Planned, called
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.patterns.table import pattern_graph
from fuseplan.planner.tuning.session import Session, open_session

SM90 = Target("cuda", "sm_90", 132, 50 << 20)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return open_session("cpu", samples.known_machine(tmp_path / "tuning.db"))


def sources(session: Session, *sizes: tuple[str, str, str]) -> list[KernelSource]:
    """Of patterns: workload, name, shape."""
    graphs = [(workload, pattern_graph(name, shape, "bfloat16")) for workload, name, shape in sizes]
    return Explained("", tuple(
        Planned(session, name, graph, session.planner().plan_graph(graph), ()) for name, graph in graphs)).kernels()


def test_a_text_stands_once_with_all_workloads_that_use_it(session: Session) -> None:
    found = sources(
        session, ("first", "swiglu", "3x128"), ("second", "swiglu", "3x128"), ("third", "rms_norm", "5x64"),
    )
    assert found[0].label == "silu+mul 3x128 bfloat16"
    assert [one.workloads for one in found] == [("first", "second"), ("third",)]
    assert len({one.text for one in found}) == len(found)


def test_a_kernel_is_called_by_letter_name_place_or_all(session: Session) -> None:
    found = sources(session, ("first", "swiglu", "3x128"), ("third", "rms_norm", "5x64"))
    placed = [replace(found[0], place="model.layers.0-31.mlp"), replace(found[1], names=("B",))]
    assert called(placed, "SILU") == called(placed, "0-31.mlp") == called(placed, "a") != placed
    assert called(placed, "b") == placed[1:] and called(placed, "all") == placed
    for wanted in ("sillu+mul 3x128 bfloat16", " ", ""):
        with pytest.raises(ConfigError, match=re.escape("silu+mul 3x128 bfloat16")):
            called(placed, wanted)
    with pytest.raises(ConfigError, match="no group"):
        called([], "all")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_left_out_is_what_kernels_have_in_common(device: str) -> None:
    """Every function that is left out is one that another kernel defines, too, word by word."""
    target = Target("cpu", "native", 2) if device == "cpu" else SM90
    for backend in backends_for(device):
        shared: dict[str, int] = {}
        for sample in static_samples():
            try:
                text = backend.source(sample.ir, backend.default_config(sample.ir, target))
            except BuildError:
                continue
            common = backend.common(text)
            one = KernelSource(("A",), "", "", backend.name, text, common, ())
            assert all(text.count(part) == 1 for part in common)
            own = one.own_text()
            assert len(own) <= len(text) - sum(map(len, common)) and own.strip()
            for part in common:
                assert part not in own
                shared[part] = shared.get(part, 0) + 1
        assert max(shared.values()) > 3, backend.name
