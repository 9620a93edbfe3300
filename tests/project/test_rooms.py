"""The rooms of the four packages: what may import what, and that neither a room nor a file outgrows a reader.

Imports are read from the source, so that lazy and type-only ones count.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
from paths import ROOT

#: The rooms of each package in order: a room may import those before it. "" is what lies beside the rooms.
ROOMS = {
    "costmodel": ("", "probe"),
    "kernels": ("ir", "native", "cpp", "gpu", "attention", "selection", "triton", "ninetoothed", ""),
    "search": ("", "store", "timing", "workers", "tune"),
    "planner": ("", "graph", "ops", "models", "rewrites", "lowering", "groups", "capture", "patterns", "work",
                "libraries", "implementations", "cost", "partition", "tuning", "runtime", "reports", "api", "fleet",
                "peers", "bench", "cli", "front"),
}
#: The packages that each may import besides itself, and what all may.
PACKAGES = {"costmodel": (), "kernels": (), "search": ("costmodel", "kernels"),
            "planner": ("costmodel", "kernels", "search")}
FOR_ALL = "costmodel.devices"
MOST_FILES, MOST_LINES = 14, 400


def files() -> list[Path]:
    return sorted(path for package in ROOMS for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    """``planner.graph.execute``; of a package's own ``__init__``, the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> tuple[str, str]:
    """Package and room of a module, or of a name in it."""
    package, *rest = module.split(".")
    return package, rest[0] if rest and (ROOT / package / rest[0]).is_dir() else ""


def imported(path: Path, modules: set[str]) -> Iterator[str]:
    """Our modules that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("fuseplan."):
                name = name.removeprefix("fuseplan.")
                yield from [one for one in (name, name.rpartition(".")[0]) if one in modules][:1]


def arrows() -> nx.DiGraph:
    """An arrow from every module of ours to each that it imports."""
    found = nx.DiGraph()
    modules = {module_of(path) for path in files()}
    found.add_nodes_from(modules)
    found.add_edges_from((module_of(path), name) for path in files() for name in imported(path, modules))
    return found


def allowed(source: str, target: str) -> bool:
    (package, room), (other_package, other_room) = room_of(source), room_of(target)
    if package != other_package:
        return other_package in PACKAGES[package] or target == FOR_ALL
    if source == "planner.__main__" and other_room == "cli":  # starts the command; nothing imports it
        return True
    order = ROOMS[package]
    return order.index(other_room) <= order.index(room)


def test_every_folder_is_a_room() -> None:
    found = {room_of(module_of(path)) for path in files()}
    assert found == {(package, room) for package, rooms in ROOMS.items() for room in rooms}


def test_arrows_between_rooms_run_one_way() -> None:
    # The package's own file hands out names from everywhere, when they are asked for.
    wrong = [f"{source} -> {target}" for source, target in arrows().edges
             if source != "planner" and not allowed(source, target)]
    assert not wrong, "\n".join(sorted(wrong))


def test_every_folder_is_in_the_wheel() -> None:
    """Folders of data too: setuptools leaves out what is not listed, or warns."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for package in ROOMS for path in (ROOT / package).rglob("*.*")
               if "__pycache__" not in path.parts and path.is_file()}
    names = (".".join(("fuseplan", *folder.relative_to(ROOT).parts)) for folder in folders)
    assert sorted(listed) == sorted("fuseplan" if name == "fuseplan.planner.front" else name for name in names)


def test_no_files_import_each_other_in_a_circle() -> None:
    circles = [sorted(circle) for circle in nx.strongly_connected_components(arrows()) if len(circle) > 1]
    assert not circles, circles


def test_folders_and_files_stay_small() -> None:
    folders = Counter(path.parent for path in files())
    large = [f"{folder.relative_to(ROOT)}: {held} files" for folder, held in folders.items() if held > MOST_FILES]
    long = [f"{module_of(path)}: {lines} lines" for path in files()
            if (lines := len(path.read_text().splitlines())) > MOST_LINES]
    assert not large + long, "\n".join(large + long)


def test_the_check_sees_lazy_and_type_only_imports(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fuseplan.planner.bench import rows\n"
        "def late():\n    import fuseplan.search.errors\n    from fuseplan.kernels.ir.ops import OPS\n"
    )
    modules = {"planner.bench.rows", "search.errors", "kernels.ir.ops"}
    assert set(imported(tmp_path / "sample.py", modules)) == modules
    assert allowed("planner.cli.tune", "planner.bench.rows") and not allowed("planner.bench.rows", "planner.cli.tune")
    assert allowed("search.tune.tuner", "kernels.ir.ir") and not allowed("kernels.ir.ir", "search.errors")
