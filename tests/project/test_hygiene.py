"""Rules that hold everywhere: imports run one way, importing does no work, the checkout shadows nobody's package."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

#: What each package may import of ours.
ALLOWED = {
    "costmodel": {"costmodel"},
    "kernels": {"kernels"},
    "search": {"search", "kernels", "costmodel"},
    "planner": {"planner", "search", "kernels", "costmodel"},
}


def modules() -> list[Path]:
    return sorted(path for package in ALLOWED for path in (ROOT / package).rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def name_of(path: Path) -> str:
    return ".".join(("fuseplan", *path.relative_to(ROOT).with_suffix("").parts))


def our_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and package of every import of ours, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if name.startswith("fuseplan.costmodel.devices."):  # the description of devices, which all may use
                continue
            if parts[0] == "fuseplan":
                yield node.lineno, parts[1]
            elif parts[0] in ALLOWED:
                yield node.lineno, f"{parts[0]} as a top-level module"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    wrong = [(line, name) for line, name in our_imports(path) if name not in ALLOWED[package_of(path)]]
    assert not wrong


def test_the_import_check_sees_what_it_should(tmp_path: Path) -> None:
    source = "import kernels.ir\ndef late():\n    from fuseplan.planner import plan\n"
    (tmp_path / "sample.py").write_text(source)
    assert list(our_imports(tmp_path / "sample.py")) == [(1, "kernels as a top-level module"), (3, "planner")]


def run(code: str, *args: str) -> str:
    """Output of a fresh interpreter, which keeps no byte code, started in the root of the checkout, where `kernels` and
    `search` are folders.
    """
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, *args], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_the_planner_package_loads_torch_only_when_it_is_needed() -> None:
    code = (
        "import sys, fuseplan.planner as p; early = 'torch' in sys.modules; "
        "print(early, 'stats' in dir(p), p.stats().regions, hasattr(p, 'no_such_name'))"
    )
    assert run(code) == "False True 0 False"


WATCH = """
import importlib, json, sys
from transformers import LlamaForCausalLM
import torch, transformers, pandas, optuna, sqlalchemy, scipy.optimize, networkx, matplotlib, jinja2, rich, typer
import torch._dynamo, torch.fx.experimental.proxy_tensor
try:
    import triton, triton.language
except ImportError:
    pass
seen = []
def hook(event, args):
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if event in ("subprocess.Popen", "os.mkdir", "socket.connect", "sqlite3.connect", "os.putenv") or writes:
        seen.append(f"{name}: {event} {args[0]}")
name = ""
sys.addaudithook(hook)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
name = ""
import fuseplan.planner as planner
print(json.dumps([seen, [one for one in planner.__all__ if type(getattr(planner, one)).__name__ == "module"]]))
"""


def test_importing_does_no_work() -> None:
    """No file is written, no process started, no connection made by importing any module; Hugging Face's are imported
    first. A name of the planner stays what it is: a module of the same name, once imported, would take its place.
    """
    names = [name_of(path) for path in modules() if path.stem != "__init__"]
    optional = {name for name in names if "ninetoothed" in name or "triton" in name or name.endswith("gpu.launch")}
    assert json.loads(run(WATCH, json.dumps([name for name in names if name not in optional]))) == [[], []]


def spelled_options(path: Path) -> Iterator[str]:
    """Options in sentences: not in docstrings, in whole commands, or alone, as other programs are given them."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            for found in re.findall(r"(?<![\w-])--[a-z][a-z-]*", re.sub(r"`plan [^`]*(`|$)", "", node.value)):
                if found != node.value:
                    yield f"{path.name}:{node.lineno}: {found}"


def test_only_the_command_line_spells_options() -> None:
    """Elsewhere an error carries its :class:`~fuseplan.planner.errors.Argument`, and words name the thing."""
    below = [path for path in modules() if ROOT / "planner" / "cli" not in path.parents]
    assert [found for path in below for found in spelled_options(path)] == []


def test_the_check_of_options_sees_what_it_should(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(
        '"""With --docs."""\nx = f"--layers {1}: too many"\nrun(["--version"])\nsay("`plan tune --again`, or --db")\n')
    assert list(spelled_options(tmp_path / "sample.py")) == ["sample.py:2: --layers", "sample.py:4: --db"]


def test_no_behaviour_hangs_on_an_environment_variable() -> None:
    readers = [
        f"{name_of(path)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    ]
    assert readers == []
