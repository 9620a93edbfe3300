"""The 24 model families that the matrix of ``check_models.py`` goes through, tiny and random: two layers, odd sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from model_samples import CONFIGS, DECODER
from torch import nn

_ENCODER = {k: v for k, v in CONFIGS["bert"].items() if k != "model_type"}

#: Hugging Face configs by family, as they would stand in a config.json.
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": CONFIGS["llama"],
    "qwen3": CONFIGS["qwen3"],
    "qwen3-moe": {
        **DECODER, "model_type": "qwen3_moe", "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
    "gemma2": {**DECODER, "model_type": "gemma2", "sliding_window": 16, "query_pre_attn_scalar": 12},
    "gemma3": CONFIGS["gemma3"],
    "mistral": {**DECODER, "model_type": "mistral", "sliding_window": 6},
    "mixtral": CONFIGS["mixtral"],
    "phi3": {**DECODER, "model_type": "phi3"},
    "gpt2": {**CONFIGS["gpt2"], "pad_token_id": 0},
    "neox": {
        **_ENCODER, "model_type": "gpt_neox", "rotary_pct": 0.5, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "opt": {
        "model_type": "opt", "vocab_size": 131, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 48, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
    },
    "bert": CONFIGS["bert"],
    "roberta": {**_ENCODER, "model_type": "roberta", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "t5": {
        "model_type": "t5", "vocab_size": 131, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2,
        "num_decoder_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu", "pad_token_id": 0,
        "eos_token_id": 2, "decoder_start_token_id": 0, "is_encoder_decoder": True,
    },
    "vit": {
        "model_type": "vit", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 36, "patch_size": 12,
    },
    "clip": {
        "model_type": "clip", "projection_dim": 24,
        "text_config": {
            "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 128, "projection_dim": 24, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0,
        },
        "vision_config": {
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 36, "patch_size": 12, "projection_dim": 24,
        },
    },
    "whisper": {
        "model_type": "whisper", "vocab_size": 131, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80,
        "num_mel_bins": 20, "max_source_positions": 30, "max_target_positions": 128, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "is_encoder_decoder": True,
    },
    "deepseek-v3": {
        **{name: value for name, value in DECODER.items() if name != "head_dim"}, "model_type": "deepseek_v3",
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
        "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4,
        "topk_group": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 40, "num_mtp_layers": 0,
    },
    "gpt-oss": {
        **DECODER, "model_type": "gpt_oss", "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_scaling": None, "layer_types": ["sliding_attention", "full_attention"],
    },
    "mamba": {
        "model_type": "mamba", "vocab_size": 131, "hidden_size": 48, "state_size": 8, "num_hidden_layers": 2,
        "time_step_rank": 3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
    "mamba2": {
        "model_type": "mamba2", "vocab_size": 131, "hidden_size": 48, "state_size": 8, "num_hidden_layers": 2,
        "num_heads": 8, "head_dim": 12, "n_groups": 2, "chunk_size": 8, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
    },
}  # fmt: skip

Task = Literal["causal", "encoder", "seq2seq", "speech", "vision", "contrastive", "own"]

_TASKS: Mapping[str, Task] = {
    "bert": "encoder", "roberta": "encoder", "t5": "seq2seq", "whisper": "speech", "vit": "vision",
    "clip": "contrastive", "transformer-encoder": "own", "cnn": "own", "unet": "own",
}  # fmt: skip

#: Every family, by name.
FAMILIES = (*FAMILY_CONFIGS, "transformer-encoder", "cnn", "unet")

#: Factory of each task's class in ``transformers``.
_AUTO: Mapping[Task, str] = {
    "causal": "AutoModelForCausalLM", "encoder": "AutoModel", "seq2seq": "AutoModelForSeq2SeqLM",
    "speech": "AutoModelForSpeechSeq2Seq", "vision": "AutoModel", "contrastive": "AutoModel",
}  # fmt: skip


def task_of(name: str) -> Task:
    """What a family is for; most generate text from text."""
    return _TASKS.get(name, "causal")


def is_transformer(name: str) -> bool:
    """Whether the bar for transformers holds for the family (95 % of coverable ops; else 90 %)."""
    return name not in ("mamba", "mamba2", "cnn", "unet")


def write_family(folder: Path, name: str) -> Path:
    """A config.json of a Hugging Face family in ``folder``."""
    path = folder / name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(FAMILY_CONFIGS[name]))
    return path


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The family's model, its weights random and large enough for every op to matter.

    It is of ``dtype`` as ``from_pretrained`` makes it so: RoPE's frequencies stay in fp32, which ``to(dtype)`` rounds.
    """
    torch.manual_seed(seed)
    if task_of(name) == "own":
        return _OWN[name]().eval().to(dtype)
    import transformers

    entries = dict(FAMILY_CONFIGS[name])
    config = transformers.AutoConfig.for_model(entries.pop("model_type"), **entries)
    model: nn.Module = getattr(transformers, _AUTO[task_of(name)]).from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(std=0.15)
    return model.eval()


