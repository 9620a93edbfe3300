"""Hugging Face's generate() with a static cache, its decode steps compiled by fuseplan. The tokens are eager's.

The first call of a static cache compiles the decode step; every later step replays what was compiled.
"""

from __future__ import annotations

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import fuseplan

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, max_position_embeddings=128, bos_token_id=0, eos_token_id=None,
)


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    ids = torch.randint(1, CONFIG.vocab_size, (1, 16))
    expected = model.generate(ids, do_sample=False, max_new_tokens=8)

    # On a GPU add options={"cuda_graphs": True}: each step is then one replay of a CUDA graph.
    config = CompileConfig(backend="fuseplan", mode=None)
    config._compile_all_devices = True  # transformers compiles on GPUs only, unless it is told
    found = model.generate(
        ids, cache_implementation="static", compile_config=config, do_sample=False, max_new_tokens=8,
    )
    assert torch.equal(found, expected), (found, expected)
    print("tokens:", found[0, ids.shape[1]:].tolist())
    print(fuseplan.stats())


if __name__ == "__main__":
    main()
