"""Hugging Face's ``generate()`` as somebody runs it: who compiles it, one call of it, and how its tokens are timed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.errors import Argument, ConfigError
from fuseplan.planner.models.sources import ModelSource, generates, hf_config, quiet
from fuseplan.planner.models.workload import fits
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE, OURS, PeerError
from fuseplan.planner.runtime.dispatch import fuseplan
from fuseplan.search.timing.timers import Operands, Run, Sampler, Timer

#: Ours without CUDA graphs; on a GPU ``OURS`` has them, as Hugging Face's own default does.
OURS_LAUNCHED = "fuseplan launched"


@dataclass(frozen=True)
class Sizes:
    """What is generated: ``new`` tokens (at least 2) after prompts of ``prompt`` tokens, for ``batch`` sequences."""

    batch: int
    prompt: int
    new: int

    @property
    def label(self) -> str:
        """``generate 16x512 + 128``."""
        return f"generate {self.batch}x{self.prompt} + {self.new}"

    @property
    def kv_len(self) -> int:
        """Length of the static cache that ``generate()`` makes: the last token is never read."""
        return self.prompt + self.new - 1


def check_sizes(source: ModelSource, sizes: Sizes) -> None:
    """ConfigError where ``generate()`` cannot be asked for this: too long for the model, or no decoder at all."""
    if not generates(source):
        raise ConfigError(f"{source.label} is no decoder that generates tokens by itself; name a causal language model")
    fits(sizes.batch * (sizes.prompt + sizes.new), "batch x (prompt + new tokens)", sizes.label)
    longest = getattr(hf_config(source).get_text_config(decoder=True), "max_position_embeddings", None)
    # Positions beyond would be indices outside a table, which end all work on a GPU.
    if isinstance(longest, int) and sizes.kv_len > longest:
        raise ConfigError("{} {} and {} {}: {} has only {} positions", Argument("prompt"), sizes.prompt,
                          Argument("new_tokens"), sizes.new, source.label, longest)


def contestants(device_type: str) -> tuple[str, ...]:
    """Everybody that there is on a device, in the order of the tables."""
    ours = (OURS, OURS_LAUNCHED) if is_gpu(device_type) else (OURS,)
    return (EAGER, INDUCTOR, MAX_AUTOTUNE, *ours)


def how_compiled(name: str, device_type: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``generate()`` that say who compiles its decode steps. ``options`` are those of our back end.

    Hugging Face compiles by itself on GPUs alone: TorchInductor with CUDA graphs, ``CompileConfig``'s defaults. On CPUs
    the same config is given, with the mark that makes ``generate()`` heed one there.
    """
    from transformers import CompileConfig

    if name == EAGER:
        return {"disable_compile": True}
    if name == INDUCTOR and is_gpu(device_type):
        return {}
    if name == INDUCTOR:
        config: Any = CompileConfig()
    elif name == MAX_AUTOTUNE:
        config = CompileConfig(mode="max-autotune")
    else:
        graphs = name == OURS and is_gpu(device_type)
        # The function: its name is known where the package is installed, not where it is only on the path.
        config = CompileConfig(backend=fuseplan, options={**options, "cuda_graphs": graphs})
        config.mode = None  # torch.compile takes no mode beside options
    config._compile_all_devices = True
    return {"compile_config": config}


@dataclass
class Generation:
    """One contestant: calls of ``generate()`` on one prompt, greedy, from a static cache, with no end of sequence.

    Contestants share the parameters of ``module``: ``model`` is a copy of the outermost object only. Hugging Face keeps
    what it compiled there (and, before transformers 5.24, the static cache), so that contestants can take turns.
    """

    name: str
    module: Any
    sizes: Sizes
    how: Mapping[str, Any]
    first_us: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = copy.copy(self.module)
        self.model.generation_config = copy.deepcopy(self.module.generation_config)
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = None
        words = self.module.config.get_text_config(decoder=True).vocab_size
        shape = (self.sizes.batch, self.sizes.prompt)
        # The same prompt for everyone, in every process.
        ids = torch.randint(0, words, shape, generator=torch.Generator().manual_seed(0))
        self.ids = ids.to(self.module.device)
        self._mask = torch.ones_like(self.ids)

    def __call__(self, new: int | None = None, streamer: Any = None) -> torch.Tensor:
        """Token ids [batch, new] of one call; :class:`PeerError` where it made fewer, or compiled nothing."""
        new = self.sizes.new if new is None else new
        with quiet():
            found: torch.Tensor = self.model.generate(
                self.ids, attention_mask=self._mask, max_new_tokens=new, do_sample=False,
                cache_implementation="static", streamer=streamer, **self.how,
            )
        tokens = found[:, self.sizes.prompt :]
        if tokens.shape[1] != new:
            raise PeerError(f"generate() made {tokens.shape[1]} of {new} tokens")
        if self.name != EAGER and "_compiled_call" not in vars(self.model):
            raise PeerError(f"generate() compiles nothing of {self.module.config.model_type}")
        return tokens


def first_difference(tokens: torch.Tensor, expected: torch.Tensor) -> int | None:
    """Number of the first token, from 1, at which some sequence differs; None where none does. Both are [batch, new].

    >>> first_difference(torch.tensor([[4, 5, 6], [7, 8, 8]]), torch.tensor([[4, 5, 6], [7, 8, 9]]))
    3
    """
    steps = (tokens.cpu() != expected.cpu()).any(0).nonzero()
    return int(steps[0]) + 1 if len(steps) else None


class TokenTimer(Timer):
    """Microseconds of a decode step: those of a whole call less those to its first token, by the steps in between.

    A call of one token is the prompt alone; its times are kept in the contestant's ``first_us``. It comes after a whole
    one, whose cache's length ``generate()`` keeps to.
    """

    regime = "eager"

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def prepare(self, run: Run, operands: Operands) -> Sampler:
        assert isinstance(run, Generation)
        run()  # the first call compiled; CUDA graphs are recorded by the steps after it

        def sample() -> float:
            whole, first = self._us(run, run.sizes.new), self._us(run, 1)
            run.first_us.append(first)
            return (whole - first) / (run.sizes.new - 1)

        return sample

    def _us(self, run: Generation, new: int) -> float:
        synchronise(self._device_type)
        start = self.clock()
        run(new)
        synchronise(self._device_type)
        return (self.clock() - start) * 1e6


def synchronise(device_type: str) -> None:
    """Wait for the device."""
    if is_gpu(device_type):
        torch.cuda.synchronize()


def step_bytes(module: Any) -> int | None:
    """Bytes of parameters that every decode step reads; None for a mixture of experts, whose tokens choose them.

    Of a table of embeddings a step reads a few rows: it is left out, unless the head is the same table.
    """
    config = module.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    table, head = (getattr(one, "weight", None) for one in ends)
    sizes = {one.data_ptr(): one.nbytes for one in module.parameters()}
    if table is not None and (head is None or head.data_ptr() != table.data_ptr()):
        sizes.pop(table.data_ptr(), None)
    return int(sum(sizes.values()))
