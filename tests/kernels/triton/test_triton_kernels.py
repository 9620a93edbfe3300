"""Triton kernels: right under the interpreter, and compiled for sm_90 without a GPU."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ir_samples as samples
import pytest
from ir_samples import Sample, label
from paths import SUPPORT
from ptx_paths import ptx_of, vector_bytes
from recipe_samples import recipe_samples

from fuseplan.kernels.gpu import targets
from fuseplan.kernels.gpu.build import compile_kernel
from fuseplan.kernels.gpu.launch import Variant
from fuseplan.kernels.gpu.tile import needs_int64, programs
from fuseplan.kernels.ir.backend import SM90, BuildError, Config, MachineError, Target
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.kernels.ir.kernel_name import kernel_name
from fuseplan.kernels.registry import local_target
from fuseplan.kernels.triton.backend import TritonBackend

LLAMA_SHAPES = [(1, 2048, 8192), (32, 4096, 14336), (16384, 8192, 28672)]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> TritonBackend:
    return TritonBackend(tmp_path_factory.mktemp("triton"))


def every_config(backend: TritonBackend, ir: KernelIR) -> Iterator[Config]:
    tunables = backend.tunables(ir, SM90)
    for values in itertools.product(*(tunable.choices for tunable in tunables)):
        yield dict(zip((tunable.name for tunable in tunables), values, strict=True))


def llama_groups() -> list[Sample]:
    groups = []
    for rows, hidden, intermediate in LLAMA_SHAPES:
        groups += [
            samples.rms_norm(rows, hidden, "bfloat16"),
            samples.add_rms_norm(rows, hidden, "bfloat16"),
            samples.swiglu(rows, intermediate, "bfloat16"),
            samples.rope(1, rows, 32, 8, 64 if hidden == 2048 else 128, "bfloat16"),
        ]
    return groups


def test_every_kernel_is_right_under_the_interpreter(tmp_path: Path) -> None:
    script = SUPPORT / "interpret_kernels.py"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "triton", str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows = json.loads(result.stdout)
    assert len(rows) > 150 and len({row["config"].get("block_cols") for row in rows}) > 4
    assert [row for row in rows if row["refused"]] == []
    assert [row for row in rows if not row["error"] <= 1.0] == []


@pytest.mark.parametrize("sample", llama_groups(), ids=label)
def test_llama_defaults_compile_for_sm90_without_spills(sample: Sample, backend: TritonBackend) -> None:
    config = backend.default_config(sample.ir, SM90)
    assert backend.infeasible(sample.ir, config, SM90) is None
    resources = backend.prepare(sample.ir, config, SM90)
    assert resources.spill_bytes == 0
    assert resources.registers is not None and 8 < resources.registers <= 128
    assert resources.shared_bytes is not None and resources.shared_bytes < 48 * 1024
    # Every access to a whole tile is a vector one: 16 bytes, or 8 where tiles are small.
    assert vector_bytes(ptx_of(backend, sample.ir, config)) >= 8


@pytest.mark.parametrize("sample", samples.static_samples() + samples.dynamic_samples(), ids=label)
def test_the_default_config_is_a_feasible_point_of_the_space(sample: Sample, backend: TritonBackend) -> None:
    default = backend.default_config(sample.ir, SM90)
    assert {t.name: t.choices for t in backend.tunables(sample.ir, SM90)}.keys() == default.keys()
    assert all(default[t.name] in t.choices for t in backend.tunables(sample.ir, SM90))
    assert backend.infeasible(sample.ir, default, SM90) is None
    assert backend.refuse(sample.ir, SM90) is None


@pytest.mark.parametrize("sample", recipe_samples(), ids=label)
def test_what_recipes_ask_for_compiles_for_sm90(sample: Sample, backend: TritonBackend) -> None:
    resources = backend.prepare(sample.ir, backend.default_config(sample.ir, SM90), SM90)
    assert resources.spill_bytes == 0


def test_feasible_configs_build_distinct_kernels(backend: TritonBackend) -> None:
    for sample in (samples.add_rms_norm(512, 4096, "bfloat16"), samples.swiglu(32, 1000), samples.softmax(64, 50000)):
        feasible = [c for c in every_config(backend, sample.ir) if backend.infeasible(sample.ir, c, SM90) is None]
        sources = [backend.source(sample.ir, config).split('"""', 2)[2] for config in feasible]
        body = [(text, c["num_warps"], programs(sample.ir, c, {})) for text, c in zip(sources, feasible, strict=True)]
        assert 5 < len(feasible) <= 200
        assert len(set(body)) == len(body)


