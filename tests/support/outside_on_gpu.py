"""Look up, or write, outside a table on a GPU, and print what happens: ``right``, ``wrong`` or the error.

A program of its own, since a device-side assertion ends all work of its process: ``python outside_on_gpu.py NAME HOW
NUMBER``. HOW is ``eager``, ``fused``, ``graph`` (a CUDA graph holds the kernels), ``ninetoothed`` or ``inductor``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import fuseplan.planner

ROWS, WIDTH, COUNT = 33, 64, 5
#: Of the cache in pages.
PAGES, BLOCKS, PAGE = 9, 3, 16


def _cached(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x.index_copy_(0, i, torch.sigmoid(x[:COUNT].clone()) + 1)
    return x


def _projected(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x.index_copy_(0, i, F.linear(torch.ones(COUNT, WIDTH, device="cuda"), torch.eye(WIDTH, device="cuda")) * 2 + 1)
    return x


def _attend(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        held = gather(x, i).transpose(1, 2).flatten(2, 3)
        return F.scaled_dot_product_attention(torch.ones_like(held[:, :, :1]), held, held) * 2

    return run


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "embedding": lambda x, i: F.embedding(i, x) * 2 + 1,
    "gather": lambda x, i: x.gather(0, i[:, None].expand(COUNT, WIDTH)) * 2 + 1,
    "index_select": lambda x, i: x.index_select(0, i) * 2 + 1,
    "x[i]": lambda x, i: x[i] * 2 + 1,
    "scatter": lambda x, i: x.scatter(0, i[:, None].expand(COUNT, WIDTH), 2.0) * 2 + 1,
    "index_put": lambda x, i: x.index_put((i,), x.new_tensor(2.0)) * 2 + 1,
    "computed": lambda x, i: x[(i - 2) + 2] * 2 + 1,
    "cache": _cached,
    "projected": _projected,
    "pages": _attend(lambda x, i: x[i]),
    "pages by index_select": _attend(lambda x, i: x.index_select(0, i.flatten()).view(2, BLOCKS, *x.shape[1:])),
}


def compiled(function: Callable[..., Any], how: str, folder: str) -> Callable[..., Any]:
    if how == "eager":
        return function
    if how == "inductor":
        return torch.compile(function)
    if how == "ninetoothed":
        from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
        from fuseplan.planner.tuning import session

        session.backends_for = lambda device_type: (NinetoothedBackend(),)  # type: ignore[attr-defined]
    options = {"db": str(Path(folder) / "none.db"), "cuda_graphs": how == "graph"}
    return torch.compile(function, backend="fuseplan", options=options)


def once(name: str, how: str, number: str, folder: str) -> str:
    torch.manual_seed(0)
    paged = name.startswith("pages")
    size = PAGES if paged else ROWS
    x = torch.randn(PAGES, 2, PAGE, WIDTH, device="cuda") if paged else torch.randn(ROWS, WIDTH, device="cuda")
    good = torch.arange(2 * BLOCKS, device="cuda").view(2, BLOCKS) if paged else torch.arange(COUNT, device="cuda") * 3
    bad = good.clone()
    if number != "inside":
        bad.view(-1)[2] = {"-1": -1, "length": size, "far": 2**31 - 1}[number]
    run = compiled(FUNCTIONS[name], how, folder)
    for _ in range(4):  # compiled, recorded, replayed
        run(x.clone(), good)
    torch.cuda.synchronize()
    result = run(x.clone(), bad)
    torch.cuda.synchronize()
    if how not in ("eager", "inductor") and fuseplan.planner.stats().fallbacks:
        return f"not fused: {fuseplan.planner.stats()}"
    return "right" if torch.allclose(result, FUNCTIONS[name](x.clone(), bad), rtol=1e-3, atol=1e-3) else "wrong"


def full_cache(how: str, folder: str, device: str = "cuda") -> str:
    """What stops a small Llama that makes more tokens than its static cache has room for, and what it made."""
    from static_caches import cache_argument
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().to(device)
    cache, made = StaticCache(config=config, max_cache_len=3, max_batch_size=1, device=device), 0
    given = cache_argument(model, cache)
    run = compiled(lambda ids, at: model(
        ids, position_ids=at[None], cache_position=at, use_cache=True, **given).logits, how, folder)
    try:
        for at in range(5):
            logits = run(torch.tensor([[7]], device=device), torch.tensor([at], device=device))
            assert logits.isfinite().all()
            made += 1
    except (RuntimeError, IndexError) as error:
        return f"{_named(error)} after {made} tokens"
    return f"no error after {made} tokens"


def _named(error: Exception) -> str:
    known = (one for one in ("device-side assert", "launch failure") if one in str(error))
    return next(known, f"{type(error).__name__}: {error}")


def main(name: str, how: str, number: str) -> None:
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(full_cache(how, folder) if name == "full cache" else once(name, how, number, folder), flush=True)
        except Exception as error:
            print(_named(error), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
