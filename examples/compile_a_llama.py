"""Compile a tiny Llama with fuseplan and compare it with eager mode. Runs on any machine in seconds.

Nothing was tuned for this model, so the cost model decides what is fused. The last lines say what it did.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fuseplan

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, max_position_embeddings=128,
)


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    fast = torch.compile(model, backend="fuseplan")
    ids = torch.randint(0, CONFIG.vocab_size, (1, 16))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        found = fast(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    print(f"largest difference to eager: {(found - expected).abs().max():.1e}")
    print(fuseplan.stats())


if __name__ == "__main__":
    main()
