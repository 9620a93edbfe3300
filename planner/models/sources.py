"""The models that can be planned: named presets, any local Hugging Face config, the user's own module.

No weights are read: a plan depends on shapes only. ``transformers`` is imported when a model is asked for.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fuseplan.costmodel.devices import ByDevice
from fuseplan.planner.errors import Argument, ConfigError, UnknownModelError, in_words, meant
from fuseplan.planner.models.workload import LARGEST, Workload, parse_workloads, with_calls

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: PyTorch's name of each dtype that weights may have, by that and by its short name.
DTYPES = {name: name for name in _SHORT.values()} | _SHORT
#: Entries of a Hugging Face config.json.
ConfigEntries: TypeAlias = Mapping[str, Any]


def _llama3(
    rope_factor: float, hidden: int, intermediate: int, layers: int, heads: int, tied: bool = False
) -> ConfigEntries:
    """A Llama 3.1 or 3.2 config."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": hidden // heads, "vocab_size": 128256,
        "tie_word_embeddings": tied, "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "bos_token_id": 128000, "eos_token_id": 128001,
        "rope_scaling": {
            "rope_type": "llama3", "factor": rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


#: Preset name to config.json entries.
PRESETS: Mapping[str, ConfigEntries] = {
    "llama-3.2-1b": _llama3(32.0, hidden=2048, intermediate=8192, layers=16, heads=32, tied=True),
    "llama-3.1-8b": _llama3(8.0, hidden=4096, intermediate=14336, layers=32, heads=32),
    "llama-3.1-70b": _llama3(8.0, hidden=8192, intermediate=28672, layers=80, heads=64),
}

#: Names that stand for another preset.
ALIASES: Mapping[str, ByDevice[str]] = {"llama": ByDevice(cpu="llama-3.2-1b", gpu="llama-3.1-8b")}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. Build one with :func:`find_source`.

    Attributes:
        name: Preset name, file path, or ``package.module:factory``; of a module at hand what reports call it.
        config_json: The Hugging Face config as canonical JSON text; empty for a factory.
        dtype: Of the weights; None leaves a factory's module as it is.
        layers: Number of layers instead of the config's own.
        made: Gives a module at hand, in the place of a factory, with its example inputs.
    """

    kind: Literal["preset", "config", "module"]
    name: str
    config_json: str = ""
    dtype: str | None = None
    layers: int | None = None
    made: Callable[[], tuple[Any, Any]] | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """Short name for tables and records."""
        path = Path(self.name)
        folder = path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")
        base = (folder or self.name) if self.kind == "config" else self.name
        return f"{base}:{self.layers}L" if self.layers else base


def alias_of(preset: str, device_type: str) -> str:
    """The preset that a name stands for on a kind of device."""
    return ALIASES[preset].on(device_type) if preset in ALIASES else preset


def find_source(
    model: str | None = None, config: str | Path | None = None, module: str | None = None, device_type: str = "cpu",
    dtype: str | None = None, layers: int | None = None,
) -> ModelSource:
    """The source that one of ``model``, ``config`` and ``module`` names, by default the preset ``llama``.

    UnknownModelError where no preset has that name, ConfigError for other mistakes.
    """
    if sum(flag is not None for flag in (model, config, module)) > 1:
        raise ConfigError("give one of {}, {} and {}, not several", *map(Argument, ("model", "config", "module")))
    if layers is not None and layers < 1:
        raise ConfigError("{} {}: a model has at least one layer", Argument("layers"), layers)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError("{} {!r} is not one of bfloat16, float16, float32", Argument("dtype"), dtype)
    name = DTYPES[dtype] if dtype else None
    if module is not None:
        if layers is not None:
            raise ConfigError("{} needs a config; {} brings its own layers", Argument("layers"), Argument("module"))
        return ModelSource("module", module, dtype=name)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("presets and configs are models of Hugging Face's transformers, which is not installed; pip "
                          "install 'fuseplan[models]'")
    if config is not None:
        path = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
        return source_of(parsed_file(path, "config", "JSON", json.loads), str(config), name, layers)
    preset = alias_of("llama" if model is None else model, device_type)
    if preset not in PRESETS:
        raise UnknownModelError(preset, [*PRESETS, *ALIASES])
    return ModelSource("preset", preset, json.dumps(PRESETS[preset], sort_keys=True), name or "bfloat16", layers)


def source_of(entries: Any, name: str, dtype: str | None = None, layers: int | None = None) -> ModelSource:
    """The source with these entries of a config.json, which messages call ``name``; ConfigError where it is none."""
    if not isinstance(entries, dict) or not isinstance(entries.get("model_type"), str):
        raise ConfigError(f'config {name} has no "model_type"; it must be a Hugging Face config.json')
    classes = entries.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(one, str) for one in classes):
        raise ConfigError(f"config {name}: architectures is no list of names")
    _check_numbers(entries, name)
    given = str(entries.get("dtype") or entries.get("torch_dtype") or "auto")
    dtype = dtype or {**DTYPES, "auto": "bfloat16"}.get(given.removeprefix("torch."))
    if dtype is None:
        raise ConfigError("config {}: dtype {!r} cannot be planned; give {} bfloat16", name, given[:40],
                          Argument("dtype"))
    return ModelSource("config", name, json.dumps(entries, sort_keys=True), dtype, layers)


def parsed_file(path: Path, what: str, language: str, parse: Callable[[str], Any]) -> Any:
    """What a user's file holds; ConfigError where it cannot be read or is not in this language."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror or error}") from None
    except RecursionError:
        raise ConfigError(f"{what} {path} is nested too deeply") from None
    except ValueError as error:  # also of what is no UTF-8
        raise ConfigError(f"{what} {path} is not {language}: {in_words(error)}") from None


#: No model has more layers; one that says so would be captured for hours.
_MOST_LAYERS = 4096
#: Entries of a config that are sizes, by their usual names.
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size",
)


