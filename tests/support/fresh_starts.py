"""How long the first tokens of ``generate()`` take in a process that has compiled nothing yet.

Run as a program it is that process: an :class:`Order` as JSON on its input (a database's URL may hold a password), and
the seconds from the call to each token as JSON on the last line of its output. Building the model is not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from generation import Generation, Sizes, how_compiled

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.peers.contestant import PeerError

#: Seconds that such a process may take, building the model included.
_LIMIT_S = 3600
#: Where compilers keep what they compiled: TorchInductor, Triton, and all of ours (the database is no cache).
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Order:
    """What a fresh process generates, and who; ``options`` are those of our back end."""

    source: ModelSource
    sizes: Sizes
    name: str
    device_type: str
    options: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Order:
        found = json.loads(text)
        return Order(**{**found, "source": ModelSource(**found["source"]), "sizes": Sizes(**found["sizes"])})


def fresh_times(order: Order, cold: bool = False) -> list[float]:
    """Seconds from the call of ``generate()`` to each of its tokens, in a process of its own.

    With ``cold`` the caches on disk are empty ones; otherwise they are as other processes left them.

    Raises:
        PeerError: The process failed; the message has its last line.
    """
    with tempfile.TemporaryDirectory() if cold else nullcontext() as folder:
        caches = ["env", *(f"{name}={Path(folder) / name.lower()}" for name in _CACHES)] if folder else []
        try:
            done = subprocess.run(
                [*caches, sys.executable, __file__], input=order.to_json(), capture_output=True, text=True,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise PeerError(f"fresh process: not done after {_LIMIT_S} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise PeerError(f"fresh process: exit status {done.returncode}: {last[:200]}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


@dataclass
class Stopwatch:
    """A streamer that notes when tokens arrive; ``generate()`` gives it the prompt first."""

    start: float = field(default_factory=time.perf_counter)
    puts: list[float] = field(default_factory=list)

    def put(self, tokens: torch.Tensor) -> None:
        """Called with tokens on the host: the device is done with them."""
        self.puts.append(time.perf_counter() - self.start)

    def end(self) -> None:
        """Nothing is left to be shown."""

    @property
    def tokens(self) -> list[float]:
        """Seconds to each token."""
        return self.puts[1:]


def serve(order: Order) -> list[float]:
    """Build the model, and generate once."""
    module = build_model(order.source, order.device_type).module
    run = Generation(order.name, module, order.sizes, how_compiled(order.name, order.device_type, order.options))
    if is_gpu(order.device_type):
        torch.cuda.synchronize()
    watch = Stopwatch()
    run(streamer=watch)
    return watch.tokens


if __name__ == "__main__":
    print(json.dumps(serve(Order.from_json(sys.stdin.read()))))
