"""Model families of packages, tiny and random: every type of transformers, and what timm, torchvision, diffusers and
PyTorch Geometric have.

Nobody writes their sizes down: a family of transformers is its own default configuration with the numbers shrunk. What
cannot be built that way is no family here.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

_VOCABULARY, _BATCH, _TOKENS, _IMAGE = 131, 2, 9, 64

#: Keyword arguments of a call.
Arguments = dict[str, Any]
#: Builds a model with the arguments of a call.
Build = Callable[[], tuple[nn.Module, Arguments]]


@dataclass(frozen=True)
class Sizes:
    """What numbers of a configuration become, by a pattern that its whole name matches; the first one counts."""

    numbers: Mapping[str, Any] = field(default_factory=dict)

    def of(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            return value
        for pattern, size in self.numbers.items():
            if re.fullmatch(pattern, name):
                return min(size, value) if pattern in _AT_MOST else size
        return value


_LAYERS = {
    r"(num|n)_(hidden_|encoder_|decoder_|text_|vision_)?(hidden_)?layers?": 2, r"(en|de)coder_layers": 2,
    r"n_layer|num_blocks|depth|num_hidden_groups|layers|.*_depth": 2, r"num_.*_layers": 2,
    r"first_k_dense_replace|moe_layer_start_index": 1,
}
_TOKENS_OF = {
    r".*vocab_size.*": _VOCABULARY, r".*(bos|eos|pad|sep|cls|mask|unk|start)_token_id|.*_token_(id|index)": 2,
}
_WIDTHS = {
    r"head_dim|.*_head_dim|d_kv|attention_head_size|kv_channels": 16, r"qk_rope_head_dim": 8,
    r"(num_)?(key_value|kv)_heads|num_key_value_heads|n_kv_heads": 2,
    r".*(num_|n_)?(attention_)?heads?|n_head|num_heads|.*_attention_heads": 4,
    r"hidden_size|d_model|n_embd|.*(embed|embedding|hidden)_(dim|size)|dim|.*proj(ection)?_dim|width": 64,
    r".*(intermediate|ffn|ff|mlp|inner).*(size|dim|hidden)|d_ff|d_inner|n_inner|.*ffn_dim": 96,
    r".*lora_rank": 24, r"(num|n)_.*experts|moe_num_experts": 4, r".*experts_per_tok.*|.*top_?k|moe_k": 2,
    r"n_group|topk_group|num_expert_groups": 1, r"num_mel_bins|num_mel": 20,
}
_AT_MOST = {
    r".*max_position_embeddings|n_positions|max_.*_positions|max_seq_len.*": 256, r"sliding_window|attention_window": 6,
    r".*state_size|.*(mamba|ssm).*d_state|d_state": 16, r".*chunk_size": 8, r".*rank": 8, r"num_queries": 10,
}
_PIXELS = {r"image_size": _IMAGE, r"patch_size": 16}

#: From the smallest to the least changed; the first that builds a model and runs it is the family.
_LEVELS = (
    Sizes({**_AT_MOST, **_TOKENS_OF, **_LAYERS, **_WIDTHS, **_PIXELS}),
    Sizes({**_AT_MOST, **_TOKENS_OF, **_LAYERS, **_WIDTHS}),
    Sizes({**_TOKENS_OF, **_LAYERS, **_PIXELS}),
    Sizes({**_TOKENS_OF, **_LAYERS}),
    Sizes(_LAYERS),
    Sizes(),
)
_MOST_PARAMETERS = 150_000_000


def families(packages: Sequence[str]) -> dict[str, Build]:
    """Every family of these packages that are installed, by its name."""
    found = dict[str, Build]()
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            continue
        found |= {f"{package}/{name}": build for name, build in _PACKAGES[package]()}
    return found


# -- transformers -----------------------------------------------------------------------------------------

#: Kinds of model, by the mapping that has the class of each type. The first that has it counts.
_TASKS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CTC", "IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "DEPTH_ESTIMATION", "TEXT_TO_WAVEFORM",
    "TIME_SERIES_PREDICTION", "IMAGE_TEXT_TO_TEXT", "KEYPOINT_DETECTION", "",
)  # fmt: skip


def _transformers() -> Iterator[tuple[str, Build]]:
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for kind in CONFIG_MAPPING_NAMES:
        for task in _TASKS:
            mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES")
            if (names := mapping.get(kind)) is not None:
                yield kind, partial(_of_transformers, kind, names if isinstance(names, str) else names[0])
                break


def _of_transformers(kind: str, name: str) -> tuple[nn.Module, Arguments]:
    import transformers

    model_class = getattr(transformers, name)
    default = transformers.AutoConfig.for_model(kind)
    problems = []
    for sizes in _LEVELS:
        try:
            model = _built(model_class, _shrunk(default, sizes))
            given = _arguments(model)
            with torch.no_grad():
                model(**given)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}"[:120])
        else:
            return model, given
    raise LookupError("; ".join(dict.fromkeys(problems)))


def _built(model_class: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        size = sum(one.numel() for one in model_class(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model: nn.Module = model_class(config)
    for parameter in model.parameters():
        if parameter.dim() == 2 and parameter.numel() < 1_000_000:
            parameter.data.normal_(std=0.1)
    return model.eval()


def _shrunk(config: Any, sizes: Sizes) -> Any:
    """The configuration made anew of its smaller numbers."""
    entries = _smaller(config.to_dict(), sizes)
    for name in ("transformers_version", "model_type", "architectures", "out_features", "out_indices", "stage_names"):
        entries.pop(name, None)
    made = type(config)(**entries)
    kinds = getattr(config, "layer_types", None)
    if kinds and len(set(kinds)) > 1 and (layers := getattr(made, "num_hidden_layers", 0)):
        different = list(dict.fromkeys(kinds))
        made.layer_types = [different[at % len(different)] for at in range(layers)]
    return made


def _smaller(entries: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, value in entries.items():
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            found[name] = {**value, "mrope_section": [4, 2, 2]} if "mrope_section" in value else value
        elif isinstance(value, dict) and name not in ("id2label", "label2id"):
            found[name] = _smaller(value, sizes)
        elif not (sizes.numbers and name in ("layer_types", "mlp_layer_types")):  # as long as there are layers
            found[name] = sizes.of(name, value)
    for name, same in (("head_dim", "qk_rope_head_dim"), ("num_key_value_heads", "num_attention_heads")):
        if same in entries and entries.get(name) == entries[same]:
            found[name] = found[same]
    return found


def _arguments(model: Any) -> Arguments:
    """What ``forward`` needs, by the names of its parameters."""
    generator = torch.Generator().manual_seed(1)
    wanted = inspect.signature(model.forward).parameters
    config = model.config
    ids = torch.randint(3, _VOCABULARY, (_BATCH, _TOKENS), generator=generator)
    channels, height = (_number(config, name, number) for name, number in (("num_channels", 3), ("image_size", _IMAGE)))
    height, width = height if isinstance(height, (list, tuple)) else (height, height)
    images = torch.randn(_BATCH, channels, height, width, generator=generator)
    mask = torch.ones_like(ids)
    mask[:-1, :3] = 0
    mels = _number(config, "num_mel_bins", 80)
    frames = 2 * _number(config, "max_source_positions", 30)
    everything: Arguments = {
        "input_ids": ids, "pixel_values": images, "attention_mask": mask,
        "input_features": torch.randn(_BATCH, mels, frames, generator=generator),
        "input_values": torch.randn(_BATCH, 4000, generator=generator),
    }
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values_videos":
        frames = _number(config, "num_frames", 2)
        everything[main] = torch.randn(_BATCH, frames, channels, height, width, generator=generator)
    given = {main: everything[main]}
    if main == "input_ids":
        given |= {name: everything[name] for name in ("attention_mask",) if name in wanted}
        needed = {"pixel_values"} if "pixel_values" in wanted and not hasattr(config, "image_token_id") else set()
        given |= {name: everything[name] for name in needed}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in wanted:
        given["decoder_input_ids"] = ids.flip(1)
    if "use_cache" in wanted:
        given["use_cache"] = False
    return given


def _number(config: Any, name: str, otherwise: Any) -> Any:
    """A number of the configuration, or of one that it holds."""
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    return next((getattr(one, name) for one in parts if getattr(one, name, None) is not None), otherwise)


# -- vision ------------------------------------------------------------------------------------------------

_SMALL = ("test_", "pico", "atto", "nano", "femto", "_xxs", "_xs", "tiny", "_t", "_s", "small", "_0", "18", "_b0")


def _timm() -> Iterator[tuple[str, Build]]:
    import timm

    for module in timm.list_modules():
        if names := timm.list_models(module=module):
            names.sort(key=lambda name: (next((at for at, part in enumerate(_SMALL) if part in name), 99), len(name)))
            yield module, partial(_of_timm, names)


def _of_timm(names: Sequence[str]) -> tuple[nn.Module, Arguments]:
    import timm

    name = names[0]
    for more in ({"img_size": 64}, {"img_size": 224}, {}):
        torch.manual_seed(0)
        try:
            model = timm.create_model(name, pretrained=False, num_classes=7, **more).eval()
            size = more.get("img_size") or model.pretrained_cfg["input_size"][-1]
            sizes = (size,) if more else (64, 96, size)
            for pixels in sizes:
                given = {"x": torch.randn(_BATCH, 3, pixels, pixels, generator=torch.Generator().manual_seed(1))}
                try:
                    with torch.no_grad():
                        model(given["x"])
                except Exception as error:
                    problem = error
                else:
                    return _Positional(model), given
        except Exception as error:
            problem = error
    raise LookupError(f"{name}: {type(problem).__name__}: {problem}"[:200])


class _Positional(nn.Module):
    """A model whose arguments are given by position, whatever it calls them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: Any) -> Any:
        return self.model(*given.values())


