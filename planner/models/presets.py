"""Published model shapes, as Hugging Face config entries. Data only; weights are random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _llama3(
    rope_factor: float, hidden: int, intermediate: int, layers: int, heads: int, tied: bool = False
) -> Mapping[str, Any]:
    """A Llama 3.1 or 3.2 config."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": hidden // heads, "vocab_size": 128256,
        "tie_word_embeddings": tied, "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "bos_token_id": 128000, "eos_token_id": 128001,
        "rope_scaling": {
            "rope_type": "llama3", "factor": rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


#: Preset name to config.json entries.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": _llama3(32.0, hidden=2048, intermediate=8192, layers=16, heads=32, tied=True),
    "llama-3.1-8b": _llama3(8.0, hidden=4096, intermediate=14336, layers=32, heads=32),
    "llama-3.1-70b": _llama3(8.0, hidden=8192, intermediate=28672, layers=80, heads=64),
}

#: Names that stand for another preset, by device type.
ALIASES: Mapping[str, Mapping[str, str]] = {"llama": {"cpu": "llama-3.2-1b", "cuda": "llama-3.1-8b"}}
