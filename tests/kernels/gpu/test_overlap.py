"""Overlapped kernels: where they wait, in source and on every path of the PTX, and which configs have it."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import ir_samples as samples
import pytest
from ir_samples import Sample, label
from overlap_samples import one_of_each, step
from ptx_paths import ACCESS, END, WAIT, overlap_faults, reached

from fuseplan.costmodel.identity import current_identity
from fuseplan.kernels.gpu.backend import GpuBackend
from fuseplan.kernels.gpu.launch import Variant
from fuseplan.kernels.gpu.overlap import (
    OVERLAP_CHOICES,
    overlapped,
    plainly,
    pointless_overlap,
)
from fuseplan.kernels.ir.backend import SM90, BuildError, Target
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
from fuseplan.kernels.triton.backend import TritonBackend
from fuseplan.planner.tuning import session
from fuseplan.planner.tuning.planner import PlanSettings
from fuseplan.search.tune.space import enumerate_space
from fuseplan.search.tune.strategy import Strategy

IN_GRAPH = replace(SM90, in_graph=True)
STATEMENTS = ("row = pid", "x = load(a)", "store(b, x)", "y = load(c)", "z = y + x", "store(d, z)")


@pytest.fixture(scope="module", params=[TritonBackend, NinetoothedBackend], ids=lambda kind: kind.name)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GpuBackend:
    made = request.param(tmp_path_factory.mktemp("overlap"))
    assert isinstance(made, GpuBackend)
    return made


def placed(statements: tuple[str, ...], overlap: str) -> str:
    """The statements with W for the wait and T for the trigger."""
    lines = overlapped(statements, {"overlap": overlap}, "load(", "store(")
    return "; ".join({"gdc_wait()": "W", "gdc_launch_dependents()": "T"}.get(line, line) for line in lines)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        ("none", "row = pid; x = load(a); store(b, x); y = load(c); z = y + x; store(d, z)"),
        ("wait", "row = pid; W; x = load(a); store(b, x); y = load(c); z = y + x; store(d, z)"),
        ("early", "T; row = pid; W; x = load(a); store(b, x); y = load(c); z = y + x; store(d, z)"),
        ("late", "row = pid; W; x = load(a); store(b, x); y = load(c); z = y + x; T; store(d, z)"),
    ],
)
def test_the_wait_precedes_every_access_and_a_late_trigger_follows_every_load(overlap: str, expected: str) -> None:
    assert placed(STATEMENTS, overlap) == expected


def test_a_loop_that_loads_and_stores_is_one_statement() -> None:
    loops = ("for s in r:\n    x = load(a)", "for s in r:\n    y = load(a)\n    store(b, y)")
    assert placed(loops, "late") == f"W; {loops[0]}; T; {loops[1]}"
    assert placed(loops[1:], "late") == f"W; T; {loops[1]}"


def test_a_program_that_loads_or_stores_nothing_waits_too() -> None:
    assert placed(("v = 1.0", "store(b, v)"), "late") == "v = 1.0; W; T; store(b, v)"
    assert placed(("v = 1.0",), "late") == "v = 1.0; W; T"
    assert placed(("v = 1.0",), "early") == "T; v = 1.0; W"


def test_an_unknown_value_is_refused(backend: GpuBackend) -> None:
    sample = samples.swiglu(3, 128)
    config = {**backend.default_config(sample.ir, SM90), "overlap": "soon"}
    with pytest.raises(BuildError, match="its overlap is none of the choices"):
        backend.prepare(sample.ir, config, SM90)


def test_devices_that_can_have_it_and_graphs_have_a_choice(backend: GpuBackend) -> None:
    ir = samples.add_rms_norm(32, 4096, "bfloat16").ir
    for target in (replace(SM90, arch="sm_80"), replace(IN_GRAPH, arch="sm_89"), replace(IN_GRAPH, arch="gfx942")):
        assert not target.gpu.overlaps
        assert "overlap" not in backend.default_config(ir, target)
        assert "overlap" not in {tunable.name for tunable in backend.tunables(ir, target)}
    for arch in ("sm_90", "sm_90a", "sm_100"):
        assert replace(IN_GRAPH, arch=arch).gpu.overlaps
    graph, older = backend.default_config(ir, IN_GRAPH), backend.default_config(ir, replace(SM90, arch="sm_89"))
    assert graph == {**older, "overlap": "wait"} and plainly(graph) == older
    assert backend.default_config(ir, SM90) == graph
    assert backend.tunables(ir, IN_GRAPH)[0].choices == OVERLAP_CHOICES
    assert backend.tunables(ir, SM90)[0].choices == ("wait",)
    assert backend.infeasible(ir, graph, IN_GRAPH) is None


def test_configs_of_older_records_build_what_they_did(backend: GpuBackend) -> None:
    ir = samples.swiglu(5, 256, "bfloat16").ir
    config = plainly(backend.default_config(ir, SM90))
    plain: Any = backend._compile(ir, config, SM90, Variant())  # type: ignore[attr-defined]
    none: Any = backend._compile(ir, {**config, "overlap": "none"}, SM90, Variant())  # type: ignore[attr-defined]
    for compiled in (plain, none):
        assert "griddepcontrol" not in compiled.asm["ptx"] and not compiled.metadata.launch_pdl
    assert "gdc" not in backend.source(ir, config)


@pytest.mark.parametrize(
    ("programs", "elements", "warps", "refused"),
    [
        (28, 512, 4, {"late"}),  # swiglu 1x14336 on an H200: early 0.70, late 0.97, wait 0.82 us
        (448, 1024, 4, set()),  # 32x14336: early 1.17, late 1.48, wait 1.41 us
        (14336, 512, 4, {"early", "late"}),  # 512x14336: 18 us for 10
        (7168, 1024, 4, {"early", "late"}),  # 9.3 and 10.0 for 8.9
        (3584, 2048, 4, set()),  # 8.6 and 8.4 for 9.1
        (512, 4096, 8, set()),  # add_rms_norm 512x4096: early 5.41, late 3.56, wait 3.74 us
    ],
)
def test_what_measurements_ruled_out_is_not_tried(programs: int, elements: int, warps: int, refused: set[str]) -> None:
    found = {
        overlap for overlap in ("none", *OVERLAP_CHOICES)
        if pointless_overlap({"overlap": overlap, "num_warps": warps}, programs, elements, IN_GRAPH)
    }
    assert found == refused


@pytest.mark.parametrize("sample", one_of_each(), ids=label)
def test_every_path_waits_before_it_touches_memory(sample: Sample, backend: GpuBackend) -> None:
    if refused := backend.refuse(sample.ir, IN_GRAPH):
        pytest.skip(refused)
    for overlap in OVERLAP_CHOICES:
        config = {**backend.default_config(sample.ir, IN_GRAPH), "overlap": overlap}
        compiled: Any = backend._compile(sample.ir, config, IN_GRAPH, Variant())  # type: ignore[attr-defined]
        assert overlap_faults(compiled.asm["ptx"], overlap) == []
        assert compiled.metadata.launch_pdl


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("stages", [1, 3])
def test_looped_and_pipelined_loads_wait_too(reduces: bool, stages: int, tmp_path: Path) -> None:
    ir = step(3, 4097, reduces)
    for overlap in OVERLAP_CHOICES:
        config = {"overlap": overlap, "block_rows": 1, "block_cols": 256, "num_warps": 2, "num_stages": stages}
        ptx = TritonBackend(tmp_path)._compile(ir, config, IN_GRAPH, Variant()).asm["ptx"]
        assert overlap_faults(ptx, overlap) == []
        assert ("cp.async" in ptx) == (reduces and stages > 1)


def test_the_path_check_sees_a_branch_around_the_wait() -> None:
    text = """.visible .entry fused() {
        setp.ge.s32 %p1, %r1, 4;
        @%p1 bra $L__1;
        griddepcontrol.wait;
        ld.global.b32 %r2, [%rd1];
        bra.uni $L__2;
    $L__1:
        st.global.b32 [%rd1], %r3;
    $L__2:
        ret;
    }"""
    assert reached(text, f"{ACCESS}|{END}", WAIT) == ["st.global.b32 [%rd1], %r3;", "ret;"]
    assert overlap_faults(text.replace("$L__1:", "$L__1: griddepcontrol.wait;"), "wait") == []


def test_the_generated_ninetoothed_module_can_be_read(tmp_path: Path) -> None:
    backend, ir = NinetoothedBackend(tmp_path), samples.swiglu(5, 256, "bfloat16").ir
    function = backend._function(ir, backend.default_config(ir, IN_GRAPH), Variant())
    lines = [line.strip() for line in Path(inspect.getfile(function.fn)).read_text().splitlines()]
    assert lines[0].startswith("from triton.language.extra.cuda import")
    assert lines.count("gdc_wait()") == 1
    assert lines.index("gdc_wait()") < next(n for n, line in enumerate(lines) if "language.load(" in line)


@pytest.mark.parametrize(("device_type", "regime", "expected"),
                         [("cuda", "graph", True), ("cuda", "eager", False), ("cpu", "graph", False)])
def test_a_session_says_whether_its_kernels_will_be_replayed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device_type: str, regime: str, expected: bool
) -> None:
    target = SM90 if device_type == "cuda" else Target("cpu", "native", 2)
    monkeypatch.setattr(session, "local_target", lambda _: target)
    identity = current_identity("cpu")
    monkeypatch.setattr(session, "current_identity", lambda _: identity)
    monkeypatch.setattr(session, "backends_for", lambda _: ())
    opened = session.open_session(device_type, tmp_path / "t.db", PlanSettings(regime=regime), mode="read")
    assert opened.target.in_graph == expected
    assert replace(opened.target, in_graph=False, l2_bytes=0) == replace(target, l2_bytes=0)


@pytest.mark.parametrize(
    ("ir", "second"),
    [
        (samples.add_rms_norm(32, 4096, "bfloat16").ir, ["early"]),
        (samples.add_rms_norm(512, 4096, "bfloat16").ir, ["early", "late"]),
        (samples.swiglu(32, 14336, "bfloat16").ir, ["early", "late"]),
    ],
    ids=["few programs", "rows", "pointwise"],
)
def test_few_trials_start_with_the_overlaps_of_the_default(ir: KernelIR, second: list[str], tmp_path: Path) -> None:
    space = enumerate_space(TritonBackend(tmp_path), ir, IN_GRAPH)
    asked = [space.configs[n] for n in Strategy(space, 6, seed=0).ask(8)]
    assert len(asked) == 5  # one is kept for the best steps together
    assert [config["overlap"] for config in asked] == ["wait", *second, *["wait"] * (4 - len(second))]
    assert all(plainly(config) == plainly(space.default) for config in asked[: 1 + len(second)])


def test_many_waves_of_programs_are_suggested_larger_tiles(tmp_path: Path) -> None:
    backend, many = TritonBackend(tmp_path), samples.swiglu(512, 14336, "bfloat16").ir
    default = backend.default_config(many, IN_GRAPH)
    (larger,) = backend.suggestions(many, IN_GRAPH)
    assert larger == {**default, "overlap": "late", "block_cols": 2048}
    assert enumerate_space(backend, many, IN_GRAPH).find(larger) is not None
    narrow = samples.rope(1, 4096, 32, 8, 128, "bfloat16").ir
    assert [config["block_rows"] for config in backend.suggestions(narrow, IN_GRAPH)] == [16]
    assert backend.suggestions(many, SM90) == ()
    assert backend.suggestions(samples.swiglu(32, 14336, "bfloat16").ir, IN_GRAPH) == ()
    assert backend.suggestions(samples.rms_norm(512, 4096, "bfloat16").ir, IN_GRAPH) == ()


def test_short_rows_that_share_an_operand_are_suggested_one_warp(tmp_path: Path) -> None:
    backend, rope = TritonBackend(tmp_path), samples.rope(1, 1, 32, 8, 128, "bfloat16").ir
    default = backend.default_config(rope, IN_GRAPH)
    warps = int(default["num_warps"])
    assert warps > 1
    (single,) = backend.suggestions(rope, IN_GRAPH)
    assert single == {
        **default, "overlap": "early", "num_warps": 1, "block_rows": int(default["block_rows"]) // warps
    }
    assert enumerate_space(backend, rope, IN_GRAPH).find(single) is not None
    assert backend.suggestions(rope, SM90) == ()  # launched from Python, kernels are too far apart
    assert backend.suggestions(samples.swiglu(4, 256, "bfloat16").ir, IN_GRAPH) == ()  # no operand is shared