_TORCHVISION = {
    **{name: {} for name in (
        "alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "wide_resnet50_2", "squeezenet1_1", "densenet121",
        "shufflenet_v2_x0_5", "mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5", "efficientnet_b0",
        "efficientnet_v2_s", "regnet_y_400mf", "regnet_x_400mf", "convnext_tiny", "swin_t", "swin_v2_t",
    )},
    "googlenet": {"init_weights": False}, "inception_v3": {"init_weights": False}, "vit_b_16": {"image_size": 64},
    "maxvit_t": {"input_size": (224, 224)},
}  # fmt: skip
_TORCHVISION_TASKS: Mapping[str, tuple[str, Sequence[Sequence[int]], Mapping[str, Any]]] = {
    "fcn_resnet50": ("segmentation", [(1, 3, 64, 64)], {"weights_backbone": None}),
    "deeplabv3_mobilenet_v3_large": ("segmentation", [(1, 3, 64, 64)], {"weights_backbone": None}),
    "lraspp_mobilenet_v3_large": ("segmentation", [(1, 3, 64, 64)], {"weights_backbone": None}),
    "r3d_18": ("video", [(1, 3, 4, 48, 48)], {}), "mc3_18": ("video", [(1, 3, 4, 48, 48)], {}),
    "r2plus1d_18": ("video", [(1, 3, 4, 48, 48)], {}), "s3d": ("video", [(1, 3, 14, 224, 224)], {}),
    "swin3d_t": ("video", [(1, 3, 4, 64, 64)], {}), "raft_small": ("optical_flow", [(1, 3, 128, 128)] * 2, {}),
}


