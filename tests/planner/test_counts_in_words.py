"""One thing is said of in the singular, wherever it is counted for people."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fuseplan.planner.dispatch_stats import CompileStats, total
from fuseplan.planner.fleet.scheduler import Counts
from fuseplan.planner.reports import drawing
from fuseplan.planner.reports.drawing import templates

#: What follows a number that is one.
PLURAL = re.compile(r"(?:^|[^\d.])1 (\w+ )?(graphs|regions|groups|misses|calls|ops|plans|outputs|masks|devices)\b")


def counts(number: int) -> dict[str, int]:
    """Every count that people are told."""
    return {one.name: number for one in fields(CompileStats) if one.name not in (
        "compile_id", "lookup_s", "fallbacks", "notes", "places", "from_tuned", "from_model")}


@pytest.mark.parametrize("number", [1, 2])
def test_what_dispatch_did(number: int) -> None:
    done = total((CompileStats(fallbacks={"why": number}, **counts(number)),))
    said = str(done).splitlines()
    first, second, plans, graphs = {
        1: ("1 graph, 1 region: 1 group fused (", "1 miss, 1 group, region, graph or call fell", "1 stored plan is",
            "1 CUDA graph recorded"),
        2: ("1 graph, 2 regions: 2 groups fused (", "2 misses, 2 groups, regions, graphs or calls fell",
            "2 stored plans are", "2 CUDA graphs recorded"),
    }[number]
    assert said[0].startswith(first) and said[1].startswith(second)
    assert f"{plans} unsound and not used; `plan tune` measures anew" in said and graphs in said
    assert not PLURAL.search("\n".join(said)) and len(said) >= len(counts(1)) - 6


def test_pages_and_explanations_of_one_of_each() -> None:
    page = templates().from_string('{{ 1 | counted("group") }}, {{ 2 | counted("miss", "misses") }}').render()
    assert page == "1 group, 2 misses"
    for file in Path(drawing.__file__).parent.glob("templates/*.j2"):
        assert not re.search(r"length \}\} [a-z ]*s\b", file.read_text()), file.name


def test_how_far_a_fleet_is() -> None:
    assert Counts(regions=1, regions_done=1).stored() == "1 of 1 region done and stored"
    assert str(Counts(regions=1, devices=1)) == "tuning on 1 device: 0 of 1 region"
    assert str(Counts(regions=2, regions_done=1, devices=2)) == "tuning on 2 devices: 1 of 2 regions"
