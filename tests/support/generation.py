"""Hugging Face's ``generate()`` end to end: eager, what it compiles by itself, and our back end through its door.

Contestants take turns in one process, round by round.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch

from fuseplan.costmodel.devices import is_gpu
from fuseplan.planner.bench.model import dispatch_note, dispatch_options, synchronise
from fuseplan.planner.bench.rows import BenchRow, Race, bench_frame, failure
from fuseplan.planner.cli.bench.topics import publish
from fuseplan.planner.cli.output.options import current
from fuseplan.planner.dispatch_stats import reset_stats, stats, total
from fuseplan.planner.errors import Argument, ConfigError
from fuseplan.planner.models.build import build_model
from fuseplan.planner.models.sources import ModelSource, generates, hf_config, quiet
from fuseplan.planner.models.workload import fits, read_size
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE, OURS, PeerError
from fuseplan.planner.peers.peers import without_chatter
from fuseplan.planner.runtime.dispatch import fuseplan
from fuseplan.planner.tuning.session import Session, stored_spec
from fuseplan.search.timing.timers import Operands, Run, Sampler, Timer

#: Rounds at least: each makes all tokens.
_ROUNDS = 4
#: Unless said otherwise: sequences, tokens of a prompt, and new ones.
_BATCHES, _PROMPT, _NEW = "1,16", 512, 128
#: Tokens of a call that are as eager's.
SAME = "as eager's"
#: What stands below the table.
LEGEND = (
    "Times are medians over interleaved rounds. `ms_token` is that of a decode step, between its 20th and 80th "
    "percentile: a call of all tokens less one of the first, by the steps in between. `vs_inductor` is the time of "
    "what Hugging Face compiles by itself over it, `x_floor` how many times reading the weights it takes. `first_ms` "
    "is a call that makes one token."
)


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
        config = CompileConfig()
    elif name == MAX_AUTOTUNE:
        config = CompileConfig(mode="max-autotune")
    else:
        graphs = name == OURS and is_gpu(device_type)
        # The function: its name is known where the package is installed, not where it is only on the path.
        config = CompileConfig(backend=fuseplan, options={**options, "cuda_graphs": graphs})
        config.mode = None  # torch.compile takes no mode beside options
    vars(config)["_compile_all_devices"] = True
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


@dataclass(frozen=True)
class GenerateRow(BenchRow):
    """One contestant's ``generate()``; ``median_us`` and its percentiles are of a decode step.

    Attributes:
        first_us: Median time of a call that makes one token, where everything is compiled.
        floor_us: Time to read the weights that every step reads, at the device's measured bandwidth.
        tokens: ``"as eager's"``, or the first that is another one.
    """

    first_us: float | None = None
    floor_us: float | None = None
    tokens: str = ""


def floor_us(session: Session, module: Any) -> float | None:
    """Microseconds to read once what every decode step reads, at measured bandwidth.

    None where the device was not probed, here or where shipped records come from, or where tokens choose the weights.
    """
    spec, moved = session.spec or stored_spec(session.store, session.device), step_bytes(module)
    return None if spec is None or moved is None else moved / spec.bandwidth.gbps(moved) / 1e3


def bench_generate(
    session: Session, module: Any, sizes: Sizes, names: Sequence[str], seconds: float
) -> list[GenerateRow]:
    """Rows of one batch size in interleaved rounds. A contestant that fails gets a row that says why.

    Nothing that was compiled before is kept: a second batch size would make sizes dynamic for everyone. Whatever a call
    does again is in its times, such as recording CUDA graphs anew for a cache that lies elsewhere.
    """
    common: dict[str, Any] = {"workload": sizes.label, "subject": "generate", "key": sizes.label}
    forget(session.target.device_type)
    race, entered = Race(GenerateRow, **common, floor_us=floor_us(session, module)), dict[str, Generation]()
    expected: list[torch.Tensor] = []
    compiled: dict[str, slice] = {}  # which of the graphs that went through our back end are whose
    reset_stats()

    def make(name: str) -> tuple[Run, Mapping[str, Any]]:
        how = how_compiled(name, session.target.device_type, dispatch_options(session))
        run, before = Generation(name, module, sizes, how), len(stats().compiles)
        with without_chatter() if name == MAX_AUTOTUNE else nullcontext():
            tokens = run()
        if name == EAGER:
            expected.append(tokens)
        entered[name] = run
        if name in (OURS, OURS_LAUNCHED):
            compiled[name] = slice(before, len(stats().compiles))
        at = first_difference(tokens, expected[0]) if expected else None
        same = SAME if expected else ""
        return run, {"tokens": same if at is None else f"another from token {at} on"}

    # Dynamo counts everybody's graphs of one function together, and would leave those of the last uncompiled.
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit * len(names)):
        race.enter(names, make)
        try:
            timer = TokenTimer(session.target.device_type)
            # Eager's calls take longest, so the noise is that of ours.
            rows = race.rows(timer, [()], seconds, twice=OURS, min_rounds=_ROUNDS)
        except Exception as error:  # such as a device without the memory: the other sizes fit
            return [GenerateRow(contestant=name, mode="eager", note=failure(error), **common) for name in names]
        # Not before the rounds are over: a kernel may fail, and a moved cache be recorded anew, in any of them.
        notes = {name: dispatch_note(total(stats().compiles[graphs])) for name, graphs in compiled.items()}
        first_us = {name: median(run.first_us) for name, run in entered.items() if run.first_us}
        return [
            replace(row, note="; ".join(filter(None, (row.note, notes.get(row.contestant)))),
                    first_us=first_us.get(row.contestant))
            for row in rows
        ]


def forget(device_type: str) -> None:
    """Drop what was compiled, and give back the memory of what nobody holds any more."""
    torch._dynamo.reset()
    gc.collect()
    if is_gpu(device_type):
        torch.cuda.empty_cache()


def generate_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A line per workload and contestant, in milliseconds a token.

    ``vs_inductor`` is the time of Hugging Face's own default over this one's, ``x_floor`` this one over the time to
    read the weights. Columns that nobody has are left out.
    """
    default = frame[frame["contestant"] == INDUCTOR].set_index("workload")["median_us"]
    table = pd.DataFrame({
        "workload": frame["workload"],
        "contestant": frame["contestant"],
        "ms_token": frame["median_us"] / 1e3,
        "p20": frame["p20_us"] / 1e3,
        "p80": frame["p80_us"] / 1e3,
        "rounds": frame["rounds"],
        "vs_inductor": frame["workload"].map(default) / frame["median_us"],
        "x_floor": frame["median_us"] / frame["floor_us"],
        "first_ms": frame["first_us"] / 1e3,
        "tokens": frame["tokens"],
    })
    return table.dropna(axis="columns", how="all")


