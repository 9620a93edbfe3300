"""Tiny Hugging Face configs of several families: two layers, odd sizes where the family allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DECODER = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**DECODER, "model_type": "llama", "rope_theta": 10000.0, "rope_scaling": _ROPE},
    "qwen3": {**DECODER, "model_type": "qwen3"},
    "gemma3": {
        **DECODER,
        "model_type": "gemma3_text",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {**DECODER, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 131,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "bert": {
        "model_type": "bert",
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
}


def write_config(folder: Path, name: str) -> Path:
    """A config.json of that family in ``folder``."""
    path = folder / name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(CONFIGS[name]))
    return path
