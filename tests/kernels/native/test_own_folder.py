"""Whatever is loaded as code comes from a folder and a file that nobody else may write."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from compilers import find_compiler

from fuseplan.kernels.gpu.build import ModuleStore
from fuseplan.kernels.native import build as module
from fuseplan.kernels.native.build import Compiler, build_library, is_exposed, own_folder


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    module._private_folder.cache_clear()
    yield
    module._private_folder.cache_clear()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_missing_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    wanted = tmp_path / "new" / "folder"
    assert own_folder(wanted) == wanted and mode(wanted) == 0o700
    wanted.chmod(0o755)  # others may read
    assert own_folder(wanted) == wanted


@pytest.mark.parametrize("bits", [0o770, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(
    bits: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = tmp_path / "shared"
    wanted.mkdir()
    wanted.chmod(bits)
    caplog.set_level(logging.WARNING, logger="fuseplan")
    used = own_folder(wanted)
    assert used != wanted and mode(used) == 0o700 and own_folder(wanted) == used
    (said,) = caplog.messages
    assert str(wanted) in said and str(used) in said and f"mode {bits:o}" in said
    module._remove(used, os.getpid() + 1)  # another process's copy of this one
    assert used.is_dir()
    module._remove(used, os.getpid())
    assert not used.exists()


def test_another_user_s_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tmp_path / "theirs"
    wanted.mkdir(mode=0o700)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert f"belongs to user {me}" in str(is_exposed(wanted))
    monkeypatch.undo()
    assert is_exposed(wanted) is None and is_exposed(wanted / "gone") is not None


# -- what is loaded ---------------------------------------------------------------------------------------

ANSWER = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def compiler() -> Compiler:
    found = find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def plant(compiler: Compiler, path: Path, folder: Path) -> None:
    """A library under another's name, with the digest that makes it sound."""
    other = build_library(ANSWER.replace("42", "666"), compiler, folder).read_bytes()[:-32]
    path.unlink()  # as a new file: to write into a library that this process has loaded would crash it at its end
    path.write_bytes(other + hashlib.sha256(other).digest())


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def test_planted_libraries_do_not_run(compiler: Compiler, tmp_path: Path) -> None:
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    path = build_library(ANSWER, compiler, cache)
    assert mode(path) & 0o022 == 0
    plant(compiler, path, elsewhere)
    path.chmod(0o777)  # written by others, in a folder of ours
    assert answer(build_library(ANSWER, compiler, cache)) == 42
    plant(compiler, path, elsewhere)
    cache.chmod(0o777)  # a folder in which they could have done so
    used = build_library(ANSWER, compiler, cache)
    assert used.parent != cache and answer(used) == 42


def test_planted_modules_do_not_run(tmp_path: Path) -> None:
    store, source = ModuleStore("triton", tmp_path), "ANSWER = 42\n"
    path = store.write(source)
    path.write_text("ANSWER = 666\n")  # by whom ever
    assert store.write(source).read_text() == source
    path.write_text("ANSWER = 666\n")
    path.parent.chmod(0o777)
    assert store.folder != path.parent and store.load(source).ANSWER == 42
