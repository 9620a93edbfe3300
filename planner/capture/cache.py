"""Captured graphs kept on disk: a second tune or bench of the same model neither traces nor imports ``transformers``.

A file is found by a hash of everything the graph depends on. One that cannot be read counts as absent.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import platformdirs
import torch
from torch._subclasses import fake_tensor

import fuseplan.kernels
from fuseplan.costmodel.devices import is_gpu, traced_on
from fuseplan.planner.capture.repeated_layers import traced_source, with_layers
from fuseplan.planner.capture.trace import Graphs, capture
from fuseplan.planner.graph.serialize import graph_from_json, graph_to_json
from fuseplan.planner.groups.regions import regions_to_json, set_regions
from fuseplan.planner.models.sources import ModelSource
from fuseplan.planner.models.workload import Workload
from fuseplan.search.timing.contest import no_collection

#: What a first capture imports, for seconds.
_IMPORTED = (
    "torch._dynamo", "torch._inductor.config", "transformers.generation", "transformers.modeling_layers",
    "transformers.modeling_utils", "transformers.models.auto.modeling_auto",
)
#: Folders whose sources decide what a captured graph looks like.
_CODE = (Path(__file__).parent.parent, Path(fuseplan.kernels.__path__[0]))


def warm_up() -> None:
    """Import what capturing a model of a config needs, as far as it is there, for processes that are forked later.

    What a model's module imports while the model is built makes its tensors on the model's device. Fake tensors need
    no context on a GPU but in a backward pass, and it takes many processes seconds.
    """
    for name in _IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    fake_tensor.init_gpu_context = functools.cache(lambda device: None)


def cached_capture(
    source: ModelSource, workload: Workload, device_type: str, pack_weights: bool = False, path: Path | None = None
) -> Graphs:
    """:func:`~fuseplan.planner.capture.trace.capture`, from disk when it was done before: ``path`` is its
    :func:`capture_path` where that is known.

    The user's own module is always captured: its code may have changed. Where the folder cannot be written nothing is
    kept.
    """
    if source.kind == "module":
        return capture(source, workload, device_type, pack_weights)
    path = path or capture_path(source, workload, device_type, pack_weights)
    found = _read(path)
    if found is None:
        found = _captured(source, workload, device_type, pack_weights)
        _write(path, found)
    return found


def _captured(source: ModelSource, workload: Workload, device_type: str, pack_weights: bool) -> Graphs:
    """A capture, of a few layers where all others are like these."""
    if (few := traced_source(source)) is not None:
        short, count = few
        found = [with_layers(graph, count) for graph in capture(short, workload, device_type, pack_weights)]
        graphs = tuple(one for one in found if one is not None)
        if len(graphs) == len(found):
            return graphs
    return capture(source, workload, device_type, pack_weights)


def capture_to_disk(
    source: ModelSource, workload: Workload, device_type: str, pack_weights: bool, path: Path
) -> None:
    """Capture in a process that does nothing else, and has not to ask the device for its name."""
    with no_collection():  # it would copy every page that is shared with the process this one is forked from
        cached_capture(source, workload, device_type, pack_weights, path)


def graphs_of_text(text: str) -> Graphs:
    """Graphs as they were written; ValueError, KeyError or TypeError where text has another form."""
    # A file holds a hundred thousand lists, none of them garbage: the collector would look through them for longer
    # than it takes to read them.
    with no_collection():
        data = json.loads(text)
        graphs = tuple(map(graph_from_json, data["graphs"]))
        for graph, found in zip(graphs, data.get("regions", ()), strict=False):
            set_regions(graph, found)
        return graphs


def capture_path(source: ModelSource, workload: Workload, device_type: str, pack_weights: bool = False) -> Path:
    """The file in the user's cache folder that holds the capture, or will hold it."""
    key = capture_key(source, workload, device_type, pack_weights)
    return platformdirs.user_cache_path("fuseplan") / "captures" / f"{key}.json"


def capture_key(source: ModelSource, workload: Workload, device_type: str, pack_weights: bool = False) -> str:
    """sha256 of everything a captured graph depends on. The path of a config file is not among it."""
    facts = {
        "source": dataclasses.asdict(dataclasses.replace(source, name="", made=None)),
        "workload": dataclasses.asdict(workload),
        "pack_weights": pack_weights,
        "device": torch.cuda.get_device_name() if is_gpu(traced := traced_on(device_type)) else traced,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "code": _code_hash(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _code_hash(folders: Sequence[Path] = _CODE) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> Graphs | None:
    try:
        return graphs_of_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, graphs: Graphs) -> None:
    """Write beside the target and rename: a reader never sees half a file."""
    with suppress(OSError, ValueError):
        text = json.dumps({
            "graphs": list(map(graph_to_json, graphs)), "regions": list(map(regions_to_json, graphs))})
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
