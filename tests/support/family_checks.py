"""What ``check_models.py`` asks of one family in a process of its own, and its answers as rows of a table."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import model_families as families
import torch
import torch.utils._pytree as pytree
from op_coverage import Coverage, coverage

import fuseplan.planner
from fuseplan.planner.dispatch_stats import Stats
from fuseplan.planner.errors import failure_reason
from fuseplan.planner.implementations.first_call import FirstCall
from fuseplan.planner.runtime import dispatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

#: Eager's relative error below which only this bound is asked for: what is left is the order of sums.
_TINY = {"fp32": 2e-6, "bf16": 4e-3}

_LIMIT = 1.05

#: Batch and tokens of calls: none is a multiple of another's.
_CALLS = ((2, 9), (3, 13))

@contextmanager
def watching() -> Iterator[list[Coverage]]:
    """The coverage of every graph compiled meanwhile."""
    found: list[Coverage] = []
    executable = dispatch.executable

    def watched(traced: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        call: Any = executable(traced, *args, **kwargs)
        slots = [slot for slot in call.__globals__.values() if isinstance(slot, FirstCall)]
        found.append(coverage(traced.graph, {name for slot in slots for name in slot.ops}))
        return call  # type: ignore[no-any-return]

    dispatch.executable = watched
    try:
        yield found
    finally:
        dispatch.executable = executable


@dataclass
class Row:
    """One line of the table.

    Attributes:
        family: Its name.
        dtype: ``"fp32"`` or ``"bf16"``.
        check: What was tried.
        graphs: The coverage of each graph that was compiled.
        eager: Eager's relative error against float64.
        error: The compiled model's.
        misses: Regions that the database did not know.
        excused: Whether tokens in half precision are others than eager's, and as good.
        problems: What was wrong.
    """

    family: str
    dtype: str
    check: str
    graphs: list[Coverage] = field(default_factory=list)
    eager: float | None = None
    error: float | None = None
    misses: int = 0
    excused: bool = False
    problems: list[str] = field(default_factory=list)


    def record(self) -> dict[str, Any]:
        """The row as plain data, its graphs added up."""
        whole = sum(self.graphs, Coverage())
        counts = {"coverable": whole.coverable, "fused": whole.fused, "alone": whole.alone, "left": dict(whole.left)}
        return {**{name: value for name, value in vars(self).items() if name != "graphs"}, "coverage": counts}


def compiled(
    function: Callable[..., Any], dynamic: bool | None, options: Mapping[str, Any] | None
) -> Callable[..., Any]:
    """The function through our back end, nothing compiled or counted before."""
    torch._dynamo.reset()
    fuseplan.planner.reset_stats()
    return torch.compile(function, backend="fuseplan", dynamic=dynamic, options=dict(options or {}))


def check_forward(
    name: str, dtype: str, dynamic: bool, device: str, options: Mapping[str, Any] | None = None
) -> Row:
    """Calls of two sizes, with and without an attention mask, against the same model in float64."""
    row = Row(name, dtype, "dynamic" if dynamic else "static")
    model = families.build(name).to(device, DTYPES[dtype])
    wide = widened(model)
    calls = [families.inputs(name, *size, masked=masked) for size, masked in zip(_CALLS, (False, True), strict=True)]
    errors = _Errors(), _Errors()
    with torch.no_grad(), watching() as row.graphs:
        fast = compiled(model, dynamic, options)
        for call in calls:
            exact, eager = (_call(one, call, device, to) for one, to in ((wide, torch.float64), (model, DTYPES[dtype])))
            try:
                fused = _call(fast, call, device, DTYPES[dtype])
            except Exception as error:
                row.problems.append(failure_reason(error))
                return row
            row.problems += _add(errors, exact, eager, fused)
    row.eager, row.error = (one.relative() for one in errors)
    if row.error > max(_LIMIT * row.eager, _TINY[dtype]):
        row.problems.append(f"error {row.error:.2e}, eager's {row.eager:.2e}")
    _add_stats(row)
    return row


def widened(model: torch.nn.Module) -> torch.nn.Module:
    """The same model in float64, without the library calls that know no float64."""
    wide = copy.deepcopy(model).double()
    config = getattr(wide, "config", None)
    if getattr(config, "_experts_implementation", None) is not None:
        config._experts_implementation = "eager"  # type: ignore[union-attr]
    return wide


@dataclass
class _Errors:
    """Squares over everything compared."""

    wrong: float = 0.0
    exact: float = 0.0

    def relative(self) -> float:
        return (self.wrong / self.exact) ** 0.5


def _call(model: Callable[..., Any], call: Mapping[str, torch.Tensor], device: str, dtype: torch.dtype) -> list[Any]:
    """Floating-point results of one call, without a cache."""
    given = {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in call.items()}
    if "input_ids" in given or "input_features" in given:
        given["use_cache"] = False  # type: ignore[assignment]
    found = [leaf for leaf in pytree.tree_leaves(model(**given)) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in found if leaf.is_floating_point()]


def _add(errors: tuple[_Errors, _Errors], exact: list[Any], eager: list[Any], fused: list[Any]) -> list[str]:
    """Add what eager and the compiled model got wrong; what else is wrong with the latter."""
    for true, plain, ours in zip(exact, eager, fused, strict=True):
        if (plain.dtype, plain.shape, plain.stride()) != (ours.dtype, ours.shape, ours.stride()):
            return [f"result is {ours.dtype} {tuple(ours.shape)}, eager's {plain.dtype} {tuple(plain.shape)}"]
        if not torch.equal(torch.isfinite(plain), torch.isfinite(ours)):
            return ["not finite where eager is, or the other way round"]
        kept = torch.isfinite(plain) & torch.isfinite(true)
        for one, result in zip(errors, (plain, ours), strict=True):
            one.wrong += float((result.double() - true)[kept].pow(2).sum())
            one.exact += float(true[kept].pow(2).sum())
    return []


def _add_stats(row: Row) -> None:
    """What dispatch counted since it was reset."""
    stats: Stats = fuseplan.planner.stats()
    row.problems += [f"{count} x {reason}" for reason, count in stats.fallbacks.items()]
    if bare := sum(one.fused == 0 and one.coverable > one.alone for one in row.graphs):
        row.problems.append(f"{bare} graphs wholly unfused")
    row.misses = stats.misses


#: Of what is tuned and then called: tokens of a prompt, and the length of a static cache.
PROMPT, KV_LEN = 9, 16
_NEW = KV_LEN - PROMPT + 1


def check_hits(
    name: str, dtype: str, device: str, batches: tuple[int, ...], options: Mapping[str, Any] | None = None,
    caches: Sequence[str | None] = (None, "static"),
) -> list[Row]:
    """After a tune of these sizes: calls with and without a mask, and generation, find every region."""
    model: Any = families.build(name, dtype=DTYPES[dtype]).to(device)
    rows = []
    for masked in (False, True):
        row = Row(name, dtype, f"hits {'with' if masked else 'without'} a mask")
        fast = compiled(model, False, options)
        for batch in batches:
            with torch.no_grad():
                _call(fast, families.inputs(name, batch, PROMPT, masked=masked), device, DTYPES[dtype])
        rows.append(row)
        _add_stats(row)
    if families.task_of(name) == "causal":
        prompts = [prompt for prompt in PROMPTS if prompt.batch in batches and prompt.cache in caches]
        rows += [check_generate(name, dtype, prompt, device, options) for prompt in prompts]
    for row in rows:
        row.check = row.check.replace("generate", "hits generate")
        if row.misses:
            row.problems.append(f"{row.misses} misses")
    return rows


# -- generating -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """What is generated from.

    Attributes:
        batch: Sequences; the first of several are padded on the left.
        cache: Cache implementation as Hugging Face calls it; None for the default one, which grows.
        by_config: Let ``generate`` compile with a ``CompileConfig``, instead of compiling ``forward`` before.
    """

    batch: int
    cache: str | None
    by_config: bool = False

    @property
    def label(self) -> str:
        how = "CompileConfig" if self.by_config else "forward"
        return f"generate {self.batch} {self.cache or 'dynamic'} {how}"


PROMPTS = tuple(
    Prompt(batch, cache, by_config)
    for cache, by_config in ((None, False), ("static", False), ("static", True)) for batch in (1, 3)
)  # fmt: skip


def check_generate(
    name: str, dtype: str, prompt: Prompt, device: str, options: Mapping[str, Any] | None = None
) -> Row:
    """Greedy generation, token by token as eager's; in half precision also one as good (:func:`unexcused`)."""
    row = Row(name, dtype, prompt.label)
    model: Any = families.build(name, dtype=DTYPES[dtype]).to(device)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        expected = generate(plain, name, prompt, device)
        with watching() as row.graphs:
            torch._dynamo.reset()
            fuseplan.planner.reset_stats()
            try:
                if not prompt.by_config:
                    model.forward = compiled(model.forward, None, options)
                result = generate(model, name, prompt, device, _compile_config(prompt, options))
            except Exception as error:
                row.problems.append(failure_reason(error))
                return row
        _add_stats(row)
        if not torch.equal(result, expected):
            wrong = "fp32 excuses none" if dtype == "fp32" else unexcused(plain, name, prompt, device, result)
            row.excused = not wrong
            row.problems += [f"other tokens than eager's: {wrong}"] if wrong else []
    return row


