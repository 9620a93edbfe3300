"""Modules that can be called: a :class:`ModelSource` turned into an ``nn.Module`` with example inputs."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fuseplan.planner.errors import Argument, ConfigError, FuseplanError, in_words, user_line
from fuseplan.planner.models.sources import ModelSource, generates, hf_config, quiet
from fuseplan.planner.models.workload import Workload

#: Names under which models take and return a cache, the newest first.
_CACHES = ("cache", "past_key_values", "cache_params")
#: Width and height of images that a model takes in any size.
_IMAGE = 224


@dataclass(frozen=True)
class Model:
    """A module in evaluation mode.

    Attributes:
        config: Its Hugging Face config; None for the user's own module.
        generates: True for a decoder, False for an encoder and for both in one.
        inputs: The example arguments of the user's own module: positional, then by keyword.
        counts: Of a module on fake tensors: whether its static cache knows how many tokens it holds. PyTorch computes
            such a number on the device itself, which few models need and makes a context on a GPU.
    """

    module: nn.Module
    device: torch.device
    config: Any = None
    generates: bool = False
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]] = field(default=((), {}))
    counts: bool = False

    def example(self, workload: Workload) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of one call in this regime.

        Decode gets a half-filled static cache, which the model makes in a run on a token: ``kv_len // 2`` calls fit
        before :func:`rewind` is due. ConfigError where it has no such regime, takes something else, or keeps no cache.
        """
        if self.config is None:
            if workload.regime != "forward":
                raise ConfigError(f"a module with its own example inputs has no regime {workload.label!r}")
            return self.inputs[0], dict(self.inputs[1])
        if workload.regime not in ("decode", "prefill"):
            raise ConfigError("a model from a config runs in decode or prefill")
        if not self.generates and workload.regime == "decode":
            raise ConfigError(f"{self.config.model_type} does not generate by itself: it has no decode")
        takes = inspect.signature(self.module.forward).parameters
        found: dict[str, Any] = {name: self._input(name, workload) for name in self._reads(takes)}
        if workload.regime == "decode":
            found |= {**self._half_full_cache(workload, found["input_ids"], takes), "use_cache": True}
        elif self.generates or self.config.is_encoder_decoder:
            found["use_cache"] = False
        if (ids := found.get("input_ids")) is not None:
            more = self._given(workload, ids, takes)
            found = {name: value for name, value in found.items() if name != "input_ids" or "inputs_embeds" not in more}
            found |= more
        return (), found

    def _given(self, workload: Workload, ids: torch.Tensor, takes: Collection[str]) -> dict[str, Any]:
        """What a call has beside ``ids`` or in their place, as far as the model takes it."""
        end = workload.kv_len // 2 + workload.seq
        found: dict[str, Any] = {}
        if workload.given == "masked":
            found["attention_mask"] = ids.new_ones(workload.batch, end)
        if workload.given == "positions":
            places = torch.arange(end - workload.seq, end, device=ids.device)
            found |= {"position_ids": places.repeat(workload.batch, 1), "logits_to_keep": 1}
        if workload.given == "embeddings":
            embedded: Callable[..., torch.Tensor] = self.module.get_input_embeddings()  # type: ignore[operator]
            found |= {"inputs_embeds": embedded(ids), "logits_to_keep": 1}
        return {name: value for name, value in found.items() if name in takes}

    def _reads(self, takes: Collection[str]) -> list[str]:
        """Names of the arguments that it computes from."""
        names = {str(getattr(self.module, "main_input_name", "input_ids"))}
        if not self.generates and hasattr(self.config, "text_config") and hasattr(self.config, "vision_config"):
            names = {"input_ids", "pixel_values"}
        if self.config.is_encoder_decoder:
            if "decoder_input_ids" not in takes:  # which may yet pass on what it does not know
                kind = self.config.model_type
                raise ConfigError(f"{kind} has no encoder beside its decoder; leave out is_encoder_decoder")
            names.add("decoder_input_ids")
        return sorted(names, reverse=True)

    def _input(self, name: str, workload: Workload) -> torch.Tensor:
        """Tokens, an image or sound."""
        config, device, dtype = self.config, self.device, next(self.module.parameters()).dtype
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
        raise ConfigError("{} reads {}; pass it with example inputs of its own, with {}", config.model_type, name,
                          Argument("module"))

    def _half_full_cache(self, workload: Workload, ids: torch.Tensor, takes: Collection[str]) -> dict[str, Any]:
        """The cache, zeros, by the name of its argument: a static one where the model takes one, else what it keeps."""
        from transformers import StaticCache

        call: Callable[..., Any] = self.module
        experts = getattr(self.config, "_experts_implementation", None) or "eager"
        if experts != "eager" and isinstance(ids, FakeTensor):
            # Some library calls of experts know no fake dtype when run alone.
            call = torch.compile(self.module, backend="eager", dynamic=False)
        given = {}
        if (name := cache_name(takes)) in ("cache", "past_key_values"):
            given[name] = StaticCache(config=self.config, max_cache_len=workload.kv_len)
            for layer in () if self.counts else given[name].layers:
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = torch.zeros((), dtype=torch.long)
        with torch.no_grad():
            outputs = call(input_ids=ids, use_cache=True, **given)
        if (name := cache_name(outputs)) is None:
            raise ConfigError("{} keeps no cache, so it has no decode; give {} only", self.config.model_type,
                              Argument("prefill"))
        cache = outputs[name]
        cache.reset()
        rewind({name: cache}, workload)
        return {name: cache}


