"""Facts about ops by name are in the table of ops, and in no list anywhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from paths import ROOT

#: ``"aten.add.Tensor"``, ``"fuseplan.merged_linear.default"``.
_NAME = re.compile(r"(aten|fuseplan)\.\w+\.\w+")
_ATTRIBUTE = re.compile(r"(^|\.)_?aten\.\w+\.\w+$", re.IGNORECASE)
#: Folders that may list ops: the table, and what is measured of a device.
_TABLES = ("planner/ops/", "costmodel/probe/")


def names_op(node: ast.expr | None) -> bool:
    """Whether an expression is an op: its name, ``_aten.add.Tensor``, or an f-string that begins with ``aten.``."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and _NAME.fullmatch(node.value) is not None
    if isinstance(node, ast.JoinedStr):
        return isinstance(first := node.values[0], ast.Constant) and str(first.value).startswith("aten.")
    return isinstance(node, ast.Attribute) and _ATTRIBUTE.search(ast.unparse(node)) is not None


def lists_of_ops(source: str) -> Iterator[int]:
    """Lines with a collection of two or more ops: a literal, or a comprehension."""
    for node in ast.walk(ast.parse(source)):
        items: list[ast.expr | None] = []
        if isinstance(node, ast.Set | ast.List | ast.Tuple):
            items = [*node.elts]
        elif isinstance(node, ast.Dict):
            items = [*node.keys]
        elif isinstance(node, ast.SetComp | ast.ListComp | ast.GeneratorExp | ast.DictComp):
            made = node.key if isinstance(node, ast.DictComp) else node.elt
            # What a call gives may be the overloads of one op.
            items = [made, made] if not isinstance(node.generators[0].iter, ast.Call) else []
        if sum(map(names_op, items)) > 1:
            yield node.lineno


def test_no_list_of_ops_stands_outside_the_table() -> None:
    packages = ("planner", "search", "kernels", "costmodel")
    files = [path.relative_to(ROOT) for package in packages for path in (ROOT / package).rglob("*.py")]
    found = [
        f"{path}:{line}" for path in files if not str(path).startswith(_TABLES)
        for line in lists_of_ops((ROOT / path).read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('A = {"aten.add.Tensor", "aten.mul.Tensor"}', [1]),
        ('A = {"aten.add.Tensor": 1, "aten.mul.Tensor": 2}', [1]),
        ("A = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)", [1]),
        ("A = [_aten.add.Tensor, _aten.mul.Tensor]", [1]),
        ('A = frozenset(f"aten.{name}.default" for name in NAMES)', [1]),
        ('A = {f"aten.{name}": 1 for name in NAMES}', [1]),
        ('match(node, _aten.add.Tensor, _aten.mul.Tensor) and x.op == "aten.add.Tensor"', []),
        ('A = ("aten", "kernel"), {"aten.add.Tensor"}', []),
        ("A = (_aten.add.Tensor, x, y)", []),
        ('A = [f"aten.{short}.{one}" for one in packet.overloads()]', []),
    ],
)
def test_lists_of_ops_are_seen(source: str, lines: list[int]) -> None:
    assert list(lists_of_ops(source)) == lines
