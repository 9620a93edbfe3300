"""Which graphs of a tune are of sizes that were given, and which of what masks or generate() make of them."""

from __future__ import annotations

from fuseplan.planner.api.request import Asked
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload, decode, prefill, with_calls


def named(*workloads: Workload, source: str = "preset") -> Asked:
    found = ModelSource(kind="preset", name="llama-3.2-1b") if source else None
    return Asked("llama", "cpu", found, workloads)


def test_derived_calls_and_their_parts_were_not_asked_for() -> None:
    what = named(*with_calls([decode(1, 256), decode(8, 256), prefill(1, 128)], True))
    asked = [one.label for one in what.workloads if what.is_asked_for(one.label)]
    assert asked == ["decode 1 @ 256", "decode 8 @ 256", "prefill 1x128"]
    assert not what.is_asked_for("generate 1x128 @ 256 part 2") and not what.is_asked_for("prefill 1x128 masked")
    assert all(what.is_derived(name) for name in ("decode 8 @ 256 positions", "generate 1x128 packed part 1"))
    assert not what.is_derived("decode 1 @ 256 packed")
    assert what.is_asked_for("decode 1 @ 256 part 2")  # of a model that Dynamo cuts


def test_a_pattern_is_no_model() -> None:
    assert not named(source="").is_asked_for("swiglu 32x4096")
