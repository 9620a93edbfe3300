"""Small CPython extensions in C++: compiled once per interpreter with the system's compiler, kept in the cache."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from fuseplan.kernels.backend import BuildError
from fuseplan.kernels.cpp_build import Compiler, build_library


def load_extension(name: str, source: Path, compiler: Compiler, cache_dir: Path) -> Any:
    """The module that ``source`` defines as ``PyInit_<name>``.

    Raises:
        BuildError: Python's headers are missing, or it does not compile or load; the message says which.
    """
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(f"{name}: Python's headers are missing ({include}); install python3-dev or its like")
    abi = f"// {sysconfig.get_config_var('SOABI')}\n"
    path = build_library(abi + source.read_text(encoding="utf-8"), compiler, cache_dir, (f"-I{include}",))
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{name}: the compiled module does not load: {error}") from error
    return module
