"""Modules that can be called: a :class:`ModelSource` turned into an ``nn.Module`` with example inputs."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fuseplan.planner.errors import ConfigError, FuseplanError, in_words
from fuseplan.planner.models.examples import example_call
from fuseplan.planner.models.sources import ModelSource, generates, hf_config, quiet
from fuseplan.planner.models.workload import Workload


@dataclass(frozen=True)
class Model:
    """A module in evaluation mode.

    Attributes:
        config: Its Hugging Face config; None for the user's own module.
        generates: True for a decoder, False for an encoder and for both in one.
        inputs: The example arguments of the user's own module: positional, then by keyword.
    """

    module: nn.Module
    device: torch.device
    config: Any = None
    generates: bool = False
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]] = field(default=((), {}))

    def example(self, workload: Workload) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of one call in this regime.

        Decode gets a half-filled static cache, so ``kv_len // 2`` calls fit before
        :func:`~fuseplan.planner.models.examples.rewind` is due. ConfigError where the model has no such regime.
        """
        if self.config is None:
            if workload.regime != "forward":
                raise ConfigError(f"a module with its own example inputs has no regime {workload.label!r}")
            return self.inputs[0], dict(self.inputs[1])
        if workload.regime not in ("decode", "prefill"):
            raise ConfigError("a model from a config runs in decode or prefill")
        if not self.generates and workload.regime == "decode":
            raise ConfigError(f"{self.config.model_type} does not generate by itself: it has no decode")
        return (), example_call(self.module, self.config, workload, self.device, self.generates)


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
    config, is_decoder = hf_config(source), generates(source)
    auto = _auto_class(config, is_decoder)
    try:
        with quiet(), torch.device(device), _unfilled():
            module = auto.from_config(config, dtype=getattr(torch, source.dtype or "bfloat16"))
    except Exception as error:
        raise ConfigError(f"model {source.name} cannot be built: {in_words(error)}") from error
    return Model(module.eval(), torch.device(device), config, is_decoder)


def _auto_class(config: Any, is_decoder: bool) -> Any:
    """The factory in ``transformers`` that knows the model with the head that it usually has."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    if is_decoder:
        return AutoModelForCausalLM
    both = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq) if config.is_encoder_decoder else ()
    return next((auto for auto in both if type(config) in auto._model_mapping), AutoModel)


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


def _fill(module: nn.Module, std: float = 0.02, seed: int = 0) -> None:
    """Tile one block of noise over all parameters: as good as fresh noise for timing, and memory-bound to make.

    The block's length is prime, so that the rows of a matrix do not repeat.
    """
    device = next(module.parameters()).device
    block = torch.randn(1_000_003, generator=torch.Generator(device).manual_seed(seed), device=device).mul_(std)
    blocks = {dtype: block.to(dtype) for dtype in {parameter.dtype for parameter in module.parameters()}}
    for name, parameter in module.named_parameters():
        noise, flat = blocks[parameter.dtype], parameter.view(-1)
        for piece in flat.split(noise.numel()):
            piece.copy_(noise[: piece.numel()])
        if parameter.dim() < 2 and not name.endswith("bias"):
            parameter.add_(1.0)


@contextmanager
def foreign_code(what: str) -> Iterator[None]:
    """Around a user's own code: whatever it raises, also to leave the process, is one :class:`ConfigError`."""
    try:
        yield
    except (KeyboardInterrupt, FuseplanError):
        raise
    except SystemExit as error:
        raise ConfigError(f"{what}: it ends the process with {error.code!r:.60}") from error
    except BaseException as error:
        raise ConfigError(f"{what}: {in_words(error)}") from error


def load_module(source: ModelSource) -> Model:
    """The module and example inputs that the user's factory returns, where it put them.

    It is imported from the current folder or from wherever Python finds it, and makes real tensors unless it builds
    under ``torch.device("meta")``. A source's dtype is that of the module's floating-point parameters and inputs. A
    factory that cannot be imported, fails, or returns something else is a :class:`ConfigError`.
    """
    path, _, attribute = source.name.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", source.name):
        raise ConfigError(f"--module {source.name!r}: write it as package.module:factory")
    with foreign_code(f"--module {source.name}: importing it failed"):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; a script's path begins with its own folder
        factory = getattr(importlib.import_module(path), attribute)
    with foreign_code(f"--module {source.name}: the factory failed"):
        made = factory()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ConfigError(f"--module {source.name}: the factory must return (nn.Module, example inputs)")
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
