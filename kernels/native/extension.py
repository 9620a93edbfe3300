"""Small CPython extensions in C++: compiled once per interpreter with the system's compiler, kept in the cache."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sysconfig
from pathlib import Path
from typing import Any

from fuseplan.kernels.ir.backend import BuildError
from fuseplan.kernels.native.build import Compiler, build_library


def load_extension(name: str, source: Path, compiler: Compiler, cache_dir: Path) -> Any:
    """The module that ``source``, with the headers beside it, defines as ``PyInit_<name>``.

    Raises:
        BuildError: Python's headers are missing, or it does not compile or load; the message says which.
    """
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(f"{name}: Python's headers are missing ({include}); install python3-dev or its like")
    abi = f"// {sysconfig.get_config_var('SOABI')}\n"
    path = build_library(abi + _whole_text(source), compiler, cache_dir, (f"-I{include}",))
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{name}: the compiled module does not load: {error}") from error
    return module


def _whole_text(source: Path) -> str:
    """A file with the headers beside it in place of the lines that include them."""

    def expand(line: re.Match[str]) -> str:
        header = source.parent / line[1]
        return header.read_text(encoding="utf-8") if header.is_file() else line[0]

    return re.sub(r'^#include "([^"]+)"$', expand, source.read_text(encoding="utf-8"), flags=re.MULTILINE)
