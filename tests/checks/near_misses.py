"""A tuned Llama called in ways that nobody tuned: other constants, arguments given that are usually made, masks.

    plan tune --model llama-3.2-1b
    python tests/checks/near_misses.py [--layers N] [--decode KV] [--prefill N] [--db DB]

Each call runs beside the tuned one in interleaved rounds; ratios of medians, the last of eager mode, whose model may do
more for such a call. Says what served its groups, and how far its logits are from eager mode's. pytest does not collect
it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers as hf

from fuseplan.planner import reset_stats, stats
from fuseplan.planner.models.sources import PRESETS

WAYS = ("as tuned", "eps", "position ids", "mask", "4-d mask", "embeddings", "last logits",
        "eps+position ids+mask+embeddings+last logits")
ROUNDS, EAGER_ROUNDS = 41, 11


class Llamas:
    """One model with two epsilons, out of entries of a config."""

    def __init__(self, entries: Mapping[str, Any], device: str) -> None:
        self.configs = {way: hf.AutoConfig.for_model(**{**entries, **changed})
                        for way, changed in (("", {}), ("eps", {"rms_norm_eps": 1e-6}))}
        with torch.device(device):
            self.models = {way: hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
                           for way, config in self.configs.items()}
        self.models["eps"].load_state_dict(self.models[""].state_dict(), assign=True)
        self.device = device

    def call(self, way: str, kv_len: int, seq: int) -> tuple[Any, dict[str, Any], Callable[[], None]]:
        """A model, its keyword arguments (of a decode step where ``kv_len``), and what makes it ready for a call."""
        names, made = way.split("+"), self.device
        which = "eps" if "eps" in names else ""
        model, config = self.models[which], self.configs[which]
        seq, past = (1, kv_len // 2) if kv_len else (seq, 0)
        torch.manual_seed(0)
        ids = torch.randint(0, config.vocab_size, (1, seq), device=made)
        given: dict[str, Any] = {"input_ids": ids, "use_cache": bool(kv_len)}
        cache = hf.StaticCache(config=config, max_cache_len=kv_len) if kv_len else None
        if cache is not None:
            before = torch.randint(0, config.vocab_size, (1, past), device=made)
            model(input_ids=before, past_key_values=cache, use_cache=True)
            given["past_key_values"] = cache
        if "embeddings" in names:
            given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids"))
        if "position ids" in names:
            given["position_ids"] = torch.arange(past, past + seq, device=made)[None]
        if "mask" in names:
            given["attention_mask"] = torch.ones(1, past + seq, dtype=torch.long, device=made)
        if "4-d mask" in names:
            keys = torch.arange(kv_len or seq, device=made)
            given["attention_mask"] = (keys <= torch.arange(past, past + seq, device=made)[:, None])[None, None]
        if "last logits" in names:
            given["logits_to_keep"] = 1

        def rewind() -> None:
            for layer in getattr(cache, "layers", ()):
                if isinstance(layer.cumulative_length, torch.Tensor):
                    layer.cumulative_length.fill_(past)
                else:
                    layer.cumulative_length = past

        return model, given, rewind


def compiled(model: Any, given: dict[str, Any], rewind: Callable[[], None], db: str | None) -> Callable[[], Any]:
    options = {} if db is None else {"db": db}
    run = torch.compile(model.forward, backend="fuseplan", options=options, dynamic=False)

    def call() -> Any:
        rewind()
        return run(**given).logits

    call()
    return call


def unplanned(model: Any, given: dict[str, Any], rewind: Callable[[], None]) -> Callable[[], Any]:
    def call() -> Any:
        rewind()
        return model(**given).logits

    return call


def medians_ms(calls: Sequence[Callable[[], Any]], rounds: int, device: str) -> list[float]:
    """Of calls in interleaved rounds."""
    found = [[timed_ms(one, device) for one in calls] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def timed_ms(call: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def compare(llamas: Llamas, way: str, kv_len: int, seq: int, db: str | None) -> None:
    torch._dynamo.reset()
    reset_stats()
    model, given, rewind = llamas.call(way, kv_len, seq)
    call = compiled(model, given, rewind, db)
    served = stats()
    tuned = llamas.call("as tuned" if "last logits" not in way or kv_len else "last logits", kv_len, seq)
    exact = compiled(*tuned, db)
    eager, eager_tuned = unplanned(model, given, rewind), unplanned(*tuned)
    expected, found = eager().float(), call().float()
    before, after = medians_ms((exact, call), ROUNDS, llamas.device)
    eager_before, eager_after = medians_ms((eager_tuned, eager), EAGER_ROUNDS, llamas.device)
    print(f"| {'decode' if kv_len else 'prefill'} | {way} | {before:.1f} | {after:.1f} | {after / before:.3f} | "
          f"{served.from_database} | {served.from_model} | {served.misses} | {eager_after / eager_before:.3f} | "
          f"{float((found - expected).norm() / expected.norm()):.1e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", choices=[*PRESETS])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--decode", type=int, default=256, metavar="KV", help="length of the cache; 0 for no decode")
    parser.add_argument("--prefill", type=int, default=128, metavar="N", help="tokens; 0 for no prefill")
    parser.add_argument("--db")
    args = parser.parse_args()
    with torch.no_grad():
        layers = {} if args.layers is None else {"num_hidden_layers": args.layers}
        llamas = Llamas({**PRESETS[args.model], **layers}, "cuda" if torch.cuda.is_available() else "cpu")
        print("| | call | as tuned, ms | this, ms | ratio | from the database | by the model | misses | eager's ratio "
              "| error |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for kv_len, seq in ((args.decode, 1), (0, args.prefill)):
            for way in WAYS if kv_len or seq > 1 else ():
                compare(llamas, way, kv_len, seq, args.db)


if __name__ == "__main__":
    main()
