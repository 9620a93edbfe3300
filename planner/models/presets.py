"""Published model shapes, as Hugging Face config entries. Data only; weights are random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _llama3(factor: float, **shape: Any) -> Mapping[str, Any]:
    """A Llama 3.1 / 3.2 config; the entries that all of them share are here."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "dtype": "bfloat16",
        **shape,
    }


#: Preset name to config.json entries.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": _llama3(
        32.0,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _llama3(
        8.0,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ),
    "llama-3.1-70b": _llama3(
        8.0,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ),
}

#: Names that stand for another preset, by device type.
ALIASES: Mapping[str, Mapping[str, str]] = {"llama": {"cpu": "llama-3.2-1b", "cuda": "llama-3.1-8b"}}