def test_arithmetic_rejects_what_cannot_fit(backend: TritonBackend) -> None:
    wide = samples.softmax(4, 32768)
    config = {"block_rows": 1, "block_cols": 32768, "num_warps": 1, "loads": "late", "num_stages": 1}
    assert "registers" in str(backend.infeasible(wide.ir, config, SM90))
    assert "no effect" in str(
        backend.infeasible(samples.softmax(4, 64).ir, {"block_rows": 1, "block_cols": 64, "num_warps": 1,
                                                       "num_stages": 2}, SM90)
    )


def test_spills_are_read_back(backend: TritonBackend) -> None:
    sample = samples.rms_norm(4, 8192)
    crowded = {"block_rows": 1, "block_cols": 8192, "num_warps": 1, "loads": "early"}
    assert backend.infeasible(sample.ir, crowded, SM90) is not None
    resources = backend.prepare(sample.ir, crowded, SM90)
    assert resources.spill_bytes is not None and resources.spill_bytes > 0
    assert resources.registers == 255


def test_a_tool_that_hangs_is_the_machines_fault(
    backend: TritonBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "cuobjdump"
    hangs.write_text("#!/bin/sh\nsleep 100000\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(targets, "TOOL_LIMIT_S", 0.2)
    monkeypatch.setattr(targets, "cuobjdump", lambda: str(hangs))
    with pytest.raises(MachineError, match=r"cuobjdump did not finish within 0\.2 s"):
        backend.prepare(samples.rms_norm(4, 128).ir, {"block_rows": 1, "block_cols": 128, "num_warps": 1}, SM90)


def machine_code(backend: TritonBackend, ir: KernelIR, config: Config) -> str:
    """What ``config`` is compiled to for sm_90, as text; skips where no tool shows it."""
    tool = targets.cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump")
    module = backend.store.load(backend.source(ir, config))
    compiled = compile_kernel(getattr(module, kernel_name(ir)), TritonBackend()._spec(ir, config, Variant()), SM90)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("sample", [samples.dequantised(8, 512), samples.clamped(8, 512)], ids=label)
def test_float8_read_back_beside_a_store_has_a_source(sample: Sample, backend: TritonBackend) -> None:
    for rows, cols, warps in ((1, 512, 4), (2, 128, 2)):
        code = machine_code(backend, sample.ir, {"block_rows": rows, "block_cols": cols, "num_warps": warps})
        assert "E4M3.UNPACK_B" in code
        # R1 is the stack pointer: ptxas 12.8 reads it where it lost the word it was to take apart.
        assert re.findall(r"E4M3\.UNPACK_B R\d+, R1\b", code) == []


def one_clamp(to: str, rows: int, cols: int) -> KernelIR:
    """``x.clamp(-448, 448)`` as ``to``."""
    buffers = [samples.contiguous("x", "float32", (rows, cols)), samples.contiguous("y", to, (rows, cols), True)]
    b = samples.Body(buffers, (rows,), cols)
    x = b("minimum", b("maximum", b.load("x", b.at), b.const(-448.0)), b.const(448.0))
    b.store("y", b.at, x)
    return KernelIR(tuple(buffers), (b.segment(),))


@pytest.mark.parametrize(("block_cols", "warps"), [(512, 4), (16, 1), (128, 4)])
def test_float8_saturates_by_its_conversion(block_cols: int, warps: int, backend: TritonBackend) -> None:
    """Of a clamp to its range nothing is left, however few numbers a thread converts."""
    config = {"block_rows": 1, "block_cols": block_cols, "num_warps": warps}
    code = machine_code(backend, one_clamp("float8_e4m3fn", 8, 512), config)
    assert "FMNMX" not in code
    conversions = re.findall(r"F2FP\S*E4M3\S*", code)
    assert conversions and all("SATFINITE" in name for name in conversions)
    assert "FMNMX" in machine_code(backend, one_clamp("float16", 8, 512), config)


def test_the_interpreter_keeps_clamps_since_it_does_not_saturate(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ir, config = one_clamp("float8_e4m3fn", 3, 64), {"block_rows": 1, "block_cols": 64, "num_warps": 1}
    assert "tl.maximum" not in backend.source(ir, config)
    monkeypatch.setattr("fuseplan.kernels.triton.values.interpreter_is_on", lambda: True)
    assert "tl.maximum" in backend.source(ir, config) and "tl.minimum" in backend.source(ir, config)


@pytest.mark.parametrize("sample", [samples.swiglu(64, 4096, "bfloat16"), samples.rms_norm(64, 4096, "bfloat16")],
                         ids=label)
def test_widening_a_bfloat16_is_one_instruction(sample: Sample, backend: TritonBackend) -> None:
    code = machine_code(backend, sample.ir, {"block_rows": 1, "block_cols": 4096, "num_warps": 4, "loads": "early"})
    assert "PRMT" not in code


def test_resources_are_remembered_by_the_cache_folder(tmp_path: Path) -> None:
    sample = samples.swiglu(32, 1024, "bfloat16")
    config = {"block_rows": 1, "block_cols": 512, "num_warps": 4}
    first = TritonBackend(tmp_path).prepare(sample.ir, config, SM90)
    record = next(tmp_path.glob("triton/resources_*.json"))
    record.write_text(json.dumps({"registers": 99, "spill_bytes": 0, "shared_bytes": 0, "extra": {}}))
    assert TritonBackend(tmp_path).prepare(sample.ir, config, SM90).registers == 99
    record.write_text("half a reco")
    assert TritonBackend(tmp_path).prepare(sample.ir, config, SM90) == first


def test_equal_kernels_share_source_whatever_their_buffers_are_called(backend: TritonBackend) -> None:
    sample = samples.swiglu(3, 128)
    from dataclasses import replace

    renamed = KernelIR(tuple(replace(b, name=f"layer7.{b.name}") for b in sample.ir.buffers), sample.ir.segments)
    config = backend.default_config(sample.ir, SM90)
    assert backend.source(sample.ir, config) == backend.source(renamed, config)


def test_large_tensors_use_64_bit_indices(backend: TritonBackend) -> None:
    small, large = samples.swiglu(1000, 4096, "bfloat16"), samples.swiglu(2**19, 4096, "bfloat16")
    assert not needs_int64(small.ir) and needs_int64(large.ir)
    config = backend.default_config(large.ir, SM90)
    assert "int64" in backend.source(large.ir, config)
    assert vector_bytes(ptx_of(backend, large.ir, config)) == 16
    dynamic = samples.dynamic_samples()[4].ir
    assert not needs_int64(dynamic, {"n": 7}) and needs_int64(dynamic, {"n": 2**25})


def test_refusals_and_build_errors_say_why(backend: TritonBackend, tmp_path: Path) -> None:
    sample = samples.swiglu(3, 128)
    config = backend.default_config(sample.ir, SM90)
    assert "CUDA" in str(backend.refuse(sample.ir, Target("cpu", "native", 4)))
    with pytest.raises(BuildError, match="gfx90a"):
        backend.prepare(sample.ir, config, Target("hip", "gfx90a", 104))
    with pytest.raises(BuildError, match="could not compile"):
        backend.prepare(sample.ir, config, Target("cuda", "sm_20", 16))
    with pytest.raises(BuildError, match="num_warps"):
        backend.prepare(sample.ir, {**config, "num_warps": 3}, SM90)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BuildError, match="cannot write"):
        TritonBackend(blocked).prepare(sample.ir, config, SM90)


def test_loading_needs_a_device(backend: TritonBackend) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    sample = samples.swiglu(3, 128)
    with pytest.raises(BuildError, match="no CUDA device"):
        backend.load(sample.ir, backend.default_config(sample.ir, SM90), SM90)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        local_target("cuda")
