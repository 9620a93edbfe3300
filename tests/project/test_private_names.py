"""Tests patch no private name: what they replace is a public seam, so that a private one may change freely."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from paths import ROOT

#: Files that still do it. Take a file out once it does not; put none in.
STILL = {
    "costmodel/probe/test_probe.py",
    "planner/bench/test_bench.py",
    "planner/bench/test_bench_launch.py",
    "planner/bench/test_generate.py",
    "planner/bench/test_launch_costs.py",
    "planner/cli/output/test_in_a_terminal.py",
    "planner/implementations/test_tunable_group.py",
    "planner/libraries/test_decode_attention.py",
    "planner/rewrites/test_attention_masks.py",
    "planner/runtime/test_cuda_recorder.py",
    "planner/runtime/test_dispatch_failures.py",
    "planner/runtime/test_dispatch_lookups.py",
    "planner/tuning/test_server_outages.py",
    "search/store/test_database_servers.py",
    "search/store/test_layered.py",
    "search/store/test_leases.py",
    "search/store/test_locks.py",
    "search/store/test_miss_log.py",
    "search/store/test_outages.py",
    "search/store/test_postgres.py",
    "search/tune/test_space.py",
    "support/family_checks.py",
    "support/given_times.py",
}


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def patches(source: str) -> Iterator[int]:
    """Lines that replace a private attribute, other than the object's own and those of PyTorch and Triton."""
    tree = ast.parse(source)
    theirs = {"self", "cls"} | {
        one.asname or one.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] in ("torch", "triton") for one in node.names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr" | "patch" | "object"), args=[*given]):
                names = [one.value for one in given[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                foreign = bool(given) and ast.unparse(given[0]).startswith("torch")
                if not foreign and any(private(name) for name in names):
                    yield node.lineno
            case ast.Assign(targets=[ast.Attribute(value=holder, attr=name)]) if private(name):
                if ast.unparse(holder) not in theirs:
                    yield node.lineno


def files() -> list[str]:
    tests = ROOT / "tests"
    found = {path.relative_to(tests).as_posix() for path in (*tests.rglob("test_*.py"), *tests.glob("support/*.py"))}
    return sorted(found - STILL)


@pytest.mark.parametrize("file", files())
def test_no_private_name_is_patched(file: str) -> None:
    assert [*patches((ROOT / "tests" / file).read_text())] == []


def test_patches_of_private_names_are_found() -> None:
    lines = (
        "patch.setattr(module, '_name', 1)", "patch.setattr('package._module.name', 1)", "mock.patch('module._name')",
        "module._name = 1", "patch.setattr(torch._C, '_name', 1)", "self._name = 1", "patch.setattr(module, 'name', 1)",
    )
    assert sorted(patches("\n".join(lines))) == [1, 2, 3, 4]
