"""What a device is and can do is asked of its description: its name is compared and listed nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from paths import ROOT

#: Where devices are described: what they are, and how code is compiled for them.
DESCRIPTIONS = {"costmodel/devices.py", "kernels/gpu/targets.py"}
PACKAGES = ("costmodel", "kernels", "search", "planner")
NAMES = {"cpu", "cuda", "hip", "rocm", "nvidia", "amd"}


def named(node: ast.AST | None) -> bool:
    """Whether an expression is a device's name, or the beginning of one's key."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return node.value.rstrip("-") in NAMES or node.value.startswith(("sm_", "gfx"))


def asked(tree: ast.AST) -> Iterator[int]:
    """Lines that compare with a device's name, or that list such names or look something up by them."""
    for node in ast.walk(tree):
        among: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            among = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            among = [*node.keys]
        elif isinstance(node, ast.Set | ast.List | ast.Tuple):
            names = [element for element in node.elts if named(element)]
            among = [*names] if len(names) > 1 or len(names) == len(node.elts) else []
        elif isinstance(node, ast.MatchValue):
            among = [node.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "get"):
            among = [*node.args[:1]]
        if any(map(named, among)):
            yield node.lineno


def test_no_device_is_asked_for_by_its_name() -> None:
    wrong = [
        f"{name}:{line}: ask fuseplan.costmodel.devices" for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py")) if (name := str(path.relative_to(ROOT))) not in DESCRIPTIONS
        for line in asked(ast.parse(path.read_text()))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("code", [
    'x == "cuda"', 'x.arch != "sm_90"', 'x in ("cpu", "cuda")', 'x.startswith("cuda-")', '{"cpu": 1}[x]',
    'D.get("hip")', 'Literal["cpu", "cuda"]', 'match x:\n    case "cuda":\n        pass',
])
def test_the_rule_sees_every_form(code: str) -> None:
    assert list(asked(ast.parse(code)))


def test_what_pytorch_is_given_may_be_a_name() -> None:
    assert not list(asked(ast.parse('x.to("cpu"), torch.device("cuda", 0), Target("cpu", "native", 1)')))
