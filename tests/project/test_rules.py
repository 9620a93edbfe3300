"""Rules about the source of the four packages: what a wide ``except`` does, where decisions stand, public names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from paths import ROOT

from fuseplan.search.errors import OWN_FAULTS, OwnFaults, plain

PACKAGES = ("planner", "search", "kernels", "costmodel")
#: What counts a reason and raises a fault of our own again in tests, or hands the error on to whoever waits for it.
COUNTS = {"tolerate", "failure_reason", "failure", "set_exception"}
#: Functions whose wide ``except`` neither counts nor raises, and why.
EXCUSED = {
    "planner/implementations/direct_calls.py: _trace":
        "tries a function of another library on operands that it may not take",
    "planner/fleet/terms.py: carried": "any class of anybody's may refuse to be pickled",
    "planner/cli/main.py: run": "the command line: shows the error and ends with its exit status",
    "search/workers/supervisor.py: _work": "ends a worker process, with its error on stderr",
    "search/workers/supervisor.py: _attempt": "a worker's job: the pool that sent it is told the error",
}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def wide_excepts(tree: ast.AST) -> Iterator[tuple[str, ast.ExceptHandler]]:
    """Every handler of all exceptions, with the name of the innermost function that it is in."""
    holder = {
        id(node): function.name for function in ast.walk(tree) if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = [] if node.type is None else list(ast.walk(node.type))
            names = {one.id for one in caught if isinstance(one, ast.Name)}
            if node.type is None or names & {"Exception", "BaseException"}:
                yield holder.get(id(node), ""), node


def counts_or_raises(handler: ast.ExceptHandler) -> bool:
    inside = [node for statement in handler.body for node in ast.walk(statement)]
    called = {node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
              for node in inside if isinstance(node, ast.Call)}
    return bool(called & COUNTS) or any(isinstance(node, ast.Raise) for node in inside)


def test_a_wide_except_counts_or_raises() -> None:
    silent = {f"{path.relative_to(ROOT)}: {function}" for path, tree in trees()
              for function, handler in wide_excepts(tree) if not counts_or_raises(handler)}
    assert silent == EXCUSED.keys(), "call OWN_FAULTS.tolerate(error) there"


def test_the_check_of_wide_excepts_sees_what_it_should() -> None:
    source = "def run():\n    try:\n        work()\n    except {}:\n        {}\n"
    silent = [source.format(kind, "pass") for kind in ("Exception", "(OSError, BaseException)", "Exception as error")]
    loud = [source.format("Exception as error", body) for body in ("raise", "FAULTS.tolerate(error)")]
    found = [counts_or_raises(handler) for text in (*silent, *loud) for _, handler in wide_excepts(ast.parse(text))]
    assert found == [False, False, False, True, True]
    assert not list(wide_excepts(ast.parse(source.format("ValueError", "pass"))))


def caught(run: Callable[[], object]) -> Exception:
    try:
        run()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_fault_of_ours_is_told_from_anybody_elses() -> None:
    faults = OwnFaults()
    theirs = caught(lambda: {}["a"])
    ours = caught(lambda: plain(None))  # type: ignore[arg-type]
    assert isinstance(ours, AttributeError)
    faults.tolerate(theirs)
    assert not faults.counts
    faults.tolerate(ours)
    wrapped = ValueError("what it was made into")
    wrapped.__cause__ = ours
    faults.tolerate(wrapped)
    assert list(faults.counts.values()) == [2]
    faults.raised = True
    with pytest.raises(ValueError, match="made into"):
        faults.tolerate(wrapped)


def test_faults_are_raised_in_tests() -> None:
    assert OWN_FAULTS.raised


#: Names of what decides, rather than of how something is measured.
DECIDES = re.compile(r"(^|_)(MARGINS?|LIMITS?|TOLERANCES?|ROUNDS|GAIN|NOISE)(_|$)")


def decisions(tree: ast.Module) -> Iterator[str]:
    """Constants at the top of a module whose names say that they decide something."""
    for node in tree.body:
        inside = ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign) else ()
        names = [one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
        yield from (name for name in names if name.isupper() and DECIDES.search(name))


def test_decisions_stand_in_policy() -> None:
    """Kernels and the cost model have limits of hardware and procedures of their own; a report's page has margins."""
    astray = [f"{path.relative_to(ROOT)}: {name}" for path, tree in trees() for name in decisions(tree)
              if {"planner", "search"} & {*path.parts} and not {"policy.py", "reports"} & {*path.parts}]
    assert not astray, "move these to search/policy.py, with their reasons:\n" + "\n".join(astray)


def test_the_check_of_decisions_sees_what_it_should() -> None:
    source = "MIN_GAIN = 1\n_A, _LIMIT_S = 1, 2\nROUNDS: int = 7\n_AGAIN = 3\ndef run():\n    LIMIT = 2\nLimits = int\n"
    assert list(decisions(ast.parse(source))) == ["MIN_GAIN", "_LIMIT_S", "ROUNDS"]


def test_policy_gives_a_reason_for_each_number() -> None:
    lines = (ROOT / "search" / "policy.py").read_text().splitlines()
    bare = [line for before, line in pairwise(lines) if re.match(r"[A-Z_, ]+ = ", line) and not before.startswith("#:")]
    assert not bare


def public_types(tree: ast.Module) -> Iterator[str]:
    """Classes and type aliases at the top of a module, but for type variables of one letter."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [node.name] if isinstance(node, ast.ClassDef) else [getattr(one, "id", "_") for one in targets]
        yield from (name for name in names if name[0].isupper() and not name.isupper())


def test_a_public_type_is_defined_once() -> None:
    modules = defaultdict[str, list[str]](list)
    for path, tree in trees():
        for name in public_types(tree):
            modules[name].append(str(path.relative_to(ROOT)))
    twice = {name: places for name, places in modules.items() if len(places) > 1}
    assert not twice, twice


def test_the_check_of_public_types_sees_what_it_should() -> None:
    source = "class Op: pass\nclass _B: pass\nCall: TypeAlias = int\nShape = int\nT = TypeVar('T')\nLIMIT = 1\nx = 2\n"
    assert list(public_types(ast.parse(source))) == ["Op", "Call", "Shape"]


def callers(module: str, name: str) -> Iterator[str]:
    """Functions that call ``name`` of a module: as an attribute of it, or imported from it."""
    for path, tree in trees():
        package, _, last = module.rpartition(".")
        known = {(one.module, alias.name): alias.asname or alias.name for one in ast.walk(tree)
                 if isinstance(one, ast.ImportFrom) for alias in one.names}
        spelled = {f"{known[package, last]}.{name}" if (package, last) in known else "", known.get((module, name), "")}
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                calls = {ast.unparse(one.func) for one in ast.walk(function) if isinstance(one, ast.Call)}
                if calls & (spelled - {""}):
                    yield f"{path.relative_to(ROOT)}: {function.name}"


def test_one_function_assembles_a_tune() -> None:
    """Command line, Python, manifest, misses and patterns make requests; a bench tunes its cells in its own session."""
    assert sorted(callers("fuseplan.planner.tuning.tune", "tune")) == [
        "planner/api/run.py: run_here", "planner/cli/bench/topics.py: tune_cells"]
    assert sorted(callers("fuseplan.planner.api.run", "run_here")) == []  # a runner like that of a fleet
    assert sorted(callers("fuseplan.planner.api.tune", "tune_request")) == ["planner/cli/tune.py: tune"]