def unexcused(model: Any, name: str, prompt: Prompt, device: str, tokens: torch.Tensor) -> str:
    """The first token that rounding as eager's does not explain; empty if there is none.

    Eager and the same model in float32, exact beside half precision, are led along ``tokens``. Eager's error there is
    the largest difference of their scores. Whoever errs by no more than 1.05 times that picks a token whose exact score
    is at most twice that below the best. (Gemma2 with padding is NaN in float64.)
    """
    eager, exact = (led(one, name, prompt, device, tokens) for one in (model, copy.deepcopy(model).float()))
    start = tokens.shape[1] - len(exact)
    for step, (rough, true) in enumerate(zip(eager, exact, strict=True)):
        open_ = torch.isfinite(true)  # what generation rules out is -inf in both
        errors = (rough - true).masked_fill(~open_, 0).abs().amax(1)
        behind = true.amax(1) - true.gather(1, tokens[:, start + step, None])[:, 0]
        if not bool((behind <= 2 * _LIMIT * errors).all()):  # NaN excuses nothing
            at = int((behind - 2 * _LIMIT * errors).argmax())
            return f"token {step} of sequence {at}: {behind[at]:.1e} below the best, eager's error {errors[at]:.1e}"
    return ""


def led(model: Any, name: str, prompt: Prompt, device: str, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Scores [batch, vocabulary] of each step of a generation that is made to yield ``tokens``."""
    scores: list[torch.Tensor] = []

    def lead(ids: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        scores.append(found.double())
        forced = torch.full_like(found, -torch.inf)
        return forced.scatter(1, tokens[:, ids.shape[1], None], 0.0)

    result = generate(model, name, prompt, device, lead=lead)
    assert torch.equal(result, tokens)
    return scores


def _compile_config(prompt: Prompt, options: Mapping[str, Any] | None) -> Any:
    """Hugging Face's own, its mode included; it takes no mode beside options."""
    if not prompt.by_config:
        return None
    from transformers import CompileConfig

    config = CompileConfig(backend="fuseplan", **({"mode": None, "options": dict(options)} if options else {}))
    config._compile_all_devices = True
    return config


def generate(
    model: Any, name: str, prompt: Prompt, device: str, config: Any = None, lead: Callable[..., Any] | None = None
) -> torch.Tensor:
    """Token ids: the prompt, and what fills a static cache, the last token never being read.

    ``lead`` is given the ids so far and the scores of the next, and returns the scores that decide.
    """
    call = families.inputs(name, prompt.batch, PROMPT, seed=1, masked=True)
    extra = {"compile_config": config} if config is not None else {"disable_compile": True}
    if prompt.cache is not None:
        extra["cache_implementation"] = prompt.cache
    if lead is not None:
        extra["logits_processor"] = [lead]
    tokens: torch.Tensor = model.generate(
        **{key: value.to(device) for key, value in call.items()}, **extra, do_sample=False,
        max_new_tokens=_NEW, min_new_tokens=_NEW,
    )
    return tokens
