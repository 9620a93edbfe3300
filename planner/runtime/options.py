"""Options of ``torch.compile(model, backend="fuseplan", options={...})``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.errors import ConfigError, nearest
from fuseplan.planner.runtime.lookup import OnMiss

Numerics = Literal["fp32", "eager"]
Regime = Literal["eager", "graph"]

#: What the names of ``torch.compile``'s modes ask for; Hugging Face's ``CompileConfig`` passes ``"reduce-overhead"``.
MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"cuda_graphs": True, "on_miss": "tune"},
    "max-autotune-no-cudagraphs": {"on_miss": "tune"},
}

_CHOICES = {"on_miss": get_args(OnMiss), "numerics": get_args(Numerics), "regime": get_args(Regime)}


@dataclass(frozen=True)
class DispatchOptions:
    """What the back end may be told; ``docs/options.md`` says more of each.

    Attributes:
        db: File or SQLAlchemy URL of the tuning database; None for the user's default file.
        on_miss: For a region without a tuned plan: ``"model"`` fuses as the cost model says (the fewest launches, where
            the device was never probed), ``"unfused"`` leaves it as it is, ``"measure"`` runs that plan beside plain
            ATen and TorchInductor for some seconds and stores nothing, ``"tune"`` tunes it now and stores the plan.
        log_misses: Store regions without a tuned plan in the database, with ops, shapes, dtypes and names of modules,
            so that ``plan tune --misses`` can tune them.
        numerics: ``"fp32"`` keeps intermediates of a group in fp32, except casts whose rounding the program can see;
            ``"eager"`` rounds where ATen rounds.
        regime: Which tuned plans to use: ``"eager"`` for launches from Python, ``"graph"`` for replay in a CUDA graph.
            None: ``"graph"`` with ``cuda_graphs``, else ``"eager"``. On a CPU always ``"eager"``.
        cuda_graphs: Replay each compiled graph as a CUDA graph, recorded in the second call of its kind. What cannot be
            recorded runs as usual, counted in ``stats().notes``.
        cuda_graphs_copy_outputs: Return results in memory of their own, not in memory that the next call overwrites.
        in_place: Let results take the memory of intermediates that nothing needs after that; they are the same bit for
            bit.
        grouped_queries: Let attention read keys and values that query heads share as they are. None: on GPUs where
            PyTorch has a fused back end that can, and in decoding on CPUs; True: in decoding on all GPUs, too; False:
            nowhere.
        attention_masks: Leave out masks that are constant and causal, or hide nothing. On GPUs turn a boolean mask into
            numbers once, and copy once a mask that no fused kernel reads where it lies.
        decode_attention: Let attention of one token read the pages of a cache where they lie, and be one op where its
            scores are capped. None: on GPUs, which have a kernel for both; True: on CPUs, too; False: nowhere.
        pack_weights: Let linear ops that read one value be one op: their parameters are moved side by side in memory.
            What cannot be moved is counted in ``stats().notes``. Such graphs have plans of their own: ``plan tune
            --pack-weights``.
        debug: Show every plan and compare each kernel with its ATen ops in its first call.
    """

    db: str | None = None
    on_miss: OnMiss = "model"
    log_misses: bool = True
    numerics: Numerics = "fp32"
    regime: Regime | None = None
    cuda_graphs: bool = False
    cuda_graphs_copy_outputs: bool = True
    in_place: bool = True
    grouped_queries: bool | None = None
    attention_masks: bool = True
    decode_attention: bool | None = None
    pack_weights: bool = False
    debug: bool = False

    def regime_on(self, device_type: str) -> Regime:
        """The regime whose plans a graph on this kind of device uses: on a CPU always ``"eager"``.

        >>> DispatchOptions(cuda_graphs=True).regime_on("cuda"), DispatchOptions(cuda_graphs=True).regime_on("cpu")
        ('graph', 'eager')
        """
        asked = self.regime or ("graph" if self.cuda_graphs else "eager")
        return asked if is_gpu(device_type) else "eager"


def parse_options(options: Mapping[str, Any] | None, mode: str | None = None) -> DispatchOptions:
    """The options of one ``torch.compile`` call; those given win over what the mode asks for.

    Raises:
        ConfigError: A mode, an option or a value is unknown; the message names the nearest one.

    >>> parse_options({"on_miss": "unfused"}).on_miss
    'unfused'
    >>> parse_options(None, mode="reduce-overhead").cuda_graphs
    True
    """
    mode = "default" if mode is None else mode
    if mode not in MODES:
        raise ConfigError(f"unknown mode {mode!r} of backend 'fuseplan'; known: {', '.join(MODES)}")
    given = {**MODES[mode], **(options or {})}
    known = {field.name: field.type for field in fields(DispatchOptions)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"unknown option {name!r} of backend 'fuseplan'; {_advice(str(name), known)}")
        choices = _CHOICES.get(name)
        if choices is not None and value not in choices and (name, value) != ("regime", None):
            advice = _advice(value if isinstance(value, str) else "", choices)
            raise ConfigError(f"option {name!r} cannot be {value!r}; {advice}")
        if known[name] == "bool" and not isinstance(value, bool):
            raise ConfigError(f"option {name!r} cannot be {value!r}; it is True or False")
        if known[name] == "bool | None" and not isinstance(value, bool | None):
            raise ConfigError(f"option {name!r} cannot be {value!r}; it is True, False or None")
    if given.get("db") is not None:
        given["db"] = _location(given["db"])
    return DispatchOptions(**given)


def _location(value: Any) -> str:
    """The database that the option ``db`` names."""
    text = os.fsdecode(value) if isinstance(value, str | os.PathLike) else ""
    if not text.strip():
        raise ConfigError(
            f"option 'db' cannot be {value!r}; it is the path of a file, a SQLAlchemy URL as text, or None")
    return text


def _advice(name: str, known: Any) -> str:
    close = nearest(name, known)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(known)}"