def _torchvision() -> Iterator[tuple[str, Build]]:
    for name, more in _TORCHVISION.items():
        side = {"inception_v3": 96, "maxvit_t": 224}.get(name, 64)
        yield name, partial(_of_torchvision, "", name, [(_BATCH, 3, side, side)], {"num_classes": 7, **more})
    for name, (room, shapes, more) in _TORCHVISION_TASKS.items():
        yield name, partial(_of_torchvision, room, name, shapes, more)


def _of_torchvision(
    room: str, name: str, shapes: Sequence[Sequence[int]], more: Mapping[str, Any]
) -> tuple[nn.Module, Arguments]:
    module: Any = importlib.import_module("torchvision.models" + (f".{room}" if room else ""))
    return _made(lambda: getattr(module, name)(weights=None, **more), shapes)


def _made(build: Callable[[], nn.Module], shapes: Sequence[Sequence[int]]) -> tuple[nn.Module, Arguments]:
    torch.manual_seed(0)
    model = build().eval()
    generator = torch.Generator().manual_seed(1)
    return _Positional(model), {f"x{at}": torch.randn(*one, generator=generator) for at, one in enumerate(shapes)}


# -- diffusion, graphs -------------------------------------------------------------------------------------

_BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_DIFFUSERS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Sequence[int] | float]]] = {
    "UNet2DModel": (
        {**_BLOCKS, "sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": (2, 3, 16, 16), "timestep": 10.0}),
    "UNet2DConditionModel": (
        {**_BLOCKS, "sample_size": 16, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 32, "attention_head_dim": 8},
        {"sample": (2, 4, 16, 16), "timestep": 10.0, "encoder_hidden_states": (2, 7, 32)}),
    "ControlNetModel": (
        {**_BLOCKS, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 32,
         "attention_head_dim": 8, "conditioning_embedding_out_channels": (16, 32, 32, 32)},
        {"sample": (2, 4, 16, 16), "timestep": 10.0, "encoder_hidden_states": (2, 7, 32),
         "controlnet_cond": (2, 3, 128, 128)}),
    "UNet3DConditionModel": (
        {**_BLOCKS, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": 32, "attention_head_dim": 8},
        {"sample": (1, 4, 3, 16, 16), "timestep": 10.0, "encoder_hidden_states": (1, 7, 32)}),
    "AutoencoderKL": (
        {**_BLOCKS, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (2, 3, 32, 32)}),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
         "num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)}, {"sample": (2, 3, 32, 32)}),
    "VQModel": (
        {**_BLOCKS, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (2, 3, 32, 32)}),
    "AutoencoderDC": (
        {"encoder_block_out_channels": (32, 64), "decoder_block_out_channels": (32, 64),
         "encoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_layers_per_block": (1, 1),
         "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "decoder_layers_per_block": (1, 1),
         "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,)), "attention_head_dim": 16,
         "latent_channels": 8}, {"sample": (1, 3, 32, 32)}),
    "DiTTransformer2DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2, "sample_size": 16},
        {"hidden_states": (2, 4, 16, 16), "timestep": (2,), "class_labels": (2,)}),
    "PixArtTransformer2DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2, "sample_size": 16,
         "cross_attention_dim": 64, "caption_channels": 32},
        {"hidden_states": (2, 4, 16, 16), "timestep": (2,), "encoder_hidden_states": (2, 7, 32)}),
    "SD3Transformer2DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2, "sample_size": 16,
         "joint_attention_dim": 32, "caption_projection_dim": 64, "pooled_projection_dim": 32, "out_channels": 4,
         "pos_embed_max_size": 16},
        {"hidden_states": (2, 4, 16, 16), "timestep": (2,), "encoder_hidden_states": (2, 7, 32),
         "pooled_projections": (2, 32)}),
    "FluxTransformer2DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 1,
         "num_single_layers": 1, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
        {"hidden_states": (2, 16, 4), "timestep": (2,), "encoder_hidden_states": (2, 7, 32),
         "pooled_projections": (2, 32), "txt_ids": (7, 3), "img_ids": (16, 3)}),
    "SanaTransformer2DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2,
         "num_cross_attention_heads": 4, "cross_attention_head_dim": 16, "cross_attention_dim": 64,
         "caption_channels": 32, "sample_size": 16},
        {"hidden_states": (2, 4, 16, 16), "timestep": (2,), "encoder_hidden_states": (2, 7, 32)}),
    "AuraFlowTransformer2DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "sample_size": 16,
         "num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 32, "caption_projection_dim": 64,
         "pos_embed_max_size": 64},
        {"hidden_states": (2, 4, 16, 16), "timestep": (2,), "encoder_hidden_states": (2, 7, 32)}),
    "WanTransformer3DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2,
         "text_dim": 32, "ffn_dim": 96, "freq_dim": 32},
        {"hidden_states": (1, 4, 2, 16, 16), "timestep": (1,), "encoder_hidden_states": (1, 7, 32)}),
    "CogVideoXTransformer3DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2,
         "text_embed_dim": 32, "time_embed_dim": 16, "sample_width": 8, "sample_height": 8, "sample_frames": 5,
         "max_text_seq_length": 7},
        {"hidden_states": (1, 2, 4, 8, 8), "timestep": (1,), "encoder_hidden_states": (1, 7, 32)}),
    "LTXVideoTransformer3DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2,
         "cross_attention_dim": 64, "caption_channels": 32},
        {"hidden_states": (1, 32, 4), "timestep": (1,), "encoder_hidden_states": (1, 7, 32),
         "encoder_attention_mask": (1, 7), "num_frames": 2.0, "height": 4.0, "width": 4.0}),
    "PriorTransformer": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "embedding_dim": 32,
         "num_embeddings": 7, "additional_embeddings": 4},
        {"hidden_states": (2, 32), "timestep": 10.0, "proj_embedding": (2, 32), "encoder_hidden_states": (2, 7, 32)}),
}