def cache_name(names: Collection[str]) -> str | None:
    """The name of the cache among those of arguments or results (it changed in transformers 5.24); None without one."""
    return next((name for name in _CACHES if name in names), None)


def rewind(kwargs: Mapping[str, Any], workload: Workload) -> None:
    """Put the cache of a decode call back to half full, so that further calls stay inside it."""
    position = workload.kv_len // 2
    # Older caches of states have no layers, and layers that keep a state of one size no position.
    for layer in getattr(kwargs.get(cache_name(kwargs) or ""), "layers", ()):
        if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
            layer.cumulative_length.fill_(position)
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = position


def build_model(source: ModelSource, device: torch.device | str) -> Model:
    """A real module with random weights (std 0.02, norms around 1); ConfigError where it cannot be built."""
    if source.kind == "module":
        model = load_module(source)
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(device), model.inputs)
        return Model(model.module.to(device), torch.device(device), inputs=(args, kwargs))
    model = construct(source, device)
    with torch.no_grad():
        _fill(model.module)
    return model


def construct(source: ModelSource, device: torch.device | str) -> Model:
    """The preset's or config's module on ``device``, its parameters as they were allocated."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    config, is_decoder = hf_config(source), generates(source)
    # With the head that it usually has.
    auto: Any = AutoModelForCausalLM if is_decoder else AutoModel
    if config.is_encoder_decoder and not is_decoder:
        both = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
        auto = next((one for one in both if type(config) in one._model_mapping), AutoModel)
    try:
        auto._model_mapping.get(type(config), None)  # imports its modules, whose constants belong on no GPU
        with quiet(), torch.device(device), _unfilled():
            module = auto.from_config(config, dtype=getattr(torch, source.dtype or "bfloat16"))
    except Exception as error:
        raise ConfigError(f"model {source.name} cannot be built: {in_words(error)}") from error
    return Model(module.eval(), torch.device(device), config, is_decoder)


@contextmanager
def _unfilled() -> Iterator[None]:
    """Leaves tensors as allocated where a constructor would fill them at random: minutes for a large model."""
    # Bounded noise is drawn until every number is within its bounds: for ever, where nothing is drawn.
    bounded: Any = getattr(init, "_no_grad_trunc_normal_", None)
    init._no_grad_trunc_normal_ = lambda tensor, *args, **kwargs: tensor
    try:
        with _SkipRandomFill():  # type: ignore[no-untyped-call]
            yield
    finally:
        init._no_grad_trunc_normal_ = bounded


class _SkipRandomFill(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.normal_, torch.ops.aten.uniform_):
            return args[0]
        return func(*args, **(kwargs or {}))


def _fill(module: nn.Module) -> None:
    """Tile one block of noise over all parameters. Its length is prime, so that the rows of a matrix do not repeat."""
    device = next(module.parameters()).device
    block = torch.randn(1_000_003, generator=torch.Generator(device).manual_seed(0), device=device).mul_(0.02)
    blocks = {dtype: block.to(dtype) for dtype in {parameter.dtype for parameter in module.parameters()}}
    for name, parameter in module.named_parameters():
        noise, flat = blocks[parameter.dtype], parameter.view(-1)
        for piece in flat.split(noise.numel()):
            piece.copy_(noise[: piece.numel()])
        if parameter.dim() < 2 and not name.endswith("bias"):
            parameter.add_(1.0)


@contextmanager
def foreign_code(what: str, *values: object) -> Iterator[None]:
    """Around a user's own code: whatever it raises is a ConfigError whose message begins with ``what`` and ``values``,
    and ends with the user's line that it came from.
    """
    try:
        yield
    except (KeyboardInterrupt, FuseplanError):
        raise
    except SystemExit as error:
        raise ConfigError(f"{what}: it ends the process with {{:.60}}", *values, repr(error.code)) from error
    except BaseException as error:
        raise ConfigError(f"{what}: {{}}{{}}", *values, in_words(error), user_line(error)) from error


def _from_factory(name: str) -> Any:
    path, _, attribute = name.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", name) or path.endswith(".py"):
        file = Path(path)
        folder = "" if file.parent == Path() else f", in the folder {file.parent}"
        hint = f"; did you mean {file.stem}:{attribute or 'factory'}{folder}?" if file.suffix == ".py" else ""
        raise ConfigError("{} {!r}: write it as package.module:factory{}", Argument("module"), name, hint)
    with foreign_code("{} {}: importing it failed", Argument("module"), name):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; a script's path begins with its own folder
        factory = getattr(importlib.import_module(path), attribute)
    with foreign_code("{} {}: the factory failed", Argument("module"), name):
        return factory()


def twin(module: nn.Module) -> nn.Module:
    """The same module out of copies that share its tensors: what is done to its modules leaves the user's alone."""
    held = {id(value): value for one in module.modules() for each in (one._parameters, one._buffers, vars(one))
            for value in each.values() if isinstance(value, torch.Tensor)}
    with foreign_code("{} cannot be copied", type(module).__name__):
        return copy.deepcopy(module, dict(held))


def _kind(made: Any) -> str:
    """What a factory returned, in a few words."""
    names = [f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
             for one in (made[:4] if isinstance(made, list | tuple) else [made])]
    return f"a {type(made).__name__} of {len(made)}: {', '.join(names)}" if isinstance(made, list | tuple) else names[0]


def load_module(source: ModelSource) -> Model:
    """The module and example inputs that the user's factory returns, where it put them, or those at hand.

    It is imported from the current folder, or as Python finds it. A source's dtype is that of floating-point parameters
    and inputs. It makes real tensors, unless it builds under ``torch.device("meta")``. ConfigError where the factory
    cannot be imported, fails, or returns something else.
    """
    made = source.made() if source.made is not None else _from_factory(source.name)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ConfigError("{} {}: the factory must return (nn.Module, example inputs); it returned {}",
                          Argument("module"), source.name, _kind(made))
    module, inputs = made
    if source.dtype is not None:
        dtype = getattr(torch, source.dtype)
        module = module.to(dtype)
        inputs = tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, inputs)
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if isinstance(inputs, Mapping):
        return Model(module.eval(), device, inputs=((), dict(inputs)))
    positional = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    return Model(module.eval(), device, inputs=(positional, {}))
