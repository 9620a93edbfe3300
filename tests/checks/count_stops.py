"""Count the functions of ours that three walks enter: a graph through dispatch, a region through a tune, a
configuration to a running kernel.

    python tests/checks/count_stops.py                       # the numbers
    python tests/checks/count_stops.py --list dispatch       # the functions, by room
    PYTHONPATH=OTHER/.typecheck python tests/checks/count_stops.py --db plans.db   # of another checkout, by these plans

A stop is one function of the four packages that is entered at least once, on any thread of this process; what is inside
a function (lambdas, comprehensions, local functions) is part of it. Every module is imported before, so that its body
and what the import calls are no stops; ``__init__`` of dataclasses and the like are written by Python and no stops.
Worker processes are not counted. A plan with other kernels enters other functions, so compare two checkouts by the same
plans. Walks run on a CPU:

* **dispatch**: ``torch.compile(layer, backend="fuseplan")`` by stored plans, up to the end of its first call; and the
  **second call**. The layer is the second half of Llama's, of a tiny size.
* **tune**: ``tune(pattern="swiglu")`` on a probed device: one region, two trials.
* **kernel**: a back end's default configuration of SwiGLU, loaded and launched.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

PACKAGES = ("planner", "costmodel", "search", "kernels")
WALKS = ("dispatch", "second call", "tune", "kernel")


class Layer(torch.nn.Module):
    """RMSNorm, gate and up, SiLU times, down and the residual: the second half of a Llama layer."""

    def __init__(self, hidden: int = 64, wide: int = 128) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden))
        self.gate, self.up = (torch.nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return x + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed))


class Stops:
    """The functions entered within :meth:`counted`, by module and qualified name."""

    def __init__(self) -> None:
        planner = importlib.import_module("fuseplan.planner")
        self.root = Path(str(planner.__file__)).resolve().parents[1]
        self._of: dict[Any, tuple[str, str] | None] = {}
        self.found: set[tuple[str, str]] = set()

    def see(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and (stop := self._stop(frame)) is not None:
            self.found.add(stop)

    def _stop(self, frame: FrameType) -> tuple[str, str] | None:
        code = frame.f_code
        if code not in self._of:
            path = Path(code.co_filename).resolve()
            inside = path.relative_to(self.root) if path.is_relative_to(self.root) else Path(path.name)
            ours = inside.parts[0] in PACKAGES and code.co_name != "<module>"
            name = code.co_qualname.partition(".<locals>")[0]
            self._of[code] = (f"{inside.with_suffix('')}", name) if ours else None
        return self._of[code]

    @contextmanager
    def counted(self) -> Iterator[set[tuple[str, str]]]:
        self.found = found = set[tuple[str, str]]()
        threading.setprofile(self.see)
        sys.setprofile(self.see)
        try:
            yield found
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


def rooms(stops: set[tuple[str, str]]) -> dict[str, list[str]]:
    """The functions of each room."""
    found = defaultdict[str, list[str]](list)
    for module, name in sorted(stops):
        room, _, file = module.rpartition("/")
        found[room].append(f"{file}.{name}")
    return found


def import_all() -> None:
    for package in PACKAGES:
        try:
            path = importlib.import_module(f"fuseplan.{package}").__path__
        except ModuleNotFoundError:
            continue
        for one in pkgutil.walk_packages(path, f"fuseplan.{package}."):
            if not one.name.endswith("__main__"):
                try:
                    importlib.import_module(one.name)
                except ImportError:  # of a package that is not here
                    continue


def tune(db: str) -> Any:
    from fuseplan.planner import tune

    return tune(pattern="swiglu", shape="32x64", trials=2, seconds=0.2, device="cpu", db=db, shipped=False)


def compiled(db: str, on_miss: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    from fuseplan.planner.runtime.dispatch import fuseplan

    torch.manual_seed(0)
    return torch.compile(Layer().eval(), backend=fuseplan, options={"db": db, "on_miss": on_miss}), torch.randn(8, 64)


def prepare(db: str) -> None:
    """Store the plans of the layer, which the walks look up."""
    call, x = compiled(db, "tune")
    with torch.no_grad():
        call(x)


def walk(name: str, db: str, stops: Stops) -> set[tuple[str, str]]:
    if name == "tune":
        from fuseplan.planner.tuning.session import open_session

        open_session("cpu", db).probed()
        with stops.counted() as found:
            tune(db)
        return found
    if name == "kernel":
        from fuseplan.kernels.registry import backends_for, local_target

        ir, backend, target = swiglu_ir(), backends_for("cpu")[0], local_target("cpu")
        with stops.counted() as found:
            backend.fused_callable(ir, backend.default_config(ir, target), target)(*torch.randn(2, 32, 64))
        return found
    call, x = compiled(db, "unfused")
    with torch.no_grad(), stops.counted() as first:
        call(x)
    with torch.no_grad(), stops.counted() as second:
        call(x)
    return first if name == "dispatch" else second


def swiglu_ir() -> Any:
    """The kernel description of SwiGLU, as the planner lowers it."""
    from fuseplan.planner.groups.compute_graph import lower_group
    from fuseplan.planner.groups.regions import find_regions
    from fuseplan.planner.patterns.table import pattern_graph

    graph = pattern_graph("swiglu", "32x64", "float32")
    return lower_group(graph, find_regions(graph)[0].ops).ir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=WALKS, help="name the functions of this walk")
    parser.add_argument("--db", help="the plans to dispatch by; they are tuned where the file is not there yet")
    parser.add_argument("--walk", choices=("prepare", *WALKS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.walk:
        import_all()
        if given.walk == "prepare":
            return prepare(given.db)
        for room, names in rooms(walk(given.walk, given.db, Stops())).items():
            print("STOP", room, *names)
        return None
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = os.environ["XDG_DATA_HOME"] = folder
        plans = Path(given.db or f"{folder}/plans.db")
        for name in WALKS if plans.exists() else ("prepare", *WALKS):
            db = f"{folder}/new.db" if name == "tune" else str(plans)
            command = [sys.executable, __file__, "--walk", name, "--db", db]
            lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            found = {room: names for _, room, *names in (one.split() for one in lines if one.startswith("STOP"))}
            if found:
                print(f"{name}: {sum(map(len, found.values()))} functions in {len(found)} rooms")
            if name == given.list:
                for room, names in found.items():
                    print(f"  {room}: {len(names)}", *names, sep="\n    ")
    return None


if __name__ == "__main__":
    main()
