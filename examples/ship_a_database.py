"""Tune on one machine, ship the plans as a file, and use them elsewhere without writing anything.

    python examples/ship_a_database.py [FOLDER]

1. `plan tune` measures a small block and stores its plan in FOLDER/tuning.db.
2. `plan db export` writes the plans to a file, which `plan db import` reads on the other machine.
3. The server opens that database read-only. Its stats say that nothing was missed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import fuseplan


class Block(nn.Module):
    """A gated feed-forward block, as in Llama."""

    def __init__(self, width: int = 64, inner: int = 128) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return hidden + x


def block() -> tuple[nn.Module, torch.Tensor]:
    """What `plan tune --module ship_a_database:block` plans: the module and an example of its input."""
    torch.manual_seed(0)
    return Block().eval(), torch.randn(4, 64)


def plan(*args: str | Path) -> None:
    """Run a `plan` command, as on a terminal."""
    print("$ plan", *args, flush=True)
    subprocess.run([sys.executable, "-m", "fuseplan.planner", *map(str, args)], check=True, cwd=Path(__file__).parent)


def main(folder: Path) -> None:
    tuned, bundle, served = folder / "tuning.db", folder / "plans.jsonl", folder / "served.db"
    plan("tune", "--module", "ship_a_database:block", "--trials", "2", "--device", "cpu", "--db", tuned)
    plan("db", "export", bundle, "--db", tuned)
    plan("db", "import", bundle, "--db", served)

    served.chmod(0o444)
    module, x = block()
    fast = torch.compile(module, backend="fuseplan", options={"db": served, "on_miss": "unfused"})
    with torch.no_grad():
        torch.testing.assert_close(fast(x), module(x))
    stats = fuseplan.stats()
    print(stats)
    assert stats.misses == 0 and stats.from_model == 0, stats


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
