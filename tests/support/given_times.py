"""Commands at their real paths in seconds: times are given, searches try one configuration, models are small.

Nothing is timed. The device's numbers are those of the samples, a call of ours or of ATen counts as long as the ops it
makes, TorchInductor runs a graph as it is, and every preset is the same model of two layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
import torch
from inline_executor import InlineExecutor
from torch.utils._python_dispatch import TorchDispatchMode

from fuseplan.costmodel.identity import current_identity
from fuseplan.costmodel.probe import probe
from fuseplan.planner.bench import fresh, generation, model, synthetic
from fuseplan.planner.cli.bench import patterns as bench_patterns
from fuseplan.planner.groups.candidates import CandidateLimits
from fuseplan.planner.models import sources, workload
from fuseplan.planner.patterns import cells
from fuseplan.planner.tuning import session
from fuseplan.planner.tuning.settings import PlanSettings
from fuseplan.search.timing.timers import CpuTimer, Operands, Run, Sampler
from fuseplan.search.tune import tuner

#: The config of every model.
LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 1024, "eos_token_id": None,
}
#: What is planned of a model unless sizes are given: ``--decode``, ``--kv-len`` and ``--prefill``.
SIZES = ("1", 64, "16")
#: Hardly any search: what is found is no matter here.
QUICK = tuner.Budget(trials=1, steep_trials=1, seconds=0.1, screen_s=0.002, decide_s=0.01, finalists=1)
#: Ops of a group and groups of a region: the most that are looked at.
GROUPS = (40, 8)
#: Ops of the graphs that show how planning scales; cells of a sweep over patterns.
GRAPHS, CELLS = (100, 200, 400), 2


def write_model(folder: Path) -> None:
    """The config as a folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))


def counted(self: CpuTimer, run: Run, operands: Operands) -> Sampler:
    """In the place of a timer: a microsecond, and five for each op that ATen runs."""
    ops = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal ops
            ops += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        run(*operands[0])
    return lambda: 1.0 + 5.0 * ops


def give_times(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, tunes and benches of this process take seconds."""
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    patch.setattr(torch.cuda, "is_available", lambda: False)
    _tunes(patch)
    _benches(patch)


def _tunes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session, "probe", lambda kind, *_: replace(samples.SPEC, identity=current_identity(kind)))
    patch.setattr(tuner, "make_pool", lambda _: InlineExecutor())
    patch.setattr(tuner.Budget, "on", lambda *_: QUICK)
    patch.setattr(PlanSettings, "measured_on", lambda *_: 1)
    patch.setattr(CpuTimer, "prepare", counted)
    patch.setattr(CpuTimer, "steady", lambda _: True)
    patch.setattr(CpuTimer, "disturbances", lambda _: 0)
    patch.setattr(probe, "machine_load", lambda: probe.MachineLoad(0.0, 2))
    patch.setattr(CandidateLimits.__init__, "__defaults__", GROUPS)
    patch.setattr(sources, "PRESETS", dict.fromkeys(sources.PRESETS, LLAMA))
    patch.setattr(workload, "_DEFAULTS", {**workload._DEFAULTS, "cpu": SIZES})


def _benches(patch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    def as_it_is(graph: Any, inputs: Sequence[Any], **_: Any) -> Any:
        return graph

    def sweep(*asked: Any) -> tuple[list[cells.Cell], list[str]]:
        found, left_out = every_cell(*asked)
        return found[:CELLS], left_out

    every_cell = cells.sweep_cells
    small = {(name, shape.replace("10000000", "1024"), dtype): said
             for (name, shape, dtype), said in bench_patterns._HEADLINES.items()}
    patch.setattr(bench_patterns, "_HEADLINES", small)
    patch.setattr(compile_fx, "compile_fx", as_it_is)
    patch.setattr(cells, "sweep_cells", sweep)
    patch.setattr(synthetic, "plan_scaling", partial(synthetic.plan_scaling, sizes=GRAPHS))
    patch.setattr(model.ForwardTimer, "_time", lambda self, go, calls: 100.0)
    patch.setattr(generation.TokenTimer, "_us", lambda self, run, new: 1000.0 + 100.0 * new)
    # In this process, whose compilers are those above.
    patch.setattr(fresh, "fresh_times", lambda order, cold: fresh.serve(fresh.Order.from_json(order.to_json())))