def generate_verdict(frame: pd.DataFrame) -> list[str]:
    """Sentences: ours beside the others, the floor, and what is to be known of single rows."""
    lines = []
    for workload, rows in frame.groupby("workload", sort=False):
        times = rows.set_index("contestant")["median_us"].dropna()
        floor_ms = rows["floor_us"].max() / 1e3
        if floor_ms > 0:
            lines.append(f"{workload}: reading the weights takes {floor_ms:.3g} ms a token at measured bandwidth")
        for name in (OURS, OURS_LAUNCHED):
            others = [f"{times[one] / times[name]:.2f}x {one}" for one in times.index if name in times and one != name]
            lines += [f"{workload}: {name} is {', '.join(others)}"] if others else []
    noted = frame[frame["note"] != ""].to_dict("records")
    return lines + [f"{row['contestant']}, {row['workload']}: {row['note']}" for row in noted]


# -- as plan bench shows it ------------------------------------------------------------------------------------


def results_name(source: ModelSource, sizes: Sequence[Sizes]) -> str:
    """Name of the results: other sizes do not take the place of a published result."""
    text = f"{','.join(str(one.batch) for one in sizes)}x{sizes[0].prompt}+{sizes[0].new}"
    return source.label if text == f"{_BATCHES}x{_PROMPT}+{_NEW}" else f"{source.label} {text}"


def sizes_of(source: ModelSource, batches: str | None, prompt: int | None, new: int | None) -> list[Sizes]:
    """The sizes that the options name; ConfigError where the model cannot be asked for one of them."""
    text = _BATCHES if batches is None else batches
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError("--batch is empty; write it like --batch 1,16")
    numbers = dict.fromkeys(read_size(word, Argument("batch"), "1,16") for word in words)
    found = [Sizes(number, _PROMPT if prompt is None else prompt, _NEW if new is None else new) for number in numbers]
    for one in found:
        check_sizes(source, one)
    return found


def measure(
    session: Session, source: ModelSource, sizes: Sequence[Sizes], names: Sequence[str], seconds: float,
    out: Path | None,
) -> None:
    """Time the contestants at each size, ``seconds`` of rounds each, and publish what there is whatever happens."""
    rows: list[GenerateRow] = []
    try:
        with current().status(f"building {source.label}") as say:
            module = build_model(source, session.target.device_type).module
            for one in sizes:
                say(f"{source.label}, {one.label}: compiling and measuring every contestant")
                rows += bench_generate(session, module, one, names, seconds)
    finally:  # an interrupted bench keeps what it has measured
        if rows:
            _publish_generate(session, source, sizes, rows, out)


def _publish_generate(
    session: Session, source: ModelSource, sizes: Sequence[Sizes], rows: Sequence[GenerateRow], out: Path | None
) -> None:
    frame = bench_frame(rows)
    table = generate_table(frame)
    current().table(table, "generate", f"{source.label}, generate(): ms a token", spare=("p20", "p80"),
                    keep=("workload", "contestant", "ms_token", "vs_inductor"))
    said = generate_verdict(frame)
    if frame["floor_us"].isna().all():
        said.append("what reading the weights takes is unknown: the device was never probed (`plan probe`), or a "
                    "token chooses its weights")
    if any(" misses" in row.note for row in rows):
        said.append(f"what was missed is tuned by: {tune_command(source, sizes, session.target.device_type)}")
    name = results_name(source, sizes)
    publish(session, name, {"generate": frame}, said, out, {"generate": table}, LEGEND)


def tune_command(source: ModelSource, sizes: Sequence[Sizes], device_type: str) -> str:
    """The ``plan tune`` of the very calls that were measured. A config is named by its file alone."""
    named = f"--model {source.name}" if source.kind == "preset" else f"--config {Path(source.name).name}"
    words = [f"plan tune {named}"]
    words += [f"--layers {source.layers}"] if source.layers else []
    words += [f"--dtype {source.dtype}"] if source.dtype else []
    first, batches = sizes[0], [one.batch for one in sizes]
    prefills = ",".join(f"{batch}x{first.prompt}" for batch in batches)
    words += [f"--decode {','.join(map(str, batches))} --kv-len {first.kv_len} --prefill {prefills}"]
    # CUDA graphs have plans of their own.
    words += ["--regime graph, and the same without it"] if is_gpu(device_type) else []
    return " ".join(words)
