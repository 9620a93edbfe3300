"""Example arguments of one call of a Hugging Face model: tokens, images or sound, masks, caches as it makes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fuseplan.planner.errors import ConfigError
from fuseplan.planner.models.workload import Workload

#: Names under which models take and return a cache.
_CACHES = ("past_key_values", "cache_params")


def example_call(
    module: nn.Module, config: Any, workload: Workload, device: torch.device, generates: bool
) -> dict[str, Any]:
    """Keyword arguments of a prefill or of a decode call, whose static cache is half full.

    A decode runs the model once on a token, so that it makes its cache as it needs it. A model that takes something
    else, or keeps no cache, is a :class:`ConfigError`.
    """
    found: dict[str, Any] = _inputs(module, config, workload, device, generates)
    if workload.masked and "attention_mask" in _parameters(module) and "input_ids" in found:
        found["attention_mask"] = torch.ones_like(found["input_ids"])
    if workload.regime == "decode":
        return {**found, **_half_full_cache(module, config, workload, found["input_ids"]), "use_cache": True}
    if generates or config.is_encoder_decoder:
        found["use_cache"] = False
    return found


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


def _inputs(
    module: nn.Module, config: Any, workload: Workload, device: torch.device, generates: bool
) -> dict[str, torch.Tensor]:
    """What the model reads, by the names of its arguments."""
    names = {str(getattr(module, "main_input_name", "input_ids"))}
    if not generates and hasattr(config, "text_config") and hasattr(config, "vision_config"):
        names = {"input_ids", "pixel_values"}
    if config.is_encoder_decoder:
        if "decoder_input_ids" not in _parameters(module):  # which may yet pass on what it does not know
            raise ConfigError(f"{config.model_type} has no encoder beside its decoder; leave out is_encoder_decoder")
        names.add("decoder_input_ids")
    return {name: _input(name, module, config, workload, device) for name in sorted(names, reverse=True)}


#: Width and height of images that a model takes in any size.
_IMAGE = 224


def _input(name: str, module: nn.Module, config: Any, workload: Workload, device: torch.device) -> torch.Tensor:
    dtype = next(module.parameters()).dtype
    if name in ("input_ids", "decoder_input_ids"):
        words = config.get_text_config(decoder=True).vocab_size
        return torch.randint(0, words, (workload.batch, workload.seq), device=device)
    if name == "pixel_values":
        seen = getattr(config, "vision_config", config)
        size = getattr(seen, "image_size", _IMAGE)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return torch.randn(workload.batch, seen.num_channels, height, width, device=device, dtype=dtype)
    if name == "input_features":
        frames = 2 * config.max_source_positions
        return torch.randn(workload.batch, config.num_mel_bins, frames, device=device, dtype=dtype)
    raise ConfigError(f"{config.model_type} reads {name}; pass it with example inputs of its own, with --module")


def _half_full_cache(module: nn.Module, config: Any, workload: Workload, ids: torch.Tensor) -> dict[str, Any]:
    """The cache, zeros, by the name of its argument: a static one where the model takes one, else what it keeps."""
    from transformers import StaticCache

    given = {}
    if "past_key_values" in _parameters(module):
        given["past_key_values"] = StaticCache(config=config, max_cache_len=workload.kv_len)
    with torch.no_grad():
        outputs = _call(module, config, {"input_ids": ids, "use_cache": True, **given})
    for name in _CACHES:
        if (cache := outputs.get(name)) is not None:
            cache.reset()
            _set_position(cache, workload.kv_len // 2)
            return {name: cache}
    raise ConfigError(f"{config.model_type} keeps no cache, so it has no decode; give --prefill only")


def _call(module: nn.Module, config: Any, kwargs: Mapping[str, Any]) -> Any:
    """One call; fake experts, some of whose library calls know no such dtype when run alone, as compiled."""
    experts = getattr(config, "_experts_implementation", None) or "eager"
    if experts != "eager" and isinstance(kwargs["input_ids"], FakeTensor):
        return torch.compile(module, backend="eager", dynamic=False)(**kwargs)
    return module(**kwargs)


def rewind(kwargs: Mapping[str, Any], workload: Workload) -> None:
    """Put the cache of a decode call back to half full, so that further calls stay inside it."""
    for name in _CACHES:
        if name in kwargs:
            _set_position(kwargs[name], workload.kv_len // 2)


def _set_position(cache: Any, position: int) -> None:
    """Layers that keep a state of one size have no position."""
    for layer in getattr(cache, "layers", ()):  # older caches of states have none
        if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
            layer.cumulative_length.fill_(position)
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = position
