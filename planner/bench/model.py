"""Our plan of a model beside eager and TorchInductor, on the same weights and inputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from fuseplan.costmodel.devices import is_gpu
from fuseplan.costmodel.probe.timing import cuda_graph
from fuseplan.planner.bench.rows import BenchRow, Race
from fuseplan.planner.dispatch_stats import CompileStats, reset_stats, stats
from fuseplan.planner.implementations.inductor import inductor_settings
from fuseplan.planner.models.build import Model, cache_name, rewind
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.peers.contestant import EAGER, MAX_AUTOTUNE, OURS
from fuseplan.planner.peers.peers import without_chatter
from fuseplan.planner.tuning.session import Session
from fuseplan.search.errors import counted
from fuseplan.search.timing.timers import Operands, Run, Sampler, Timer
from fuseplan.search.timing.verify import errors

#: A sample is at least this long, so that the clock's resolution and one stray interrupt do not show.
_SAMPLE_US = 20_000.0
_MAX_CALLS = 200


class ForwardTimer(Timer):
    """Times whole forward passes, in the graph regime replayed from a CUDA graph of one.

    A pass is a partial whose KV cache is a keyword. The cache is put back between samples, outside the measured time.
    """

    def __init__(self, device_type: str, workload: Workload, regime: str = "eager") -> None:
        self.device_type, self.workload = device_type, workload
        self.regime = regime  # type: ignore[misc]

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        assert isinstance(run, partial)
        go = self._recorded(run) if self.regime == "graph" else self._warm(run)

        def sample(calls: int) -> float:
            rewind(run.keywords, self.workload)
            return self._time(go, calls)

        # No more calls than the other half of a cache has room for.
        most = max(1, self.workload.kv_len // 2 - 1) if self.workload.kv_len else _MAX_CALLS
        calls = math.ceil(_SAMPLE_US / max(sample(1), 1.0))
        return partial(sample, calls=min(most, _MAX_CALLS, calls))

    def _warm(self, run: partial[Any]) -> Callable[[], object]:
        for _ in range(2):
            rewind(run.keywords, self.workload)
            run()
        return run

    def _recorded(self, run: partial[Any]) -> Callable[[], object]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._warm(run)
        torch.cuda.current_stream().wait_stream(stream)
        rewind(run.keywords, self.workload)
        with cuda_graph() as graph:
            run()
        return graph.replay

    def _time(self, go: Callable[[], object], calls: int) -> float:
        """Microseconds per call, until the device is done; in a graph, of the device alone."""
        if self.regime == "graph":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                go()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3 / calls
        synchronise(self.device_type)
        start = time.perf_counter()
        for _ in range(calls):
            go()
        synchronise(self.device_type)
        return (time.perf_counter() - start) * 1e6 / calls


def bench_model(
    session: Session, model: Model, workload: Workload, peers: Sequence[str], modes: Sequence[str], seconds: float
) -> list[BenchRow]:
    """Rows of the whole model in every mode. A contestant that fails gets a row that says why."""
    race = Race(BenchRow, workload=workload.label, subject="model")
    expected: list[torch.Tensor] = []
    torch._dynamo.reset()
    with torch.no_grad():
        # The same prompt for everyone; each contestant writes into a cache of its own.
        args, kwargs = model.example(workload)

        def make(name: str) -> tuple[Run, dict[str, Any]]:
            own = dict(kwargs)
            if cache := cache_name(own):
                own[cache] = model.example(workload)[1][cache]
            reset_stats()
            forward = partial(_compiled(session, model, name), *args, **own)
            with without_chatter() if name == MAX_AUTOTUNE else nullcontext():
                output = first_tensor(forward()).cpu()
            if not expected:
                expected.append(output.double())
            note = dispatch_note(stats()) if name == OURS else ""
            return forward, {"error": errors(output, expected[0])[0], "note": note}

        race.enter((EAGER, OURS, *(peer for peer in peers if peer != EAGER)), make)
        timers = [ForwardTimer(session.target.device_type, workload, mode) for mode in modes]
        return [row for timer in timers for row in race.rows(timer, [()], seconds)]


def _compiled(session: Session, model: Model, name: str) -> Callable[..., Any]:
    if name == EAGER:
        return model.module
    if name == OURS:
        ours = dispatch_options(session) | {"regime": session.settings.regime}
        return torch.compile(model.module, backend="fuseplan", dynamic=False, options=ours)
    options = inductor_settings("max-autotune" if name == MAX_AUTOTUNE else "default")
    return torch.compile(model.module, dynamic=False, options=options)


def dispatch_options(session: Session) -> dict[str, Any]:
    """The options of our back end: the database of the plans, and their numerics."""
    return {
        "db": session.database.url.render_as_string(hide_password=False), "numerics": session.settings.numerics,
    }


def synchronise(device_type: str) -> None:
    """Wait for the device."""
    if is_gpu(device_type):
        torch.cuda.synchronize()


def first_tensor(output: Any) -> torch.Tensor:
    """The first floating-point tensor of a model's output (the logits); ValueError without one."""
    leaves = torch.utils._pytree.tree_leaves(output)
    for leaf in (*leaves, *(output.values() if isinstance(output, Mapping) else ())):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError("the model returns no floating-point tensor, so its output cannot be compared")


def dispatch_note(seen: CompileStats) -> str:
    """What dispatch did, so that a miss cannot pass for a result of the plan."""
    words = f"{counted(seen.from_database, 'group')} from the database"
    words += f", {seen.from_model} by the model" if seen.from_model else ""
    words += f", {counted(seen.misses, 'miss', 'misses')}" if seen.misses else ""
    words += f", {seen.unfused} fell back: {'; '.join(seen.fallbacks)[:150]}" if seen.fallbacks else ""
    words += f", {counted(seen.recordings, 'CUDA graph')} recorded" if seen.recordings else ""
    words += f"; {'; '.join(seen.notes)[:150]}" if seen.notes else ""
    return words
