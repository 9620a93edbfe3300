"""Models as people write them, of many kinds, with random weights and something to call each with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from static_caches import cache_argument
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class FixedCache(hf.StaticCache):
    """Each call writes to the same position, so that calls do not run out of room."""

    def __init__(self, config: Any, position: torch.Tensor, length: int) -> None:
        super().__init__(config=config, max_cache_len=length)
        self.position = position

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        layer = self.layers[layer_idx]
        return layer.keys.index_copy_(2, self.position, keys), layer.values.index_copy_(2, self.position, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class Models:
    """Makes a model and what it is called with."""

    def __init__(self, device: str, small: bool) -> None:
        self.device, self.small = device, small or device == "cpu"
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def _made(self, config: Any, kind: str) -> Any:
        with torch.device(self.device):
            model = getattr(hf, kind)(config).to(self.dtype)
        return self._initialised(model)

    @staticmethod
    def _initialised(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            if parameter.dim() > 1:  # a convolution's results keep the size of what it reads
                window = parameter[0].numel()
                parameter.data.normal_(0, 0.02 if parameter.dim() == 2 else (2 / window) ** 0.5)
        return model.eval()

    def _ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(3, 1000, shape, device=self.device)

    def gpt2(self) -> Made:
        config = hf.GPT2Config(n_embd=1024, n_layer=1 if self.small else 12, n_head=16)
        return self._made(config, "GPT2LMHeadModel"), (), {
            "input_ids": self._ids(*(1, 128) if self.small else (4, 512)), "use_cache": False}

    def bert(self) -> Made:
        model = self._made(hf.BertConfig(num_hidden_layers=1 if self.small else 12), "BertForMaskedLM")
        mask = torch.ones_like(ids := self._ids(*(2, 64) if self.small else (32, 128)))
        mask[::3, 100:] = 0
        return model, (), {"input_ids": ids, "attention_mask": mask}

    def whisper(self) -> Made:
        config = hf.WhisperConfig(
            d_model=768, encoder_layers=1 if self.small else 6, decoder_layers=2, encoder_attention_heads=12,
            decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072)
        return self._made(config, "WhisperModel").encoder, (self._floats(1 if self.small else 8, 80, 3000),), {}

    def convnext(self) -> Made:
        return self._images(hf.ConvNextConfig(), "ConvNextForImageClassification")

    def resnet(self) -> Made:
        return self._images(hf.ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512]),
                            "ResNetForImageClassification")

    def swin(self) -> Made:
        return self._images(hf.SwinConfig(depths=[2, 2, 2, 2] if self.small else [2, 2, 6, 2]),
                            "SwinForImageClassification")

    def vit(self) -> Made:
        return self._images(hf.ViTConfig(num_hidden_layers=2 if self.small else 12), "ViTForImageClassification")

    def _images(self, config: Any, kind: str) -> Made:
        return self._made(config, kind), (self._floats(1 if self.small else 32, 3, 224, 224),), {}

    def t5(self) -> Made:
        layers = 1 if self.small else 6
        config = hf.T5Config(num_layers=layers, num_decoder_layers=layers, feed_forward_proj="gated-gelu")
        ids = self._ids(*(1, 64) if self.small else (8, 512))
        return self._made(config, "T5ForConditionalGeneration"), (), {
            "input_ids": ids, "decoder_input_ids": ids, "use_cache": False}

    def mamba(self) -> Made:
        config = hf.MambaConfig(hidden_size=256, num_hidden_layers=1 if self.small else 8, vocab_size=8192)
        return self._made(config, "MambaForCausalLM"), (), {"input_ids": self._ids(1, 16), "use_cache": False}

    def qwen(self) -> Made:
        config = hf.Qwen2Config(
            hidden_size=896, intermediate_size=4864, num_hidden_layers=2 if self.small else 24, num_attention_heads=14,
            num_key_value_heads=2, vocab_size=32768)
        return self._made(config, "Qwen2ForCausalLM"), (), {
            "input_ids": self._ids(1, 128 if self.small else 1024), "use_cache": False}

    def llama(self) -> Made:
        """Decodes one token with a static cache, as Llama-3.2-1B does."""
        config = hf.LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=2 if self.small else 16, num_attention_heads=32,
            num_key_value_heads=8, head_dim=64, vocab_size=8192 if self.small else 128256)
        model = self._made(config, "LlamaForCausalLM")
        position = torch.tensor([256], device=self.device)
        cache = FixedCache(config, position, 512)
        cache.early_initialization(1, 8, 64, self.dtype, torch.device(self.device))
        mask = (torch.arange(512, device=self.device) <= position)[None, None, None]
        return model, (), {"input_ids": self._ids(1, 1), "position_ids": position[None], "attention_mask": mask,
                           **cache_argument(model, cache)}

    def int8_llama(self) -> Made:
        """The same with torchao's int8 weights: each is a tensor subclass."""
        from torchao import quantization  # type: ignore[import-not-found]

        model, args, kwargs = self.llama()
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return model, args, kwargs

    def unet(self) -> Made:
        class Block(nn.Module):
            """Two convolutions with group norms, around a smaller picture."""

            def __init__(self, width: int, inner: nn.Module | None) -> None:
                super().__init__()
                self.norm, self.second = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
                self.conv, self.out = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
                self.down, self.inner = nn.Conv2d(width, 2 * width, 3, 2, 1), inner
                self.up = nn.Conv2d(2 * width, width, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.conv(F.silu(self.norm(x)))
                if self.inner is not None:
                    y = y + F.interpolate(self.up(self.inner(self.down(y))), scale_factor=2.0)
                return x + self.out(F.silu(self.second(y)))

        model = Block(32, Block(64, Block(128, None))).to(self.device, self.dtype)
        return self._initialised(model), (self._floats(1 if self.small else 16, 32, 64, 64),), {}

    def gcn(self) -> Made:
        class Graph(nn.Module):
            """Two layers of message passing by gathers and sums over edges."""

            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 16)

            def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                for layer in (self.first, self.second):
                    y = layer(x)
                    count = torch.zeros_like(y[:, 0]).index_add(0, target, torch.ones_like(target, dtype=y.dtype))
                    x = torch.zeros_like(y).index_add(0, target, F.relu(y)[source]) / count.clamp(min=1)[:, None]
                return x

        nodes, edges = (1000, 8000) if self.small else (20000, 200000)
        ends = (torch.randint(0, nodes, (edges,), device=self.device) for _ in range(2))
        return self._initialised(Graph().to(self.device, self.dtype)), (self._floats(nodes, 64), *ends), {}

    def statistics(self) -> Made:
        def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            z = torch.sin((x + 1) * 2) * torch.sigmoid(y)
            z = (z - z.mean(0, keepdim=True)) / (z.std(0, keepdim=True) + 1e-5)
            return z.clamp(-1, 1).cumsum(-1), z.amax(-1), (z > 0).sum()

        size = 512 if self.small else 4096
        return Function(run), tuple(torch.randn(size, size, device=self.device) for _ in range(2)), {}

    def mlp(self) -> Made:
        layers = [one for _ in range(4) for one in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())]
        model = self._initialised(nn.Sequential(*layers).to(self.device, self.dtype))
        head = Function(lambda x: F.softmax(x, -1).sum(-2))
        return nn.Sequential(model, head), (self._floats(8 if self.small else 64, 200, 512),), {}

    def clip(self) -> Made:
        layers = {"num_hidden_layers": 1} if self.small else {}
        model = self._made(hf.CLIPConfig(text_config=layers, vision_config=layers), "CLIPModel")
        images = 1 if self.small else 32
        ids = self._ids(images, 77).sort().values  # the largest one ends each text
        return model, (), {"input_ids": ids, "pixel_values": self._floats(images, 3, 224, 224)}

    def segformer(self) -> Made:
        return self._images(hf.SegformerConfig(), "SegformerForSemanticSegmentation")

    def mobilenet(self) -> Made:
        return self._images(hf.MobileNetV2Config(), "MobileNetV2ForImageClassification")

    def wav2vec2(self) -> Made:
        model = self._made(hf.Wav2Vec2Config(num_hidden_layers=1 if self.small else 12), "Wav2Vec2ForCTC")
        return model, (self._floats(*(1, 8000) if self.small else (8, 80000)),), {}

    def gemma2(self) -> Made:
        config = hf.Gemma2Config(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=2 if self.small else 8, num_attention_heads=8,
            num_key_value_heads=4, head_dim=128, vocab_size=32768, sliding_window=256)
        return self._made(config, "Gemma2ForCausalLM"), (), {
            "input_ids": self._ids(*(1, 64) if self.small else (2, 1024)), "use_cache": False}

    def bloom(self) -> Made:
        config = hf.BloomConfig(hidden_size=1024, n_layer=1 if self.small else 12, n_head=16, vocab_size=32768)
        return self._made(config, "BloomForCausalLM"), (), {
            "input_ids": self._ids(*(1, 64) if self.small else (4, 512)), "use_cache": False}

    def deberta(self) -> Made:
        config = hf.DebertaV2Config(
            hidden_size=768, num_hidden_layers=1 if self.small else 6, num_attention_heads=12, intermediate_size=3072,
            relative_attention=True, position_buckets=256, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm",
            share_att_key=True)
        ids = self._ids(*(1, 64) if self.small else (8, 256))
        return self._made(config, "DebertaV2ForMaskedLM"), (), {
            "input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def moe(self) -> Made:
        config = hf.Qwen3MoeConfig(
            hidden_size=1024, intermediate_size=2048, moe_intermediate_size=512, head_dim=64, num_attention_heads=16,
            num_key_value_heads=4, num_hidden_layers=1 if self.small else 4, num_experts=8 if self.small else 64,
            num_experts_per_tok=2 if self.small else 8, vocab_size=32768)
        return self._made(config, "Qwen3MoeForCausalLM"), (), {"input_ids": self._ids(8, 1), "use_cache": False}

    def mixer(self) -> Made:
        class Layer(nn.Module):
            """Mixes patches, then channels (Tolstikhin et al., 2021)."""

            def __init__(self, patches: int, width: int) -> None:
                super().__init__()
                self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
                self.patches, self.channels = (nn.Sequential(nn.Linear(n, 4 * m), nn.GELU(), nn.Linear(4 * m, n))
                                               for n, m in ((patches, width // 8), (width, width)))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = x + self.patches(self.first(x).transpose(1, 2)).transpose(1, 2)
                return x + self.channels(self.second(x))

        layers = nn.Sequential(*(Layer(196, 512) for _ in range(1 if self.small else 8)), nn.LayerNorm(512))
        patches = self._floats(2 if self.small else 32, 196, 512)
        return self._initialised(layers.to(self.device, self.dtype)), (patches,), {}

    def dit(self) -> Made:
        class Block(nn.Module):
            """A transformer whose norms are shifted and scaled by a condition (Peebles and Xie, 2022)."""

            def __init__(self, width: int) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(width, elementwise_affine=False)
                self.condition, self.qkv = nn.Linear(width, 6 * width), nn.Linear(width, 3 * width)
                self.out = nn.Linear(width, width)
                self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

            def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
                shift, scale, gate, shift2, scale2, gate2 = self.condition(F.silu(condition))[:, None].chunk(6, -1)
                qkv = self.qkv(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
                y = F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
                x = x + gate * self.out(y)
                return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)

        class Blocks(nn.Module):
            def __init__(self, count: int) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(Block(768) for _ in range(count))

            def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = block(x, condition)
                return x

        model = Blocks(1 if self.small else 6).to(self.device, self.dtype)
        shape = (1, 64, 768) if self.small else (4, 1024, 768)
        return self._initialised(model), (self._floats(*shape), self._floats(shape[0], 768)), {}

    def dlrm(self) -> Made:
        class Recommender(nn.Module):
            """Bags of embeddings and dense features, products of all pairs (Naumov et al., 2019)."""

            def __init__(self, tables: int, rows: int) -> None:
                super().__init__()
                self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 64, mode="sum") for _ in range(tables))
                self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU())
                pairs = (tables + 1) * tables // 2
                self.top = nn.Sequential(nn.Linear(64 + pairs, 512), nn.ReLU(), nn.Linear(512, 1), nn.Sigmoid())
                self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

            def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
                dense = self.dense(x)
                bags = torch.stack([dense, *(table(ids[at]) for at, table in enumerate(self.tables))], 1)
                products = (bags @ bags.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
                return self.top(torch.cat([dense, products], 1))

        tables, rows, batch = (4, 1000, 64) if self.small else (26, 10000, 4096)
        model = Recommender(tables, rows).to(self.device, self.dtype)
        ids = torch.randint(0, rows, (tables, batch, 4), device=self.device)
        return self._initialised(model), (self._floats(batch, 13), ids), {}

    def _floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)
