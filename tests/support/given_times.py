"""Every command in seconds, on its real path: times are given, and models are small.

Tunes count (`fast_tunes.py`), the device's numbers are those of the samples, TorchInductor runs a graph as it is, and
every preset is the model of two layers that the reader has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
import torch
from fast_tunes import count_instead_of_timing

from fuseplan.costmodel.devices import ByDevice
from fuseplan.costmodel.identity import current_identity
from fuseplan.planner.bench import model
from fuseplan.planner.capture import cache
from fuseplan.planner.models import sources, workload
from fuseplan.planner.patterns import cells
from fuseplan.planner.tuning import session

#: The config of every model. A bench takes two layers unless it is told otherwise.
LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 1024, "eos_token_id": None,
}
#: What is planned of a model unless sizes are given: ``--decode``, ``--kv-len`` and ``--prefill``.
SIZES = ("1", 64, "16")
#: Cells of a sweep over patterns.
CELLS = 2


def write_model(folder: Path) -> None:
    """The config as a folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))


def give_times(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, tunes and benches of this process take seconds."""
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    patch.setattr(torch.cuda, "is_available", lambda: False)
    _tunes(patch)
    _benches(patch)


def _tunes(patch: pytest.MonkeyPatch) -> None:
    key = cache.capture_key  # a preset and the reader's model are one config: it is captured once
    count_instead_of_timing(patch)
    patch.setattr(session, "probe", lambda kind, *_: replace(samples.SPEC, identity=current_identity(kind)))
    patch.setattr(sources, "PRESETS", dict.fromkeys(sources.PRESETS, LLAMA))
    patch.setattr(cache, "capture_key", lambda source, *rest: key(replace(source, kind="config", dtype=None), *rest))
    patch.setattr(workload, "_DEFAULTS", ByDevice(SIZES, SIZES))


def _benches(patch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    def as_it_is(graph: Any, inputs: Sequence[Any], **_: Any) -> Any:
        return graph

    def sweep(*asked: Any) -> tuple[list[cells.Cell], list[str]]:
        found, left_out = every_cell(*asked)
        return found[:CELLS], left_out

    every_cell = cells.sweep_cells
    patch.setattr(compile_fx, "compile_fx", as_it_is)
    patch.setattr(cells, "sweep_cells", sweep)
    patch.setattr(model.ForwardTimer, "_time", lambda self, go, calls: 100.0)
