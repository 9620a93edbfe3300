"""Print the host time of a CUDA graph replay of a model with many parameters; not a test, because it measures.

``python tests/checks/check_replay_gpu.py [PARAMETERS]`` replays a graph that uses that many tensors where they lie (300
when not given) and copies one small input in and one result out. It prints microseconds of host time a call: of the
whole call, and of its parts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fuseplan.kernels.gpu.direct import find_launcher, launcher_problem
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.runtime.cuda_graphs import GraphedCall, address_reader
from fuseplan.planner.runtime.cuda_recorder import cuda_recorder
from fuseplan.planner.runtime.replay_arguments import Roles

_CALLS = 200
_ROUNDS = 20


def host_us(call: Callable[[], Any]) -> float:
    """Least time of a call over rounds, none of which fills the device's queue."""
    best = float("inf")
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        best = min(best, (time.perf_counter() - start) / _CALLS)
    return best * 1e6


def main(parameters: int = 300) -> None:
    if not torch.cuda.is_available():
        sys.exit("check_replay_gpu.py needs a CUDA device")
    roles = Roles(kept=tuple(range(1, parameters + 1)), copied=(0,))
    args = tuple(torch.ones(8, device="cuda") for _ in range(parameters + 1))
    launcher, recorder = find_launcher(), cuda_recorder(torch.cuda.current_device())
    slow = address_reader(roles)
    fast = slow if launcher is None else launcher.address_reader(roles.kept, roles.held)
    if launcher is None:
        print(f"no extension: {launcher_problem()}")

    def function(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * weights[0],)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*args)
    call = GraphedCall(function, roles, recorder, Tally(), read_addresses=fast).__call__
    plain = GraphedCall(function, roles, recorder, Tally(), copy_outputs=False, read_addresses=fast).__call__
    for _ in range(3):
        call(*args)
        plain(*args)

    def turn() -> None:
        with recorder.turn():
            pass

    for label, work in {
        "whole call": lambda: call(*args),
        "whole call, results not copied": lambda: plain(*args),
        "replay alone": graph.replay,
        "copy in alone": lambda: args[0].copy_(args[1]),
        "addresses, extension": lambda: fast(args),
        "addresses, tensor by tensor": lambda: slow(args),
        "turn": turn,
        "busy": recorder.busy,
    }.items():
        print(f"{label:32} {host_us(work):8.2f} us")


if __name__ == "__main__":
    with torch.no_grad():
        main(*map(int, sys.argv[1:]))
