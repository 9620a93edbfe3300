"""A whole model end to end: our plan beside eager and TorchInductor, on the same weights and inputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from fuseplan.costmodel.probe.timing import cuda_graph
from fuseplan.planner.bench.rows import BenchRow, failure, mode_rows
from fuseplan.planner.dispatch_stats import reset_stats, stats
from fuseplan.planner.models.build import Model
from fuseplan.planner.models.examples import rewind
from fuseplan.planner.models.workload import Workload
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE, OURS
from fuseplan.planner.peers.inductor import without_chatter
from fuseplan.planner.tuning.session import Session
from fuseplan.search.timing.timers import Operands, Run, Sampler, Timer
from fuseplan.search.timing.verify import errors

#: A sample is at least this long, so that the clock's resolution and one stray interrupt do not show.
_SAMPLE_US = 20_000.0
_MAX_CALLS = 200


@dataclass
class Forward:
    """One contestant: the (compiled) model's call on fixed arguments, with a KV cache of its own to put back."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    workload: Workload = field(default_factory=lambda: Workload("forward"))

    def __call__(self) -> Any:
        return self.call(*self.args, **self.kwargs)

    def rewind(self) -> None:
        """Make room in the cache again."""
        rewind(self.kwargs, self.workload)

    @property
    def room(self) -> int:
        """Calls between two rewinds."""
        return max(1, self.workload.kv_len // 2 - 1) if self.workload.kv_len else _MAX_CALLS


class ForwardTimer(Timer):
    """Times whole forward passes; the cache is put back between samples, outside the measured time."""

    regime = "eager"

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        assert isinstance(run, Forward)
        go = self._callable(run)
        run.rewind()
        calls = self._calls(run, self._time(go, 1))

        def sample(number: int) -> float:
            run.rewind()
            return self._time(go, calls)

        return sample

    def _callable(self, run: Forward) -> Callable[[], object]:
        for _ in range(2):
            run.rewind()
            run()
        return run

    def _calls(self, run: Forward, once_us: float) -> int:
        return max(1, min(run.room, _MAX_CALLS, math.ceil(_SAMPLE_US / max(once_us, 1.0))))

    def _time(self, go: Callable[[], object], calls: int) -> float:
        """Microseconds per call."""
        self._synchronise()
        start = time.perf_counter()
        for _ in range(calls):
            go()
        self._synchronise()
        return (time.perf_counter() - start) * 1e6 / calls

    def _synchronise(self) -> None:
        if self.device_type == "cuda":
            torch.cuda.synchronize()


class ForwardGraphTimer(ForwardTimer):
    """The same with the forward pass captured in a CUDA graph and replayed."""

    regime = "graph"

    def __init__(self) -> None:
        super().__init__("cuda")

    def _callable(self, run: Forward) -> Callable[[], object]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            super()._callable(run)
        torch.cuda.current_stream().wait_stream(stream)
        run.rewind()
        with cuda_graph() as graph:
            run()
        return graph.replay

    def _time(self, go: Callable[[], object], calls: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            go()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / calls


def bench_model(
    session: Session, model: Model, workload: Workload, peers: Sequence[str], modes: Sequence[str], seconds: float
) -> Iterator[BenchRow]:
    """Rows of the whole model in every mode. A contestant that fails gets a row that says why."""
    common: dict[str, Any] = {"workload": workload.label, "subject": "model"}
    runs: dict[str, Run] = {}
    facts: dict[str, dict[str, Any]] = {}
    expected: torch.Tensor | None = None
    torch._dynamo.reset()
    with torch.no_grad():
        # The same prompt for everyone; each contestant writes into a cache of its own.
        args, kwargs = model.example(workload)
        for name in (EAGER, OURS, *(peer for peer in peers if peer != EAGER)):
            start = time.perf_counter()
            own = dict(kwargs)
            if "past_key_values" in own:
                own["past_key_values"] = model.example(workload)[1]["past_key_values"]
            reset_stats()
            try:
                forward = Forward(_compiled(session, model, name), args, own, workload)
                with without_chatter() if name == MAX_AUTOTUNE else nullcontext():
                    output = first_tensor(forward())
            except Exception as error:  # a peer that cannot compile the model must not end the bench
                note = failure(error)
                yield from (BenchRow(contestant=name, mode=mode, note=note, **common) for mode in modes)
                continue
            expected = output if expected is None else expected
            runs[name] = forward
            facts[name] = {
                "compile_s": time.perf_counter() - start,
                "error": errors(output.cpu(), expected.cpu().double())[0],
                "note": _plan_note() if name == OURS else "",
            }
        for mode in modes:
            timer = ForwardGraphTimer() if mode == "graph" else ForwardTimer(session.target.device_type)
            yield from mode_rows(timer, runs, [()], seconds, facts, **common)


def _compiled(session: Session, model: Model, name: str) -> Callable[..., Any]:
    if name == EAGER:
        return model.module
    if name == OURS:
        options: dict[str, Any] = {
            "db": session.database.url.render_as_string(hide_password=False), "numerics": session.settings.numerics,
            "regime": session.settings.regime,
        }
        return torch.compile(model.module, backend="fuseplan", dynamic=False, options=options)
    if name == INDUCTOR:
        return torch.compile(model.module, dynamic=False)
    choices = {**torch._inductor.list_mode_options("max-autotune-no-cudagraphs"), "autotune_num_choices_displayed": 0}
    return torch.compile(model.module, dynamic=False, options=choices)


def first_tensor(output: Any) -> torch.Tensor:
    """The first floating-point tensor of a model's output (the logits).

    Raises:
        ValueError: There is none.
    """
    leaves = torch.utils._pytree.tree_leaves(output)
    for leaf in (*leaves, *(output.values() if isinstance(output, Mapping) else ())):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError("the model returns no floating-point tensor, so its output cannot be compared")


def _plan_note() -> str:
    """What dispatch did, so that a miss cannot pass for a result of the plan."""
    seen = stats()
    words = f"{seen.from_database} groups from the database"
    words += f", {seen.from_model} by the model" if seen.from_model else ""
    words += f", {seen.misses} misses" if seen.misses else ""
    words += f", {seen.unfused} fell back: {'; '.join(seen.fallbacks)[:150]}" if seen.fallbacks else ""
    return words
