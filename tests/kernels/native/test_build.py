"""The compile cache and the compiler's messages."""

from __future__ import annotations

import ctypes
import multiprocessing
from pathlib import Path

import pytest
from compilers import find_compiler

from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.native.build import Compiler, build_library, is_sound

FOUND = find_compiler()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no C++ compiler on PATH")
ANSWER = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def compiler() -> Compiler:
    assert FOUND is not None
    return FOUND


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def test_a_library_is_built_once(compiler: Compiler, tmp_path: Path) -> None:
    path = build_library(ANSWER, compiler, tmp_path / "new" / "folder")
    stamp = path.stat().st_mtime_ns
    assert answer(path) == 42
    assert build_library(ANSWER, compiler, tmp_path / "new" / "folder") == path
    assert path.stat().st_mtime_ns == stamp
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_source_flags_and_compiler_each_make_another_entry(compiler: Compiler, tmp_path: Path) -> None:
    older = Compiler(compiler.path, "older", compiler.native)
    generic = Compiler(compiler.path, compiler.version, ())
    paths = {
        build_library(ANSWER, compiler, tmp_path),
        build_library(ANSWER + "// changed\n", compiler, tmp_path),
        build_library(ANSWER, compiler, tmp_path, ("-DOTHER",)),
        build_library(ANSWER, older, tmp_path),
        build_library(ANSWER, generic, tmp_path),
    }
    assert len(paths) == 5


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_entry_is_built_again(compiler: Compiler, tmp_path: Path, damage: str) -> None:
    path = build_library(ANSWER, compiler, tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"truncated": content[: len(content) // 2], "flipped": content, "empty": b""}[damage])
    assert not is_sound(path)
    assert answer(build_library(ANSWER, compiler, tmp_path)) == 42
    assert is_sound(path)


def test_the_compiler_s_first_error_is_reported(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"kernel\.cpp:2.*error") as caught:
        build_library("int fine;\nint broken = nonsense;\n", compiler, tmp_path)
    assert str(tmp_path) not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_a_vanished_compiler_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no-such-compiler"):
        build_library(ANSWER, Compiler("/nowhere/no-such-compiler", "1", ()), tmp_path)


def test_a_cache_that_cannot_be_written_names_the_folder(compiler: Compiler, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BuildError, match="cannot write the kernel cache"):
        build_library(ANSWER, compiler, blocked / "cache")


def test_no_compiler_is_found_where_there_is_none(tmp_path: Path) -> None:
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho version 1\nexit 0\n")
    broken.chmod(0o755)
    assert find_compiler(("no-such-compiler", str(broken))) is None


def _build(cache: Path) -> int:
    compiler = find_compiler()
    assert compiler is not None
    return answer(build_library(ANSWER, compiler, cache))


@pytest.mark.slow
def test_processes_building_the_same_kernel_agree(compiler: Compiler, tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(_build, [tmp_path] * 6) == [42] * 6
    assert len([*tmp_path.iterdir()]) == 1