def _check_numbers(entries: ConfigEntries, name: str) -> None:
    """Refuse numbers that no model has, before libraries count up to them."""
    for key, value in entries.items():
        most = _MOST_LAYERS if re.search(r"layers?$", key) else LARGEST
        if isinstance(value, int) and value > most:
            raise ConfigError(f"config {name}: {key} is {str(value)[:40]}, and the most that can be planned is {most}")
        if isinstance(value, dict):
            _check_numbers(value, name)


def hf_config(source: ModelSource) -> Any:
    """The Hugging Face config of a preset or config source; ConfigError where ``transformers`` does not take it."""
    from transformers import CONFIG_MAPPING, AutoConfig

    entries = json.loads(source.config_json)
    model_type = entries.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        hint = meant(model_type, CONFIG_MAPPING)
        raise ConfigError(f"config {source.name}: transformers knows no model_type {model_type[:60]!r}"
                          + (hint and f"; {hint}"))
    try:
        with quiet():
            config = AutoConfig.for_model(model_type, **entries)
            text = config.get_text_config(decoder=True)
    except Exception as error:
        raise ConfigError(f"config {source.name}: {in_words(error)}") from None
    for key in _SIZES:
        value = getattr(text, key, None)
        stages = value if isinstance(value, list | tuple) and value else [value]  # Swin has a size for each
        if value is not None and any(type(one) is not int or one < 1 for one in stages):
            raise ConfigError(f"config {source.name}: {key} is {str(value)[:40]!r}, which is no positive whole number")
    if source.layers is not None:
        # Of the (text) config; num_hidden_layers maps to the model's own name for their number.
        if source.layers > text.num_hidden_layers:
            raise ConfigError("{} {}: this config describes only {} layers", Argument("layers"), source.layers,
                              text.num_hidden_layers)
        computed = isinstance(getattr(type(text), "layer_types", None), property)  # Mamba's, from their number
        if not computed and getattr(text, "layer_types", None) is not None:
            text.layer_types = text.layer_types[: source.layers]
        text.num_hidden_layers = source.layers
    return config


@contextmanager
def quiet() -> Iterator[None]:
    """Only errors from ``transformers`` meanwhile: what it says is meant for who trains or generates."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def generates(source: ModelSource) -> bool:
    """True for a decoder that generates tokens; False for an encoder such as BERT, and for both in one, such as T5."""
    entries = json.loads(source.config_json)
    if entries.get("is_encoder_decoder"):
        return False
    head = next(map(str, entries.get("architectures") or ()), "")
    if head.endswith(("ForCausalLM", "LMHeadModel")):
        return True
    if head and not head.endswith("ForConditionalGeneration"):
        return False
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    model_type = entries["model_type"]
    silent = "is_encoder_decoder" not in entries and model_type in CONFIG_MAPPING
    if silent and getattr(CONFIG_MAPPING[model_type], "is_encoder_decoder", False):
        return False
    # Without architectures, models that have a masked head too are encoders.
    encoder_too = model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not entries.get("is_decoder")
    return bool(head) or (model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not encoder_too)


def workloads_for(
    source: ModelSource, device_type: str, decode_batches: str | None = None, kv_len: int | None = None,
    prefills: str | None = None, calls: bool = False,
) -> tuple[Workload, ...]:
    """The workloads to plan for this model, from arguments or defaults (see :func:`parse_workloads`).

    The user's own module has one, its example inputs; an encoder has no decode. ``calls`` adds those of
    :func:`with_calls`. ConfigError where the model does not take such sizes.
    """
    if source.kind == "module":
        if any(option is not None for option in (decode_batches, kv_len, prefills)):
            raise ConfigError("{}, {} and {} need a config; {} brings its own example inputs",
                              *map(Argument, ("decode", "kv_len", "prefill", "module")))
        return (Workload("forward"),)
    found = parse_workloads(device_type, decode_batches, kv_len, prefills)
    decoder = generates(source)
    if not decoder:
        if decode_batches:
            raise ConfigError("{} does not generate by itself: it has no decode; give {} only", source.name,
                              Argument("prefill"))
        found = tuple(workload for workload in found if workload.regime != "decode")
    return with_calls(found, decoder) if calls else found
