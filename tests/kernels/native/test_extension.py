"""Extensions: one text with the headers beside it, kept by content, and a reason where there is none."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from compilers import find_compiler

from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.native.build import Compiler, load_extension

_MODULE = """#include <Python.h>

#include "answer.h"
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fuseplan_sample", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_fuseplan_sample(void) {
  PyObject* result = PyModule_Create(&module);
  if (result) PyModule_AddIntConstant(result, "answer", ANSWER);
  return result;
}
"""


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    found = find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def test_a_header_beside_the_source_is_part_of_it(compiler: Compiler, tmp_path: Path) -> None:
    source, cache = tmp_path / "sample.cpp", tmp_path / "cache"
    source.write_text(_MODULE)
    answers = []
    for number in (3, 4, 3):
        (tmp_path / "answer.h").write_text(f"enum {{ ANSWER = {number} }};\n")
        answers.append(load_extension(source, compiler, cache).answer)
    assert answers == [3, 4, 3]
    assert len(list(cache.glob("*.so"))) == 2


def test_what_does_not_build_or_load_is_a_reason(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "sample.cpp"
    source.write_text(_MODULE)
    with pytest.raises(BuildError, match=r"answer\.h"):
        load_extension(source, compiler, tmp_path)
    source.write_text("#include <Python.h>\nint unrelated;\n")
    with pytest.raises(BuildError, match="fuseplan_sample: the compiled module does not load"):
        load_extension(source, compiler, tmp_path)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "nowhere"))
    with pytest.raises(BuildError, match="Python's headers are missing"):
        load_extension(source, compiler, tmp_path)