def _diffusers() -> Iterator[tuple[str, Build]]:
    for name in _DIFFUSERS:
        yield name, partial(_of_diffusers, name)


def _of_diffusers(name: str) -> tuple[nn.Module, Arguments]:
    import diffusers

    options, shapes = _DIFFUSERS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, name)(**options).eval()
    generator = torch.Generator().manual_seed(1)
    given = Arguments()
    for argument, shape in shapes.items():
        if isinstance(shape, float):
            given[argument] = int(shape)
        elif argument in ("class_labels", "timestep"):
            given[argument] = torch.randint(0, 9, tuple(shape), generator=generator)
        else:
            given[argument] = torch.randn(*shape, generator=generator)
    return model, {**given, "return_dict": False}


_GRAPH_MODELS = ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN")
_GRAPH_LAYERS = (
    "GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "TransformerConv", "GINConv", "ChebConv", "ARMAConv", "SGConv",
    "TAGConv", "GraphConv", "ResGatedGraphConv", "LEConv", "ClusterGCNConv", "GENConv", "GeneralConv", "MFConv",
    "SuperGATConv", "FiLMConv", "EGConv", "AntiSymmetricConv",
)  # fmt: skip


def _torch_geometric() -> Iterator[tuple[str, Build]]:
    for name in (*_GRAPH_MODELS, *_GRAPH_LAYERS):
        yield name, partial(_of_torch_geometric, name)


def _of_torch_geometric(name: str) -> tuple[nn.Module, Arguments]:
    from torch_geometric import nn as layers

    torch.manual_seed(0)
    kind: Any = getattr(layers, name)
    edges = torch.randint(0, 20, (2, 60), generator=torch.Generator().manual_seed(1))
    more: dict[str, Any] = {
        "PNA": {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"],
                "deg": torch.bincount(edges[1], minlength=20)},
        "ChebConv": {"K": 3},
    }.get(name, {})
    if name in _GRAPH_MODELS:
        model = kind(16, 24, 2, 7, **more)
    elif name == "GINConv":
        model = kind(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24)))
    else:
        model = kind(16) if name == "AntiSymmetricConv" else kind(16, 24, **more)
    nodes = torch.randn(20, 16, generator=torch.Generator().manual_seed(2))
    return model.eval(), {"x": nodes, "edge_index": edges}


_PACKAGES: Mapping[str, Callable[[], Iterator[tuple[str, Build]]]] = {
    "transformers": _transformers, "timm": _timm, "torchvision": _torchvision, "diffusers": _diffusers,
    "torch_geometric": _torch_geometric,
}
PACKAGES = tuple(_PACKAGES)