#: Images or sequences of an example, and their length.
EXAMPLE = (3, 9)


def example(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The family's model with arguments of one call, as ``plan tune --module`` asks for them."""
    return build(name), inputs(name, *EXAMPLE)


transformer_encoder_example, cnn_example, unet_example = (partial(example, name) for name in FAMILIES[-3:])


def inputs(name: str, batch: int, length: int, seed: int = 0, masked: bool = False) -> dict[str, torch.Tensor]:
    """Arguments of one call, by keyword.

    Args:
        name: The family.
        batch: Sequences or images.
        length: Tokens, or of an image 4 pixels of its width, where the model takes any width.
        seed: Of the contents.
        masked: Give an attention mask, the first tokens of all sequences but the last padded, where there are tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    task = task_of(name)
    if task == "own":
        shape = (batch, length, 48) if name == "transformer-encoder" else (batch, 3, 24, 4 * length)
        return {"x": torch.randn(shape, generator=generator)}
    ids = torch.randint(3, 131, (batch, length), generator=generator)
    images = torch.randn(batch, 3, 36, 36, generator=generator)
    if task == "vision":
        return {"pixel_values": images}
    if task == "speech":
        return {"input_features": torch.randn(batch, 20, 60, generator=generator), "decoder_input_ids": ids}
    found = {"input_ids": ids}
    if masked:
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][:-1, : length // 3] = 0
    if task == "contrastive":
        found["pixel_values"] = images
    if task == "seq2seq":
        found["decoder_input_ids"] = ids.flip(1)
    return found


class Encoder(nn.Module):
    """PyTorch's own encoder, without the fast path that computes a whole layer in one call."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(48, 4, 80, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            result: torch.Tensor = self.layers(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        return result


class Residual(nn.Module):
    """Two convolutions with batch norms and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm1(self.first(x)))
        return torch.relu_(self.norm2(self.second(hidden)) + x)


def cnn() -> nn.Module:
    """A small residual network."""
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        Residual(12), Residual(12), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 7),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # as training leaves them, not as they are made
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 2.0)
            nn.init.normal_(module.weight, 1.0, 0.2)
            nn.init.normal_(module.bias, 0.0, 0.2)
    return model


class Named(nn.Module):
    """A model whose argument is called ``x``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x)
        return result


class Stage(nn.Module):
    """Group norm, SiLU and a convolution, twice, with a shortcut: the block of a diffusion model."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, out)
        self.first, self.second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(nn.functional.silu(self.norm1(x)))
        hidden = self.second(nn.functional.silu(self.norm2(hidden)))
        return hidden + self.shortcut(x)


class UNet(nn.Module):
    """One step down and up again, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 3, 3, padding=1)
        self.down, self.middle, self.up = Stage(12, 16), Stage(16, 16), Stage(28, 12)
        self.shrink = nn.Conv2d(12, 12, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.stem(x)
        hidden = self.middle(self.down(self.shrink(skip)))
        hidden = nn.functional.interpolate(hidden, scale_factor=2.0, mode="nearest")
        return torch.tanh(self.head(self.up(torch.cat([hidden, skip], dim=1))))


_OWN: Mapping[str, Callable[[], nn.Module]] = {
    "transformer-encoder": Encoder, "cnn": lambda: Named(cnn()), "unet": UNet,
}  # fmt: skip
