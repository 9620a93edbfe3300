"""What runs unfused as a whole, and what was never tuned, is said at warning level: once, with what to do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_samples import compiled, fresh_start, store_plans
from paths import ROOT
from reference_backend import ReferenceBackend, use
from torch import Tensor

import fuseplan.planner


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use(monkeypatch, ReferenceBackend())
    yield from fresh_start()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The warnings of the package so far."""
    with caplog.at_level(logging.WARNING, "fuseplan"):
        yield lambda: [
            record.getMessage() for record in caplog.records
            if record.levelno >= logging.WARNING and record.name.startswith("fuseplan")
        ]


class Marked(Tensor):
    """Its ops give tensors of the same class."""


def gated(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def given_memory(x: Tensor, y: Tensor) -> Tensor:
    x.data = y * 2
    return gated(x, y)


def tensors(count: int = 2) -> list[Tensor]:
    return [torch.randn(3, 8) for _ in range(count)]


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], Any], Callable[[], AbstractContextManager[Any]], str]] = {
    "gradients": (gated, lambda: [one.requires_grad_() for one in tensors()], torch.enable_grad, "torch.no_grad()"),
    "autocast": (gated, tensors, lambda: torch.autocast("cpu", dtype=torch.bfloat16), "model.to(dtype)"),
    "class": (gated, lambda: (torch.randn(3, 8).as_subclass(Marked), torch.randn(3, 8)), nullcontext,
              "torch.nn.Parameter"),
    "x.data = y": (given_memory, tensors, nullcontext, "x.copy_(y)"),
    "device": (gated, lambda: torch.zeros(2, 3, 8, device="meta").unbind(), nullcontext, "use a CPU or a GPU"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_graph_that_stays_unfused_says_so_once_with_what_to_do(
    kind: str, said: Callable[[], list[str]], tmp_path: Path
) -> None:
    function, inputs, context, advice = REFUSED[kind]
    for number in range(3):
        torch._dynamo.reset()
        with context():
            compiled(function, tmp_path / "tuning.db")(*inputs())
        assert len(said()) == 1 and sum(fuseplan.planner.stats().fallbacks.values()) == number + 1, said()
    assert advice in said()[0] and "unfused" in said()[0]


@pytest.mark.parametrize("on_miss", ["model", "unfused"])
def test_the_first_miss_names_the_command_that_tunes_it(
    on_miss: str, said: Callable[[], list[str]], tmp_path: Path
) -> None:
    for function in (gated, lambda x, y: torch.tanh(x + y) * 2):
        compiled(function, tmp_path / "tuning.db", on_miss=on_miss)(*tensors())
    (line,) = said()
    assert "plan tune --misses" in line and fuseplan.planner.stats().misses == 2


def test_misses_that_cannot_be_stored_are_not_promised(said: Callable[[], list[str]], tmp_path: Path) -> None:
    (tmp_path / "in the way").touch()
    compiled(gated, tmp_path / "in the way" / "tuning.db")(*tensors())
    (line,) = [line for line in said() if "plan tune" in line]
    assert "needs a database that can be written" in line


@pytest.mark.parametrize("on_miss", ["model", "tune"])
@pytest.mark.parametrize("place", ["in the way", "in the way/tuning.db", "folder"])
def test_a_database_that_cannot_be_used_is_said_once_with_its_path(
    place: str, on_miss: str, said: Callable[[], list[str]], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "in the way").write_text("text")
    (tmp_path / "folder").mkdir()
    for function in (gated, lambda x, y: torch.tanh(x + y) * 2):
        compiled(function, tmp_path / place, on_miss=on_miss)(*tensors())
    lines = [line for line in said() if str(tmp_path / place) in line]
    assert len(lines) == 1 and "\n" not in lines[0], said()
    assert not [one for one in recwarn if issubclass(one.category, UserWarning)]
    assert not fuseplan.planner.stats().fallbacks and fuseplan.planner.stats().from_model == 2


def test_nothing_is_said_of_what_is_normal(said: Callable[[], list[str]], tmp_path: Path) -> None:
    db = tmp_path / "tuning.db"
    x, y = tensors()
    store_plans(gated, (x, y), db, ({},))
    for function in (gated, lambda x, y: x.t(), lambda x, y: torch.sort(x)[0], lambda x, y: x + y, lambda x, y: x):
        torch._dynamo.reset()
        compiled(function, db)(x, y)
    assert said() == [] and fuseplan.planner.stats().from_database == 1


def test_a_process_that_never_set_up_logging_shows_one_line(tmp_path: Path) -> None:
    script = f"""
import torch
def f(k, v):
    k[:, 2] = 1
    return torch.relu(v)
base = torch.zeros(4, 8)
for _ in range(2):
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(f, backend="fuseplan", options={{"db": {str(tmp_path / "t.db")!r}}})(base[:3], base[1:])
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=300, check=False
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 0 and "share memory" in line
