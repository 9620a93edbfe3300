"""A small Llama whose weights are tensor subclasses of torchao or quanto, beside the same one with plain weights.

    pip install torchao optimum-quanto
    python tests/checks/quantised_models.py

Says of each, untuned, on a CPU: groups fused, fallbacks, and how far results are from eager mode's, ours and
TorchInductor's (normwise, relative). pytest does not collect it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from optimum import quanto  # type: ignore[import-not-found]
from torchao import quantization as ao  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM

from fuseplan.planner import reset_stats, stats

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128)


def by_torchao(config: Any) -> Callable[[Any], None]:
    return lambda model: ao.quantize_(model, config)


def by_quanto(kind: Any) -> Callable[[Any], None]:
    def quantise(model: Any) -> None:
        quanto.quantize(model, weights=kind)
        quanto.freeze(model)

    return quantise


WEIGHTS: Mapping[str, Callable[[Any], None]] = {
    "plain": lambda model: None,
    "torchao int8 weight-only": by_torchao(ao.Int8WeightOnlyConfig()),
    "torchao int8 dynamic": by_torchao(ao.Int8DynamicActivationInt8WeightConfig()),
    "torchao int4 (Intx)": by_torchao(ao.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
    "torchao fp8 weight-only": by_torchao(ao.Float8WeightOnlyConfig()),
    "quanto int8": by_quanto(quanto.qint8),
    "quanto fp8": by_quanto(quanto.qfloat8),
}


def main() -> None:
    ids = torch.randint(0, CONFIG.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    print("| weights | groups fused | fallbacks | error | TorchInductor's |\n| --- | ---: | ---: | ---: | ---: |")
    for name, quantise in WEIGHTS.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(CONFIG).eval().to(torch.bfloat16)
        quantise(model)
        errors, seen = [], stats()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            expected = model(ids, use_cache=False).logits.float()
            for how in ({"backend": "fuseplan", "options": {"db": str(Path(folder) / "tuning.db")}}, {}):
                torch._dynamo.reset()
                reset_stats()
                call = torch.compile(model, **how)
                found = [call(ids, use_cache=False).logits.float() for _ in range(2)][-1]
                errors.append(float((found - expected).norm() / expected.norm()))
                seen = stats() if how else seen
        print(f"| {name} | {seen.groups_fused} | {len(seen.fallbacks)} | {errors[0]:.1e} | {errors[1]:.1e} |",
              flush=True)


if __name__ == "__main__":
    main()
