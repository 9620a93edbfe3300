"""What a core install can do on a CPU: all but what the extras are for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: Tunes, explains, compiles and reports where the packages of the extras cannot be found.
PROGRAM = """
import sys

EXTRAS = ("triton", "ninetoothed", "transformers", "matplotlib", "distributed", "psycopg")


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main(db):
    import importlib.util

    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] in EXTRAS else found(name, *rest)
    sys.meta_path.insert(0, Absent())
    import torch

    import fuseplan

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.up(x)) * x).softmax(-1).cumsum(1)

    model, x = Gated().eval(), torch.randn(3, 64)
    how = {"db": db, "device": "cpu"}
    tuned = fuseplan.tune(model, x, trials=1, seconds=0.2, inductor="off", **how)
    assert not tuned.result.failures and len(tuned.groups), tuned.result.failures
    assert str(fuseplan.explain(model, x, **how))
    with torch.no_grad():
        fast = torch.compile(model, backend="fuseplan", options={"db": db})
        torch.testing.assert_close(fast(x), model(x))
    stats = fuseplan.stats()
    assert stats.misses == 0 and stats.from_database > 0 and not stats.fallbacks, stats
    assert len(fuseplan.report(db=db, device="cpu").groups)
    assert not any(name in sys.modules for name in EXTRAS)


if __name__ == "__main__":
    main(sys.argv[1])
"""


def test_a_cpu_needs_no_extra(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    # The device is measured: two threads that wait for each other beside other tests would take three times as long.
    ran = subprocess.run([sys.executable, "program.py", str(tmp_path / "t.db")], cwd=tmp_path, capture_output=True,
                         text=True, timeout=240, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr[-2000:]
